"""Prediction errors on published runs, by kind of run: the notes and error bands of uncalibrated roofline costs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specsim.io.arrays import Floats

ERRORS = Path(__file__).parent / "published_errors.json"
SMALL = 8  # largest batch of the middle class, see `batch_class`
WIDE_PERCENT = 40.0  # 90th percentile of the error above which notes advise against relying on a prediction
# Median error in percent of a speedup at a batch or K between the two that costs were calibrated on, by (model has
# experts, batch size is 1).
CALIBRATED_PERCENT = {(False, True): 0.5, (False, False): 7.2, (True, True): 5.6, (True, False): 5.6}
NORMAL_MEDIAN = 0.6745  # of the absolute value of a standard normal
NORMAL_90 = 1.645  # from the 5th percentile of a standard normal to its median


class Runs(NamedTuple):
    """Published runs of one kind on one system, predicted with parameters that were fitted to the other systems.

    what : predicted quantity: "decoding step", "TPOT" (time per output token of a loaded server) or "speedup"
    system : GPU and engine, or GPU and source
    kind : features of the runs, such as ("experts", "mtp", "batch 1")
    runs : number of runs
    mean, sd : mean and standard deviation of log(measured / predicted)
    """

    what: str
    system: str
    kind: tuple[str, ...]
    runs: int
    mean: float
    sd: float


class Errors(NamedTuple):
    """Absolute errors of the published runs of a kind in percent, and the numbers of systems and runs."""

    what: str
    kind: tuple[str, ...]
    systems: int
    runs: int
    median_percent: float
    p90_percent: float


class Spread(NamedTuple):
    """Standard deviations of log(measured / predicted) between words of a kind, systems, and runs of a system."""

    word: float
    system: float
    run: float


class Error(NamedTuple):
    """Expected log(measured / predicted) of a run on a new system. reach : 95th percentile minus mean"""

    mean: float
    reach: float

    @property
    def band(self) -> tuple[float, float]:
        """5th and 95th percentile of measured / predicted, widened to include 1."""
        return math.exp(min(self.mean - self.reach, 0.0)), math.exp(max(self.mean + self.reach, 0.0))

    @property
    def sd(self) -> float:
        """Standard deviation of the normal distribution with the same `reach`."""
        return self.reach / NORMAL_90


def batch_class(batch: int) -> str:
    """Name the class of a batch size.

    >>> [batch_class(size) for size in (1, 8, 64)]
    ['batch 1', 'batch 2 to 8', 'batch 9 and more']
    """
    if batch == 1:
        return "batch 1"
    return f"batch 2 to {SMALL}" if batch <= SMALL else f"batch {SMALL + 1} and more"


@cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(ERRORS.read_text())
    return document


@cache
def published_runs() -> tuple[Runs, ...]:
    """Read the errors by system and kind, which `python -m studies published` computes."""
    return tuple(Runs(what, system, tuple(kind), *rest) for what, system, kind, *rest in _document()["runs"])


def published_errors(what: str, kind: Sequence[str]) -> Errors | None:
    """Find the errors of runs of exactly this kind; None if none was published."""
    found = next((row for row in _document()["kinds"] if row[0] == what and set(row[1]) == {*kind}), None)
    return found and Errors(found[0], tuple(found[1]), *found[2:])


@cache
def published_error(what: str, kind: tuple[str, ...]) -> Error | None:
    """Estimate the error of a run of this kind on a new system; None if a word of the kind is in no published run.

    A random-effects model: log(measured / predicted) is a sum of one effect per word of the kind, one per system, and
    noise. Effects of words that few systems ran are shrunk to 0. The interval uses Student's t over systems.

    >>> published_error("speedup", ("experts", "prompt-lookup", "batch 1")) is None
    True
    """
    return expected_error([runs for runs in published_runs() if runs.what == what], kind, spread_of(what))


def expected_error(published: Sequence[Runs], kind: Iterable[str], spread: Spread) -> Error | None:
    """Estimate the error of a run of this kind from published runs, see `published_error`.

    References: Robinson 1991, "That BLUP is a good thing", Statistical Science 6(1).
    """
    from scipy.special import stdtrit  # slow to import

    words = sorted({word for runs in published for word in runs.kind})
    systems = {runs.system for runs in published}
    if not {*kind} <= {*words} or len(systems) < 2:
        return None

    def indicators(of: Iterable[str]) -> Floats:
        return np.array([1.0, *(word in {*of} for word in words)])

    rows = np.array([indicators(runs.kind) for runs in published])
    same = np.array([[one.system == other.system for other in published] for one in published])
    noise = np.diag([spread.run**2 / runs.runs for runs in published])
    between = spread.word**2 * rows @ rows.T + spread.system**2 * same + noise
    new = indicators(kind)
    shared = spread.word**2 * rows @ new
    solved = np.linalg.solve(between, np.column_stack([[runs.mean for runs in published], shared]))
    variance = spread.word**2 * new @ new + spread.system**2 + spread.run**2 - shared @ solved[:, 1]
    return Error(float(shared @ solved[:, 0]), float(stdtrit(len(systems) - 1, 0.95) * math.sqrt(variance)))


def spread_of(what: str) -> Spread:
    """Read the standard deviations between words, systems and runs."""
    return Spread(*_document()["spread"][what])


def error_note(what: str, kind: tuple[str, ...]) -> str:
    """Write the note on the prediction errors of published runs of this kind.

    >>> error_note("speedup", ("experts", "prompt-lookup", "batch 1"))[:61]
    'no published run like this one (experts, prompt-lookup, batch'
    """
    name = ", ".join(kind)
    if published_error(what, kind) is None:
        low, high = (100 * (1 / ratio - 1) for ratio in _document()["worst"][what])
        return (
            f"no published run like this one ({name}): the plain roofline's worst {what}s are {high:+.0f} and "
            f"{low:+.0f} % off"
        )
    errors = published_errors(what, kind)
    if errors is None:
        total = sum(runs.runs for runs in published_runs() if runs.what == what)
        return f"uncalibrated: no published {what} is of this kind ({name}), its error is that of {total} others"
    wide = "; do not rely on it" if errors.p90_percent > WIDE_PERCENT else ""
    if errors.runs == 1:
        median = f"{errors.median_percent:.0f} %"
        return (
            f"uncalibrated: the {what} of a single published run ({name}) was predicted with an error of {median}{wide}"
        )
    return (
        f"uncalibrated: the {what} of {errors.runs} published runs ({name}; {errors.systems} "
        f"system{'s' * (errors.systems > 1)}) was predicted "
        f"with a median error of {errors.median_percent:.0f} % (90th percentile {errors.p90_percent:.0f} %){wide}"
    )


def correction_notes(bias: float) -> list[str]:
    """Write the note on speedups that are corrected by published runs, if any is. bias : log(measured / predicted)

    >>> correction_notes(-0.04)
    ['published runs of this kind were predicted too high: speedups are multiplied by 0.96']
    """
    factor = f"{math.exp(bias):.2f}"
    direction = "low" if bias > 0 else "high"
    what = f"published runs of this kind were predicted too {direction}: speedups are multiplied by {factor}"
    return [] if factor == "1.00" else [what]


def unknown_error(what: str) -> float:
    """Standard deviation of log(measured / predicted) of a run unlike all published ones: over words, systems, runs."""
    return math.hypot(*spread_of(what))


def calibrated_error(*, experts: bool, batch: int) -> float:
    """Standard deviation of log(measured / predicted speedup) of calibrated costs, at another batch or K."""
    return math.log1p(CALIBRATED_PERCENT[experts, batch == 1] / 100) / NORMAL_MEDIAN
