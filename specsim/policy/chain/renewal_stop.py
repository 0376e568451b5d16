"""RenewalStop: continue drafting while the expected gain exceeds the cost, a token's value being its mean cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba as nb
import numpy as np

from specsim.io.errors import InputError
from specsim.policy.base import Variant, setting
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.estimates.token_probability import FEATURES, interpolate, run_after, score, with_one_more

# Between what the lab at temperature 0.8 teaches with and without the drafted token's own probability.
ROUGH_WEIGHTS = (0.55, 0.37, -0.24, 0.11, 0.0, 0.0, 0.0)
ODDS_KNOTS = tuple(i / 4 for i in range(-32, 33))
ODDS_PROBS = tuple(1 / (1 + math.exp(-odds)) for odds in ODDS_KNOTS)
SIGNALS = ("confidence", "entropy", "both", "all")


@nb.njit
def initial_state(params):  # type: ignore[no-untyped-def]
    return (1.0, 0.0, 0.0)  # path probability, run of tokens since the last rejection, past confidence


@nb.njit
def keep_drafting(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    path, past = (1.0, 0.0) if depth == 1 else (state[0], state[2])
    signal = score(params.weights, step.confidence, step.entropy_nats, step.prob, depth, state[1], past)
    path *= interpolate(signal, params.knots, params.probs)
    bins = len(params.edges) + 1
    row = min(depth, len(params.thresholds) // bins) - 1
    column = np.searchsorted(params.edges, signal, side="right")
    return path >= params.thresholds[row * bins + column], (path, state[1], with_one_more(past, step.confidence))


@nb.njit
def update(state, params, drafted, accepted):  # type: ignore[no-untyped-def]
    return (state[0], run_after(state[1], drafted, accepted), state[2])


@dataclass(frozen=True)
class RenewalStop(ChainPolicy):
    """The best stationary causal policy that sees calibrated acceptance probabilities.

    A token's acceptance probability, given that all before it are right, is calibrated from
    confidence, AdaEDL's entropy score, both, or these and the probability of the drafted token
    itself ("all"); and from the confidence of the round's earlier tokens, the depth, and the run
    of tokens since the last rejection. Their product along the draft is the path probability;
    drafting goes on while that reaches the threshold of its depth and of the signal's bin.
    `fit` learns both from a trace and its costs: thresholds by the renewal-reward rule with
    look-ahead (`specsim.learn.renewal_stop`), or myopic, weighing the next token alone. It learns from the
    rounds that the policy itself starts, found by replaying it and learning again: rounds from
    every position would make long easy stretches count by their length, which a good policy
    crosses in few rounds.

    With `thresholds` given, nothing is learned. The defaults come from no fit: a rough
    calibration, and continuing to draft while the path probability is at least 0.4.
    """

    lookahead: bool = setting(True, 0, 1, doc="weigh all that may follow, not just the next token")
    signal: str = setting("all", tune=(0, 3), choices=SIGNALS, doc="what acceptance is told from")
    calibration: str = setting("isotonic", choices=("platt", "isotonic"), doc="how the probability is fitted")
    value_scale: float = setting(1.0, 0.1, 10.0, log=True, doc="factor on the value of a token")
    time_per_token_s: float = setting(0.0, 0.0, 1e6, doc="learned: value of a token in seconds, the time per token")
    max_draft_tokens: int = setting(16, 1, 256, bounds="depth", doc="longest draft in tokens")
    weights: tuple[float, ...] = setting(ROUGH_WEIGHTS, -1e9, 1e9, doc="learned: score of a token")
    knots: tuple[float, ...] = setting(ODDS_KNOTS, -1e9, 1e9, doc="learned: scores at which `probs` are given")
    probs: tuple[float, ...] = setting(ODDS_PROBS, 0.0, 1.0, doc="learned: acceptance probability at `knots`")
    edges: tuple[float, ...] = setting((0.0,), -1e9, 1e9, doc="learned: scores between bins")
    thresholds: tuple[float, ...] = setting((0.4, 0.4), 0.0, 2.0, doc="learned: path probability, [depth, bin]")

    name = "renewal_stop"
    source = "renewal-reward form of EDD + PCT Eq. 5, see specsim/learn/renewal_stop.py"
    features = ("prob", "confidence", "entropy_nats")
    variants = (Variant("fitted", tuned=False), Variant("myopic", {"lookahead": False}, tuned=False))
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, ok, wanted in (
            ("weights", len(self.weights) == 1 + FEATURES, f"{1 + FEATURES} numbers"),
            ("probs", len(self.probs) == len(self.knots) > 1, "as many numbers as knots, at least 2"),
            ("knots", list(self.knots) == sorted(set(self.knots)), "increasing numbers"),
            ("edges", list(self.edges) == sorted(set(self.edges)), "increasing numbers"),
            ("thresholds", len(self.thresholds) % (len(self.edges) + 1) == 0, "a number per depth and bin"),
        ):
            if not ok:
                raise InputError(f"policy {self.name}: {name} has to hold {wanted}; fit the policy again")
