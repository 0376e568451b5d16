"""Every figure of the audit, against the figures that an independent script printed of the same cells."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from specsim.errors import InputError
from studies.papers import adaedl, audit
from studies.papers.record import Finding
from tests.support.commands import call, json_of

# By name, or name:low and name:high, to the digits printed. Simulations used other random numbers.
PRINTED = json.loads((Path(__file__).parent / "papers_printed_figures.json").read_text())


@pytest.fixture(scope="module")
def found() -> dict[str, Finding]:
    return {one.name: one for one in audit.findings()}


def half_a_unit(printed: str) -> float:
    return float(0.5 * 10.0 ** -len(printed.partition(".")[2])) + 1e-9


def test_every_computed_figure_is_the_printed_one(found: dict[str, Finding]) -> None:
    off = {}
    for key, printed in PRINTED["computed"].items():
        name, _, part = key.partition(":")
        value = getattr(found[name], part or "value")
        if abs(value - float(printed)) > half_a_unit(printed):
            off[key] = (value, printed)
    assert off == {}
    assert len(PRINTED["computed"]) == 1338


def test_simulated_figures_agree_within_their_noise(found: dict[str, Finding]) -> None:
    """The printed ones are of a quarter as many generations: their interval is twice as wide, and four of them pass."""
    off = {}
    for name, printed in PRINTED["simulated"].items():
        one = found[name]
        assert one.low is not None and one.high is not None
        noise = (one.high - one.low) / 2
        if abs(one.value - float(printed)) > half_a_unit(printed) + 2.5 * noise:
            off[name] = (one.value, printed, noise)
    assert off == {}
    assert len(PRINTED["simulated"]) == 45


def test_a_short_fixed_draft_is_promised_more_than_thompson_control_reaches(found: dict[str, Finding]) -> None:
    """K = 4 under i.i.d. acceptance, by the K = 10 row of table 4, where Beta-TS prints 1.91 and 1.84."""
    at_4 = {dataset: found[f"eesd.fixed_k.{dataset}.speedup_at_4"] for dataset in ("gsm8k", "xsum")}
    assert {dataset: round(one.value, 2) for dataset, one in at_4.items()} == {"gsm8k": 2.03, "xsum": 1.94}
    own = [found[f"eesd.fixed_k.{dataset}.speedup_at_4_own_ratio"].value for dataset in at_4]
    assert [round(value, 2) for value in own] == [1.99, 1.94]
    assert all(one.verdict == "contradicts" for one in at_4.values())


def test_costs_of_nodes_are_those_of_the_errata(found: dict[str, Finding]) -> None:
    """docs/errata.md, B13: 0.006 ms a node takes the error from 3.5 to 2.6 %; 4.3 and 0.032 ms where VCT is capped."""
    printed = {"ms": "0.006", "error_without": "3.5", "error": "2.6"}
    printed |= {"capped_overhead_ms": "4.3", "capped_ms": "0.032", "capped_error": "3.3"}
    for name, figure in printed.items():
        assert abs(found[f"edd.per_node.{name}"].value - float(figure)) <= half_a_unit(figure), name


def test_two_shared_costs_are_fitted_better_than_on_the_printed_grid() -> None:
    """The other script stopped at a grid point: draft 0.0775, verification 0.905."""
    models = adaedl.fit_shared(verify=True)
    draft, verify = models["cnn_dm"].draft, models["cnn_dm"].verify
    assert (draft, verify) == pytest.approx((0.0780, 0.9073), abs=1e-3)
    at_grid, at_fit = (adaedl.loss_of(adaedl.DATASETS, *costs) for costs in ((0.0775, 0.905), (draft, verify)))
    assert at_fit < at_grid
    assert all(
        adaedl.loss_of(adaedl.DATASETS, draft * a, verify * b) > at_fit for a in (0.97, 1.03) for b in (0.98, 1.02)
    )


def test_the_known_contradictions_are_flagged(found: dict[str, Finding]) -> None:
    """Of the rows that contradict themselves (docs/errata.md, F), every one, by its cell."""
    cells = {one.tables[0] for one in found.values() if one.verdict == "contradicts" and one.erratum.startswith("F")}
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


def test_verdicts_are_the_recorded_ones(found: dict[str, Finding]) -> None:
    assert audit.changed_verdicts(list(found.values())) == []
    assert audit.recorded_verdicts() == audit.verdicts_of(list(found.values()))


def test_a_verdict_that_changes_is_named_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "medusa.medusa1_speedup"
    assert call("papers", "audit", "--paper", "medusa").code == 0
    found = tuple(
        dataclasses.replace(one, verdict="supports") if one.name == name else one for one in audit.findings_of("medusa")
    )
    monkeypatch.setattr(audit, "findings_of", lambda paper: found)
    result = call("papers", "audit", "--paper", "medusa")
    assert result.code == 1 and f"verdict changed: {name}: no longer 'contradicts'" in result.out
    missing = audit.changed_verdicts(found[:-1])
    assert missing == [f"{name}: no longer 'contradicts'", "medusa.figure2_candidates: 0 findings, recorded 1"]


def test_the_audit_fits_a_narrow_terminal() -> None:
    for arguments in ((), ("--paper", "space")):
        result = call("papers", "audit", *arguments)
        assert result.code == 0 and max(map(len, result.out.splitlines())) <= 80
        assert "step_cost.greedy.cip.falcon_40b" in result.out.replace("\n", "")


def test_json_holds_every_finding(found: dict[str, Finding]) -> None:
    document = json_of(call("papers", "audit", "--json"))
    assert document["changed_verdicts"] == []
    assert [Finding(**{**one, "tables": tuple(one["tables"])}) for one in document["findings"]] == list(found.values())


def test_names_are_found_and_wrong_ones_told() -> None:
    assert audit.finding("medusa.speedup.vicuna_7b").value == pytest.approx(3.47 / 1.22)
    with pytest.raises(InputError, match=r"there is no finding medusa.speed; `python -m studies.papers audit --json`"):
        audit.finding("medusa.speed")
    with pytest.raises(InputError, match="there is no paper llama; choose of eesd, edd, space, adaedl, medusa"):
        audit.finding("llama.speed")
