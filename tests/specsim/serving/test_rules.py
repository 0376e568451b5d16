"""Rules of draft length across requests: by hand, against all allocations, and what holds whatever a rule does."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import specsim
from specsim.acceptance.formulas import mean_tokens_per_round
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.batches import BatchCost, BatchTokens
from specsim.cost.linear import LinearCost, LinearPass
from specsim.cost.model import ConstantCost
from specsim.io.arrays import FloatArray, Ints
from specsim.learn.calibration import Calibration
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.serving.arrivals import requests_of_trace
from specsim.serving.continuous import run_server
from specsim.serving.costs import batch_cost, round_seconds
from specsim.serving.draft_length import (
    DraftLengthRule,
    DraftRounds,
    Running,
    ScheduledK,
    State,
    StepTables,
    TurboSpec,
    fixed_length,
)
from specsim.serving.drafts import Arm, drafts_of
from specsim.serving.lockstep import Lockstep, lockstep
from specsim.serving.rules.budget import Budget
from specsim.serving.rules.dspark import DSpark
from specsim.serving.rules.oracle import Oracle
from specsim.serving.rules.registry import RULES, find_rule
from specsim.serving.rules.sglang_adaptive import SGLangAdaptive, StepsConfig, moved
from specsim.serving.rules.sglang_throughput import ThroughputAware, expected_rates
from specsim.serving.rules.survival import Survival, fit_survival
from specsim.serving.rules.value import hand_out
from specsim.serving.serve import fit_policies
from specsim.trace.files import read_plain_trace
from specsim.trace.trace import Trace
from tests.support.acceptance_examples import difficulty
from tests.support.checks import refusal
from tests.support.serving_costs import COST, exact_table

# Three requests of twelve positions in all, and drafts of up to three tokens. By position: how many would be accepted,
# and the drafter's probability of each.
OUTPUT = [5, 4, 3]
MATCH = [3, 0, 2, 1, 0, 1, 2, 1, 0, 2, 0, 0]
PROB = [
    (0.9, 0.9, 0.9), (0.2, 0.5, 0.5), (0.8, 0.7, 0.1), (0.6, 0.2, 0.2), (0.5, 0.5, 0.5),
    (0.7, 0.3, 0.3), (0.9, 0.8, 0.2), (0.5, 0.2, 0.2), (0.5, 0.5, 0.5),
    (0.6, 0.6, 0.1), (0.3, 0.3, 0.3), (0.5, 0.5, 0.5),
]  # fmt: skip
TEN_MS = LinearCost(LinearPass(0.010, 0.001), LinearPass(0.001))  # a verified token 1 ms, a draft pass 1 ms


def twelve() -> Trace:
    drawn = generate(IID(0.5), sequences=3, output_tokens=OUTPUT, depth=3, prompt_tokens=1)
    prob = np.array(PROB, dtype=np.float32)
    return dataclasses.replace(drawn, match_len=np.array(MATCH, dtype=np.uint8), prob=prob, confidence=prob)


def by_round(run: Lockstep, *names: str) -> list[list[tuple[int, ...]]]:
    """List these columns of the rounds by step: a tuple for each request that runs."""
    facts = [getattr(run.rounds, name) for name in ("batch_round", "sequence", *names)]
    rows = sorted(zip(*(fact.tolist() for fact in facts), strict=True))
    return [[tuple(row[2:]) for row in group] for _, group in itertools.groupby(rows, key=lambda row: row[0])]


def decoded(rule: DraftLengthRule, trace: Trace, cost: BatchCost = TEN_MS) -> Lockstep:
    return lockstep(drafts_of(trace, rule), cost, trace.sequences)


def running(cached: npt.ArrayLike, **known: Any) -> Running:
    """Requests with these contexts, of which nothing else is known unless given by name."""
    contexts = np.asarray(cached, dtype=np.int64)
    none = np.zeros_like(contexts)
    facts = {"request": np.arange(len(contexts)), "cached": contexts, "remaining": none + 1000}
    facts |= dict.fromkeys(("verified", "accepted", "behind"), none)
    return Running(**{**facts, "sequences": len(contexts), **known})


def rounds(verified: npt.ArrayLike, accepted: npt.ArrayLike) -> DraftRounds:
    """Rounds whose drafts were verified whole."""
    drafted, right = np.asarray(verified), np.asarray(accepted)
    return DraftRounds(drafted, drafted, right, right + 1, 0 * right, 0 * right, bool(drafted.any()))


def as_it_is() -> Survival:
    """A drafter whose confidence is the chance of acceptance, whose next token is as likely as the last."""
    log_odds = np.linspace(-14, 14, 4001)
    sure = 1 / (1 + np.exp(-log_odds))
    token = Calibration(np.array([0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]), log_odds, sure)
    return Survival(token, Calibration(np.array([0.0, 1.0, 0.0]), log_odds, sure), np.array([0.6, 0.4, 0.2]))


def test_a_budget_in_tokens_is_handed_out_by_survival() -> None:
    run = decoded(Budget(TEN_MS, as_it_is(), budget=4, max_draft_tokens=3), twelve())
    first, *_ = by_round(run, "drafted", "verified", "accepted")
    # After the first pass survival is .9, .7 and .6, and there is room: all go on. After the second it is .81, .21,
    # .36; the fourth of all is .6, and a next token is as likely as the last: of the first request .73, above it.
    assert first == [(3, 3, 3), (2, 1, 1), (2, 0, 0)]  # .9, .81, .729, .7
    # Three draft passes, and verification of three pending tokens and four drafted ones.
    assert run.seconds.total_s[0] == pytest.approx(0.003 + 0.010 + 7 * 0.001)


def test_dspark_plans_by_the_drafts_of_the_step_before() -> None:
    trace = twelve()
    # The drafter passes are the same whatever is verified, 3 ms. In the first step every chance is taken to be 1, so
    # that promised tokens over seconds, (3 + b) / (16 + b) ms, grow to the end and all nine tokens are verified.
    run = decoded(DSpark(TEN_MS, as_it_is(), max_draft_tokens=3), trace)
    first, second, *_ = by_round(run, "t", "drafted", "verified")
    assert first == [(0, 3, 3), (0, 3, 3), (0, 2, 2)]
    # The third request is over. Chances of the others' first drafts are .9 .81 .729 .7 .21 .063 in order, and
    # (2 + sums) / (15 + b) is the most at four tokens, of which one is left to draft.
    assert second == [(4, 0, 0), (2, 1, 1)]
    exact = DSpark(TEN_MS, as_it_is(), max_draft_tokens=3, lag=False)
    survival = np.cumprod(np.array(PROB)[[0, 5, 9]], axis=1)
    # With this step's own, .9 .81 .729 .7 .6 .36 .21 .063 .036, (3 + sums) / (16 + b) is 6.739 / 21 = .321 at five
    # tokens, 7.099 / 22 = .323 at six and 7.309 / 23 = .318 at seven.
    assert exact.budget(running([0, 0, 0]), survival) == 6
    assert exact.verify(exact.initial_state(), running([0, 0, 0]), survival, np.full(3, 3)).tolist() == [3, 1, 2]


def test_sglang_moves_between_candidates_as_its_source_does() -> None:
    constants = SGLangAdaptive().config.by_size[1]  # 1, 3, 5, 7; down -0.25, up 0
    assert moved(3, 0.25, constants)[0] == 1  # at most 1 - 0.5 - 0.25
    assert moved(3, 0.26, constants)[0] == 3
    assert moved(3, 2.5, constants)[0] == 3  # not above 3 - 0.5
    assert moved(3, 2.51, constants)[0] == 5
    assert moved(3, 4.6, constants)[0] == 7  # above 4.5 as well
    assert moved(7, 0.1, constants)[0] == 1  # past all
    at_eight = SGLangAdaptive().config.by_size[8]  # 0, 1, 3; no hysteresis
    assert moved(1, 0.5, at_eight)[0] == 0 and moved(1, 0.51, at_eight)[0] == 3
    assert moved(0, -1.0, at_eight) == (1, 0.0)  # tries again, from that step's neutral average
    assert moved(0, 0.2, at_eight) == (1, 0.2)
    assert moved(5, 2.4, constants._replace(ceiling_coeff=1.0))[0] == 3  # at most ceil(2.4)


def test_sglang_looks_every_five_steps_after_ten() -> None:
    rule, one = SGLangAdaptive(), running([100])
    state = rule.initial_state()
    assert (rule.choose(state, one), state[1].accepted) == (3, 2.0)
    lengths = []
    for _ in range(20):
        state = rule.update(state, one, rounds([3], [3]))
        lengths.append(rule.choose(state, one))
    assert lengths == [3] * 14 + [5] * 6  # 3 - 0.8^15 = 2.96 is above 2.5, and never above 4.5
    assert [rule.choose(state, running([100] * batch)) for batch in (7, 8, 40, 64)] == [5, 3, 1, 0]
    assert state[8].batches == 0


def test_sglang_decides_as_its_own_class_did() -> None:
    """K and for how many steps, as AdaptiveSpeculativeParams of SGLang 0.5.23 chose them on the same acceptance."""
    theirs = {
        1: [(3, 45), (5, 60), (3, 45), (1, 80), (3, 45), (5, 10), (7, 5), (5, 35), (3, 40), (1, 80), (3, 50), (5, 20),
            (7, 30), (5, 10), (3, 35), (1, 10)],
        8: [(3, 70), *[(0, 5), (1, 5)] * 6, (3, 55), *[(0, 5), (1, 5)] * 5, (3, 65)],
        32: [(1, 65), *[(0, 5), (1, 5)] * 5, (0, 5), (1, 55), *[(0, 5), (1, 5)] * 5, (0, 5), (1, 60), (0, 5), (1, 5)],
        64: [(0, 300)],
    }  # fmt: skip
    rule, rng = SGLangAdaptive(), np.random.default_rng(23)
    state, chosen = rule.initial_state(), {batch: list[int]() for batch in theirs}
    for step in range(1500):
        batch = (1, 1, 8, 32, 64)[step % 5]
        now = running([100] * batch)
        k = rule.choose(state, now)
        chosen[batch].append(k)
        refused = rng.random((batch, 7)) > 0.5 + 0.45 * np.sin(step / 90)
        accepted = np.minimum((refused.cumsum(axis=1) == 0).sum(axis=1), k)
        state = rule.update(state, now, rounds([k] * batch, accepted))
    assert {
        batch: [(k, len([*same])) for k, same in itertools.groupby(all_k)] for batch, all_k in chosen.items()
    } == theirs


@pytest.mark.parametrize(("batch", "steps"), [(30, 1), (31, 0), (32, 0), (60, 0), (61, 2), (64, 2)])
def test_sglang_pads_a_batch_before_it_looks_its_slot_up(batch: int, steps: int) -> None:
    """Captured sizes are 28, 30, 32 and 56, 60, 64: its adaptive_step_router.py takes the next larger one."""
    document = {str(n): {"candidate_steps": [k]} for n, k in ((1, 1), (32, 0), (64, 2))}
    rule = SGLangAdaptive(StepsConfig.from_json(document, "given", 0))
    assert rule.choose(rule.initial_state(), running([100] * batch)) == steps


def test_sglang_by_throughput_reconsiders_when_its_windows_are_full() -> None:
    # A verified token 1 ms of 11, a draft pass 1 ms: steps of one request take 11 + 2 K ms, 13 and 17 of K = 1 and 3.
    document = {"1": {"candidate_steps": [1, 3]}, "window_size": 2, "update_interval": 1}
    config = StepsConfig.from_json(document, "given", 1)
    rule, one = ThroughputAware(TEN_MS, config, initial_steps=1), running([100])
    state = rule.initial_state()
    chosen = []
    for accepted in (1, 1, 1, 3, 3, 0, 0, 0):
        chosen.append(rule.choose(state, one))
        state = rule.update(state, one, rounds([chosen[-1]], [min(accepted, chosen[-1])]))
    # After two steps that accept all, 4 / 17 beats 2 / 13 by more than a tenth. The third token is drafted in steps 3
    # to 5; K = 1 comes back once both steps of the windows accepted nothing: 1 / 13 against 1 / 17.
    assert chosen == [1, 1, 3, 3, 3, 3, 3, 1]
    assert [len(window) for window in state.windows] == [2, 0, 0]


def test_sglang_by_throughput_looks_seconds_up_at_captured_batches() -> None:
    rule = ThroughputAware(TEN_MS)
    seen = rule.initial_state()._replace(windows=((0.8,), (0.6,), (0.4,)))
    scores = {batch: rule.scores(seen, [1, 3], batch) for batch in (30, 31, 32, 512, 600)}
    assert scores[30] > scores[31] == scores[32] and scores[600] == scores[512]


def test_rates_beyond_the_drafts_go_on_falling() -> None:
    assert expected_rates([[], []]) == []
    assert expected_rates([[0.8], []]) == [0.8, 0.8]
    # From 0.8 to 0.4 in two steps is a fall by the root of 1/2 each.
    assert expected_rates([[0.8], [0.6], [0.4], []]) == pytest.approx([0.8, 0.6, 0.4, 0.4 * 0.5**0.5])


def test_the_oracle_drafts_what_is_accepted_while_it_pays() -> None:
    trace = twelve()
    first, *_ = by_round(decoded(Oracle(TEN_MS, max_draft_tokens=3), trace), "t", "drafted", "accepted")
    # A token is worth 13 ms / 3 at first. Three, one and two tokens would be accepted: the first pass adds 1 + 3 ms for
    # three tokens, the second 1 + 2 for two, the third 1 + 1 for one; all pay.
    assert first == [(0, 3, 3), (0, 1, 1), (0, 2, 2)]
    dear = LinearCost(LinearPass(0.010, 0.001), LinearPass(0.004))
    first, *_ = by_round(decoded(Oracle(dear, max_draft_tokens=3), trace, dear), "t", "drafted", "accepted")
    # Passes of 4 ms: 7 ms for three tokens and 6 ms for two pay at 4.33 ms each, 5 ms for one do not.
    assert first == [(0, 2, 2), (0, 1, 1), (0, 2, 2)]


def allocations(most: Ints) -> list[Ints]:
    return [np.array(each) for each in itertools.product(*(range(int(n) + 1) for n in most))]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_budget_is_the_best_of_all_allocations(data: st.DataObject) -> None:
    """Verified tokens: as many as make value x expected tokens - seconds the most, over every prefix of every draft."""
    requests = data.draw(st.integers(1, 3))
    prob = np.array(data.draw(st.lists(st.lists(st.floats(0.02, 0.98), min_size=3, max_size=3),
                                       min_size=requests, max_size=requests)))  # fmt: skip
    token_s = data.draw(st.floats(1e-5, 2e-3))
    cost = LinearCost(LinearPass(0.01, token_s), LinearPass(0.001))
    rule, drafted = Budget(cost, as_it_is(), max_draft_tokens=3), np.array(data.draw(
        st.lists(st.integers(1, 3), min_size=requests, max_size=requests)))  # fmt: skip
    survival, here = np.cumprod(prob, axis=1), running(np.full(requests, 50))
    value_s = rule.value_s(rule.initial_state().achieved, here)
    assume(rule.pays(rule.initial_state(), here))  # else the token drafted is a trial, and is verified

    def worth(verified: Ints) -> float:
        sure = sum(survival[r, :n].sum() for r, n in enumerate(verified))
        return float(value_s * sure - cost.batch_verify(BatchTokens.of(verified + 1, here.cached)))

    best = max(worth(each) for each in allocations(drafted))
    assert worth(rule.verify(rule.initial_state(), here, survival, drafted)) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize(("share", "rests"), [(0.05, 4), (0.1, 2), (0.01, 19)])
def test_a_draft_that_does_not_pay_is_tried_for_its_share_of_the_time(share: float, rests: int) -> None:
    """A step takes 11 ms, with a draft of one token 2 ms more: share x rests x 11 ms reaches 2 ms."""
    rule, one = Budget(TEN_MS, as_it_is(), max_draft_tokens=3, trial_share=share), running([50])
    state = rule.initial_state()._replace(foretold=1e6)  # of which nothing was accepted
    tried = 0
    while rule.choose(state, one) == 0:
        state, tried = rule.update(state, one, rounds([0], [0])), tried + 1
    assert (tried, rule.choose(state, one)) == (rests, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.floats(1e-5, 5e-3), st.floats(1e-5, 1e-2))
def test_the_oracle_is_the_best_of_all_allocations(match: list[int], token_s: float, pass_s: float) -> None:
    cost = LinearCost(LinearPass(0.01, token_s), LinearPass(pass_s, token_s / 7), step_s=0.001, round_s=0.0005)
    rule, here = Oracle(cost, max_draft_tokens=3), running(np.full(len(match), 50), match=np.array(match))
    value_s = rule.value_s(rule.initial_state(), here)

    def worth(drafted: Ints) -> float:
        none = 0 * drafted
        took = round_seconds(cost, none, drafted, none, here.cached, speculates=bool(drafted.any()))
        return float(value_s * np.minimum(drafted, match).sum() - took.total_s[0])

    best = max(worth(each) for each in allocations(np.full(len(match), 3)))
    assert worth(rule.choose(rule.initial_state(), here)) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("accept_prob", [0.5, 0.8])
def test_the_oracle_of_a_step_is_close_to_the_oracle_of_a_text(accept_prob: float) -> None:
    """One sequence at a time, whose least seconds an exact dynamic programme over its positions gives."""
    trace = generate(IID(accept_prob), sequences=20, output_tokens=60, depth=4, seed=5, prompt_tokens=30)
    cost = dataclasses.replace(COST, round_s=0.0)  # which the programme charges without a draft as well
    least_s = float(chain_oracle_seconds(trace, exact_table(trace, cost)).sum())
    step_s = lockstep(drafts_of(trace, Oracle(cost, max_draft_tokens=4)), cost, 1).total_s
    assert least_s < step_s < 1.02 * least_s


@pytest.fixture(scope="module")
def informed() -> Trace:
    """Text of easy and hard stretches, whose drafter says which is which."""
    return generate(difficulty(), sequences=48, output_tokens=60, depth=5, seed=4)


NAMES = [name for name in RULES if name != "oracle"]
GIVEN: dict[str, dict[str, Any]] = {"dspark": {"max_draft_tokens": 5}}


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_by_name_decodes_every_text_once_and_none_beats_the_oracle(name: str, informed: Trace) -> None:
    part, arms, learned_on = fit_policies(
        informed, COST, [(name, GIVEN.get(name, {})), ("oracle", {})], tuning_share=0.5, seed=0
    )
    assert learned_on == (24 if RULES[name].learns else 0)
    runs = [lockstep(drafts_of(part, arm), COST, 12, refill=True) for arm in arms]
    for run in runs:
        rounds = run.rounds
        assert np.bincount(rounds.sequence, rounds.emitted).tolist() == part.output_tokens.tolist()
        assert (rounds.accepted <= rounds.verified).all() and (rounds.verified <= rounds.drafted).all()
    assert runs[1].total_s < runs[0].total_s


def test_a_calibrated_budget_beats_every_fixed_k(informed: Trace) -> None:
    """Its confidence tells easy stretches from hard ones; a fixed K drafts as much in both."""
    cost = LinearCost(LinearPass(0.01, 1e-4, 2e-6), LinearPass(0.001, 2e-5, 5e-7), step_s=0.001, round_s=0.0005)
    part, (budget,), _ = fit_policies(informed, cost, [("budget", {})], tuning_share=0.5, seed=0)
    order = np.tile(np.arange(part.sequences), 8)

    def tokens_per_s(arm: Any) -> float:
        tokens, seconds = lockstep(drafts_of(part, arm), cost, 12, order=order, refill=True).per_sequence(
            full_only=True
        )
        return float(tokens.sum() / seconds.sum())

    fixed = [tokens_per_s(ScheduledK({1: k})) for k in range(6)]
    assert tokens_per_s(budget) > max(fixed) > 1.1 * fixed[0]


def test_calibrated_survival_is_the_share_of_rounds_that_survives() -> None:
    """Of a real language model, in rounds of a fixed K on sequences that the calibration has not seen."""
    whole = read_plain_trace("example:smollm2-eagle")
    learned, held = whole.select(range(0, 120, 2)), whole.select(range(1, 120, 2))
    chances = fit_survival(learned).of(held)
    log = replay(held, FixedK(k=3), cost_table(held, ConstantCost(1.0, 1.0)), log=True).rounds
    assert log is not None
    rows, judged = held.offsets[log.sequence] + log.t, 0
    for depth in (1, 2, 3):
        full = rows[held.draft_limit[rows] >= depth]
        likely = np.digitize(chances[full, depth - 1], [0.2, 0.5, 0.8])
        for level in np.unique(likely):
            those = full[likely == level]
            if len(those) > 100:
                judged += 1
                share = (held.match_len[those] >= depth).mean()
                assert share == pytest.approx(chances[those, depth - 1].mean(), abs=0.05)
    assert judged >= 9


@dataclasses.dataclass(frozen=True)
class Whim(DraftLengthRule):
    """Drafts and verifies by a random generator, a budget at most."""

    budget: int
    seed: int
    name = "whim"
    source = "this test"

    @property
    def max_draft_tokens(self) -> int:
        return 3

    def initial_state(self) -> State:
        return np.random.default_rng(self.seed)

    def survival(self, trace: Trace) -> FloatArray:
        return np.cumprod(trace.prob, axis=1)

    def choose(self, state: State, running: Running) -> Ints:
        return np.asarray(state.integers(0, 4, len(running.request)))

    def go_on(self, state: State, running: Running, survival: FloatArray, drafted: Ints, going: Any) -> Any:
        assert survival.shape == (len(going), drafted.max()) and (drafted[going] == survival.shape[1]).all()
        assert (survival[np.arange(survival.shape[1]) >= drafted[:, None]] == 0).all()  # sees only what is drafted
        return state.random(len(going)) < 0.7

    def verify(self, state: State, running: Running, survival: FloatArray, drafted: Ints) -> Ints:
        verified = hand_out(survival, drafted, self.budget)
        return np.where(verified == drafted, verified + self.seed % 2, verified)  # more than all are all


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_whatever_a_rule_does_every_text_is_emitted_once(budget: int, slots: int, seed: int, server: bool) -> None:
    trace = generate(IID(0.7), sequences=5, output_tokens=[9, 1, 14, 3, 8], depth=3, seed=seed, prompt_tokens=4)
    drafts = drafts_of(trace, Whim(budget, seed))
    if server:
        requests = requests_of_trace(trace, 5, rate=50.0, seed=seed)
        run = run_server(drafts, COST, requests, slots=slots)
        step, facts, sequence = run.rounds["step"], run.rounds, requests.sequence[run.rounds["request"]]
        emitted = np.bincount(sequence, facts["accepted"] + 1, minlength=5) + 1  # and the prompt's pass a token
        assert run.steps["output_tokens"].sum() == len(trace.token) == emitted.sum()
    else:
        rounds = lockstep(drafts, COST, slots, refill=True).rounds
        step, facts, sequence = rounds.batch_round, rounds._asdict(), rounds.sequence
        for s in range(trace.sequences):  # each round begins where the last one ended
            mine = sequence == s
            assert rounds.t[mine].tolist() == [0, *np.cumsum(rounds.emitted[mine])[:-1]]
            assert rounds.emitted[mine].sum() == trace.output_tokens[s]
    assert (facts["accepted"] <= facts["verified"]).all() and (facts["verified"] <= facts["drafted"]).all()
    assert np.bincount(step, facts["verified"]).max() <= budget


def test_only_drafting_requests_pay_and_what_is_left_behind_is_taken_in_later() -> None:
    """A request that does not draft while another does falls behind by its tokens."""

    @dataclasses.dataclass(frozen=True)
    class Second(Whim):
        def choose(self, state: State, running: Running) -> Ints:
            first = running.request == 0
            return np.where(first & (running.remaining > 6), 0, 2)

        @property
        def max_draft_tokens(self) -> int:
            return 2

        def survival(self, trace: Trace) -> None:  # type: ignore[override]
            return None

    trace = generate(IID(1.0), sequences=2, output_tokens=[9, 9], depth=2, prompt_tokens=1)
    run = lockstep(drafts_of(trace, Second(0, 0)), TEN_MS, 2)
    first = run.rounds.sequence == 0
    assert run.rounds.drafted[first].tolist() == [0, 0, 0, 2, 2] and run.rounds.behind[first].tolist() == [
        0,
        1,
        2,
        3,
        1,
    ]
    assert run.rounds.behind[~first].tolist() == [0, 1, 1]


def test_a_switch_costs_what_the_drafter_has_to_catch_up() -> None:
    """The first pass of two requests, 5 and 9 tokens behind, reads 14 tokens more; 8 steps share the charge."""
    rule, late = Oracle(COST, max_draft_tokens=3), running([96, 96], behind=np.array([5, 9]), match=np.array([3, 3]))
    none = np.zeros(2, dtype=np.int64)
    seconds = [
        float(round_seconds(COST, none, none + 3, behind, late.cached, True).total_s[0])
        for behind in (late.behind, none)
    ]
    assert rule.catch_up_s(late) == pytest.approx(seconds[0] - seconds[1], rel=1e-9)
    assert rule.switch_s(late) == pytest.approx(14 * COST.drafter.token_s / 8)
    assert rule.catch_up_s(running([96, 96], behind=none + 1)) == 0


def test_a_switch_that_does_not_pay_its_catching_up_is_not_made() -> None:
    """Drafts that would just pay are left out where the drafter is far behind: hysteresis."""
    cost = LinearCost(LinearPass(0.010, 1e-5), LinearPass(0.004, 1e-3))
    rule = Oracle(cost, max_draft_tokens=3)
    for behind, drafted in ((0, 1), (40, 0)):
        here = running([100], match=np.array([1]), behind=np.array([behind]))
        assert rule.choose(rule.initial_state(), here).sum() == drafted
        budget = Budget(cost, as_it_is(), max_draft_tokens=3)  # 0.6 tokens of 10 ms for 4 ms, and 5 ms for 40 tokens
        assert budget.pays(budget.initial_state(), here) == bool(drafted)


@pytest.mark.parametrize(("pad", "verified"), [("none", 7), ("longest", 9), ("graphs", 8)])
def test_padding_charges_what_the_engine_computes(pad: str, verified: int) -> None:
    # Three requests draft 2, 1 and 1 tokens: 3 + 4 = 7 tokens are verified; padded to the longest 3 x 3, to a CUDA
    # graph 8. Draft passes are of 3 and 1 requests: 4 tokens; 3 and 3; padded to graphs 4 and 1.
    cost = batch_cost(LinearCost(LinearPass(1e-9, 1.0), LinearPass(1e-9, 1.0)), pad)  # type: ignore[arg-type]
    none = np.zeros(3, dtype=np.int64)
    took = round_seconds(cost, none, np.array([2, 1, 1]), none, none, True)
    assert took.verify_s[0] == pytest.approx(verified)
    assert took.draft_s[0] == pytest.approx({"none": 4, "longest": 6, "graphs": 5}[pad])


RULE_FILE = """
import dataclasses
import specsim

@dataclasses.dataclass(frozen=True)
class OneInTwo(specsim.DraftLengthRule):
    every: int = specsim.setting(2, 1, 9, doc="requests of which one drafts")
    name = "one_in_two"
    source = "a user"
    max_draft_tokens = 3

    def choose(self, state, running):
        return 3 * (running.request % self.every == 0)
"""


def test_a_users_own_rule(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(RULE_FILE)
    trace = generate(IID(0.7), sequences=4, output_tokens=8, depth=3)
    _, (rule,), _ = fit_policies(trace, COST, [(str(file), {"every": "3"})], tuning_share=0.5, seed=0)
    assert isinstance(rule, DraftLengthRule) and rule.label == "one_in_two(every=3)"
    rounds = lockstep(drafts_of(trace, rule), COST, 4).rounds
    assert set(rounds.sequence[rounds.drafted > 0].tolist()) == {0, 3}
    assert find_rule(f"{file}:one_in_two") is find_rule(file) is specsim.rules(file)["one_in_two"]
    file.write_text(RULE_FILE.replace('source = "a user"', ""))
    refusal(lambda: find_rule(file), "OneInTwo has no 'source'")


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    trace = generate(IID(0.7), sequences=4, output_tokens=8, depth=3)
    refusal(lambda: fit_policies(trace, COST, [("budget", {})], tuning_share=0.5, seed=0), "no drafter confidence")
    wrong = {"1": {"candidate_steps": [-1]}}
    refusal(lambda: StepsConfig.from_json(wrong, "sglang_adaptive", 0), "candidate_steps", "give such as")
    refusal(lambda: find_rule("nonsense"), "unknown policy 'nonsense'", "budget")
    refusal(
        lambda: fit_policies(trace, COST, [("turbospec", {"k": 3})], tuning_share=0.5, seed=0),
        "no setting 'k'",
        "memory",
    )
    refusal(lambda: drafts_of(trace, ScheduledK({1: 4})), "recorded to depth 3")
    refusal(lambda: batch_cost(COST, "wide"), "unknown padding 'wide'", "longest")  # type: ignore[arg-type]
    config = tmp_path / "adaptive.json"
    config.write_text('{"1": {"candidate_steps": [2]}}')
    _, (rule,), _ = fit_policies(trace, COST, [("sglang_adaptive", {"config": str(config)})], tuning_share=0.5, seed=0)
    assert isinstance(rule, SGLangAdaptive) and rule.max_draft_tokens == 2


QUICK = LinearCost(LinearPass(0.006, 2e-5, 4e-8), LinearPass(0.001, 1e-6, 2e-9), step_s=0.001, round_s=0.0002)


def test_a_schedule_is_followed_round_by_round() -> None:
    trace = generate(IID(1.0), sequences=3, output_tokens=[4, 6, 40], depth=4)
    rounds = lockstep(drafts_of(trace, ScheduledK({1: 4, 2: 1, 3: 0})), QUICK, 3).rounds
    sizes = np.bincount(rounds.batch_round)
    by_size = {size: set(rounds.drafted[sizes[rounds.batch_round] == size].tolist()) for size in (1, 2, 3)}
    assert by_size == {3: {0}, 2: {1}, 1: {4, 3}}  # before the last of 4 tokens, 3 are left to draft


def test_a_drafter_that_rested_takes_in_all_that_was_said_meanwhile() -> None:
    trace = generate(IID(1.0), sequences=2, output_tokens=[5, 20], depth=4)
    rounds = lockstep(drafts_of(trace, ScheduledK({1: 3, 2: 0})), QUICK, 2).rounds
    longer = rounds.sequence == 1
    # Five tokens singly, then rounds of 3 accepted tokens and a bonus.
    assert rounds.t[longer].tolist() == [0, 1, 2, 3, 4, 5, 9, 13, 17]
    assert rounds.behind[longer].tolist() == [0, 1, 2, 3, 4, 5, 1, 1, 1]
    assert rounds.speculates[longer].tolist() == [False] * 5 + [True] * 4


@pytest.mark.parametrize("cached", [100, 40_000])
@pytest.mark.parametrize("sequences", [1, 16, 400])
@pytest.mark.parametrize("accept_prob", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_turbospec_chooses_the_k_of_most_tokens_per_second(accept_prob: float, sequences: int, cached: int) -> None:
    rule = TurboSpec(QUICK, 6, accept_prob=accept_prob)
    rates = []
    each = np.full(sequences, cached)
    for k in range(7):
        took = round_seconds(QUICK, each * 0, np.full(sequences, k), each * 0, each, speculates=k > 0)
        rates.append(float(mean_tokens_per_round(accept_prob, k) / took.total_s[0]))
    assert rule.choose(rule.initial_state(), running(each)) == int(np.argmax(rates))


def test_turbospec_learns_and_forgets() -> None:
    rule = TurboSpec(QUICK, 6, accept_prob=0.6, prior_tokens=10, memory=0.9)
    state = rule.initial_state()
    one, two = running(np.array([100])), running(np.array([50, 50]))
    for _ in range(100):  # 3 accepted of 4 verified; what comes after a rejection was not verified
        state = rule.update(state, one, rounds([5], [3]))
    assert state == pytest.approx((30, 40), rel=1e-3)
    hopeful = rule.choose(state, one)
    for _ in range(100):
        state = rule.update(state, two, rounds([5, 2], [0, 0]))
    assert state == pytest.approx((0, 20), rel=1e-2, abs=1e-2)
    assert rule.choose(state, one) < hopeful
    for _ in range(100):  # at rest
        state = rule.update(state, one, rounds([0], [0]))
    assert rule.choose(state, one) == rule.choose(rule.initial_state(), one)


@pytest.mark.parametrize("accept_prob", [0.5, 0.8])
@pytest.mark.parametrize("batch", [2, 32, 128])
def test_turbospec_comes_close_to_the_best_fixed_k(batch: int, accept_prob: float) -> None:
    trace = generate(IID(accept_prob), sequences=64, output_tokens=60, depth=6, seed=1)
    order = np.arange(max(64, 6 * batch)) % 64

    def tokens_per_s(arm: Arm) -> float:
        full = lockstep(drafts_of(trace, arm), QUICK, batch, order=order, refill=True).per_sequence(full_only=True)
        return float(full[0].sum() / full[1].sum())

    fixed = [tokens_per_s(arm) for arm in (None, *(FixedK(k=k) for k in range(1, 7)))]
    rate = tokens_per_s(TurboSpec(QUICK, 6))
    assert 0.98 * max(fixed) < rate < 1.02 * max(fixed)
    assert rate > 1.05 * min(fixed)


def test_settings_that_make_no_sense_are_refused() -> None:
    refusal(lambda: ScheduledK({2: 3}), "batch 1", "1:5,4:3,16:0")
    refusal(lambda: ScheduledK({1: -1}), "0 or more")
    refusal(lambda: TurboSpec(QUICK, 4, accept_prob=1.5), "accept_prob=1.5")
    refusal(lambda: TurboSpec(QUICK, 4, memory=1.0), "memory=1.0")
    assert fixed_length(3).max_draft_tokens == 3


def test_a_token_ahead_is_judged_by_the_last_drafted_token_alone() -> None:
    """Drafts of 0.8, then 0.5: with acceptance like the last token's, the next makes 0.8 * 0.5 * 0.5 = 0.2."""
    like_the_last = SimpleNamespace(prob=lambda features: 1 / (1 + np.exp(-features[:, 0])))
    survival = Survival(None, like_the_last, np.ones(2))  # type: ignore[arg-type]
    np.testing.assert_allclose(survival.ahead(np.array([[0.8, 0.4]])), [0.2], rtol=1e-6)
    np.testing.assert_allclose(survival.ahead(np.array([[0.8]])), [0.64], rtol=1e-6)


def test_a_draft_pass_reads_what_was_drafted_before_it() -> None:
    """Three requests with 100 cached tokens each, at 1 us per cached token: 300, then 303, then 306 tokens."""
    tables = StepTables(LinearCost(LinearPass(0.01), LinearPass(1e-3, cached_token_s=1e-6)), longest=3)
    assert tables.draft(4, 100)[:, 3] == pytest.approx([1.300e-3, 1.303e-3, 1.306e-3], rel=1e-12)
