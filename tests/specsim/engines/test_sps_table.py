"""Tables of step times: read as their engines read them, they say what the costs say."""

from __future__ import annotations

import bisect
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.cost.files import read_cost
from specsim.engines.export import step_times
from specsim.io.errors import InputError
from tests.specsim.cost.test_batch_profile import document as profile_document
from tests.support.commands import assert_refused, call, json_of

H100 = "specdecode-bench-llama3.1-8b-eagle-h100"
K, CONTEXT, LARGEST = 3, 500, 64
STEPS = [(1, 1), (1, 4), (2, 5), (3, 10), (5, 20), (33, 40), (64, 64), (64, 256)]  # sequences, verified tokens


def h100_step_s(sequences: int, verified: float) -> float:
    """By the printed constants: a proposal, a pass, an overhead."""
    cached = sequences * CONTEXT
    draft_s = 2.13526175e-3 + 8.41429603e-7 * (K + 1) + 2.37768493e-9 * cached
    return draft_s + 5.88590713e-3 + 2.10103129e-5 * verified + 3.92645679e-8 * cached + 1.20683946e-3


def sglang_additive_s(table: dict[str, Any], sequences: int, verified: float) -> float:
    """Between its probes linear, beyond them level."""
    alpha_s = np.interp(sequences, table["bs_probes"], table["alpha_seconds"])
    return float(table["bias_seconds"] + alpha_s + np.interp(verified, table["m_probes"], table["theta_seconds"]))


def tensorrt_llm_s(table: dict[str, Any], sequences: int, verified: float) -> float:
    alpha_ms = np.interp(sequences, table["batch_sizes"], table["batch_overhead_ms"])
    theta_ms = np.interp(verified, table["token_counts"], table["step_time_ms"])
    return float(table["fixed_overhead_ms"] + alpha_ms + theta_ms) / 1000


def exported(engine: str, cost: Path | str, k: int = K, form: str = "additive", context: int = CONTEXT) -> Any:
    step_table = step_times(engine, read_cost(cost), k, largest_batch=LARGEST, context=context, form=form)
    return json.loads(step_table.file)


def rises(values: list[float]) -> bool:
    return all(value < other for value, other in pairwise(values))


@pytest.mark.parametrize("sequences_and_verified", STEPS)
def test_the_additive_table_is_the_sum_of_the_published_costs(sequences_and_verified: tuple[int, int]) -> None:
    """Linear costs are of the form, so that nothing is lost but digits, also between the batches that it has."""
    wanted = pytest.approx(h100_step_s(*sequences_and_verified), rel=1e-5)
    assert sglang_additive_s(exported("sglang", H100), *sequences_and_verified) == wanted
    assert tensorrt_llm_s(exported("tensorrt-llm", H100), *sequences_and_verified) == wanted


def test_additive_tables_are_as_their_readers_want_them() -> None:
    sglang, llm = exported("sglang", H100), exported("tensorrt-llm", H100)
    assert sglang["bias_seconds"] > 0 and sglang["bs_probes"][0] == 1 and sglang["bs_probes"][-1] == LARGEST
    assert sglang["m_probes"][0] == 1 and sglang["m_probes"][-1] == (K + 1) * LARGEST
    assert rises(sglang["bs_probes"]) and rises(sglang["m_probes"])
    assert all(isinstance(probe, int) for name in ("bs_probes", "m_probes") for probe in sglang[name])
    assert set(llm) == {"token_counts", "step_time_ms", "fixed_overhead_ms", "batch_sizes", "batch_overhead_ms"}
    assert rises(llm["token_counts"]) and rises(llm["batch_sizes"]) and min(llm["step_time_ms"]) > 0
    assert llm["fixed_overhead_ms"] > 0 and min(llm["batch_overhead_ms"]) >= 0
    # A pass over no token would take nothing but the overhead.
    assert llm["step_time_ms"][0] == pytest.approx(1000 * 2.10103129e-5, rel=1e-4)


def test_steps_per_second_by_tokens_are_those_of_batches_that_verify_all() -> None:
    table = exported("sglang", H100, form="tokens")
    tokens, per_second = table["sample_batch_tokens"], table["sample_steps_per_sec"]
    assert tokens == [(K + 1) * sequences for sequences in range(1, LARGEST + 1)]
    assert table["max_batch_tokens"] == tokens[-1]
    for sequences in (1, 7, 64):
        rate = per_second[bisect.bisect_right(tokens, (K + 1) * sequences) - 1]
        assert rate == pytest.approx(1 / h100_step_s(sequences, (K + 1) * sequences), rel=1e-5)


def test_more_tokens_are_never_faster_in_a_table(tmp_path: Path) -> None:
    """A batch of 2 that was measured to take half as long as a batch of 1 is taken to be as fast."""
    path = tmp_path / "batches.json"
    measured = profile_document()
    measured["verify_s"][1] = (np.array(measured["verify_s"][0]) / 2).tolist()
    path.write_text(json.dumps(measured))
    table = exported("sglang", path, k=2, form="tokens", context=200)
    assert table["sample_batch_tokens"] == [3 * sequences for sequences in range(1, 9)]  # as far as was measured
    assert table["sample_steps_per_sec"][0] == table["sample_steps_per_sec"][1] > table["sample_steps_per_sec"][-1]


def test_a_batch_profile_gives_the_steps_that_it_measured(tmp_path: Path) -> None:
    """Its passes take 10 ms, 1 ms a token and 1 us a cached token; at 200 tokens in each cache, by hand."""
    path = tmp_path / "batches.json"
    path.write_text(json.dumps(profile_document()))
    table = exported("sglang", path, k=2, context=200)
    assert table["bs_probes"] == [1, 2, 8]
    for sequences, verified in ((1, 1), (2, 6), (8, 8), (8, 24)):
        drafts_s = sum(0.002 + 1e-4 * sequences - 5e-4 * place + 1e-7 * 200 for place in (0, 1))
        pass_s = 0.01 + 1e-3 * verified + 1e-6 * sequences * 200
        seconds = sglang_additive_s(table, sequences, verified)
        assert seconds == pytest.approx(drafts_s + pass_s + 1e-3 + 5e-4, rel=1e-5)
    with pytest.raises(InputError, match="batch profile covers contexts 100 to 300, asked for 1000"):
        step_times("sglang", read_cost(path), 2, largest_batch=8, context=1000, form="additive")


def test_a_table_read_as_costs_gives_itself_again(tmp_path: Path) -> None:
    """Knots of a curve in a cost file are those of the table, seconds of drafts apart."""
    table = exported("sglang", H100)
    curves = {
        "fixed_s": table["bias_seconds"],
        "sequences": {"at": table["bs_probes"], "seconds": table["alpha_seconds"]},
        "tokens": {"at": table["m_probes"], "seconds": table["theta_seconds"]},
    }
    path = tmp_path / "cost.json"
    written = {"kind": "specsim-cost", "version": 1, "form": "linear", "source": "a table", "date": "2026-11"}
    path.write_text(json.dumps({**written, "target": curves, "drafter": {"fixed_s": 1e-12}}))
    again = exported("sglang", path)
    for step in STEPS:
        assert sglang_additive_s(again, *step) == pytest.approx(sglang_additive_s(table, *step), rel=1e-5)


def test_what_the_form_cannot_say_is_said(tmp_path: Path) -> None:
    """From 2 to 4 verified tokens, 1 sequence takes 2 ms more, and 2 take 6: no sum. The note has the error."""
    path, measured = tmp_path / "batches.json", profile_document()
    scaled = np.array(measured["verify_s"]) * np.array([1, 3, 3])[:, None, None]
    path.write_text(json.dumps({**measured, "verify_s": scaled.tolist()}))
    step_table = step_times("sglang", read_cost(path), 4, largest_batch=8, context=200, form="additive")
    (note,) = (note for note in step_table.notes if "off by at most" in note)
    assert float(note.split("at most ")[1].split(" %")[0]) > 1
    plain = step_times("sglang", read_cost(H100), K, largest_batch=LARGEST, context=CONTEXT, form="additive")
    (note,) = (note for note in plain.notes if "off by at most" in note)
    assert "at most 0.001 %" in note


def test_costs_that_cannot_tell_are_refused(tmp_path: Path) -> None:
    level, plain = tmp_path / "level.json", tmp_path / "plain.json"
    written = {"kind": "specsim-cost", "version": 1, "form": "linear", "source": "by hand", "date": "2026-11"}
    passes = {"target": {"fixed_s": 0.01}, "drafter": {"fixed_s": 0.001}}
    level.write_text(json.dumps({**written, **passes}))
    plain.write_text('{"s_d": 0.001, "s_t": 0.01}')
    for form in ("additive", "tokens"):
        with pytest.raises(InputError, match="the same however many tokens are verified; verify all, without"):
            exported("sglang", level, form=form)
        with pytest.raises(InputError, match="this cost model is for batch size 1 alone"):
            exported("sglang", plain, form=form)
    with pytest.raises(InputError, match="vllm reads no such file of a drafter with confidence; choose one of sglang"):
        exported("vllm", H100)
    with pytest.raises(InputError, match="tensorrt-llm has no table by tokens alone; leave --form out"):
        exported("tensorrt-llm", H100, form="tokens")


def test_the_command_writes_the_file_that_its_flags_name(tmp_path: Path) -> None:
    out = tmp_path / "sps.json"
    asked = ("specsim", "export", "sglang", "--k", K, "--cost", H100, "--context", CONTEXT, "--largest-batch", LARGEST)
    shown = call(*asked, "--out", out)
    assert f"--speculative-dspark-sps-table-path {out} (also pass --speculative-algorithm DSPARK" in shown.out
    assert json.loads(out.read_text()) == exported("sglang", H100)
    assert_refused(call(*asked, "--out", out), f"{out} exists")
    assert call(*asked, "--form", "tokens").out.splitlines()[1].startswith('sps.json: {"sample_batch_tokens": [4, 8')
    document = json_of(call("specsim", "export", "tensorrt-llm", "--k", K, "--cost", H100, "--json"))
    assert "confidence_sps_table_path: sps.json}" in document["flags"] and "1,000 tokens" in document["notes"][0]
