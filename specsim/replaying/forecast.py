"""The interval of a forecast: what a speedup on other prompts, measured later on the same machine, may turn out as."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specsim.cost.profile import NORMAL
from specsim.io.arrays import Floats, Strings
from specsim.replaying.document import Document
from specsim.replaying.intervals import CONFIDENCE, LARGEST_EXPONENT, Estimate, filled_columns, student_quantile


def forecast_interval(
    baseline_s: Floats, policy_s: Floats, domains: Strings, held_out: int, *, cost_error: float, run_error: float
) -> Estimate:
    """Forecast the speedup that a policy will be measured at on other prompts.

    The tuning prompts estimate the speedup, and as many other prompts as will be decoded vary around it: so the
    variance over prompts, within domains, counts 1/S + 1/held_out times. What the costs do not know is added.

    baseline_s, policy_s : seconds of each tuning prompt [S] without and with the policy, by replay
    domains : of the tuning prompts [S]; the held-out prompts are of the same domains in the same shares
    held_out : prompts that will be decoded
    cost_error : standard error of the logarithm of the speedup that the noise of the costs makes
    run_error : standard deviation of the logarithm of a speedup between runs of the same machine

    Raises InputError when there is no sequence.
    """
    top, bottom = filled_columns(baseline_s, policy_s)
    value = float(top.sum() / bottom.sum())
    influence = top / top.mean() - bottom / bottom.mean()
    names, domain = np.unique(domains[(baseline_s != 0) | (policy_s != 0)], return_inverse=True)
    freedom = top.size - len(names)
    if freedom > 0:
        influence -= (np.bincount(domain, influence) / np.bincount(domain))[domain]
    else:  # a prompt each: the domains' differences are all that shows how prompts vary
        freedom = top.size - 1
    reach = NORMAL * math.hypot(cost_error, run_error)
    if freedom > 0:
        prompts = math.sqrt(float((influence**2).sum()) / freedom * (1 / top.size + 1 / held_out))
        reach = math.hypot(reach, student_quantile(freedom, (1 + CONFIDENCE) / 2) * prompts)
    factor = math.exp(min(reach, LARGEST_EXPONENT))
    return Estimate(value, value / factor, value * factor)


class ErrorSummary(Document, frozen=True):
    """By how many percent predicted speedups lie above the measured ones, over policies.

    median_abs_percent, p90_abs_percent : of the absolute errors
    largest_percent : the error that is furthest from 0, with its sign
    mean_percent : shows whether errors have one sign
    """

    median_abs_percent: float
    p90_abs_percent: float
    largest_percent: float
    mean_percent: float


def error_summary(forecasts: Sequence[float], measured: Sequence[float]) -> ErrorSummary:
    """Summarise the errors of these speedups."""
    errors = 100 * (np.asarray(forecasts) / np.asarray(measured) - 1)
    return ErrorSummary(
        median_abs_percent=float(np.median(abs(errors))),
        p90_abs_percent=float(np.quantile(abs(errors), 0.9)),
        largest_percent=float(errors[abs(errors).argmax()]),
        mean_percent=float(errors.mean()),
    )
