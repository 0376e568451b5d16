"""Beta-TS and Cali-TS, of chains and trees: the algorithms by hand, with theta really drawn, and in the long run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product
from operator import mul
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special, stats
from scipy.special import expit, logit

from specsim.cost.model import ConstantCost
from specsim.cost.profile import ProfileCost
from specsim.io.errors import InputError
from specsim.io.rng import split, uniform
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.cali_ts import CaliTS, clamped_mean, posterior, threshold
from specsim.policy.chain.cali_ts_confidence import CaliTSConfidence
from specsim.policy.estimates.counts import count_round
from specsim.policy.tree.beta_ts_tree import BetaTSTree
from specsim.policy.tree.cali_ts_tree import CaliTSTree
from specsim.replaying.expected import expected_replay
from specsim.replaying.replay import Replay, replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from specsim.trace.tree_record import record_from_nodes
from tests.specsim.policy.test_tree_policies import (
    DEPTH,
    LENGTHS,
    Node,
    Scripted,
    children,
    grow,
    likeliest,
    record,
    recorded_text,
)
from tests.specsim.replaying.test_tree_replay import COST
from tests.support.reference import RampCost, build_trace, copies, small_trace
from tests.support.tree_traces import tree_trace

OPTIONS = list(product(("exact", "printed"), ("per_token", "per_round")))
every_option = pytest.mark.parametrize(("counting", "theta"), OPTIONS)
NO_STEP = Step(math.nan, math.nan, math.nan, math.nan, math.nan)


# Drafted, accepted -> r, n exact, n printed. Emitted are a + 1 tokens, so |Q_v| = a + 1 and r = |Q_v| - 1.
ROUNDS = {
    "nothing accepted of 1": ((1, 0), (0, 1, 1)),
    "nothing accepted of five: printed counts the second as judged": ((5, 0), (0, 1, 2)),
    "rejected at the last token": ((5, 4), (4, 5, 5)),
    "rejected at the second to last": ((5, 3), (3, 4, 5)),
    "all accepted": ((5, 5), (5, 5, 5)),
    "the only token accepted": ((1, 1), (1, 1, 1)),
}


@pytest.mark.parametrize(("round_", "counts"), ROUNDS.values(), ids=ROUNDS)
def test_what_a_round_counts(round_: tuple[int, int], counts: tuple[int, int, int]) -> None:
    successes, exact, printed = counts
    assert count_round((3.0, 4.0, 2.0), *round_, 0.0) == (3.0 + successes, 4.0 + exact, 3.0)
    assert count_round((3.0, 4.0, 2.0), *round_, 1.0) == (3.0 + successes, 4.0 + printed, 3.0)


@pytest.mark.parametrize(("counting", "alpha", "beta"), [("exact", 9.0, 3.5), ("printed", 9.0, 5.5)])
def test_three_rounds_of_algorithm_2(counting: str, alpha: float, beta: float) -> None:
    """From Beta(2, 1.5): rounds (d, a) = (4, 4), (5, 1), (6, 2).

    Exact: r = 4, 1, 2 and n = 4, 2, 3. Printed: n = 4, 3, 4.
    """
    policy = BetaTS(alpha0=2.0, beta0=1.5, counting=counting)
    state = policy.initial_state(policy.params)
    for drafted, accepted in ((4, 4), (5, 1), (6, 2)):
        state = policy.update(state, policy.params, drafted, accepted)
    accept_prob = policy.keep_probability(state, policy.params, NO_STEP, 3)
    assert accept_prob == alpha / (alpha + beta)
    assert policy.keep_drafting(state, policy.params, NO_STEP, 3, accept_prob - 1e-9) == (True, state)
    assert policy.keep_drafting(state, policy.params, NO_STEP, 3, accept_prob + 1e-9) == (False, state)


@pytest.mark.parametrize(("theta", "mean_draft"), [("per_token", 3.0), ("per_round", 4.0)])
def test_spread_of_the_posterior_lengthens_drafts_only_if_theta_is_drawn_per_round(
    theta: str, mean_draft: float
) -> None:
    """Beta(6, 3), unbounded drafts: 1 / (1 - 6/9) = 3, and E[1 / (1 - theta)] = (6 + 3 - 1) / (3 - 1) = 4.

    The mean is the sum over j of the chance of drafting beyond j. Summed to 100,000, where the
    urn's terms fall like j^-3; the rest is below 1e-7.
    """
    policy = BetaTS(alpha0=6.0, beta0=3.0, theta=theta)
    accept_probs = (policy.keep_probability((0.0, 0.0, 0.0), policy.params, NO_STEP, j) for j in range(1, 100_001))
    assert 1 + sum(accumulate(accept_probs, mul)) == pytest.approx(mean_draft, abs=1e-7)


def test_the_priors_to_report() -> None:
    """A weak prior, and a prior of mean 0.76 and weight 1500 tokens."""
    weak, strong = (BetaTS(**BetaTS.PRIORS[name]) for name in ("weak", "strong"))
    assert (weak.alpha0, weak.beta0) == (1.0, 1.0)
    assert strong.alpha0 + strong.beta0 == 1500 and strong.alpha0 / 1500 == 0.76
    fixed = [variant.fixed for variant in BetaTS.variants]
    assert BetaTS.PRIORS["weak"] in fixed and BetaTS.PRIORS["strong"] in fixed


def test_posterior_of_algorithm_3_by_hand() -> None:
    """theta0 = 0.6, sigma_M = 0.2, sigma_S = 0.4; three rounds with r = 5, n = 7; a score of 0.9.

    theta_hat = 5.6 / 8 = 0.7; weights 0.16 / 0.28 and 0.12 / 0.28; 1 / sigma^2 = 25 + 3 * 6.25.
    """
    params = CaliTS(theta0=0.6, sigma_m=0.2, sigma_s=0.4).params
    mu, sigma = posterior((5.0, 7.0, 3.0), params, 0.9)
    assert mu == pytest.approx(0.9 * 4 / 7 + 0.7 * 3 / 7, rel=1e-15)
    assert sigma == pytest.approx(1 / math.sqrt(43.75), rel=1e-15)
    assert posterior((0.0, 0.0, 0.0), params, 0.9) == (0.9, 0.2)  # at first the score alone


@pytest.mark.parametrize("mu", [-1.0, 0.0, 0.3, 0.97, 1.0, 1.4])
@pytest.mark.parametrize("sigma", [0.01, 0.3, 5.0])
def test_mean_of_a_clamped_gaussian(mu: float, sigma: float) -> None:
    """Against the integral of P(X > x) over [0, 1], which is the mean of clip(X, 0, 1)."""
    edges = np.clip(mu + sigma * np.arange(-6, 7), 0, 1)
    wanted = sum(
        integrate.quad(stats.norm(mu, sigma).sf, low, high, epsabs=1e-14)[0]
        for low, high in zip([0, *edges], [*edges, 1], strict=True)
    )
    assert clamped_mean(mu, sigma) == pytest.approx(wanted, abs=1e-12)


@given(st.floats(-3, 4), st.floats(-5, 2), st.floats(0, 1, exclude_min=True, exclude_max=True), st.floats(-2, 2))
def test_the_short_cut_decides_as_the_clamped_mean(mu: float, log_sigma: float, u: float, offset: float) -> None:
    """For any u, and for u near mu; to the rounding error of the mean, a few ulp of sigma or of 1."""
    sigma = 10**log_sigma
    for value in (u, min(max(mu + offset * sigma, 1e-12), 1 - 1e-12)):
        mean = clamped_mean(mu, sigma)
        if abs(value - mean) > 1e-15 * max(1.0, sigma) * 10:
            assert (value < threshold(value, mu, sigma)) == (value < mean)


@dataclass
class Bandit:
    """Algorithms 2 and 3 in plain Python, with their errata; `keep` is asked as a policy is.

    uniforms : draws that belong to a place; None where theta is really drawn, from rng
    """

    policy: BetaTS | CaliTS
    rng: np.random.Generator | None = None
    counting_error: float = 0.0  # to see that a wrong n shows

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.accepted = self.judged = self.rounds = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        emitted = accepted + 1  # |Q_v|
        self.accepted += emitted - 1
        extra = 0 if self.policy.counting == "exact" else 1
        self.judged += min(emitted + extra, drafted) + self.counting_error * (accepted < drafted)
        self.rounds += 1

    def keep(self, score: float, depth: int, u: float) -> bool:
        fresh = depth == 1 or self.policy.theta == "per_token"
        accept_prob = self.beta(depth, fresh) if isinstance(self.policy, BetaTS) else self.gauss(score, u, fresh)
        return (u if self.rng is None else self.rng.random()) < accept_prob

    def beta(self, depth: int, fresh: bool) -> float:
        assert isinstance(self.policy, BetaTS)
        alpha = self.policy.alpha0 + self.accepted
        beta = self.policy.beta0 + self.judged - self.accepted
        if self.rng is not None:
            if fresh:
                self.drawn = self.rng.beta(alpha, beta)
            return self.drawn
        ones = 0 if fresh else depth - 1
        return (alpha + ones) / (alpha + beta + ones)

    def gauss(self, score: float, u: float, fresh: bool) -> float:
        policy = self.policy
        assert isinstance(policy, CaliTS)
        model, sample = policy.sigma_m**2, policy.sigma_s**2
        theta_hat = (policy.theta0 + self.accepted) / (1 + self.judged)
        mu = (sample * score + self.rounds * model * theta_hat) / (self.rounds * model + sample)
        sigma = math.sqrt(1 / (1 / model + self.rounds / sample))
        if self.rng is None and policy.theta == "per_token":
            return clipped_mean(mu, sigma)
        if fresh:
            self.drawn = float(special.ndtri(split(u, 1))) if self.rng is None else self.rng.normal()
        return min(max(mu + sigma * self.drawn, 0.0), 1.0)


def clipped_mean(mu: float, sigma: float) -> float:
    """E[clip(N(mu, sigma^2), 0, 1)] from the truncated Gaussian's mean and the mass at 1."""
    low, high = -mu / sigma, (1 - mu) / sigma
    inside = stats.norm.cdf(high) - stats.norm.cdf(low)
    mean: float = mu * inside + sigma * (stats.norm.pdf(low) - stats.norm.pdf(high)) + stats.norm.sf(high)
    return mean


def decode(trace: Trace, bandit: Bandit, seed: int = 0) -> Iterator[tuple[int, ...]]:
    """Rounds (sequence, t, drafted, accepted) of a bandit over a trace, token by token."""
    for s, (start, end) in enumerate(zip(trace.offsets[:-1].tolist(), trace.offsets[1:].tolist(), strict=True)):
        if not bandit.policy.carry:
            bandit.begin()
        row = start
        while row < end:
            limit, drafted = min(bandit.policy.max_draft_tokens, int(trace.draft_limit[row])), 0
            while drafted < limit:
                drafted += 1
                score = 0.0 if trace.score is None else float(trace.score[row, drafted - 1])
                u = uniform(seed, int(trace.sequence_id[s]), row - start, drafted)
                if drafted < limit and not bandit.keep(score, drafted, u):
                    break
            accepted = min(drafted, int(trace.match_len[row]))
            if drafted:
                bandit.observe(drafted, accepted)
            yield s, row - start, drafted, accepted
            row += accepted + 1


def scored_trace(seed: int = 0) -> Trace:
    return small_trace(seed, score=np.random.default_rng(seed + 1).random((102, 6)).astype(np.float32))


PRIORS: dict[type[ChainPolicy], list[dict[str, Any]]] = {
    BetaTS: [{}, {"alpha0": 3.0, "beta0": 0.5}, {"alpha0": 0.2, "beta0": 0.1}],
    CaliTS: [{}, {"theta0": 1.0, "sigma_m": 1.5, "sigma_s": 0.1}, {"theta0": 0.2, "sigma_m": 0.02, "sigma_s": 3.0}],
}
both = pytest.mark.parametrize("kind", [BetaTS, CaliTS], ids=["beta_ts", "cali_ts"])


@both
@every_option
@pytest.mark.parametrize("carry", [False, True])
def test_replay_is_the_algorithm_round_for_round(kind: Any, counting: str, theta: str, carry: bool) -> None:
    caught = 0
    for seed, prior in product(range(4), PRIORS[kind]):
        policy = kind(counting=counting, theta=theta, carry=carry, max_draft_tokens=6, **prior)
        trace = scored_trace(seed)
        log = replay(trace, policy, cost_table(trace, RampCost()), seed=seed, log=True).rounds
        assert [row[:4] for row in log.rows()] == list(decode(trace, Bandit(policy), seed))
        wrong_n = Bandit(policy, counting_error=1.0)
        caught += [row[:4] for row in log.rows()] != list(decode(trace, wrong_n, seed))
        caught += [row[:4] for row in log.rows()] != list(decode(trace, Bandit(replace(policy, carry=not carry)), seed))
    assert caught >= 12  # of 24: counts are seen to matter, within sequences and across them


SIMULATIONS = 1500


def apart(result: Replay, runs: np.ndarray) -> bool:
    """Whether mean drafted or accepted tokens are more than 4 standard errors from those of runs [N, 2]."""
    gaps = []
    for sampled, drawn in zip((result.drafted, result.accepted), runs.T, strict=True):
        error = math.sqrt(sampled.var() / len(sampled) + drawn.var() / len(drawn))
        gaps.append(abs(sampled.mean() - drawn.mean()) / error)
    return max(gaps) > 4


@both
@every_option
def test_replay_has_the_distribution_of_theta_really_drawn(kind: Any, counting: str, theta: str) -> None:
    """Mean drafted and accepted tokens of 20,000 replays against 1500 runs that draw theta; 4 standard errors."""
    rng = np.random.default_rng(3)
    trace = build_trace(
        rng, rng.random((30, 8)) < 0.75, [30], score=rng.uniform(0.4, 1.1, (30, 8)).clip(0, 1).astype(np.float32)
    )
    many = copies(trace, 20_000)
    policy = kind(counting=counting, theta=theta, max_draft_tokens=8, **PRIORS[kind][1])
    result = replay(many, policy, cost_table(many, RampCost()))

    def differs(bandit: Bandit) -> bool:
        runs = np.array([np.sum(list(decode(trace, bandit)), axis=0)[2:] for _ in range(SIMULATIONS)])
        return apart(result, runs)

    assert not differs(Bandit(policy, rng=rng))
    assert differs(Bandit(policy, rng=rng, counting_error=1.0))
    if kind is BetaTS:  # there the spread is wide enough to tell the two
        other = "per_round" if theta == "per_token" else "per_token"
        assert differs(Bandit(replace(policy, theta=other), rng=rng))


@pytest.mark.parametrize("accept_prob", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("counting", ["exact", "printed"])
@both
def test_long_run_means(kind: Any, counting: str, accept_prob: float) -> None:
    """Exact: p. Printed: theta = p / (1 + (1 - p) theta), a rejection drafted past counting twice.

    Under independent acceptance r is binomial among the judged tokens, n of them, so r / n
    misses p by a standard deviation of sqrt(p (1 - p) / n); printed less. Cali-TS is made to
    rely on its sample mean.
    """
    length = 60_000
    rng = np.random.default_rng(round(100 * accept_prob))
    hits = rng.random((length, 64)) < accept_prob
    trace = build_trace(rng, hits, [length], score=np.full(hits.shape, 0.5, dtype=np.float32))
    trace = replace(trace, meta={**trace.meta, "eos_token_id": None})
    policy = kind(counting=counting, max_draft_tokens=64, **({"sigma_s": 1e-3} if kind is CaliTS else {}))
    log = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2)), log=True).rounds
    state = policy.initial_state(policy.params)
    for _, _, drafted, accepted, *_ in log.rows():
        if drafted:
            state = policy.update(state, policy.params, drafted, accepted)
    missed = 1 - accept_prob
    fixed_point = (math.sqrt(1 + 4 * missed * accept_prob) - 1) / (2 * missed)
    wanted = accept_prob if counting == "exact" else fixed_point
    error = math.sqrt(accept_prob * missed / state[1])
    assert policy.keep_probability(state, policy.params, Step(0.5, 0.5, 0.5, 0.5, 0.5), 1) == pytest.approx(
        wanted, abs=4 * error
    )
    assert 4 * error < 0.015 < 0.7 * (accept_prob - fixed_point)  # the two rules are told apart


every_option_and_carry = pytest.mark.parametrize(
    ("counting", "theta", "carry"), [(*option, carry) for option in OPTIONS for carry in (False, True)]
)
TREE_PRIORS: list[dict[str, Any]] = [{"alpha0": 2.0, "beta0": 1.0}, {"alpha0": 0.4, "beta0": 0.2}]


class TreeBandit:
    """The levels' Beta posterior in plain Python. rng : draws theta, or None for draws that belong to a place."""

    def __init__(self, policy: BetaTSTree, rng: np.random.Generator | None = None, error: float = 0.0) -> None:
        self.policy, self.rng, self.error = policy, rng, error
        self.begin()

    def begin(self) -> None:
        self.alpha, self.beta = self.policy.alpha0, self.policy.beta0

    def passed(self, row: int, levels: int, expanded: list[Node]) -> None:
        """A draft pass over these nodes, after so many levels."""

    def another(self, drafted_levels: int, u: float) -> bool:
        """chi, after so many levels of this round."""
        fresh = drafted_levels == 1 or self.policy.theta == "per_token"
        if self.rng is not None:
            if fresh:
                self.drawn = self.rng.beta(self.alpha, self.beta)
            return bool(self.rng.random() < self.drawn)
        urn = 0 if self.policy.theta == "per_token" else drafted_levels - 1
        return u < (self.alpha + urn) / (self.alpha + self.beta + urn)

    def observe(self, levels: int, accepted: int) -> None:
        emitted = accepted + 1  # |Q_v|
        judged = min(emitted + (self.policy.counting == "printed"), levels) + self.error * (accepted < levels)
        self.alpha += accepted
        self.beta += judged - accepted


def decode_trees(bandit: TreeBandit, seed: int = 0) -> list[tuple[int, ...]]:
    """Rows (sequence, t, drafted, accepted, verified, levels drafted) of every round, over the whole record."""
    policy = bandit.policy
    trace, places = recorded_text(None)
    rows = []
    for s, length in enumerate(LENGTHS):
        if not policy.carry:
            bandit.begin()
        t = 0
        while t < length:
            here, _ = places[s, t]
            limit = min(policy.max_depth, int(trace.budget_tokens[s]) - t - 1)
            level, drafted, levels = [()], list[Node](), 0
            while levels < limit:
                u = float(uniform(seed, int(trace.sequence_id[s]), t, levels))
                if levels and not bandit.another(levels, u):
                    break
                expanded = sorted(likeliest(here, level, policy.beam))
                bandit.passed(int(trace.offsets[s]) + t, levels, expanded)
                level = [child for node in expanded for child in children(node, policy.width)]
                drafted += level
                levels += 1
            kept = set(likeliest(here, drafted, policy.nodes))
            accepted: Node = ()
            for rank in trace.true_rank[int(trace.offsets[s]) + t]:
                if (*accepted, int(rank)) not in kept:
                    break
                accepted = (*accepted, int(rank))
            if levels:
                bandit.observe(max(len(node) for node in kept), len(accepted))
            rows.append((s, t, len(drafted), len(accepted), len(kept), levels))
            t += len(accepted) + 1
    return rows


@every_option_and_carry
@pytest.mark.parametrize("shape", [(1, 1, 255), (2, 3, 255), (3, 3, 5), (2, 2, 2)], ids=str)
def test_replay_is_the_bandit_round_for_round(
    counting: str, theta: str, carry: bool, shape: tuple[int, int, int]
) -> None:
    beam, width, nodes = shape
    trace, _ = recorded_text(None)
    caught = 0
    for seed, prior in product(range(4), TREE_PRIORS):
        policy = BetaTSTree(
            counting=counting, theta=theta, carry=carry, beam=beam, width=width, nodes=nodes, max_depth=3, **prior
        )
        result = replay(trace, policy, cost_table(trace, COST), seed=seed, log=True)
        assert not result.truncated.any()
        rounds = [row[:5] for row in result.rounds.rows()]
        wanted = decode_trees(TreeBandit(policy), seed)
        assert rounds == [row[:5] for row in wanted]
        # The policy is asked before every level but where the limit is reached, and its first answer is yes.
        limits = [min(3, int(trace.budget_tokens[s]) - t - 1) for s, t, *_ in wanted]
        asked = sum(min(row[5] + 1, limit) for row, limit in zip(wanted, limits, strict=True))
        assert result.policy_steps.sum() == asked
        wrong = [TreeBandit(policy, error=1.0), TreeBandit(replace(policy, carry=not carry))]
        caught += sum(rounds != [row[:5] for row in decode_trees(bandit, seed)] for bandit in wrong)
    assert caught >= 8  # of 16: counts are seen to matter, within sequences and across them


def test_a_round_is_counted_by_the_depth_of_what_was_verified() -> None:
    """Levels that were drafted and then dropped were not judged: of six nodes the two likeliest are a single level."""
    trace, _ = recorded_text(None)
    policy = BetaTSTree(alpha0=1e9, beta0=1e-6, beam=1, width=3, nodes=2, max_depth=2)
    log = replay(trace, policy, cost_table(trace, COST), log=True).rounds
    assert {6} < set(log.drafted.tolist()) <= {0, 3, 6}
    rows = decode_trees(TreeBandit(policy))
    assert [row[:5] for row in rows] == [row[:5] for row in log.rows()]


@every_option
def test_a_replay_of_trees_has_the_distribution_of_theta_really_drawn(counting: str, theta: str) -> None:
    """Mean drafted and accepted tokens of 20,000 replays against 600 runs that draw theta; 4 standard errors."""
    trace, _ = recorded_text(None)
    policy = BetaTSTree(
        alpha0=3.0, beta0=0.5, counting=counting, theta=theta, carry=False, beam=2, width=3, max_depth=3
    )
    first = copies(trace, 20_000)
    result = replay(first, policy, cost_table(first, COST))

    def differs(error: float) -> bool:
        bandit = TreeBandit(policy, np.random.default_rng(3), error)
        runs = []
        for _ in range(600):
            rows = np.array([row for row in decode_trees(bandit) if row[0] == 0])
            runs.append(rows[:, 2:4].sum(axis=0))
        return apart(result, np.array(runs))

    assert not differs(0.0)
    assert differs(1.0)


def test_siblings_need_no_record_where_all_are_verified() -> None:
    """A beam of 1 goes along the chain, which every record has; what hangs beside it goes by rank."""
    trace = tree_trace(9, sequences=6, tokens=60, depth=4, width=4, nodes=4)
    for policy in (BetaTSTree(beam=1, width=4, max_depth=4), BetaTSTree(beam=2, width=4, max_depth=4)):
        result = replay(trace, policy, cost_table(trace, COST))
        assert (result.truncated.sum() == 0) == (policy.beam == 1)
    whole = tree_trace(9, sequences=6, tokens=60, depth=4, width=4, nodes=400)
    policy = BetaTSTree(beam=1, width=4, max_depth=4)
    few, all_ = (replay(t, policy, cost_table(t, COST), log=True).rounds for t in (trace, whole))
    assert few.rows() == all_.rows()


def test_a_beam_that_the_record_may_have_wrong_is_told() -> None:
    """Second level: .1 .1 and .24 .16, of which the record has the chain's .1 and .24; the beam is .24 and .16."""
    drafter = Scripted({(): [0.5, 0.4], (0,): [0.2, 0.2], (1,): [0.6, 0.4], (1, 0): [0.5, 0.5]})
    recorded, horizon = record(drafter, nodes=5, width=2, depth=3)
    assert recorded == {(), (0,), (0, 0), (0, 0, 0), (1,), (1, 0)} and horizon == pytest.approx(0.16)
    policy = BetaTSTree(alpha0=2.0, beam=2, width=2, max_depth=3)
    replayed, real = grow(policy, drafter, recorded=recorded), grow(policy, drafter)
    assert replayed.expanded[2] == [(0, 0), (1, 0)] and real.expanded[2] == [(1, 0), (1, 1)]
    assert replayed.floor == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"beam": 2, "width": 3, "max_depth": 4}, (3 + 3 * 6, 2, 21)),
        ({"beam": 8, "width": 2, "max_depth": 5}, (2 + 4 + 8 + 16 + 16, 8, 46)),
        ({"beam": 8, "width": 2, "max_depth": 5, "nodes": 20}, (46, 8, 20)),
        ({"beam": 5, "width": 1, "max_depth": 7}, (7, 1, 7)),
    ],
    ids=str,
)
def test_bounds_are_those_of_the_deepest_tree(settings: dict[str, int], sizes: tuple[int, int, int]) -> None:
    policy = BetaTSTree(**settings)
    assert (policy.max_drafted, policy.max_expanded, policy.max_verified_nodes) == sizes


def test_a_tree_without_room_is_refused() -> None:
    with pytest.raises(InputError, match="beam=9 and width=8 draft 1080 nodes, more than 1023; lower either"):
        BetaTSTree(max_depth=16, beam=9, width=8)


def scored(trace: Trace, seed: int = 0) -> Trace:
    """The trace with random scores at every position and depth."""
    return replace(trace, score=np.random.default_rng(seed).random(trace.true_rank.shape, np.float32))


@every_option_and_carry
@pytest.mark.parametrize(
    ("chain", "tree", "prior"),
    [
        (BetaTS, BetaTSTree, {"alpha0": 3.0, "beta0": 1.0}),
        (CaliTS, CaliTSTree, {"theta0": 0.7, "sigma_m": 0.3, "sigma_s": 0.5}),
    ],
    ids=["beta_ts", "cali_ts"],
)
def test_a_tree_of_width_one_is_the_chain(
    chain: Any, tree: Any, prior: dict[str, Any], counting: str, theta: str, carry: bool
) -> None:
    """Draw for draw: every level has the uniform and the score of the token that a chain drafts there."""
    trace = scored(tree_trace(9, sequences=6, tokens=60, depth=5, width=4, nodes=20))
    options = {**prior, "counting": counting, "theta": theta, "carry": carry}
    policies = chain(**options, max_draft_tokens=5), tree(**options, beam=1, width=1, max_depth=5)
    of_chain, of_tree = (replay(trace, p, cost_table(trace, COST, p), seed=4, log=True) for p in policies)
    assert of_chain.rounds.rows() == of_tree.rounds.rows()
    assert len(set(of_chain.rounds.drafted.tolist())) > 3


class ByScore(TreeBandit):
    """With a predictor that never errs theta is its score: of the newest pass over the first candidates' chain."""

    def __init__(self, policy: CaliTSTree, score: np.ndarray) -> None:
        self.policy, self.score = policy, score

    def begin(self) -> None:
        pass

    def passed(self, row: int, levels: int, expanded: list[Node]) -> None:
        if (0,) * levels in expanded:
            self.theta = float(self.score[row, levels])

    def another(self, drafted_levels: int, u: float) -> bool:
        return u < self.theta

    def observe(self, levels: int, accepted: int) -> None:
        pass


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (3, 2)], ids=str)
def test_the_score_along_the_first_candidates_decides(shape: tuple[int, int]) -> None:
    beam, width = shape
    trace = scored(recorded_text(None)[0])
    policy = CaliTSTree(sigma_m=1e-6, sigma_s=1e4, beam=beam, width=width, nodes=255, max_depth=DEPTH)
    log = replay(trace, policy, cost_table(trace, COST), seed=3, log=True).rounds
    assert [row[:5] for row in log.rows()] == [row[:5] for row in decode_trees(ByScore(policy, trace.score), 3)]


@pytest.mark.parametrize(("after_first", "levels"), [((0.3, 0.25), 4), ((0.6, 0.3), 3)], ids=["left", "kept"])
def test_where_the_beam_has_left_that_chain_its_last_score_stays(after_first: tuple[float, float], levels: int) -> None:
    """Of a root with children .51 and .49, those of the second are (.5, .45): likelier than the first's, or not."""
    nodes = [node for depth in range(5) for node in product((0, 1), repeat=depth)]
    children_of = {(): (0.51, 0.49), (0,): after_first, (1,): (0.5, 0.45)}
    prob = [children_of.get(node[:-1], (0.6, 0.3))[node[-1]] for node in nodes[1:]]
    parent = [nodes.index(node[:-1]) for node in nodes[1:]]
    tokens, depth = 9, 4
    rows = (np.array([values] * tokens) for values in (parent, [0] * len(parent), prob))
    rank = np.where(np.arange(tokens)[:, None] + np.arange(depth) < tokens, 0, -1).astype(np.int16)
    trace = build_trace(np.random.default_rng(0), rank == 0, [tokens], true_rank=rank)
    scores = np.tile(np.array([1.0, 1.0, 0.0, 0.0], np.float32), (tokens, 1))  # the third pass says to stop
    trace = replace(trace, tree=record_from_nodes(*rows, np.full(tokens, -1.0), 2), score=scores)
    policy = CaliTSTree(sigma_m=1e-6, sigma_s=1e4, beam=2, width=2, nodes=255, max_depth=4)
    log = replay(trace, policy, cost_table(trace, COST), log=True).rounds
    assert log.drafted[0] == 2 + 4 * (levels - 1)


def test_scores_are_paid_for_with_every_draft_step() -> None:
    contexts = np.array([1, 400])
    cost = ProfileCost(contexts, np.ones((5, 2)), np.zeros(2), np.full((6, 2), 12.0), np.full(2, 10.0), 0.0, 0.5, 0.25)
    assert float(CaliTSTree().cost(cost).draft(1, 10)) == float(CaliTS().cost(cost).draft(1, 10)) == 1.25
    assert float(CaliTSConfidence().cost(cost).draft(1, 10)) == 1.0


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (0.6, -0.8), (2.5, 1.0)])
@every_option_and_carry
def test_calibrated_confidence_stands_in_the_predictors_place(
    slope: float, offset: float, counting: str, theta: str, carry: bool
) -> None:
    """Rounds are those of Cali-TS whose predictor had said sigmoid(slope logit(confidence) + offset)."""
    trace = tree_trace(9, sequences=6, tokens=60, depth=5, width=4, nodes=20)
    with np.errstate(divide="ignore"):
        scores = expit(slope * logit(trace.confidence.astype(np.float64)) + offset).astype(np.float32)
    scored = replace(trace, score=scores)
    settings: dict[str, Any] = {"theta0": 0.7, "sigma_m": 0.3, "sigma_s": 0.5, "max_draft_tokens": 5}
    settings |= {"counting": counting, "theta": theta, "carry": carry}
    trained, free = CaliTS(**settings), CaliTSConfidence(slope=slope, offset=offset, **settings)
    predicted, calibrated = (
        replay(t, p, cost_table(t, COST, p), seed=4, log=True).rounds for t, p in ((scored, trained), (trace, free))
    )
    assert predicted.rows() == calibrated.rows()
    assert len(set(predicted.drafted.tolist())) > 2
    if theta == "per_token" and not carry:
        table = cost_table(trace, ConstantCost(1.0, 10.0), free)
        averages = (expected_replay(t, p, table) for t, p in ((scored, trained), (trace, free)))
        first, second = (average.drafted.sum() for average in averages)
        assert first == pytest.approx(second, rel=1e-5)
