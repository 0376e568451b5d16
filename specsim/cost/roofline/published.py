"""How far predictions of published runs are off, by class: what `notes` of uncalibrated costs say."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

ERRORS = Path(__file__).parent / "published_errors.json"
SMALL = 8  # largest batch of the class between one sequence and many
WIDE_PERCENT = 40.0  # an error of one run in ten from which on a prediction is not to be relied on


class ClassError(NamedTuple):
    """Errors of predictions of runs of a class, in systems that no fit had seen.

    what : "decoding step", "served token" (time per output token) or "speedup"
    experts : whether the target has experts
    batch : class of batch sizes
    systems, runs : how many were predicted
    median_percent, p90_percent, bias_percent : median and 90th percentile without sign, and median with its sign
    """

    what: str
    experts: bool
    batch: str
    systems: int
    runs: int
    median_percent: float
    p90_percent: float
    bias_percent: float


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


def error_note(what: str, *, experts: bool, batch: int) -> str:
    """Write how far published runs like this one were off.

    >>> error_note("speedup", experts=True, batch=100_000)
    'no published speedup of this class (experts, batch 9 and more) was at hand to judge it by'
    """
    name = f"{'experts' if experts else 'dense'}, batch {batch_class(batch)}"
    error = class_error(what, experts=experts, batch=batch)
    if error is None:
        return f"no published {what} of this class ({name}) was at hand to judge it by"
    wide = "; do not rely on it" if error.p90_percent > WIDE_PERCENT else ""
    return (
        f"{what} of published runs ({name}; {error.runs} runs of {error.systems} systems) was predicted within "
        f"{error.median_percent:.0f} % in half of them and {error.p90_percent:.0f} % in nine of ten{wide}"
    )
