"""Optimal stopping of a draft, with renewal reward.

Rounds are renewals: the long-run time per token is smallest if every round maximises
value x tokens - seconds, where the value of a token is that smallest time per token (renewal
reward; Dinkelbach 1967 for the iteration). Within a round the state after the depth-th token
is its signal, in bins, and the path probability: that it and all tokens before it are accepted.
Signals of a round form a Markov chain, fitted to tokens whose predecessor is accepted. Gains are
linear in the path probability except for the option to stop, so every depth and bin has
a threshold on the path probability above which continuing to draft pays.

The fit of RenewalStop calibrates acceptance on the policy's own rounds, solves for thresholds, and repeats.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from specsim.cost.table import CostTable, autoregressive_seconds, context_share
from specsim.io.arrays import Floats, Ints
from specsim.io.compiled import njit
from specsim.io.errors import InputError
from specsim.learn.calibration import Calibration, Tokens
from specsim.policy.base import Settings, build_policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.renewal_stop import RenewalStop
from specsim.trace.trace import Trace

NEVER = 2.0  # a threshold that no path probability reaches
PATH_POINTS = 129  # grid of path probabilities, linear interpolation between
PSEUDO_COUNT = 1.0  # tokens spread like the marginal, in every row of the transition matrix


@dataclass(frozen=True)
class RoundCost:
    """Seconds of a round's parts at an average context.

    draft_s : [k_max + 1], drafting k tokens in sequence
    catch_up_s : extra time of the first step if the draft cache lacks a token
    verify_s : [n_max + 1], a target pass over n tokens (entry 0 is unused)
    """

    draft_s: Floats
    catch_up_s: float
    verify_s: Floats
    policy_step_s: float
    round_overhead_s: float
    autoregressive_s: float

    def margin_s(self, depth: int) -> float:
        """Smallest cost of drafting on after the depth-th token: a draft step and a longer target pass."""
        step_s = self.draft_s[depth + 1] - self.draft_s[depth]
        return float(step_s + self.verify_s[depth + 2] - self.verify_s[depth + 1])


def mean_cost(trace: Trace, table: CostTable) -> RoundCost:
    """Average the costs of a table over the contexts of a trace's positions."""
    share = context_share(trace, table)
    return RoundCost(
        draft_s=table.draft_s @ share,
        catch_up_s=float(table.catch_up_s @ share),
        verify_s=np.nan_to_num(table.verify_s) @ share,
        policy_step_s=table.policy_step_s,
        round_overhead_s=table.round_overhead_s,
        autoregressive_s=float(autoregressive_seconds(trace, table).sum() / len(trace.token)),
    )


@dataclass(frozen=True)
class SignalChain:
    """Markov chain of a round's signals in B bins; a token is accepted with probability accept[bin].

    first [B] : distribution of the first token's bin
    accept [B] : probability that a token in this bin is accepted, given that all before it are
    following [B, B] : distribution of the next token's bin, given this token's
    next_accept [B] : probability that the token after a token in this bin is accepted, if that token is
    """

    first: Floats
    accept: Floats
    following: Floats
    next_accept: Floats


def fit_chain(tokens: Tokens, model: Calibration, edges: Floats, next_model: Calibration | None = None) -> SignalChain:
    """Fit the chain to a calibrated score, divided into bins at `edges` [B - 1].

    next_model : calibration of the next token's acceptance; without it, the chain predicts it
    """
    bins = len(edges) + 1
    signal_bin = np.searchsorted(edges, model.score(tokens.features), side="right")
    known = (tokens.accepted & tokens.verified)[:, :-1] & tokens.in_range[:, 1:]
    steps = np.zeros((bins, bins))
    np.add.at(steps, (signal_bin[:, :-1][known], signal_bin[:, 1:][known]), 1.0)
    overall = np.bincount(signal_bin[tokens.verified], minlength=bins) + 1e-9
    steps += PSEUDO_COUNT * overall / overall.sum()
    following = steps / steps.sum(axis=1, keepdims=True)
    accept = _bin_means(signal_bin[tokens.verified], model.prob(tokens.features[tokens.verified]), bins)
    next_accept = following @ accept
    if next_model is not None:
        known = tokens.verified[:, 1:]
        next_accept = _bin_means(signal_bin[:, :-1][known], next_model.prob(tokens.features[:, :-1][known]), bins)
    first = np.bincount(signal_bin[tokens.in_range[:, 0], 0], minlength=bins) + 1e-9
    return SignalChain(first / first.sum(), accept, following, next_accept)


def _bin_means(signal_bin: Ints, values: Floats, bins: int) -> Floats:
    """Mean value per bin; the overall mean for an empty bin."""
    count = np.bincount(signal_bin, minlength=bins)
    overall = values.mean() if len(values) else 0.5
    return np.where(count > 0, np.bincount(signal_bin, values, bins) / np.maximum(count, 1), overall)


def thresholds(
    chain: SignalChain, cost: RoundCost, time_per_token_s: float, max_tokens: int, *, lookahead: bool
) -> Floats:
    """Smallest path probabilities [max(max_tokens - 1, 1), B] at which drafting on pays, by depth and signal."""
    if max_tokens == 1:
        return np.full((1, len(chain.accept)), NEVER)
    if lookahead:
        return optimal_thresholds(chain, cost, time_per_token_s, max_tokens)[0]
    return myopic_thresholds(chain, cost, time_per_token_s, max_tokens)


def myopic_thresholds(chain: SignalChain, cost: RoundCost, time_per_token_s: float, max_tokens: int) -> Floats:
    """Smallest path probabilities [max_tokens - 1, B] at which another token pays for itself.

    Continue drafting iff path x next_accept x value > draft step + policy step + longer verification.
    """
    margin_s = np.array([cost.margin_s(depth) + cost.policy_step_s for depth in range(1, max_tokens)])
    # One more token always pays if a longer pass is cheaper.
    return np.clip(margin_s[:, None] / (time_per_token_s * chain.next_accept[None]), 0.0, NEVER)


def optimal_thresholds(
    chain: SignalChain, cost: RoundCost, time_per_token_s: float, max_tokens: int
) -> tuple[Floats, Floats]:
    """Smallest path probabilities [max_tokens - 1, B] at which drafting on is optimal, and values of a round [B].

    The value of a round, in seconds, is that after its first token: value x accepted tokens beyond the first
    minus the seconds beyond a draft step and its verification.
    """
    margins_s = np.array([cost.margin_s(depth) for depth in range(1, max_tokens)])
    thresholds = np.full((max(max_tokens - 1, 0), len(chain.accept)), NEVER)
    gain_s = _backward(
        chain.accept,
        chain.following,
        margins_s,
        time_per_token_s,
        cost.catch_up_s,
        cost.policy_step_s,
        PATH_POINTS,
        thresholds,
    )
    reached = chain.accept * (PATH_POINTS - 1)
    low = np.minimum(reached.astype(int), PATH_POINTS - 2)
    bins = np.arange(len(chain.accept))
    expected_s = gain_s[bins, low] + (reached - low) * (gain_s[bins, low + 1] - gain_s[bins, low])
    return thresholds, expected_s


@njit
def _backward(accept, following, margins_s, time_per_token_s, catch_up_s, policy_step_s, points, thresholds):  # type: ignore[no-untyped-def]
    """Gain of drafting on over stopping, computed backward over the depth: after the first token, [B, points].

    catch_up_s is the extra time of the next round after a fully accepted draft, whose last token is not in the
    draft cache. A draft stopped at path probability p pays it with probability p.
    """
    bins, depths = len(accept), len(margins_s)
    path = np.linspace(0.0, 1.0, points)
    gain_s = np.zeros((bins, points))  # no gain at the depth limit
    for d in range(depths - 1, -1, -1):
        asked_s = policy_step_s if d + 1 < depths else 0.0  # no policy step after the last token
        before_s = np.zeros((bins, points))
        for b in range(bins):
            threshold, below = NEVER, False
            for x in range(points - 1, -1, -1):
                on_s = path[x] * catch_up_s - margins_s[d] - asked_s
                for c in range(bins):
                    reached = path[x] * accept[c]
                    low = min(int(reached * (points - 1)), points - 2)
                    share = reached * (points - 1) - low
                    option_s = gain_s[c, low] + share * (gain_s[c, low + 1] - gain_s[c, low])
                    on_s += following[b, c] * ((time_per_token_s - catch_up_s) * reached + option_s)
                before_s[b, x] = max(on_s, 0.0)
                if on_s >= 0.0 and not below:
                    threshold, least_s = path[x], on_s
                elif not below:
                    below = True
                    if threshold < NEVER:  # zero of the gain, between two grid points
                        threshold -= (path[x + 1] - path[x]) * least_s / (least_s - on_s)
            thresholds[d, b] = threshold
        gain_s = before_s
    return gain_s


def round_surplus_s(chain: SignalChain, cost: RoundCost, time_per_token_s: float, max_tokens: int) -> float:
    """Expected value x tokens - seconds of a round under optimal stopping, at this value of a token."""
    _, gain_s = optimal_thresholds(chain, cost, time_per_token_s, max_tokens)
    asked_s = cost.policy_step_s if max_tokens > 1 else 0.0
    fixed_s = cost.draft_s[1] + cost.verify_s[2] + cost.round_overhead_s + asked_s
    return float(
        chain.first @ ((time_per_token_s - cost.catch_up_s) * chain.accept + gain_s) + time_per_token_s - fixed_s
    )


def least_time_per_token_s(chain: SignalChain, cost: RoundCost, max_tokens: int) -> float:
    """Value of a token, in seconds, at which the best round has no surplus: the smallest time per token.

    A bracketing search, because Newton's (Dinkelbach's) steps would need the slope of the surplus. Raises
    InputError for costs of 0.
    """
    from scipy.optimize import brentq  # slow to import, and a replay does not need it

    high = float(cost.draft_s[1] + cost.catch_up_s + cost.verify_s[2] + cost.round_overhead_s + cost.policy_step_s)
    if not high > 0:
        raise InputError("the cost table has rounds of 0 seconds; give costs above 0")
    return float(
        brentq(
            lambda time_per_token_s: round_surplus_s(chain, cost, time_per_token_s, max_tokens),
            0.0,
            2 * high,
            xtol=1e-9 * high,
        )
    )


BINS = 12  # of the signal
FIRST_DRAFT = 4  # tokens; fixed draft length of the first rounds
VALUE_STEPS = 4  # updates of the value of a token in each pass
PASSES = 6  # over the rounds of the previous policy


def _learn(policy: RenewalStop, train: Trace, table: CostTable) -> RenewalStop:
    """Repeat replay, calibration on its rounds and solution for thresholds; return the fastest policy on the trace.

    The value of a token is the time per token of the last replay, which converges to its fixed point.
    """
    from specsim.learn.calibration import calibrate, drafted_tokens
    from specsim.replaying.checks import check_replayable
    from specsim.replaying.replay import replay

    check_replayable(train, policy)
    cost = mean_cost(train, table)
    last = replay(train, FixedK(k=min(FIRST_DRAFT, policy.max_draft_tokens)), table, log=True)
    best, least_s = policy, math.inf
    for _ in range(PASSES):
        tokens = drafted_tokens(train, last.rounds)
        options: dict[str, Any] = {"signal": policy.signal, "method": policy.calibration}
        model = calibrate(tokens.features[tokens.verified], tokens.accepted[tokens.verified], **options)
        scores = model.score(tokens.features[tokens.verified])
        edges = np.unique(np.quantile(scores, np.linspace(0, 1, BINS + 1)[1:-1]))
        features, accepted = tokens.followed()
        next_model = calibrate(features, accepted, **options) if len(accepted) and not policy.lookahead else None
        chain = fit_chain(tokens, model, edges, next_model)
        for _ in range(VALUE_STEPS):
            time_per_token_s = float(last.speculative_s.sum() / last.output_tokens.sum())
            limits = thresholds(
                chain, cost, policy.value_scale * time_per_token_s, policy.max_draft_tokens, lookahead=policy.lookahead
            )
            candidate = dataclasses.replace(
                policy,
                time_per_token_s=time_per_token_s,
                weights=tuple(model.weights.tolist()),
                knots=tuple(model.knots.tolist()),
                probs=tuple(model.probs.tolist()),
                edges=tuple(edges.tolist()),
                thresholds=tuple(limits.ravel().tolist()),
            )
            last = replay(train, candidate, table, log=True)
        if last.speculative_s.sum() < least_s:
            best, least_s = candidate, float(last.speculative_s.sum())
    return best


def fit_renewal_stop(kind: type[RenewalStop], settings: Settings, train: Trace, table: CostTable) -> RenewalStop:
    if "thresholds" in settings:
        return build_policy(kind, settings)
    return build_policy(kind, _learn(build_policy(kind, settings), train, table).settings)
