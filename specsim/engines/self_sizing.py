"""Whether an engine should size drafts itself: vLLM's adaptive verification against the best K, from counts alone.

Counts do not hold the drafter's confidence, so the gain is computed for two drafters that are accepted as often as
counted: one whose confidence is as informative as that of SmolLM2's EAGLE drafter, and one whose confidence says no
more than the position in the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from specsim.cost.batches import BatchCost
from specsim.cost.linear import LinearCost
from specsim.cost.model import CostModel
from specsim.engines.by_load import ByLoad
from specsim.engines.counted import MAY_ABSTAIN
from specsim.engines.export import LARGEST_BATCH, schedule_setting
from specsim.engines.flags import speculative_config, vllm_drafter
from specsim.io.arrays import FloatArray, Floats, Ints
from specsim.io.errors import InputError
from specsim.serving.costs import batch_cost, round_seconds
from specsim.serving.draft_length import Running, ScheduledK
from specsim.serving.rules.adaptive_verification import AdaptiveVerification, Learned

# Standard deviation of the log odds of acceptance by SmolLM2's EAGLE drafter; the tests recompute it.
INFORMED_SD = 1.6
CEILINGS = (1, 3, 5, 8)  # values of num_speculative_tokens that are tried
BISECTIONS = 60  # of an interval of 80, to less than a rounding error
LEAST_STEPS, LEAST_ROUNDS = 50, 200  # simulated
PROFILE_CONTEXT = AdaptiveVerification.profile_context  # vLLM's default
WORTH = 0.01  # smallest relative gain at which it is recommended
NOT_VERIFIED = ("medusa", "eesd", "self-sd", "space")  # drafters for which vLLM has no adaptive verification


class SelfSizing(NamedTuple):
    """Gain of vLLM's adaptive verification over the best fixed K.

    ceiling, profile_context : the fastest of the tried settings: largest K, and cached tokens at which vLLM profiles
    gain, gain_uninformed : relative gain in tokens per second with an informative and with an uninformative confidence
    k : the best fixed K
    requests : concurrent requests
    """

    ceiling: int
    profile_context: int
    gain: float
    gain_uninformed: float
    k: int
    requests: int

    def text(self, drafter: str) -> str:
        """Write the advice in a line, with vLLM's flag. drafter : its kind, such as "eagle3\""""
        against = f"K = {self.k}" if self.k else "no speculation"
        at_once = f"{self.requests} requests at once" if self.requests > 1 else "one request at a time"
        told = (
            f"{100 * self.gain:+.1f} % against {against} with {at_once} if confidence tells as much as SmolLM2's EAGLE "
            f"drafter's, {100 * self.gain_uninformed:+.1f} % if it tells nothing"
        )
        if self.gain < WORTH:
            return f"adaptive verification (vLLM 0.32): leave it off: {told}"
        flag = speculative_config(
            **vllm_drafter(drafter), num_speculative_tokens=self.ceiling, enable_adaptive_verification=True
        )
        if self.profile_context != PROFILE_CONTEXT:
            flag = f"VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN={self.profile_context} vllm serve ... {flag}"
        return f"adaptive verification (vLLM 0.32): switch it on with a ceiling of {self.ceiling}: {told}: {flag}"


def adaptive_verification(
    survival: Sequence[float], cost: CostModel, requests: int, context: int, drafter: str | None
) -> SelfSizing | None:
    """Compare vLLM's adaptive verification with the best fixed K.

    survival : [D], share of drafts whose first 1, ..., D tokens are accepted
    requests : concurrent requests
    context : cached tokens of each request
    drafter : its kind; None if unknown

    Returns None if costs are of a single batch size, or if vLLM has no adaptive verification for the drafter.
    """
    if drafter is None or drafter in (*MAY_ABSTAIN, *NOT_VERIFIED):
        return None
    if not isinstance(cost, BatchCost) or (isinstance(cost, LinearCost) and cost.only_batch is not None):
        return None
    priced = batch_cost(cost, "graphs")
    if not all(survival):
        return None
    accepted = np.array(survival) / np.array([1.0, *survival[:-1]])

    def tokens_per_s(verified: Ints, tokens: Floats, k: int) -> float:
        """Output tokens per second, from verified draft tokens [T, R] and output tokens [T, R] of T steps."""
        step = np.repeat(np.arange(len(verified)), requests)
        zeros = np.zeros(len(step), dtype=np.int64)
        args = (step, zeros + k, zeros, zeros + context, k > 0)
        return float(tokens.sum() / round_seconds(priced, *args, verified=verified.ravel()).total_s.sum())

    one = np.ones((1, requests), dtype=np.int64)
    fixed = [
        tokens_per_s(k * one, np.full((1, requests), 1.0 + sum(survival[:k])), k) for k in range(len(survival) + 1)
    ]
    best = int(np.argmax(fixed))

    @cache
    def rule(k: int, profile: int) -> AdaptiveVerification:
        return AdaptiveVerification(priced, max_draft_tokens=k, profile_context=profile)

    def gain(k: int, profile: int, chance: FloatArray) -> float:
        """Relative gain over the best fixed K, in steps with these acceptance probabilities [T, R, D]."""
        verified, tokens = _steps(rule(k, profile), chance[..., :k])
        fixed_tokens = np.asarray(1 + np.cumprod(chance[..., :best], axis=2).sum(axis=2), dtype=np.float64)
        return tokens_per_s(verified, tokens, k) / tokens_per_s(np.full_like(verified, best), fixed_tokens, best) - 1

    chance = _chances(accepted, INFORMED_SD, requests)
    tried = {
        (k, profile): gain(k, profile, chance)
        for k in CEILINGS
        if k <= len(survival)
        for profile in dict.fromkeys((PROFILE_CONTEXT, context))
    }
    chosen = max(tried, key=lambda each: tried[each])
    return SelfSizing(*chosen, tried[chosen], gain(*chosen, _chances(accepted, 0.0, requests)), best, requests)


def _chances(accepted: Floats, sd: float, requests: int) -> FloatArray:
    """Draw acceptance probabilities [T, R, D] with these means [D] and this standard deviation of the log odds."""
    from scipy.special import expit  # slow to import, as is a solver: bisection does

    nodes, weights = np.polynomial.hermite_e.hermegauss(31)
    weights, rates = weights / weights.sum(), np.minimum(accepted, 1 - 1e-9)
    low, high = np.full(len(rates), -40.0), np.full(len(rates), 40.0)
    for _ in range(BISECTIONS):
        odds = (low + high) / 2
        above = expit(odds[:, None] + sd * nodes) @ weights > rates
        low, high = np.where(above, low, odds), np.where(above, odds, high)
    odds = (low + high) / 2
    steps = max(LEAST_STEPS, LEAST_ROUNDS // requests)
    drawn = np.random.default_rng(0).standard_normal((steps, requests, len(odds)))
    return expit(odds + sd * drawn).astype(np.float32)


def _steps(rule: AdaptiveVerification, chance: FloatArray) -> tuple[Ints, Floats]:
    """Verified draft tokens and expected output tokens [T, R], from acceptance probabilities [T, R, K]."""
    steps, requests, k = chance.shape
    zeros, request = np.zeros(requests, dtype=np.int64), np.arange(requests)
    running = Running(request, zeros, zeros, zeros, zeros, zeros, requests)
    state = Learned(1.0, np.zeros(k), np.zeros((k, 6)), 0, request, chance[-1])
    verified = np.empty((steps, requests), dtype=np.int64)
    for step, drafts in enumerate(chance):
        verified[step] = rule.verify(state, running, drafts, zeros + k)
        state = state._replace(foretold=drafts)
    admitted = np.arange(k) < verified[..., None]
    return verified, 1 + np.where(admitted, np.cumprod(chance, axis=2), 0.0).sum(axis=2)


def schedule_line(engine: str, by_load: ByLoad | None, drafter: str | None) -> str | None:
    """Write SGLang's or TensorRT-LLM's schedule of K by batch size in a line; None if one K is best at every load.

    by_load : None, too, if that is unknown
    """
    if by_load is None:
        return None
    lengths: dict[int, int] = {}
    for at, batch in enumerate(by_load.batches):
        k = int(max(by_load.speedups, key=lambda length: by_load.speedups[length][at]))
        if not lengths or lengths[max(lengths)] != k:
            lengths[batch] = k
    if len(lengths) < 2:
        return None
    try:
        setting = schedule_setting(engine, ScheduledK(lengths), max(LARGEST_BATCH, *lengths), drafter=drafter)
    except InputError:  # TensorRT-LLM takes no K that grows with the batch
        return None
    schedule = ",".join(f"{batch}:{k}" for batch, k in lengths.items())
    file = "" if setting.file is None else f"; {setting.path}: {setting.file}"
    return f"K by requests at once {schedule}: {setting.flags}{file}"
