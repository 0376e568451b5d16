"""How far predictions of published runs are off, by class: what `notes` of uncalibrated costs say."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

ERRORS = Path(__file__).parent / "published_errors.json"
SMALL = 8  # largest batch of the class between one sequence and many
WIDE_PERCENT = 40.0  # 90th percentile from which on a prediction is not to be relied on
FEW_SYSTEMS = 3  # as many systems as a class is believed to be unbiased, and as varied as all classes
# Median errors of speedups of deployments between two that costs were calibrated on, by experts and batch: "How far to
# trust this" of `python -m studies published`.
CALIBRATED_PERCENT = {(False, True): 0.5, (False, False): 7.2, (True, True): 5.6, (True, False): 5.6}
NORMAL_MEDIAN = 0.6745  # of the absolute value of a standard normal
NORMAL_90 = 1.645  # from the 5th percentile of a standard normal to its median
DRAFTERS = ("eagle", "eagle3", "block")  # kinds of which speedups and acceptance lengths are published


class ClassError(NamedTuple):
    """Errors of predictions of runs of a class, in systems that no fit had seen.

    what : "decoding step", "TPOT" (time per output token of a loaded server) or "speedup"
    experts : whether the target has experts
    batch : class of batch sizes
    systems, runs : how many were predicted
    median_percent, p90_percent, bias_percent : median and 90th percentile without sign, and median with its sign
    low, high : 5th and 95th percentile of measured over predicted
    """

    what: str
    experts: bool
    batch: str
    systems: int
    runs: int
    median_percent: float
    p90_percent: float
    bias_percent: float
    low: float
    high: float


def batch_class(batch: int) -> str:
    """Name the class of a batch size.

    >>> [batch_class(size) for size in (1, 8, 64)]
    ['1', '2 to 8', '9 and more']
    """
    if batch == 1:
        return "1"
    return f"2 to {SMALL}" if batch <= SMALL else f"{SMALL + 1} and more"


@cache
def published_errors() -> tuple[ClassError, ...]:
    """Read the errors by class, as `python -m studies published` finds them."""
    return tuple(ClassError(**row) for row in json.loads(ERRORS.read_text())["classes"])


def class_error(what: str, *, experts: bool, batch: int) -> ClassError | None:
    """Find the errors of the class; None for a class without published runs."""
    of_class = (what, experts, batch_class(batch))
    return next((e for e in published_errors() if (e.what, e.experts, e.batch) == of_class), None)


def error_note(what: str, *, experts: bool, batch: int, known: bool = True) -> str:
    """Write how far published runs like this one were off.

    known : whether there are published runs of the drafter's kind and of the weights' format

    >>> error_note("speedup", experts=True, batch=100_000)
    'error unknown: no published speedup of this kind (experts, batch 9 and more)'
    """
    name = f"{'experts' if experts else 'dense'}, batch {batch_class(batch)}"
    error = class_error(what, experts=experts, batch=batch) if known else None
    if error is None:
        return f"error unknown: no published {what} of this kind ({name}{'' if known else ', this drafter or format'})"
    wide = "; do not rely on it" if error.p90_percent > WIDE_PERCENT else ""
    return (
        f"uncalibrated: the {what} of {error.runs} published runs ({name}; {error.systems} systems) was predicted with "
        f"a median error of {error.median_percent:.0f} % (90th percentile {error.p90_percent:.0f} %){wide}"
    )


def log_error(*, experts: bool, batch: int, known: bool) -> tuple[float, float]:
    """Mean and standard deviation of log(measured / predicted) of uncalibrated speedups.

    A class is of few systems, so its bias is drawn to 0 and its variance to that of all classes, as if FEW_SYSTEMS more
    had been measured. An unknown class has no bias and the variance of all.

    known : whether there are published runs of the drafter's kind and of the weights' format

    >>> [round(value, 2) for value in log_error(experts=False, batch=4, known=True)]
    [-0.04, 0.13]
    """
    classes = [error for error in published_errors() if error.what == "speedup"]
    systems = sum(error.systems for error in classes)
    pooled = sum(error.systems * _log_sd(error) ** 2 for error in classes) / systems
    error = class_error("speedup", experts=experts, batch=batch) if known else None
    if error is None:
        return 0.0, math.sqrt(pooled)
    weight = error.systems / (error.systems + FEW_SYSTEMS)
    bias = -math.log1p(error.bias_percent / 100)  # of predictions
    return weight * bias, math.sqrt(weight * _log_sd(error) ** 2 + (1 - weight) * pooled)


def _log_sd(error: ClassError) -> float:
    return math.log(error.high / error.low) / (2 * NORMAL_90)


def calibrated_error(*, experts: bool, batch: int) -> float:
    """Standard deviation of log(measured / predicted speedup) of calibrated costs, at another deployment."""
    return math.log1p(CALIBRATED_PERCENT[experts, batch == 1] / 100) / NORMAL_MEDIAN
