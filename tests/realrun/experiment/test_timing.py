"""Arms that take turns by round: who goes next, typical rounds, that no arm notices the others, and what they cost."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import realrun.measure.sweeps as probes
from realrun.decode.decoder import Decoding
from realrun.decode.rounds import Decoded, Round
from realrun.decode.sampling import Sampler
from realrun.drafters.lookup import LookupKind
from realrun.experiment import measuring
from realrun.experiment.measuring import MeasuredCosts, Run
from realrun.experiment.timing import (
    Arm,
    Timings,
    WallClock,
    check_repeats,
    decode_sequence,
    make_arm,
    turned,
    typical_rounds,
    warm_up,
)
from realrun.lm.llama import FusedLlama, shared_prefill
from realrun.measure.interleaving import take_turns
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.policy.registry import make_policy
from specsim.replaying.intervals import ratio_interval
from specsim.trace.trace import Trace
from tests.support.checks import refusal
from tests.support.pairs.inside import pair_of
from tests.support.tiny import tiny_pair, tiny_prompts

# Turns.


class Stepper:
    """Goes through a sequence by these steps, and writes down who went."""

    def __init__(self, name: int, steps: list[int], log: list[int]):
        self.name, self.steps, self.log = name, list(steps), log
        self.position = 0

    @property
    def done(self) -> bool:
        return not self.steps

    def advance(self) -> None:
        assert not self.done
        self.log.append(self.name)
        self.position += self.steps.pop(0)


def steppers(steps: list[list[int]]) -> tuple[list[Stepper], list[int]]:
    log = list[int]()
    return [Stepper(name, own, log) for name, own in enumerate(steps)], log


sequences = st.lists(st.lists(st.integers(1, 5), max_size=8), max_size=5)


@given(steps=sequences, turn=st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 1), (3, 2)]), seed=st.integers(0, 9))
def test_whoever_is_furthest_behind_goes_next(steps: list[list[int]], turn: tuple[int, int], seed: int) -> None:
    runners, log = steppers(steps)
    turn_rounds, shift = turn
    take_turns(runners, np.random.default_rng(seed), turn_rounds, shift)
    assert all(runner.done for runner in runners)
    assert Counter(log) == Counter({name: len(own) for name, own in enumerate(steps) if own})
    left, position = [list(own) for own in steps], [0] * len(steps)
    while log:
        least = min(position[name] for name, own in enumerate(left) if own)
        rounds = turn_rounds - (shift if position[log[0]] == 0 else 0)
        names = log[: min(rounds, len(left[log[0]]))]
        assert position[names[0]] == least and set(names) == {names[0]}
        for name in names:
            position[name] += left[name].pop(0)
        del log[: len(names)]


def test_who_begins_is_drawn_by_lot() -> None:
    first = Counter[int]()
    order = np.random.default_rng(0)
    for _ in range(300):
        runners, log = steppers([[1], [1], [1]])
        take_turns(runners, order)
        first[log[0]] += 1
    assert len(first) == 3 and min(first.values()) > 70


# Typical rounds.


def one_round(t: int, seconds: float, accepted: int = 0) -> Round:
    """Its parts tell which repeat it is of."""
    return Round(t, 2, accepted, 2, accepted, seconds / 2, seconds / 8, seconds / 4, seconds / 8, (seconds / 4,) * 2)


def run_of(*seconds: float, accepted: int = 0) -> Decoded:
    return Decoded([7] * len(seconds), [one_round(t, s, accepted) for t, s in enumerate(seconds)], 0.0)


def interrupted(seconds: float, repeats: int, share: float, seed: int) -> list[Decoded]:
    """Repeats of 2000 rounds of so many seconds, of which this share was interrupted and took nine times as long."""
    draw = np.random.default_rng(seed)
    factors = np.where(draw.random((repeats, 2000)) < share, 9.0, 1.0) * draw.normal(1.0, 0.02, (repeats, 2000))
    return [run_of(*(seconds * factors[repeat]).tolist()) for repeat in range(repeats)]


def timings_of(repeats: int, share: float) -> Timings:
    """A baseline of 2 s a round, and an arm of 1 s a round for as many tokens: a speedup of 2."""
    timings = Timings()
    for arm, seconds in enumerate((2.0, 1.0)):
        for sequence in range(3):
            for run in interrupted(seconds, repeats, share * arm, seed=10 * arm + sequence):
                timings.add(arm, sequence, run)
    return timings


@pytest.mark.parametrize("share", [0.0, 0.05, 0.1])
def test_of_known_interruptions_the_median_shows_nothing_and_the_wall_clock_all(share: float) -> None:
    timings, sequences = timings_of(3, share), [0, 1, 2]
    baseline_s, own_s = (timings.seconds_for_baseline(arm, sequences) for arm in (0, 1))
    measured = ratio_interval(baseline_s, own_s)
    # Of three rounds at least two are interrupted with probability 3 p^2 (1 - p) + p^3: for 10 %, 2.8 %.
    both = 3 * share**2 * (1 - share) + share**3
    assert measured.estimate == pytest.approx(2 / (1 + 8 * both), rel=0.03)
    walls = [timings.wall_s_for_baseline(arm, sequences) for arm in (0, 1)]
    wall = WallClock.of(*walls, measured, floor_percent=2.0)
    assert wall.speedup == pytest.approx(2 / (1 + 8 * share), rel=0.03)
    assert wall.differs == (share > 0)


@pytest.mark.parametrize(("repeats", "wanted"), [(-1, 3), (0, 3), (1, 3), (2, 3), (4, 5), (10, 11)])
def test_repeats_without_a_median_are_refused(repeats: int, wanted: int) -> None:
    refusal(lambda: check_repeats(repeats), f"{repeats} repeats have no median run", f"pass --repeats {wanted}")
    check_repeats(wanted)


@given(
    seconds=st.lists(st.lists(st.floats(0.1, 9), min_size=4, max_size=4), min_size=1, max_size=6),
    seed=st.integers(0, 9),
)
def test_the_parts_of_a_typical_round_are_those_of_one_repeat(seconds: list[list[float]], seed: int) -> None:
    runs = [run_of(*own) for own in seconds]
    typical = typical_rounds(runs)
    assert len(typical) == 4
    for number, round_ in enumerate(typical):
        same = [run.rounds[number] for run in runs]
        assert round_ in same
        assert round_.seconds == sorted(other.seconds for other in same)[len(runs) // 2]
    shuffled = [runs[i] for i in np.random.default_rng(seed).permutation(len(runs))]
    assert [round_.seconds for round_ in typical_rounds(shuffled)] == [round_.seconds for round_ in typical]


def test_of_repeats_that_differ_the_middle_one_is_taken_whole() -> None:
    runs = [run_of(1.0, 9.0), run_of(2.0, 5.0, accepted=1), run_of(90.0)]
    assert typical_rounds(runs) == runs[0].rounds  # 10 s, between 7 s and 90 s


def test_seconds_are_those_of_typical_rounds() -> None:
    timings = Timings()
    for arm, sequence, run in ((0, 0, run_of(1.0, 9.0)), (0, 1, run_of(3.0)), (1, 0, run_of(4.0))):
        timings.add(arm, sequence, run)
    timings.add(0, 0, run_of(5.0, 2.0))
    timings.add(0, 0, run_of(0.5, 1.0))
    np.testing.assert_allclose(timings.seconds(0, [0, 1]), [1.0 + 2.0, 3.0])
    np.testing.assert_allclose(timings.seconds(1, [0]), [4.0])
    assert timings.mean_round_s(0, [0, 1]) == 2.0  # the round of 9 s was interrupted
    np.testing.assert_allclose(timings.wall_s(0, [0, 1]), [18.5, 3.0])
    assert [len(run.rounds) for run in timings.last_runs(0, [1, 0])] == [1, 2]
    assert timings.last_runs(0, [0]) == [timings.runs[0, 0][2]]


# Arms.

POLICIES = {
    "chain": ("fixed_k", {"k": 3}),
    "adaptive chain": ("adaedl", {"max_draft_tokens": 4}),
    "carried state": ("beta_ts", {"carry": True, "max_draft_tokens": 4}),
    "tree": ("vct", {"width": 2, "depth": 3}),
    "dynamic tree": ("eagle2", {"nodes": 6, "top_k": 3, "depth": 3}),
}
SAMPLER = Sampler("gumbel", 0.8, seed=4)


def decode_in_turns(
    arms: list[Arm], prompts: list[Prompt], trace: Trace, timings: Timings, turn_rounds: int = 2
) -> None:
    """Another repeat of all sequences, in turns that end elsewhere in every repeat."""
    states: list[Any] = [None] * len(arms)
    order, shift = np.random.default_rng(2), len(timings.runs[0, 0]) % turn_rounds
    for index, prompt in enumerate(prompts):
        runs = decode_sequence(
            arms, prompt, trace, index, states, seed=5, order=order, turn_rounds=turn_rounds, shift=shift
        )
        states = [run.state for run in runs]
        for arm, run in enumerate(runs):
            timings.add(arm, index, run)


def arms_over(pair: Pair) -> list[Arm]:
    policies = [None, *(make_policy(name, settings) for name, settings in POLICIES.values()), None]
    return [make_arm(str(number), policy, pair, SAMPLER) for number, policy in enumerate(policies)]


@pytest.mark.parametrize("turn_rounds", [1, 3])
@pytest.mark.parametrize("kind", ["model", "edd", "medusa", "self-sd", "eesd"])
def test_no_arm_notices_the_others(kind: str, turn_rounds: int) -> None:
    """All at once over one pair, in turns by round, they do what each does alone: the same tokens, the same rounds."""
    pair, prompts = pair_of(kind), tiny_prompts(3)
    trace = record(pair, prompts, RecordSettings(4, 20, SAMPLER))
    arms, timings = arms_over(pair), Timings()
    warm_up(arms, prompts, trace)
    for now in (arms, turned(arms)):  # states that are carried start anew with each repeat
        decode_in_turns(now, prompts, trace, timings, turn_rounds)
    for number, arm in enumerate(arms_over(pair)):
        state: Any = None
        for index, prompt in enumerate(prompts):
            alone = arm.decoder.decode(prompt.tokens, 20, arm.policy, sequence=index, seed=5, state=state)
            state = alone.state
            for run in timings.runs[number, index]:
                assert run.tokens == alone.tokens and run.full_log() == alone.full_log(), (kind, arm.policy)
                assert run.state == alone.state
                assert [(round_.fed, round_.asked, round_.level_nodes) for round_ in run.rounds] == [
                    (round_.fed, round_.asked, round_.level_nodes) for round_ in alone.rounds
                ]


def test_arms_exchange_decoders_of_their_own_pair() -> None:
    """Each other sequence every arm, the two baselines first of all, decodes in the other's memory."""
    pairs, policies = (tiny_pair(), replace(tiny_pair())), [None, make_policy("fixed_k", {"k": 2}), None]
    arms = [make_arm(str(policy), policy, pair, SAMPLER) for pair in pairs for policy in policies]
    exchanged = turned(arms)
    assert [arm.decoder for arm in exchanged] == [arms[at].decoder for at in (2, 1, 0, 5, 4, 3)]
    assert [arm[:2] for arm in exchanged] == [arm[:2] for arm in arms] and turned(exchanged) == arms


def test_a_measurement_gives_every_arm_both_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, prompts = tiny_pair(), tiny_prompts(4)
    trace = record(pair, prompts, RecordSettings(4, 8, SAMPLER))
    arms = [make_arm("plain", None, pair, SAMPLER), make_arm("null", None, pair, SAMPLER)]
    used: list[bool] = []

    def noted(now: list[Arm], *args: Any, **options: Any) -> Any:
        used.append(now[0].decoder is arms[0].decoder)
        return decode_sequence(now, *args, **options)

    monkeypatch.setattr(measuring, "decode_sequence", noted)
    costs = MeasuredCosts(pair, trace, tree_tokens=0, sampler=SAMPLER, seed=0, texts=8, arms=[0, 1])
    reports: list[tuple[int, int]] = []
    measuring.measure_in_turns(
        arms, {"": costs}, prompts, trace, None, repeats=2, seed=0,
        progress=lambda done, total: reports.append((done, total)),
    )  # fmt: skip
    assert used == [True, False, True, False, False, True, False, True]
    assert reports == [(done, 8) for done in range(9)]  # from before the first, which warms up


@pytest.mark.parametrize(
    ("floor_percent", "more_until_s", "repeats"), [(5.0, None, 3), (1.0, np.inf, 1), (1.04, np.inf, 3), (5.0, 0.0, 1)]
)
def test_within_minutes_more_repeats_follow_where_noise_asks_and_time_allows(
    floor_percent: float, more_until_s: float | None, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring.Measurement, "noise_floor_percent", floor_percent)
    pair, prompts = tiny_pair(), tiny_prompts(2)
    trace = record(pair, prompts, RecordSettings(4, 8, SAMPLER))
    arms = [make_arm("plain", None, pair, SAMPLER), make_arm("null", None, pair, SAMPLER)]
    costs = MeasuredCosts(pair, trace, tree_tokens=0, sampler=SAMPLER, seed=0, texts=8, arms=[0, 1])
    reports: list[tuple[int, int]] = []
    made = measuring.measure_in_turns(
        arms, {"": costs}, prompts, trace, None, repeats=3, seed=0, more_until_s=more_until_s,
        progress=lambda done, total: reports.append((done, total)),
    )  # fmt: skip
    assert made.repeats == repeats and {len(runs) for runs in made.timings.runs.values()} == {repeats}
    assert reports[-1] == (2 * repeats, 2 * repeats)


def test_arms_that_read_the_same_prompt_compute_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the caches of its own: all outputs and rounds are those of prompts that every arm read by itself."""
    pair, prompts = tiny_pair(), tiny_prompts(2)
    trace = record(pair, prompts, RecordSettings(4, 12, SAMPLER))
    policies = [None, make_policy("fixed_k", {"k": 2}), make_policy("adaedl", {}), None]
    arms, passes = [make_arm(str(policy), policy, pair, SAMPLER) for policy in policies], list[int]()

    def runs_of(index: int) -> list[Decoded]:
        order = np.random.default_rng(0)
        return decode_sequence(arms, prompts[index], trace, index, [None] * 4, seed=0, order=order)

    alone = [runs_of(index) for index in range(2)]
    forward = FusedLlama._forward
    monkeypatch.setattr(
        FusedLlama, "_forward", lambda lm, tokens, keep: (passes.append(len(tokens)), forward(lm, tokens, keep))[1]
    )
    for index, prompt in enumerate(prompts):
        passes.clear()
        with shared_prefill():
            runs = runs_of(index)
        kept_hidden = {arm.decoder.target.keep_hidden for arm in arms}
        models = 1 + len(kept_hidden)  # the target, with hidden states or without, and the draft model
        assert sum(tokens == len(prompt.tokens) - 1 for tokens in passes) <= models
        for run, own in zip(runs, alone[index], strict=True):
            assert (run.tokens, run.full_log()) == (own.tokens, own.full_log())


def test_what_else_takes_turns_on_a_sequence_ends_with_it() -> None:
    pair, prompts = tiny_pair(), tiny_prompts(3)
    trace = record(pair, prompts, RecordSettings(4, 12, SAMPLER))
    log: list[int] = []
    arms, order = [make_arm("plain", None, pair, SAMPLER)], np.random.default_rng(0)
    for index, prompt in enumerate(prompts):
        beside = Stepper(index, [4, 4, 4], log)
        (run,) = decode_sequence(arms, prompt, trace, index, [None], seed=0, order=order, beside=beside)
        assert beside.done and len(run.tokens) == trace.output_tokens[index]
    assert log == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_what_begins_a_turn_in_one_repeat_does_not_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[int]] = [[], [], []]
    pair, prompts = tiny_pair(), tiny_prompts(1)
    trace = record(pair, prompts, RecordSettings(4, 7, Sampler("greedy")))
    arms = [make_arm("plain", None, pair, Sampler("greedy")), make_arm("null", None, pair, Sampler("greedy"))]
    timings, before = Timings(), list[Any]()

    def noted(decoding: Decoding) -> Any:
        if not before or before[-1] is not decoding:
            begun[len(timings.runs[0, 0])].append(decoding.position)
        before.append(decoding)
        return advance(decoding)

    advance = Decoding.advance
    monkeypatch.setattr(Decoding, "advance", noted)
    for _ in range(3):
        decode_in_turns(arms, prompts, trace, timings)
        before.clear()
    assert sorted(set(begun[0])) == sorted(set(begun[2])) == [0, 2, 4, 6]
    assert sorted(set(begun[1])) == [0, 1, 3, 5]


def test_a_repeat_is_of_the_traces_sequences_and_budgets() -> None:
    pair, prompts = tiny_pair(), tiny_prompts(4)
    trace = record(pair, prompts, RecordSettings(4, 12, SAMPLER)).select([3, 1])
    timings = Timings()
    arms = [make_arm("plain", None, pair, SAMPLER), make_arm("k", make_policy("fixed_k", {"k": 2}), pair, SAMPLER)]
    decode_in_turns(arms, [prompts[3], prompts[1]], trace, timings)
    for index in range(2):
        recorded = trace.token[trace.offsets[index] : trace.offsets[index + 1]].tolist()
        assert timings.runs[0, index][0].tokens == timings.runs[1, index][0].tokens == recorded


# Costs of the arms' own rounds, completed by probes: each drafter has all that its policies may ask for.


PROMPTS = [Prompt("all", list(range(5, 15))), Prompt("all", [30, 40, 50, 60])]
ENOUGH = 3
PAIRS = {"model": tiny_pair, "prompt-lookup": lambda: replace(tiny_pair(), drafter=LookupKind())}
PAIRS |= {kind: (lambda kind=kind: pair_of(kind)) for kind in ("edd", "medusa")}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "ENOUGH", ENOUGH)


def measured_costs(pair: Pair, texts: int = 2) -> tuple[MeasuredCosts, Trace]:
    trace = record(pair, PROMPTS, RecordSettings(3, 16, SAMPLER))
    trees = 4 if pair.drafter.trees else 0
    return MeasuredCosts(pair, trace, tree_tokens=trees, sampler=SAMPLER, seed=0, texts=texts), trace


def baseline_runs(trace: Trace, seconds: float) -> list[Run]:
    """Made up: every step takes so long."""
    return [
        (None, int(prompt), [Round(t, 0, 0, 0, 0, 0.0, 0.0, seconds, 0.0) for t in range(tokens)])
        for prompt, tokens in zip(trace.prompt_tokens, trace.output_tokens, strict=True)
    ]


def chain_runs(trace: Trace, seconds: float, k: int = 2) -> list[Run]:
    round_ = Round(0, k, 0, k, 0, k * seconds, k * seconds, seconds, seconds, (seconds,) * k, (), 1, k)
    policy = make_policy("fixed_k", {"k": k})
    return [
        (policy, int(prompt), [replace(round_, t=t) for t in range(tokens - k)])
        for prompt, tokens in zip(trace.prompt_tokens, trace.output_tokens, strict=True)
    ]


@pytest.mark.parametrize("kind", PAIRS)
def test_probes_alone_give_every_drafter_a_whole_profile(kind: str) -> None:
    """Also prompt lookup, on texts that repeat nothing."""
    costs, trace = measured_costs(PAIRS[kind]())
    for index, prompt in enumerate(PROMPTS):
        take_turns([costs.probing(prompt, index)], np.random.default_rng(0))
    for tokens in range(1, trace.depth + 1):
        assert costs.probed.count("draft", tokens) >= ENOUGH and costs.probed.count("verify", tokens + 1) >= ENOUGH
    profile = costs.profile(baseline_runs(trace, 0.25), repeats=1)
    cost, document = profile.cost, profile.as_dict()
    np.testing.assert_allclose(cost.autoregressive_s, 0.25)
    assert (cost.draft_step_s > 0).all() and (cost.verify_s > 0).all()
    assert len(cost.verify_s) == trace.depth + 1 and document["repeats"] == 1
    low, high = cost.contexts[[0, -1]]
    assert low == trace.prompt_tokens.min() - 1 and high >= (trace.prompt_tokens + trace.output_tokens).max() - 2


def test_the_arms_rounds_and_the_probes_are_weighed_alike() -> None:
    costs, trace = measured_costs(tiny_pair())
    for index, prompt in enumerate(PROMPTS):
        take_turns([costs.probing(prompt, index)], np.random.default_rng(0))
    probes_alone = costs.profile(baseline_runs(trace, 0.25), 1).document["median_s"]
    slow_s = 100.0  # beyond any probe, however busy the machine
    both = costs.profile([*baseline_runs(trace, 0.25), *chain_runs(trace, slow_s)], 1).document["median_s"]
    assert np.max(probes_alone["verify"][1:]) < 0.2 * slow_s and probes_alone["verify"][3] == both["verify"][3]
    np.testing.assert_allclose(both["verify"][2], slow_s, rtol=0.1)  # there are more rounds of arms than probes
    np.testing.assert_allclose(both["draft_step"][0], slow_s, rtol=0.1)
    again = costs.profile(baseline_runs(trace, 0.25), 1).document["median_s"]
    assert again == probes_alone  # no document leaves anything behind for the next


def test_what_the_arms_have_shown_is_not_probed() -> None:
    costs, trace = measured_costs(tiny_pair(), texts=1)
    for k in (1, 2, 3):
        shown = chain_runs(trace, 0.5, k)
        other = make_policy("adaedl", {"max_draft_tokens": k})  # two policies, as none is to be priced by itself alone
        costs.saw([*shown, *((other, prompt_tokens, rounds) for _, prompt_tokens, rounds in shown)])
    take_turns([costs.probing(PROMPTS[0], 0)], np.random.default_rng(0))
    assert not any(costs.probed.count(what) for what in ("draft", "behind")) and costs.probed.count("tree verify", 4)
    assert costs.probed.count("verify") == costs.probed.count("verify", 1)  # of trees of nothing but the pending token


def test_probes_go_on_from_a_file_and_are_finished_where_texts_were_too_few() -> None:
    costs, _ = measured_costs(tiny_pair(), texts=5)
    take_turns([costs.probing(PROMPTS[0], 0)], np.random.default_rng(0))
    samples = json.loads(json.dumps(costs.probed.as_dict()))
    assert 0 < costs.probed.count("verify", 4) < ENOUGH
    resumed, trace = measured_costs(tiny_pair(), texts=5)
    resumed.resume(samples)
    assert json.loads(json.dumps(resumed.probed.as_dict())) == samples

    def short_of(costs: MeasuredCosts) -> list[Any]:
        chains = [("draft", place) for place in (1, 2, 3)] + [("verify", size) for size in (2, 3, 4)]
        wanted = [*chains, *(("tree verify", size) for size in (2, 3, 4)), *(("tree draft", n) for n in (2, 3, 4))]
        return [what for what in wanted if costs.probed.count(*what) < ENOUGH]

    assert short_of(resumed)
    resumed.finish(PROMPTS[1], 1)
    assert not short_of(resumed)
    before = json.dumps(resumed.probed.as_dict())
    resumed.finish(PROMPTS[1], 1)
    assert json.dumps(resumed.probed.as_dict()) == before
    assert resumed.profile(baseline_runs(trace, 0.25), 2).cost.max_tree_tokens == 4
