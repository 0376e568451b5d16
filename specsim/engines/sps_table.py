"""Tables of what a step takes, by which engines choose how many drafted tokens to verify: DSpark's cost tables.

A step drafts K tokens for each of R sequences, and verifies M tokens of them all, the R pending ones included: the
likeliest ones, as many as make the tokens that are accepted times the steps per second (SPS) the most.

======== ===================================================== ============================
form     seconds of a step                                     read by
======== ===================================================== ============================
additive bias + alpha(R) + theta(M), each linear between knots SGLang 0.5.23, TensorRT-LLM
tokens   those of the largest M in the table that is not above SGLang 0.5.23
======== ===================================================== ============================

Beyond their ends, tables are level. As read in SGLang's ``srt/speculative/dspark_components/dspark_sps.py`` and
TensorRT-LLM's ``_torch/speculative/dspark_planner.py``, which no release has yet (2026-11).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specsim.cost.batch_profile import BatchProfileCost
from specsim.cost.batches import BatchCost, BatchTokens
from specsim.cost.step_times import Steps, StepTime, fit_step_time
from specsim.io.arrays import Ints
from specsim.io.errors import InputError

DIGITS = 6  # that a table's numbers have
LEAST_THETA_S = 1e-7  # TensorRT-LLM wants times of passes to be positive


class AdditiveSteps(NamedTuple):
    """Steps of K drafted tokens as bias + alpha(R) + theta(M), and by how much they are off at most, relative."""

    fitted: StepTime
    max_error: float


def additive_steps(cost: BatchCost, k: int, largest_batch: int, context: int) -> AdditiveSteps:
    """Fit the form to the costs of steps at batches up to the largest, each with every number of verified tokens."""
    steps = _steps(cost, k, _batches(cost, largest_batch), range(1, k + 2), context)
    fitted = fit_step_time(steps, "batch, tokens")
    return AdditiveSteps(fitted, float(np.abs(fitted.seconds(steps) / steps.seconds - 1).max()))


def sglang_additive(fitted: StepTime) -> dict[str, Any]:
    """Format the table as SGLang reads it."""
    (batches, alpha_s), (tokens, theta_s) = (_knots(fitted, name) for name in ("sequences", "tokens"))
    return {
        "bias_seconds": _rounded(fitted.fixed_s),
        "bs_probes": batches,
        "alpha_seconds": alpha_s,
        "m_probes": tokens,
        "theta_seconds": theta_s,
    }


def tensorrt_llm_additive(fitted: StepTime) -> dict[str, Any]:
    """Format the table as TensorRT-LLM reads it, in ms: theta is 0 at 0 verified tokens, the rest is overhead."""
    (batches, alpha_s), (tokens, theta_s) = (_knots(fitted, name) for name in ("sequences", "tokens"))
    slope_s = (theta_s[1] - theta_s[0]) / (tokens[1] - tokens[0])
    shift_s = min(max(slope_s * tokens[0], LEAST_THETA_S), fitted.fixed_s)  # only the sum of all terms counts
    return {
        "token_counts": tokens,
        "step_time_ms": [_rounded(1e3 * (seconds + shift_s)) for seconds in theta_s],
        "fixed_overhead_ms": _rounded(1e3 * (fitted.fixed_s - shift_s)),
        "batch_sizes": batches,
        "batch_overhead_ms": [_rounded(1e3 * seconds) for seconds in alpha_s],
    }


def sglang_by_tokens(cost: BatchCost, k: int, largest_batch: int, context: int) -> dict[str, Any]:
    """Steps per second of batches whose drafts are all verified, as SGLang profiles them.

    At every batch, as the engine looks up the next smaller entry and would take wide steps for cheap. Where more tokens
    were measured to be faster, they are taken to be as fast: a longer draft would else be verified for its own sake.
    """
    last = _batches(cost, largest_batch)[-1]
    steps = _steps(cost, k, np.arange(1, last + 1), (1, k + 1), context)
    steps = steps.select(steps.tokens == (k + 1) * steps.sequences)
    tokens = steps.tokens.astype(int).tolist()
    per_second = np.minimum.accumulate(1 / steps.seconds)
    return {
        "sample_batch_tokens": tokens,
        "sample_steps_per_sec": [_rounded(rate) for rate in per_second],
        "max_batch_tokens": tokens[-1],
    }


def _steps(cost: BatchCost, k: int, batches: Ints, verified: Sequence[int], context: int) -> Steps:
    """Compute a step's seconds for every batch size and number of verified tokens per sequence; K are always drafted.

    Raises InputError if the seconds do not depend on the number of verified tokens.
    """
    batch, tokens = (axis.ravel() for axis in np.meshgrid(batches, verified, indexing="ij"))
    drafts_s = [cost.batch_draft(place, BatchTokens.alike(batch, 1, context + place)) for place in range(k)]
    held = BatchTokens.alike(batch, tokens, context)
    seconds = np.sum(drafts_s, axis=0) + cost.batch_verify(held) + cost.step_s + cost.round_s
    by_batch = seconds.reshape(len(batches), len(verified))
    if not (by_batch[:, -1] > by_batch[:, 0]).any():
        raise InputError("these costs are the same however many tokens are verified; verify all, without a table")
    return Steps(held.sequences, held.new, held.cached, seconds)


def _batches(cost: BatchCost, largest: int) -> Ints:
    """Those that were measured, or powers of two, up to the largest."""
    if isinstance(cost, BatchProfileCost):
        return cost.batches[cost.batches <= largest]
    return np.unique([*(2**power for power in range(largest.bit_length())), largest])


def _knots(fitted: StepTime, name: str) -> tuple[list[int], list[float]]:
    """Where a curve bends, and its seconds there."""
    curve = fitted.curves[name].as_dict()
    return [int(at) for at in curve["at"]], [_rounded(seconds) for seconds in curve["seconds"]]


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
