"""Draft lengths from counts, and why speculation is slow: by hand, servers of known truth, a real trace, commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import specsim
from specsim.acceptance.sources import Counters, Rounds
from specsim.cost.calibrate import data_sheet_document
from specsim.cost.files import read_cost
from specsim.cost.linear import LinearCost, LinearPass
from specsim.cost.model import ConstantCost
from specsim.cost.roofline.cost import RooflineCost
from specsim.cost.roofline.serving import tpot_s
from specsim.engines.advise import advise
from specsim.engines.as_engine import counters_of
from specsim.engines.counted import counted as as_counted
from specsim.engines.diagnose import diagnose
from specsim.engines.flags import FLAGS, draft_length_flags
from specsim.engines.import_records import import_records
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of

FIXTURES = Path(__file__).parent / "fixtures"
COST = ConstantCost(s_d=0.001, s_t=0.010)
NEAR_PERCENT, RIGHT_PERCENT, FEWEST_ROUNDS = 1, 95, 200  # so near the best K, on so many, from so many rounds on


def true_speedups(rates: Floats, cost: ConstantCost) -> Floats:
    """Of K = 0, 1, ..., by hand: expected tokens over time, both of a round."""
    tokens, whole, speedups = 1.0, 1.0, [1.0]
    for k, rate in enumerate(rates, start=1):
        whole *= rate
        tokens += whole
        speedups.append(tokens * cost.s_t / (k * cost.s_d + cost.s_t))
    return np.array(speedups)


def counted(rates: Floats, rounds: int, rng: np.random.Generator, requests: int = 20) -> Rounds:
    """What a server counts that drafts as many tokens in every round as there are rates; all requests are alike."""
    accepted = np.cumprod(rng.random((rounds, len(rates))) < rates, axis=1).sum(axis=1)
    return Rounds(np.full(rounds, len(rates)), accepted, None, np.arange(rounds) % requests)


def test_many_rounds_tell_the_truth() -> None:
    rates = np.array([0.9, 0.7, 0.5, 0.2])
    advice = advise(counted(rates, 400_000, np.random.default_rng(0)), COST, context=100)
    truth = true_speedups(rates, COST)
    assert advice.k == truth.argmax() == 3 and advice.sure and advice.times_rounds is None
    assert [length.speedup.estimate for length in advice.lengths] == pytest.approx(truth, rel=3e-3)
    assert advice.lengths[2].tokens_per_round == pytest.approx(1 + 0.9 + 0.63, rel=3e-3)
    assert sum(length.best for length in advice.lengths) == pytest.approx(1)


def test_a_draft_that_was_accepted_whole_leaves_a_token_to_catch_up_with() -> None:
    """By hand: a draft step of 1 ms and 0.5 ms a token, a pass of 10; after K accepted tokens a step takes 0.5 more."""
    cost = LinearCost(target=LinearPass(0.010), drafter=LinearPass(0.0010, 0.0005))
    advice = advise(Counters(np.array([10**6, 10**6]), np.array([8 * 10**5, 4 * 10**5])), cost, context=100)
    by_hand = [1.0, 1.8 / (1.15 + 0.8 * 0.05), 2.2 / (1.3 + 0.4 * 0.05)]
    assert [length.speedup.estimate for length in advice.lengths] == pytest.approx(by_hand, rel=1e-3)


def test_where_no_draft_pays_none_is_recommended() -> None:
    advice = advise(Counters(np.array([5000, 5000]), np.array([200, 10])), ConstantCost(0.005, 0.010), context=100)
    assert advice.k == 0 and advice.sure and advice.lengths[0].speedup.estimate == 1.0


@pytest.mark.parametrize("rounds", [FEWEST_ROUNDS, 2_000, 100_000])
def test_it_is_right_about_servers_of_known_truth(rounds: int) -> None:
    """A K that is recommended is near the best on nearly all, intervals cover on 92 of 100, and sure only if right."""
    rng = np.random.default_rng(1)
    near = decided = covered = sure = sure_and_wrong = 0
    servers = 200
    for seed in range(servers):
        first, decay = rng.uniform(0.3, 0.95), rng.uniform(0.85, 1.0)
        rates = np.clip(first * decay ** np.arange(rng.integers(3, 9)), 0.02, 0.98)
        cost = ConstantCost(float(10 ** rng.uniform(-4, -2.3)), 0.010)
        truth = true_speedups(rates, cost)
        advice = advise(counted(rates, rounds, rng), cost, context=100, seed=seed)
        good = advice.k is not None and truth[advice.k] >= (1 - NEAR_PERCENT / 100) * truth.max()
        interval = advice.lengths[advice.candidate].speedup
        near, decided = near + good, decided + (advice.k is not None)
        covered += interval.low <= truth[advice.candidate] <= interval.high
        sure += advice.sure
        sure_and_wrong += advice.sure and not good
    assert 100 * near >= RIGHT_PERCENT * decided and covered >= 0.92 * servers and sure_and_wrong <= 0.05 * servers
    assert sure >= (0.7 if rounds == FEWEST_ROUNDS else 0.95) * servers


def test_few_rounds_cannot_tell_and_say_how_many_would() -> None:
    rates = np.array([0.75, 0.74, 0.73, 0.72, 0.71, 0.7])
    few = advise(counted(rates, 40, np.random.default_rng(3)), COST, context=100)
    assert not few.sure and few.times_rounds >= 2 and few.rounds == 40
    assert f"collect about {20 * few.times_rounds:,} requests to be sure (have 20)" in repr(few)
    assert advise(counted(rates, 100_000, np.random.default_rng(3)), COST, context=100).sure


def test_a_recorded_trace_decodes_as_fast_as_its_best_at_the_k_that_its_counts_recommend() -> None:
    trace = specsim.read_trace(Path(specsim.__file__).parent / "data" / "example" / "lab-model.zip")
    run = specsim.replay(trace, COST, "fixed_k", k=trace.depth)
    advice = advise(counters_of(Rounds(run.rounds.drafted, run.rounds.accepted)), COST, context=100)
    replayed = [specsim.replay(trace, COST, "fixed_k", k=k).speedup for k in range(1, trace.depth + 1)]
    assert replayed[advice.k - 1] >= 0.98 * max(replayed)


def test_the_command_recommends_and_says_what_to_type(tmp_path: Path) -> None:
    counters, cost = tmp_path / "counters.json", tmp_path / "cost.json"
    counters.write_text(json.dumps({"drafted": [9000] * 4, "accepted": [7200, 5000, 2000, 400]}))
    cost.write_text('{"s_d": 0.001, "s_t": 0.010}')
    args = ["advise", counters, "--cost", cost]
    document = json_of(call("specsim", *args, "--engine", "sglang", "--json"))
    assert document["k"] == 3 and document["sure"] and not document["longest"] and document["rounds"] == 9000
    assert document["flags"] == "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    shown = call("specsim", *args, "--engine", "llamacpp")
    assert "K = 3" in shown.out and "--spec-draft-n-max 3" in shown.out
    counters.write_text(json.dumps({"drafted": [30] * 2, "accepted": [26, 24]}))
    shown = call("specsim", *args)
    assert "longer drafts were not counted and may be faster" in " ".join(shown.out.split())
    assert_refused(call("specsim", *args, "--engine", "tgi"), "tgi", "vllm")
    many = "specdecode-bench-llama3.1-8b-eagle-h100"
    priced = json_of(call("specsim", "advise", counters, "--cost", many, "--batch", 64, "--json"))
    assert priced["k"] in (0, 1, 2) and priced["notes"] and "which K" in priced["notes"][0]
    assert "note: the source of these costs" in call("specsim", "advise", counters, "--cost", many).out
    single = ("--cost", "vllm-llama3.1-8b-eagle-h100")
    assert_refused(call("specsim", "advise", counters, *single, "--batch", 64), "measured at batch 1 alone", many)
    counters.write_text(json.dumps({"drafted": [9] * 9, "accepted": [8] * 9}))
    assert (
        "note: extrapolated: drafts of 9 tokens, fitted to 2 to 7" in call("specsim", "advise", counters, *single).out
    )


@pytest.mark.parametrize("engine", FLAGS)
def test_every_engine_has_words_for_a_draft_length(engine: str) -> None:
    assert "5" in draft_length_flags(engine, 5)
    assert draft_length_flags(engine, 0) == "turn speculation off"


@pytest.mark.parametrize(
    ("drafter", "vllm", "sglang"),
    [("eagle3", "eagle3", "EAGLE3"), ("mtp", "mtp", "NEXTN"), ("llama-3.2-1b", "draft_model", "STANDALONE")],
)
def test_flags_name_the_kind_of_drafter(drafter: str, vllm: str, sglang: str) -> None:
    config = json.loads(draft_length_flags("vllm", 3, drafter).partition("'")[2].rstrip("'"))
    assert (config["method"], config["num_speculative_tokens"]) == (vllm, 3)
    assert draft_length_flags("sglang", 3, drafter).split()[:2] == ["--speculative-algorithm", sglang]
    assert "3" in draft_length_flags("llamacpp", 3, drafter) and "off" in draft_length_flags("vllm", 0, drafter)


def test_a_log_and_a_gpu_give_a_line_to_paste(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text((FIXTURES / "vllm_log.txt").read_text().splitlines()[0])
    gpu = ("--gpu", "h100", "--target", "llama-3.1-8b", "--drafter", "eagle3", "--engine", "vllm")
    found = json_of(call("specsim", "advise", log, *gpu, "--json"))
    answer, command = call("specsim", "advise", log, *gpu).out.splitlines()[-2:]
    speedup, even = found["lengths"][found["k"]]["speedup"], found["off_above"]
    assert answer.startswith(f"K = {found['k']}, {speedup['estimate']:.3f} [{speedup['low']:.3f}, ")
    assert f"off above {even['requests']} requests at once (95 % interval: {even['low']} to " in answer
    assert f" to {even['high'] or 'over {}'.format(even['most'])})" in answer
    assert [command] == found["commands"] == [f"vllm serve <llama-3.1-8b> {found['flags']}"]
    assert '"eagle3"' in found["flags"]
    medusa = (*gpu[:5], "medusa:5", *gpu[6:])
    assert '"medusa"' in json_of(call("specsim", "advise", log, *medusa, "--json"))["flags"]
    assert_refused(call("specsim", "advise", log, *gpu[:5], "eesd:8", *gpu[6:]), "vllm has no drafters of kind eesd")
    assert_refused(call("specsim", "advise", log, *gpu, "--policy", "fixed_k"), "names no policies")
    refusal(lambda: advise(log, COST, isl=8), "isl and osl go together")


def test_prompts_of_other_requests_bring_speedups_nearer_to_one() -> None:
    """At counts so large that the posterior is a point: the ratio of two served times per token."""
    cost = read_cost(data_sheet_document("h100", "llama-3.1-8b", "eagle3"), batch=16)
    assert isinstance(cost, RooflineCost)
    source = {"drafted": [10**9, 10**9], "accepted": [8 * 10**8, 4 * 10**8]}
    served, alone = (advise(source, cost, **lengths) for lengths in ({"isl": 2048, "osl": 128}, {"context": 2112}))
    tau = 1 + 0.8 + 0.4
    times = [tpot_s(cost, 2048, 128, 16, **how) for how in ({}, {"k": 2, "acceptance": tau})]
    assert served.lengths[2].speedup.estimate == pytest.approx(times[0] / times[1], rel=1e-3)
    assert 1 < served.lengths[2].speedup.estimate < alone.lengths[2].speedup.estimate
    refusal(lambda: advise(source, COST, isl=8, osl=8), "need costs of shapes and hardware")


@pytest.mark.parametrize("alike", [1, 6])
def test_the_variance_of_requests_is_that_of_rounds_times_how_many_are_alike(alike: int) -> None:
    """Rounds of two tokens, each accepted with 0.6, drawn for 4,000 requests of 6 rounds, `alike` of them the same."""
    rng = np.random.default_rng(4)
    drawn = (rng.random((4000 * 6 // alike, 2)) < 0.6).cumprod(axis=1).sum(axis=1)
    accepted = drawn.repeat(alike)
    request = np.arange(len(accepted)) // 6
    rounds = Rounds(np.full(len(accepted), 2), accepted, None, request, None)
    assert as_counted(rounds).phi == pytest.approx(alike, rel=0.06)
    alone = Rounds(rounds.drafted[:6], accepted[:6], None, request[:6], None)
    assert as_counted(alone).phi == 1.0  # a single request says nothing of it


def test_what_cannot_be_advised_is_refused() -> None:
    with pytest.raises(InputError, match="context=0 tokens; give at least 1"):
        advise(Counters(np.array([5]), np.array([2])), COST, context=0)
    assert advise(Counters(np.array([500]), np.array([200])), COST, context=1).k in (0, 1)
    refusal(lambda: advise(Rounds(np.array([0, 0]), np.array([0, 0])), COST, context=10), "nothing was drafted")


def test_logs_of_engines_are_read(tmp_path: Path) -> None:
    vllm = tmp_path / "vllm.log"  # of three servers, the first
    vllm.write_text((FIXTURES / "vllm_log.txt").read_text().splitlines()[0])
    for path, kind in ((vllm, "vllm-log"), (FIXTURES / "llamacpp_log_k3.txt", "llamacpp-log")):
        assert advise(path, COST) == advise(import_records(kind, [path]), COST)
    log = tmp_path / "server.log"
    log.write_text("started\n")
    refusal(lambda: advise(log, COST), "server.log holds nothing that an engine or a benchmark writes about drafts")


COUNTED = Counters(np.array([300_000] * 4), np.array([240_000, 168_000, 84_000, 16_800]))
EMITTED = 1 + 0.8 + 0.56 + 0.28 + 0.056


def rate(round_s: float) -> float:
    return EMITTED / round_s


def test_a_round_of_known_parts_comes_apart() -> None:
    """10 ms a token; drafting 4 x 2 ms, a target pass of 5 tokens 4 x 0.5 ms more, and 3 ms of the engine's own."""
    cost = LinearCost(target=LinearPass(0.0095, 0.0005), drafter=LinearPass(0.002))
    round_s = 0.010 + 0.008 + 0.002 + 0.003
    diagnosis = diagnose(COUNTED, baseline_tokens_per_s=100, tokens_per_s=rate(round_s), cost=cost)
    assert diagnosis.draft_tokens == 4 and diagnosis.round_tokens == pytest.approx(2.3, rel=1e-3)
    assert diagnosis.tokens_per_round.estimate == pytest.approx(EMITTED, rel=1e-3)
    assert diagnosis.speedup == pytest.approx(EMITTED / 2.3, rel=1e-3)
    assert [*diagnosis.parts.values()] == pytest.approx([1.0, 0.8, 0.2, 0.3], abs=5e-3)
    ((assumed, advice),) = diagnosis.advice
    assert assumed == "at these costs"
    # By hand: tokens over time of K = 1 to 4, at 10 + 3 ms a round and 2.5 ms a drafted token.
    speeds = [1.8 / 1.55, 2.36 / 1.8, 2.64 / 2.05, 2.696 / 2.3]
    assert [length.speedup.estimate for length in advice.lengths[1:]] == pytest.approx(speeds, rel=2e-3)
    assert advice.k == 2 and advice.sure


def test_costs_scale_to_the_measured_baseline() -> None:
    """The same shapes, on a machine twice as slow as the costs'."""
    cost = LinearCost(target=LinearPass(0.0095, 0.0005), drafter=LinearPass(0.002))
    diagnosis = diagnose(COUNTED, baseline_tokens_per_s=50, tokens_per_s=rate(2 * 0.020), cost=cost)
    assert [*diagnosis.parts.values()] == pytest.approx([1.0, 0.8, 0.2, 0.0], abs=5e-3)


def test_without_costs_both_ends_are_given() -> None:
    diagnosis = diagnose(COUNTED, baseline_tokens_per_s=100, tokens_per_s=rate(0.030))
    (grows, with_k), (fixed, without) = diagnosis.advice
    assert grows.startswith("best case") and fixed.startswith("worst case") and diagnosis.parts == {}
    # 5 ms a drafted token, or 20 ms a round: a round at K = 1 takes 15 or 30 ms.
    assert with_k.lengths[1].speedup.estimate == pytest.approx(1.8 / 1.5, rel=2e-3) and with_k.k == 1
    assert without.lengths[1].speedup.estimate == pytest.approx(1.8 / 3.0, rel=2e-3) and without.k == 0
    for advice in (with_k, without):  # both know the measured K
        assert advice.lengths[4].speedup.estimate == pytest.approx(diagnosis.speedup, rel=2e-3)


def test_rates_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="would be faster than a normal decode step"):
        diagnose(COUNTED, baseline_tokens_per_s=10, tokens_per_s=30)
    with pytest.raises(InputError, match=r"0 tokens per second without speculation; give a positive rate"):
        diagnose(COUNTED, baseline_tokens_per_s=0, tokens_per_s=30)
    with pytest.raises(InputError, match="nan tokens per second with speculation"):
        diagnose(COUNTED, baseline_tokens_per_s=10, tokens_per_s=float("nan"), cost=ConstantCost(0.001, 0.01))


@pytest.mark.parametrize(("rate", "said"), [(72, "up to K = 3"), (60, "up to K = 7")])
def test_off_says_up_to_which_draft_length_nothing_is_faster(rate: float, said: str) -> None:
    """Rounds of a fixed time, in which longer drafts are free, up to those that nothing was counted of.

    (1 - a^4) / (1 - a) = 2.57 tokens of K = 3 give a = 0.716; K = 7 has (1 - 0.716^8) / (1 - 0.716) = 3.28. At 72 tok/s
    for 80 without, a round takes 2.57 x 80 / 72 = 2.86 steps: K = 7 is faster. At 60, it takes 3.43: K = 7 is not.
    """
    shown = call(
        "specsim", "doctor", "--accept-length", 2.57, "--k", 3, "--baseline-tokens-per-second", 80,
        "--tokens-per-second", rate,
    )  # fmt: skip
    fixed = " ".join(shown.out.split()).partition("worst case")[2]
    assert f"turn speculation off: no draft length {said} is faster (K = 3: " in fixed
    longer = re.search(r"may be faster: K = 7 about ([\d.]+) to ([\d.]+) times", fixed)
    assert bool(longer) == (rate == 72)
    assert longer is None or 1 < float(longer[1]) < float(longer[2]) <= 3.28 / 2.86 + 0.005


def test_the_command_says_it_in_the_first_line(tmp_path: Path) -> None:
    counters = tmp_path / "counters.json"
    counters.write_text(json.dumps({"drafted": [1000] * 3, "accepted": [700, 400, 200]}))
    args = ["doctor", counters, "--baseline-tokens-per-second", 52, "--tokens-per-second", 41]
    shown = call("specsim", *args)
    assert (
        shown.code == 0
        and "0.79x (21 % slower): each step yields 2.30 tokens but costs as much as 2.92" in " ".join(shown.out.split())
    )
    assert "worst case (all overhead is fixed per round): turn speculation off" in shown.out
    document = json_of(call("specsim", *args, "--cost", "vllm-llama3.1-8b-eagle-h100", "--json"))
    assert len(document["parts"]) == 4 and document["advice"][0]["assumed"] == "at these costs"
    assert sum(document["parts"].values()) == pytest.approx(document["round_tokens"])
    assert_refused(call("specsim", *args[:-1], -3), "-3.0 tokens per second with speculation")
    assert_refused(call("specsim", *args[:-2]), "1,000 rounds; what is its throughput? Add --tokens-per-second")
    assert_refused(call("specsim", *args, "--out", tmp_path / "page.html"), "do not go with counters")
    assert_refused(call("specsim", *args, "--concurrency", 4), "do not go with counters")
    assert_refused(call("specsim", "doctor", "http://localhost:1", *args[2:]), "go with counters; give a file")
