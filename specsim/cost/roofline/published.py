"""How far predictions of published runs are off, by class: what `notes` of uncalibrated costs say."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

ERRORS = Path(__file__).parent / "published_errors.json"
SMALL = 8  # largest batch of the class between one sequence and many
WIDE_PERCENT = 40.0  # 90th percentile from which on a prediction is not to be relied on
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
