"""The audit's figures, compared with those that an independent script computed from the same cells."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from specsim.io.errors import InputError
from studies.papers import adaedl, audit
from studies.papers.record import Finding
from tests.support.commands import call, json_of

# By name, name:low or name:high, to the printed digits. The script simulated with other random numbers.
PRINTED = json.loads((Path(__file__).parent / "papers_printed_figures.json").read_text())


@pytest.fixture(scope="module")
def findings() -> dict[str, Finding]:
    return {finding.name: finding for finding in audit.findings()}


def half_a_unit(printed: str) -> float:
    return float(0.5 * 10.0 ** -len(printed.partition(".")[2])) + 1e-9


def test_every_computed_figure_is_that_of_the_script(findings: dict[str, Finding]) -> None:
    off = {}
    for key, printed in PRINTED["computed"].items():
        name, _, part = key.partition(":")
        value = getattr(findings[name], part or "value")
        if abs(value - float(printed)) > half_a_unit(printed):
            off[key] = (value, printed)
    assert off == {}
    assert len(PRINTED["computed"]) == 1338


def test_simulated_figures_agree_within_their_noise(findings: dict[str, Finding]) -> None:
    """The script simulated a quarter as many generations, so its intervals are twice as wide."""
    off = {}
    for name, printed in PRINTED["simulated"].items():
        finding = findings[name]
        noise = (finding.high - finding.low) / 2
        if abs(finding.value - float(printed)) > half_a_unit(printed) + 2.5 * noise:
            off[name] = (finding.value, printed, noise)
    assert off == {}
    assert len(PRINTED["simulated"]) == 45


def test_a_fixed_k_of_4_is_predicted_to_beat_thompson_control(findings: dict[str, Finding]) -> None:
    """K = 4 under i.i.d. acceptance, by the K = 10 row of table 4, where Beta-TS prints 1.91 and 1.84."""
    at_4 = {dataset: findings[f"eesd.fixed_k.{dataset}.speedup_at_4"] for dataset in ("gsm8k", "xsum")}
    assert {dataset: round(finding.value, 2) for dataset, finding in at_4.items()} == {"gsm8k": 2.03, "xsum": 1.94}
    own = [findings[f"eesd.fixed_k.{dataset}.speedup_at_4_own_ratio"].value for dataset in at_4]
    assert [round(value, 2) for value in own] == [1.99, 1.94]
    assert all(finding.verdict == "contradicts" for finding in at_4.values())


def test_costs_of_nodes_are_those_of_the_errata(findings: dict[str, Finding]) -> None:
    """docs/errata.md, B13: 0.006 ms a node lowers the error from 3.5 to 2.6 %; 4.3 and 0.032 ms if VCT is capped."""
    printed = {"ms": "0.006", "error_without": "3.5", "error": "2.6"}
    printed |= {"capped_overhead_ms": "4.3", "capped_ms": "0.032", "capped_error": "3.3"}
    for name, figure in printed.items():
        assert abs(findings[f"edd.per_node.{name}"].value - float(figure)) <= half_a_unit(figure), name


def test_two_shared_costs_are_fitted_better_than_on_the_printed_grid() -> None:
    """The other script stopped at a grid point: draft 0.0775, verification 0.905."""
    models = adaedl.fit_models("shared_verify")
    draft, verify = models["cnn_dm"].draft, models["cnn_dm"].verify
    assert (draft, verify) == pytest.approx((0.0780, 0.9073), abs=1e-3)
    at_grid, at_fit = (adaedl.loss_of(adaedl.DATASETS, *costs) for costs in ((0.0775, 0.905), (draft, verify)))
    assert at_fit < at_grid
    assert all(
        adaedl.loss_of(adaedl.DATASETS, draft * a, verify * b) > at_fit for a in (0.97, 1.03) for b in (0.98, 1.02)
    )


def test_the_known_contradictions_are_flagged(findings: dict[str, Finding]) -> None:
    """Every row that contradicts itself (docs/errata.md, F), by its cell."""
    wrong = [finding for finding in findings.values() if finding.verdict == "contradicts"]
    cells = {finding.tables[0] for finding in wrong if finding.erratum.startswith("F")}
    assert cells >= {
        "eesd_1: LLaMA-2-70B-chat, Medusa, self, gsm8k: speedup",
        "eesd_1: LLaMA-2-70B, Self SD, self, xsum: speedup",
        "eesd_5: LLaMA-2-70B, Self SD, xsum: speedup_fixed_k",
        "eesd_10: LLaMA-2-70B, Auto-regressive: tokens_per_s",
        "eesd_11: LLaMA-2-70B-chat, Vanilla SD, LLaMA-2-7B-chat: hm_percent",
        *(f"eesd_11: Vicuna-13B, {arm}: speedup" for arm in ("Vanilla SD, Vicuna-7B", "Self SD, self", "Medusa, self")),
        "eesd_3: Vicuna-13B, Medusa: trainable_params",
        "edd_1: Vicuna1.5-7B, VDM, gsm8k: alpha",
        "edd_3: w/o encoding result: speedup",
        "space_1: Falcon-40B, cip: speedup",
        "space_5: LLaMA-2-13B, humaneval_x: tokens_per_step",
        "space_4: Falcon-40B: overall",
        "medusa_1: Vicuna-13B",
    }


def test_verdicts_are_as_recorded(findings: dict[str, Finding]) -> None:
    assert audit.changed_verdicts(list(findings.values())) == []
    assert audit.recorded_verdicts() == audit.verdicts_of(list(findings.values()))


def test_a_verdict_that_changes_is_named_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "medusa.medusa1_speedup"
    assert call("papers", "audit", "--paper", "medusa").code == 0
    edited = tuple(
        dataclasses.replace(finding, verdict="supports") if finding.name == name else finding
        for finding in audit.findings_of("medusa")
    )
    monkeypatch.setattr(audit, "findings_of", lambda paper: edited)
    result = call("papers", "audit", "--paper", "medusa")
    assert result.code == 1 and f"verdict changed: {name}: no longer 'contradicts'" in result.out
    missing = audit.changed_verdicts(edited[:-1])
    assert missing == [f"{name}: no longer 'contradicts'", "medusa.figure2_candidates: 0 findings, recorded 1"]


def test_the_audit_fits_a_narrow_terminal() -> None:
    for arguments in ((), ("--paper", "space")):
        result = call("papers", "audit", *arguments)
        assert result.code == 0 and max(map(len, result.out.splitlines())) <= 80
        assert "step_cost.greedy.cip.falcon_40b" in result.out.replace("\n", "")


def test_json_holds_every_finding(findings: dict[str, Finding]) -> None:
    document = json_of(call("papers", "audit", "--json"))
    assert document["changed_verdicts"] == []
    listed = [Finding(**{**entry, "tables": tuple(entry["tables"])}) for entry in document["findings"]]
    assert listed == list(findings.values())


def test_an_unknown_paper_is_refused() -> None:
    with pytest.raises(InputError, match="unknown paper llama; choose one of eesd, edd, space, adaedl, medusa"):
        audit.findings_of("llama")
