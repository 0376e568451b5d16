"""Every cost that ships, against numbers that its source measured."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq

import specsim
from specsim.cost.files import shipped_costs
from specsim.trace.files import write_trace
from studies.papers.tables import Row, read_table
from tests.support.commands import call, json_of
from tests.support.reference import build_trace

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
    assert not advised["notes"]  # five tokens are among the lengths that were measured
