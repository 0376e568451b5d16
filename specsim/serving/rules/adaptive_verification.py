"""vLLM's adaptive verification: every request drafts K tokens, and a budget of them is verified.

The acceptance of a drafted token is estimated from the drafter's largest probability q by sigma(w logit(q) + beta_i),
i its place in the draft, and w, beta are learned while serving. vLLM's own two files run beside this one in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from specsim.cost.batches import GRAPH_SIZES, BatchTokens, DoesNotFit
from specsim.io.arrays import FloatArray, Floats, Ints, Seconds
from specsim.io.errors import InputError
from specsim.policy.base import setting
from specsim.serving.draft_length import DraftRounds, PricedRule, Running
from specsim.serving.rules.value import hand_out
from specsim.trace.trace import Trace

SLOPE, INTERCEPT = 0.5, -0.2  # w and every beta at first
REFIT_STEPS = 100
DAMPING = 50.0  # observations that move a coefficient by half a Newton step
RIDGE = 1e-3
MAX_LOG_ODDS = 40.0
MAX_TOKENS = 8192  # of a step, up to which it is profiled
SHORT_CONTEXTS = (64, 128)  # at which any batch fits


class Learned(NamedTuple):
    """Coefficients, statistics since the last fit, and predicted acceptance of the last step's drafts.

    slope : w; intercepts : beta [K]
    statistics : [K, 6], sums over verified tokens since the last fit; steps : since the last fit
    request : requests of the last step [R]
    foretold : [R, K], predicted acceptance of each token of their drafts
    """

    slope: float
    intercepts: Floats
    statistics: Floats
    steps: int
    request: Ints
    foretold: FloatArray


@dataclass(frozen=True)
class AdaptiveVerification(PricedRule):
    """Draft K tokens for every request, and verify those that maximise the expected tokens per second.

    The number b of verified tokens maximises (requests that sample + the b largest chances) / seconds, as in DSpark.
    The chances are those of each request's previous draft, because the engine plans a step while the previous one runs;
    they are 1 for a request without a draft. The b likeliest tokens of the new drafts are verified. Seconds come from a
    profile at start-up, in which every token of a pass is a request of its own with `profile_context` cached tokens; a
    pass of up to 512 tokens is padded to a captured size. Every 100 steps the coefficients take a damped Newton step on
    the tokens that were verified since. A place in the draft that is never verified is never learned.

    Differences from vLLM: steps that only prefill are not counted, and the logits of a step are not limited to 1 GB.
    """

    max_draft_tokens: int = setting(7, 1, 255, bounds="depth", doc="K: num_speculative_tokens")
    profile_context: int = setting(
        8192, 0, 10_000_000, doc="cached tokens at start-up: VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"
    )
    max_num_seqs: int = setting(256, 1, 1_000_000, doc="most requests of a step: max_num_seqs")
    head: bool = setting(False, 0, 1, doc="the drafter has a confidence head, whose output the trace has as score")

    name = "adaptive_verification"
    source = "vLLM 0.32, enable_adaptive_verification: v1/worker/gpu/spec_decode/adaptive_verification.py"
    features = ("confidence",)
    trims_filled_steps = True

    def initial_state(self) -> Learned:
        k = self.max_draft_tokens
        nothing = np.empty(0, dtype=np.int64), np.empty((0, k), dtype=np.float32)
        return Learned(SLOPE, np.full(k, INTERCEPT), np.zeros((k, 6)), 0, *nothing)

    def survival(self, trace: Trace) -> FloatArray:
        """The drafter's confidence in each token, from which `verify` predicts its acceptance."""
        if self.head and trace.score is None:
            raise InputError(f"{self.name}: the trace has no scores of a confidence head; leave out head")
        if not trace.informed:
            raise InputError("the trace has no drafter confidence; record it with a drafter that reports probabilities")
        return trace.confidence if trace.score is None or not self.head else trace.score

    def choose(self, state: Learned, running: Running) -> int:
        return self.max_draft_tokens

    def verify(self, state: Learned, running: Running, survival: FloatArray, drafted: Ints) -> Ints:
        live = np.cumprod(self.foretold(state, survival), axis=1)
        return hand_out(live, drafted, self.budget(state, running, drafted))

    def budget(self, state: Learned, running: Running, drafted: Ints) -> int:
        """Drafted tokens to verify in the step."""
        earlier = np.cumprod(self.earlier(state, running).astype(np.float64), axis=1)
        chances = np.sort(earlier[np.arange(self.max_draft_tokens) < drafted[:, None]])[::-1]
        decoding = len(running.request)
        promised = decoding + running.prompts_ending + np.concatenate([[0.0], np.cumsum(chances)])
        return int(np.argmax(promised / self.profiled_s(running, np.arange(len(chances) + 1))))

    def profiled_s(self, running: Running, count: Ints) -> Seconds:
        """Seconds of the step if so many drafted tokens are verified, by the engine's profile."""
        decoding = len(running.request)
        passes_s = self.verify_profile(decoding + running.prompt_tokens + count)
        return self.draft_profile(decoding + running.prompts) + passes_s

    def foretold(self, state: Learned, said: FloatArray) -> FloatArray:
        """Predicted acceptance [R, i] of each token of a draft, given that all earlier ones are accepted."""
        if self.head:
            return said
        odds = state.slope * log_odds(said) + state.intercepts[: said.shape[1]]
        return expit(odds).astype(np.float32)

    def earlier(self, state: Learned, running: Running) -> FloatArray:
        """Predicted acceptance of each request's draft in the last step; 1 for requests that were not in that step."""
        foretold = np.ones((len(running.request), self.max_draft_tokens), dtype=np.float32)
        _, here, there = np.intersect1d(running.request, state.request, assume_unique=True, return_indices=True)
        foretold[here] = state.foretold[there]
        return foretold

    def update(self, state: Learned, running: Running, rounds: DraftRounds) -> Learned:
        k, said = self.max_draft_tokens, rounds.survival
        foretold = np.zeros((len(running.request), k), dtype=np.float32)
        statistics = state.statistics
        if said is not None:
            foretold[:, : said.shape[1]] = self.foretold(state, said)
            if not self.head:
                statistics = statistics + observations(log_odds(said), foretold, rounds.verified, rounds.accepted)
        state = Learned(state.slope, state.intercepts, statistics, state.steps + 1, running.request, foretold)
        return self.refit(state) if state.steps == REFIT_STEPS else state

    def refit(self, state: Learned) -> Learned:
        """The state with new coefficients."""
        return refitted(state)

    @cached_property
    def curves(self) -> tuple[tuple[Floats, Seconds], tuple[Floats, Seconds]]:
        """Profiles: sizes and seconds, of draft passes by requests and of verification by tokens."""
        sizes = [int(size) for size in GRAPH_SIZES]
        while sizes[-1] < MAX_TOKENS:
            sizes.append(min(2 * sizes[-1], MAX_TOKENS))
        sizes.insert(len(GRAPH_SIZES), int(1.5 * GRAPH_SIZES[-1]))
        verify, draft = [], {}
        for size in sizes:
            requests = min(size, self.max_num_seqs)
            new = np.full(requests, size // requests) + (np.arange(requests) < size % requests)
            try:
                verify.append((size, self._at_start(partial(self._verify_s, new))))
                if size <= GRAPH_SIZES[-1]:
                    draft[requests] = self._at_start(partial(self._draft_s, requests))
            except InputError:  # larger passes than the costs cover
                break
        if not draft:
            raise InputError(
                f"{self.name}: the costs do not cover {self.profile_context} cached tokens; lower profile_context"
            )
        return _curve(draft.items()), _curve(verify)

    def _at_start(self, seconds: Callable[[int], float]) -> float:
        """Seconds at `profile_context`. Where the KV cache is too small, extrapolated from two short contexts.

        The engine lets the requests share blocks there, so that the pass reads as much.
        """
        try:
            return seconds(self.profile_context)
        except DoesNotFit:
            short, long = SHORT_CONTEXTS
            per_token = (seconds(long) - seconds(short)) / (long - short)
            return seconds(short) + per_token * (self.profile_context - short)

    def _verify_s(self, new: Ints, context: int) -> float:
        return float(self.cost.batch_verify(BatchTokens.of(new, np.full(len(new), context))))

    def _draft_s(self, requests: int, context: int) -> float:
        places = np.arange(self.max_draft_tokens)
        return float(np.sum(self.cost.batch_draft(places, BatchTokens.alike(requests, 1, context + places))))

    def draft_profile(self, requests: int) -> float:
        """Seconds of the drafts of so many requests, as profiled."""
        return float(looked_up(*self.curves[0], np.array([requests]))[0])

    def verify_profile(self, tokens: Ints) -> Seconds:
        """Seconds of a pass over so many tokens, as profiled."""
        return np.maximum(looked_up(*self.curves[1], tokens), 1e-9)


def log_odds(prob: FloatArray) -> Floats:
    """log(q / (1 - q)), within 40 of 0."""
    own = prob.astype(np.float64)
    with np.errstate(divide="ignore"):
        return np.clip(np.log(own) - np.log1p(-own), -MAX_LOG_ODDS, MAX_LOG_ODDS)


def observations(feature: Floats, foretold: FloatArray, verified: Ints, accepted: Ints) -> Floats:
    """Statistics [K, 6] of the verified tokens of each draft, up to its first rejected one. foretold : [R, K]"""
    place, length = np.arange(feature.shape[1]), feature.shape[1]
    observed = (place <= accepted[:, None]) & (place < verified[:, None])
    chance = foretold[:, :length].astype(np.float64)
    weight = np.where(observed, chance * (1 - chance), 0.0)
    error = np.where(observed, (place < accepted[:, None]) - chance, 0.0)
    columns = (weight * feature**2, weight * feature, weight, error * feature, error, observed)
    sums = np.zeros((foretold.shape[1], 6))
    sums[:length] = np.stack([column.sum(axis=0) for column in columns], axis=1)
    return sums


def refitted(state: Learned) -> Learned:
    """Coefficients after a damped Newton step of the logistic likelihood, with nothing observed since."""
    a, b, c, g0, g1, n = state.statistics.T
    c, total = c + RIDGE, n.sum()
    slope_step = (g0.sum() - (b * g1 / c).sum()) / (a.sum() + RIDGE - (b * b / c).sum())
    slope_step *= total / (total + DAMPING)
    if not state.slope + slope_step >= 0:  # not a number, or confidence would count against a token
        slope_step = 0.0
    steps = (g1 - b * slope_step) / c * n / (n + DAMPING)
    return state._replace(
        slope=float(state.slope + slope_step),
        intercepts=state.intercepts + np.nan_to_num(steps),
        statistics=np.zeros_like(state.statistics),
        steps=0,
    )


def looked_up(sizes: Floats, seconds: Seconds, asked: Ints) -> Seconds:
    """Seconds of passes by a profile: at the next captured size, or interpolated between larger sizes."""
    largest = GRAPH_SIZES[-1]
    found = seconds[np.minimum(np.searchsorted(sizes, asked), len(sizes) - 1)]
    beyond = sizes > largest
    if beyond.any():
        found = np.where(asked > largest, np.interp(asked, sizes[beyond], seconds[beyond]), found)
    if len(sizes) > 1:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        found = np.where(asked > sizes[-1], seconds[-1] + slope * (asked - sizes[-1]), found)
    return found


def _curve(points: Any) -> tuple[Floats, Seconds]:
    """Sizes in ascending order, and their seconds, made monotonic."""
    sizes, seconds = np.array(sorted(points), dtype=np.float64).T
    return sizes, np.maximum.accumulate(seconds)
