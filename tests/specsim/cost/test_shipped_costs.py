"""Linear costs, written cost files, and every cost that ships, against numbers that its source measured."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

import specsim
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.files import read_cost, read_cost_file, shipped_costs
from specsim.cost.linear import LinearCost, LinearPass
from specsim.io.errors import InputError
from specsim.policy.chain.fixed_k import FixedK
from specsim.serving.costs import batch_cost
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import lockstep
from specsim.trace.files import write_trace
from studies.papers.tables import Row, read_table
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of
from tests.support.reference import build_trace

H100 = "specdecode-bench-llama3.1-8b-eagle-h100"
VLLM_EAGLE = "vllm-llama3.1-8b-eagle-h100"
EDD_7B = "edd-llama2-chat-7b-a6000"
times = st.floats(1e-6, 1.0)


def linear(**changes: Any) -> LinearCost:
    values = {"target": LinearPass(0.006, 2e-5, 4e-8), "drafter": LinearPass(0.002, 1e-6, 2e-9), "step_s": 0.001}
    return LinearCost(**{**values, **changes})


def test_fixed_k_is_a_closed_form() -> None:
    """Every token is accepted: a round of K drafts emits K + 1 tokens, at a context that is known."""
    k, tokens, prompt = 3, 40, 16
    trace = generate(IID(1.0), sequences=1, output_tokens=tokens, depth=8, prompt_tokens=prompt)
    model = linear()
    replayed = specsim.replay(trace, model, "fixed_k", k=k)
    seconds = 0.0
    for start in range(0, tokens, k + 1):
        context = ((prompt - 1 + start) // 16 + 0.5) * 16  # a cost table has a column every 16 tokens
        context = min(max(context, prompt - 1), prompt + tokens - 2)
        drafts = sum(0.002 + 1e-6 + 2e-9 * (context + i) for i in range(k))
        seconds += drafts + 0.006 + (k + 1) * 2e-5 + context * 4e-8 + 0.001
        if start:  # the draft before was accepted whole, so the first step ingests two tokens
            seconds += 1e-6
    assert replayed.speculative_s[0] == pytest.approx(seconds, rel=1e-9)


@given(tokens=st.integers(1, 64), context=st.integers(0, 10_000), batch=st.integers(1, 64), fixed=times, token=times)
def test_more_never_takes_less(tokens: int, context: int, batch: int, fixed: float, token: float) -> None:
    model = linear(target=LinearPass(fixed, token, 1e-8), batch=batch)
    more = linear(target=LinearPass(fixed, token, 1e-8), batch=batch + 1)
    assert model.verify(tokens + 1, context) > model.verify(tokens, context)
    assert model.verify(tokens, context + 1) > model.verify(tokens, context)
    assert more.verify(tokens, context) > model.verify(tokens, context)
    assert more.verify(tokens, context) < 2 * batch * model.verify(tokens, context)
    assert model.draft(tokens + 1, context) > model.draft(tokens, context)


def test_published_constants_are_as_published() -> None:
    """A pass over 4 tokens behind 1,000 cached ones, by hand; drafts are proposed once, whatever their number."""
    model = read_cost(H100)
    assert float(model.verify(4, 1000)) == pytest.approx(
        5.88590713e-3 + 4 * 21.0103129e-6 + 1000 * 39.2645679e-9, rel=1e-12
    )
    for k in (1, 2, 8):
        draft_s = 2.13526175e-3 + (k + 1) * 0.841429603e-6 + 1000 * 2.37768493e-9
        assert float(model.draft(k, 1000)) == pytest.approx(draft_s, rel=1e-12)
    assert model.round_overhead() == 1.20683946e-3
    assert float(model.autoregressive_step(0)) == pytest.approx(
        5.88590713e-3 + 21.0103129e-6 + 1.20683946e-3, rel=1e-12
    )
    batched = read_cost(H100, batch=8)
    assert float(batched.verify(1, 0)) == pytest.approx(5.88590713e-3 + 8 * 21.0103129e-6, rel=1e-12)


def test_a_papers_overhead_is_of_rounds_alone() -> None:
    model = read_cost(EDD_7B)
    assert float(model.autoregressive_step(7)) == pytest.approx(29.8e-3, rel=1e-12)
    assert model.round_overhead() == 4.9e-3 and float(model.draft(5, 7)) == pytest.approx(5.5e-3, rel=1e-12)


@pytest.mark.parametrize("name", shipped_costs())
def test_what_ships_has_a_source_and_prices_a_trace(name: str) -> None:
    document = read_cost_file(shipped_costs()[name])
    assert len(document["source"]) > 20 and document["date"][:2] == "20"
    trace = generate(IID(0.7), sequences=12, output_tokens=40, depth=6)
    prediction = specsim.predict(trace, read_cost(name), "fixed_k", k=3)
    assert 0.5 < prediction.speedup.estimate < 4
    assert (read_cost(name).max_tree_tokens > 0) == (not name.startswith("vllm"))  # whose runs were chains alone


WRITTEN = {
    "kind": "specsim-cost",
    "version": 1,
    "form": "constant",
    "source": "my machine",
    "date": "2026-11-22",
    "s_d": 0.001,
    "s_t": 0.01,
}


LINEAR = {
    **{key: WRITTEN[key] for key in ("kind", "version", "source", "date")},
    "form": "linear",
    "target": {"fixed_s": 0.01, "token_s": 1e-4},
    "drafter": {"fixed_s": 0.001},
}


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (WRITTEN, {"version": 2}, "version"),
    (WRITTEN, {"form": "cubic"}, "form"),
    (WRITTEN, {"s_d": "1 ms"}, "s_d"),
    (WRITTEN, {"s_d": 0.0}, "s_d"),
    (WRITTEN, {"s_t": -1.0}, "s_t"),
    (WRITTEN, {"s_d_ms": 1.0}, "s_d_ms"),
    (WRITTEN, {"round_s": -0.1}, "round_s"),
    (WRITTEN, {"token_s": 0.02}, "fixed_s"),
    (WRITTEN, {"source": None}, "source"),
    (WRITTEN, {"form": "linear"}, "target"),
    (WRITTEN, {"form": "linear", "target": {"fixed_s": 1.0}, "drafter": {"fixed_s": 1.0, "token": 1.0}}, "s_d"),
    (LINEAR, {"proposal": {"cached_token_s": 1e-9}}, "proposal is malformed (Object missing required field `fixed_s`)"),
    (LINEAR, {"proposal": {"fixed_s": 1e-3, "token_s": 1e-9}}, "proposal has an unknown key 'token_s'"),
    (LINEAR, {"proposal": {"fixed_s": -1e-3}}, "fixed_s=-0.001"),
    (LINEAR, {"fitted": {}}, "fitted is malformed (Object missing required field `batches`)"),
    (LINEAR, {"fitted": {"batches": [1]}}, "batches=[1]; give the smallest and the largest"),
    (LINEAR, {"fitted": {"batches": [8, 1]}}, "batches=[8, 1]; give the smallest and the largest"),
    (LINEAR, {"fitted": {"batches": [1, 8], "draft_tokens": [0, 3]}}, "draft_tokens=[0, 3]; give the smallest"),
    (LINEAR, {"fitted": {"batches": [1, 8], "k": [1, 3]}}, "fitted has an unknown key 'k'"),
]


@pytest.mark.parametrize(("document", "changes", "word"), WRONG)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, document: dict[str, Any], changes: dict[str, Any], word: str
) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({**document, **changes}))
    refusal(lambda: read_cost(path), word, str(path))


def test_a_written_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(WRITTEN))
    assert read_cost(path) == specsim.ConstantCost(0.001, 0.01)
    path.write_text(json.dumps({**WRITTEN, "token_s": 1e-4}))
    assert np.allclose([read_cost(path).verify(n, 9) for n in (1, 5)], [0.01, 0.0104])
    path.write_text(json.dumps(WRITTEN))
    refusal(lambda: read_cost(path, batch=2), "batches")
    refusal(lambda: read_cost("vllm-unheard-of"), "cost list")


def test_a_proposal_is_paid_once_a_round_and_only_by_rounds_that_draft(tmp_path: Path) -> None:
    """In replays and in batches. Nothing is accepted: 40 tokens are 40 rounds, of which the last drafts none."""
    path = tmp_path / "cost.json"
    trace = generate(IID(0.0), sequences=1, output_tokens=40, depth=4)
    seconds = {}
    for proposal_s in (0.0, 0.002):
        path.write_text(json.dumps({**LINEAR, "proposal": {"fixed_s": proposal_s}}))
        model = read_cost(path)
        for k in (1, 4):
            seconds[proposal_s, k, "replay"] = float(specsim.replay(trace, model, "fixed_k", k=k).speculative_s[0])
            served = lockstep(drafts_of(trace, FixedK(k=k)), batch_cost(model), 1)
            seconds[proposal_s, k, "lockstep"] = served.total_s
    for k in (1, 4):
        for way in ("replay", "lockstep"):
            assert seconds[0.002, k, way] - seconds[0.0, k, way] == pytest.approx(39 * 0.002, rel=1e-9)


def test_what_costs_were_fitted_to_is_said_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({**LINEAR, "fitted": {"batches": [1, 64], "draft_tokens": [2, 7]}}))
    assert read_cost(path, batch=64).notes(5, (0, 100)) == []
    assert read_cost(path, batch=65).notes(8, (0, 100)) == [
        "extrapolated: batch 65, fitted to 1 to 64",
        "extrapolated: drafts of 8 tokens, fitted to 2 to 7",
    ]
    assert "which K" in read_cost(H100).notes(3, (0, 100))[0]
    assert read_cost(VLLM_EAGLE, batch=1) == read_cost(VLLM_EAGLE)
    with pytest.raises(InputError, match=r"measured at batch 1 alone, which says nothing of batch 8; use costs of"):
        read_cost(VLLM_EAGLE, batch=8)
    path.write_text(json.dumps(LINEAR))  # as before these keys were known
    assert read_cost(path, batch=65).notes(8, (0, 100)) == []


def test_the_commands(tmp_path: Path) -> None:
    assert set(json_of(call("specsim", "cost", "list", "--json"))) == set(shipped_costs())
    assert H100 in call("specsim", "cost", "list").out
    (row,) = json_of(call("specsim", "cost", "show", H100, "--contexts", "1000", "--tokens", "4", "--json"))["rows"]
    assert row["verify_s"] == {"4": pytest.approx(float(read_cost(H100).verify(4, 1000)))}
    assert "s_d / s_t" in call("specsim", "cost", "show", EDD_7B).out
    assert (row["proposal_s"], row["draft_step_s"]) == pytest.approx((2.1384808645e-3, 8.41429603e-7))
    assert "proposal" in call("specsim", "cost", "show", H100).out.replace("┃", "")
    assert_refused(call("specsim", "cost", "show", "nothing"), "nothing")


HERE = Path(__file__).parent
BENCH = "specdecode-bench-llama3.1-8b-eagle-h100"
VLLM = {"EAGLE-1": "vllm-llama3.1-8b-eagle-h100", "EAGLE-3": "vllm-llama3.1-8b-eagle3-h100"}
EDD = {"7B": "edd-llama2-chat-7b-a6000", "13B": "edd-llama2-chat-13b-a6000"}
EESD = {"13B": "eesd-llama2-13b", "70B": "eesd-llama2-70b"}
ADAEDL = "adaedl-llama2-7b-115m"
PLAIN_MS = 7.07
CONTEXT = 500  # of costs that do not depend on it


def round_s(name: str, k: int) -> float:
    """A round of K drafts."""
    cost = specsim.read_cost(name)
    return float(cost.draft(k, CONTEXT)) + float(cost.verify(k + 1, CONTEXT)) + cost.round_overhead()


def step_s(name: str) -> float:
    return float(specsim.read_cost(name).autoregressive_step(CONTEXT))


def test_every_cost_that_ships_is_held_against_a_measurement_here() -> None:
    assert set(shipped_costs()) == {BENCH, ADAEDL, *VLLM.values(), *EDD.values(), *EESD.values()}


@cache
def vllm_points() -> list[dict[str, str]]:
    with (HERE / "vllm_20780.csv").open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


@pytest.mark.parametrize("point", vllm_points(), ids=lambda point: f"{point['drafter']}-{point['draft_tokens']}")
def test_vllm_takes_as_long_as_was_measured(point: dict[str, str]) -> None:
    """Milliseconds per token, and speedup, of all twelve runs, at the acceptance length that each had."""
    name, tokens = VLLM[point["drafter"]], float(point["acceptance_length"])
    token_ms = 1e3 * round_s(name, int(point["draft_tokens"])) / tokens
    assert token_ms == pytest.approx(float(point["token_ms"]), rel=0.03)
    assert 1e3 * step_s(name) == pytest.approx(PLAIN_MS, rel=1e-3)


@pytest.mark.parametrize("drafter", VLLM)
def test_vllm_is_fastest_at_the_draft_length_that_was_measured_fastest(drafter: str) -> None:
    points = [point for point in vllm_points() if point["drafter"] == drafter]

    def token_s(point: dict[str, str]) -> float:
        return round_s(VLLM[drafter], int(point["draft_tokens"])) / float(point["acceptance_length"])

    assert min(points, key=token_s) == min(points, key=lambda point: float(point["token_ms"]))


def test_the_published_simulator_says_the_same_of_its_requests(tmp_path: Path) -> None:
    """What SpecDecode-Bench's own simulator printed of twelve of its requests, at three K and three batches.

    It drafts beyond the last token, which a replay does not: hence 2 %. It counts the pass over the prompts, too, which
    at batch 1 hardly matters; in larger ones decoding alone is compared.
    """
    facts = json.loads((HERE / "specdecode_bench_gsm8k.json").read_text())
    accepted = np.array([length - 1 for request in facts["requests"] for length in request["acc_len"]])
    lengths = [len(request["acc_len"]) for request in facts["requests"]]
    prompts = [request["prompt_tokens"] for request in facts["requests"]]
    hits = np.arange(accepted.max()) < accepted[:, None]  # at every position, with what it would accept
    trace = tmp_path / "trace"
    write_trace(build_trace(np.random.default_rng(0), hits, lengths, prompts=prompts), trace)
    assert len(facts["simulated"]) == 9
    for simulated in facts["simulated"]:
        options = ("--policy", "fixed_k", "--set", f"k={simulated['k']}", "--batch", simulated["batch"], "--json")
        document = json_of(call("specsim", "replay", trace, "--cost", BENCH, *options))["speedup"]["estimate"]
        printed = ["speedup_by_tpt", "speedup_by_latency"] if simulated["batch"] == 1 else []
        for way in ("without_prefill", *printed):
            assert document == pytest.approx(simulated[way], rel=0.02), simulated


def test_vllm_decodes_as_fast_without_speculation_as_the_simulator_says() -> None:
    """Another measurement of the same model on vLLM; contexts there are not told, a prompt like MT-Bench is short."""
    assert 1e3 * step_s(BENCH) == pytest.approx(PLAIN_MS, rel=0.02)


EDD_ROWS = [
    (name, row)
    for size, name in EDD.items()
    for row in read_table("edd_1").rows
    if row["target"] == f"LLaMA2-Chat-{size}" and row["method"] == "EDD"
]


@pytest.mark.parametrize(("name", "row"), EDD_ROWS)
def test_edd_has_the_speedups_of_its_table_1(name: str, row: Row) -> None:
    """Drafts of 5 tokens, at the tau of each run; a single overhead was fitted to all methods of tables 1 and 2."""
    speedup = row.number("tau") * step_s(name) / round_s(name, 5)
    assert speedup == pytest.approx(row.number("speedup"), rel=0.05)


EESD_ROWS = [
    (name, row)
    for size, name in EESD.items()
    for table in ("eesd_10", "eesd_12", "eesd_13")
    for row in read_table(table).rows
    if row["target"] == f"LLaMA-2-{size}" and row["method"].startswith("EESD")
]


@pytest.mark.parametrize(("name", "row"), EESD_ROWS)
def test_eesd_has_the_speedups_of_data_that_its_costs_were_not_taken_from(name: str, row: Row) -> None:
    """The costs are of XSum; these are Gsm8k, Humaneval and MT-Bench, and both of its policies."""
    drafted_share = row.number("r_d")  # of the output, so that the rest is a round each
    drafts_s = drafted_share / row.number("v_d") * float(specsim.read_cost(name).draft(1, CONTEXT))
    rounds_s = (1 - drafted_share) * (round_s(name, 1) - float(specsim.read_cost(name).draft(1, CONTEXT)))
    assert step_s(name) / (drafts_s + rounds_s) == pytest.approx(row.number("speedup"), rel=0.04)


@pytest.mark.parametrize("dataset", ["cnn_dm", "dolly_15k", "wmt_19"])
def test_adaedl_has_the_rates_of_longer_drafts(dataset: str) -> None:
    """The rate of three drafts says what is accepted; those of 7 and 16 follow, but for independence of acceptance."""
    rows = {(row["method"], int(row["max_draft_tokens"])): row.number(dataset) for row in read_table("adaedl_1").rows}
    plain = rows["Autoregressive", 3]

    def rate(accept: float, k: int) -> float:
        tokens = sum(accept**depth for depth in range(k + 1))
        return plain * tokens * step_s(ADAEDL) / round_s(ADAEDL, k)

    accept = brentq(lambda guess: rate(guess, 3) - rows["Base-SPD", 3], 0.01, 0.99)
    for k in (7, 16):
        assert rate(accept, k) == pytest.approx(rows["Base-SPD", k], rel=0.1)
    assert 1 / step_s(ADAEDL) == pytest.approx(rows["Autoregressive", 3], rel=0.001) or dataset != "cnn_dm"


def test_the_counters_of_a_real_server_speak_for_three_to_five_tokens(tmp_path: Path) -> None:
    """README's example: 5 drafts a round. Measured runs of vLLM are fastest at K = 3 with EAGLE-1, 4 with EAGLE-3."""
    counters = tmp_path / "counters.json"
    counters.write_text(json.dumps({"drafted": [247] * 5, "accepted": [142, 89, 60, 48, 37]}))
    advised = json_of(call("specsim", "advise", counters, "--cost", VLLM["EAGLE-1"], "--json"))
    assert advised["k"] == 4 and advised["lengths"][4]["speedup"]["estimate"] == pytest.approx(1.58, abs=0.01)
    assert not any(
        "extrapolated" in note for note in advised["notes"]
    )  # five tokens are among the lengths that were measured
