"""What the commands about engines and servers do, from a program: the same answers, as tables and objects."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specsim
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call

TRACE, COST = "example:lab-model", "example:llama-3.1-8b-eagle-h100"
COUNTERS = {"drafted": [247, 247, 247, 247, 247], "accepted": [142, 89, 60, 48, 37]}
CONSTANT = {"s_d": 0.001, "s_t": 0.010}
RESPONSES = [
    {"timings": {"draft_n": 40, "draft_n_accepted": 25, "predicted_n": 36}},
    {"timings": {"draft_n": 10, "draft_n_accepted": 5, "predicted_n": 9}},
]


def printed(*words: object) -> Any:
    """What a command prints with --json."""
    result = call("specsim", *words, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def plain(document: object) -> Any:
    return json.loads(json.dumps(document))


@pytest.fixture
def counters(tmp_path: Path) -> Path:
    (tmp_path / "counters.json").write_text(json.dumps(COUNTERS))
    (tmp_path / "cost.json").write_text(json.dumps(CONSTANT))
    return tmp_path / "counters.json"


def test_advise_takes_counters_as_they_come_and_says_what_its_command_says(counters: Path) -> None:
    advice = specsim.advise(COUNTERS, CONSTANT)
    document = printed("advise", counters, "--cost", counters.parent / "cost.json", "--engine", "vllm")
    same = {**plain(advice.to_dict()), "flags": advice.flags("vllm")}
    assert {key: document[key] for key in same} == same  # beside what was asked, and read
    from specsim.acceptance.sources import read_counters

    for same in (counters, str(counters), read_counters(counters)):
        assert specsim.advise(same, counters.parent / "cost.json").to_dict() == advice.to_dict()
    table = advice.to_frame()
    assert table["k"].tolist() == [0, 1, 2, 3, 4, 5] and table["speedup"].idxmax() == advice.k
    assert repr(advice).startswith(f"K = {advice.k}, ") and len(repr(advice)) < 250
    assert "<table" in advice._repr_html_()


def test_advise_agrees_with_counting_by_hand() -> None:
    """Many rounds, so that the prior weighs nothing: tokens per round over seconds per round."""
    accepted = np.array([142, 89, 60, 48, 37])
    many = {"drafted": [247_000] * 5, "accepted": (1000 * accepted).tolist()}
    table = specsim.advise(many, CONSTANT).to_frame()
    for k in range(1, 6):
        tokens = 1 + accepted[:k].sum() / 247
        assert table["tokens_per_round"][k] == pytest.approx(tokens, rel=1e-3)
        assert table["speedup"][k] == pytest.approx(tokens * 0.010 / (k * 0.001 + 0.010), rel=1e-3)


def test_diagnose_takes_the_same_and_says_what_its_command_says(counters: Path) -> None:
    rates = {"baseline_tokens_per_s": 52, "tokens_per_s": 41}
    diagnosis = specsim.diagnose(COUNTERS, **rates, cost=CONSTANT)
    words = ("--baseline-tokens-per-second", 52, "--tokens-per-second", 41, "--cost", counters.parent / "cost.json")
    assert printed("doctor", counters, *words) == plain(diagnosis.to_dict())
    table = diagnosis.to_frame()
    assert diagnosis.speedup == pytest.approx(41 / 52)
    ((assumed, advice),) = diagnosis.advice
    assert table["assumed"].tolist() == [assumed] and table["k"].tolist() == [advice.k]
    assert table["speedup"].tolist() == [advice.lengths[advice.candidate].speedup]
    assert repr(diagnosis).startswith("0.79x (21 % slower)")


def test_an_engine_s_records_are_read_and_go_on_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "responses.jsonl").write_text("\n".join(map(json.dumps, RESPONSES)))
    records = specsim.import_records("llamacpp-responses", tmp_path / "responses.jsonl")
    document = printed("import", "llamacpp-responses", tmp_path / "responses.jsonl")
    assert {**plain(records.to_dict()), "kind": "llamacpp-responses", "out": None} == document
    assert records.to_dict()["averages"]["accepted / drafted"] == pytest.approx(30 / 50)
    advice = specsim.advise(records, CONSTANT)  # 45 tokens less 2 of the prompts' steps and 30 accepted ones
    assert advice.rounds == 13 and advice.k is None and "measure K = 0 and K = 4" in repr(advice)


@pytest.mark.parametrize(
    ("kind", "name"), [("vllm-requests", "vllm_requests_k3.json"), ("prometheus", "llamacpp_metrics_k3.prom")]
)
def test_records_with_positions_are_advised_on_and_written(kind: str, name: str, tmp_path: Path) -> None:
    records = specsim.import_records(kind, [Path(__file__).parent / "engines" / "fixtures" / name])
    assert records.source is not None
    out = tmp_path / ("counters.json" if records.holds == "counters" else "rounds.parquet")
    records.write(out)
    advice = specsim.advise(records, CONSTANT)
    assert advice.rounds > 0 and specsim.advise(out, CONSTANT).to_dict() == advice.to_dict()
    refusal(lambda: records.write(out), "exists")
    assert list(records.to_frame().columns) == ["quantity", "engine", "printed", "value", "formula"]


EXPORTS: dict[str, tuple[dict[str, Any], str]] = {
    "a length": ({"k": 3}, "--k 3"),
    "none": ({"k": 0}, "--k 0"),
    "a schedule": ({"schedule": {1: 5, 4: 3, 16: 0}}, "--schedule 1:5,4:3,16:0"),
    "its text": ({"schedule": "1:5,4:3,16:0"}, "--schedule 1:5,4:3,16:0"),
    "lookup": ({"k": 4, "min_ngram": 2, "max_ngram": 5}, "--k 4 --min-ngram 2 --max-ngram 5"),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_flags_are_the_command_s(case: str) -> None:
    asked, words = EXPORTS[case]
    document = printed("export", "vllm", *words.split())
    own = specsim.export_flags("vllm", **asked)
    assert (own.flags, own.file) == (document["flags"], document["file"])


def test_flags_from_counts_and_a_trace() -> None:
    scripted = specsim.export_flags("llamacpp", 5, acceptance=COUNTERS).flags
    rates = [float(rate) for rate in re.search(r"--spec-synth-rates ([\d.,]+\d)", scripted)[1].split(",")]
    assert rates == pytest.approx(np.array([142, 89, 60, 48, 37]) / 247, abs=1e-6)
    for wrong in ({}, {"k": 3, "schedule": {1: 3}}, {"k": 3, "p_min": 0.1, "max_ngram": 3}, {"p_min": 0.5, "k": 0}):
        with pytest.raises(specsim.InputError):
            specsim.export_flags("vllm", **wrong)


def test_a_server_s_figures_are_the_command_s() -> None:
    served = specsim.serve(TRACE, COST, "fixed_k", k=3, arrivals="poisson:20", requests=40, slots=8, tpot_ms=10)
    words = ("--arrivals", "poisson:20", "--requests", 40, "--slots", 8, "--tpot-ms", 10, "--set", "k=3")
    assert printed("serve", "simulate", TRACE, "--cost", COST, *words) == plain(served.to_dict())
    table = served.to_frame()
    assert table.loc["fixed_k(k=3)", "tokens_per_round"] > table.loc["no speculation", "tokens_per_round"] == 1
    assert "tok/s" in repr(served) and "\n" not in repr(served)
    by_object = specsim.serve(TRACE, COST, specsim.make_policy("fixed_k", k=3), requests=40, slots=8, tpot_ms=10)
    assert by_object.to_dict() == served.to_dict()


def test_batches_are_the_command_s_and_rules_are_taken() -> None:
    served = specsim.serve_batches(TRACE, COST, {1: 4, 8: 2}, batches=[1, 8])
    document = printed("serve", "simulate", TRACE, "--cost", COST, "--schedule", "1:4,8:2", "--batch", "1,8")
    assert document == plain(served.to_dict())
    (alone,) = specsim.serve_batches(TRACE, COST, "fixed_k", batches=1, k=4).to_frame().to_dict("records")
    assert served.to_frame()["speedup"][0] == pytest.approx(alone["speedup"])
    assert specsim.serve_batches(TRACE, COST, "turbospec", batches=2, max_draft_tokens=4).batches
    learned = specsim.serve_batches(TRACE, COST, "time_gain", batches=1)
    assert learned.learned_on > 0 and learned.notes[0].startswith("learned on")
    refusal(lambda: specsim.serve_batches(TRACE, COST, {1: 4}, k=3), "takes no settings; leave out k")
    refusal(lambda: specsim.serve_batches(TRACE, "example:lab-deep-model"), "batch")


def test_the_schedule_is_the_command_s_and_goes_on_as_it_is() -> None:
    schedule = specsim.serve_schedule(TRACE, COST, batches=[1, 256], contexts=512, max_draft_tokens=3, policies="p_min")
    words = ("--batch", "1,256", "--context", 512, "--max-draft-tokens", 3, "--policy", "p_min")
    document = printed("serve", "schedule", TRACE, "--cost", COST, *words)
    assert (document.pop("cost"), document.pop("cost_band")) == (COST, None)
    assert document == plain(schedule.to_dict())
    table = schedule.to_frame()
    assert table["batch"].tolist() == [1, 256] and set(schedule.lengths) <= set(table.columns)
    lengths = schedule.schedule(512)
    assert specsim.export_flags("vllm", schedule=lengths).flags and "schedule" in repr(schedule)
    assert specsim.serve_batches(TRACE, COST, lengths, batches=1).to_frame()["speedup"][0] > 1


def test_a_roofline_is_calibrated_by_names() -> None:
    fitted = specsim.calibrate(COST, "example:lab-deep-eagle")
    measured = specsim.read_cost("example:lab-deep-eagle")
    assert float(fitted.autoregressive_step(100)) == pytest.approx(float(measured.autoregressive_step(100)), rel=0.2)
    with pytest.raises(TypeError, match="cost is ConstantCost.*expected roofline costs"):
        specsim.calibrate(CONSTANT, "example:lab-deep-eagle")
    with pytest.raises(TypeError, match="measured is RooflineCost.*expected what `realrun profile`"):
        specsim.calibrate(COST, COST)


def test_a_calibrated_roofline_is_written_as_it_was_fitted(tmp_path: Path) -> None:
    out = tmp_path / "fitted.json"
    printed("cost", "calibrate", COST, "example:lab-deep-eagle", "--out", out)
    fitted, written = specsim.calibrate(COST, "example:lab-deep-eagle"), specsim.read_cost(out)
    assert [float(written.verify(n, 90)) for n in (1, 5)] == [float(fitted.verify(n, 90)) for n in (1, 5)]
    assert float(written.draft(3, 90)) == float(fitted.draft(3, 90)) and written.notes(3, (70, 90)) == []
    again = "cost", "calibrate", "example:lab-deep-eagle", "example:lab-deep-eagle", "--out"
    assert_refused(call("specsim", *again, out), "fitted.json", "--overwrite")
    assert_refused(call("specsim", *again, tmp_path / "new.json"), "lab-deep-eagle", "no form roofline")


@pytest.mark.parametrize("wrong", [None, 3, ["a"]])
def test_what_is_no_source_is_refused_in_words(wrong: Any) -> None:
    for call_ in (
        lambda: specsim.advise(wrong, CONSTANT),
        lambda: specsim.diagnose(wrong, baseline_tokens_per_s=1, tokens_per_s=1),
        lambda: specsim.export_flags("vllm", 3, acceptance=[wrong]),
    ):
        with pytest.raises(TypeError, match="counts are a .*expected a trace, a rounds.parquet, counters"):
            call_()
    for serve in (specsim.serve, specsim.serve_batches):
        with pytest.raises(TypeError, match="policy is a .*expected a name"):
            serve(TRACE, COST, wrong)
