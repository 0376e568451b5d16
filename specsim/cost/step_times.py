"""Times of a serving engine's steps, fitted to recorded steps in the forms that papers and engines use.

=============== ======================================= ==========================================================
form            seconds                                 used by
=============== ======================================= ==========================================================
linear          fixed + a tokens + k cached             arXiv 2601.11580, of vLLM
tokens, cached  f(tokens) + k cached                    regressions on vLLM's steps
batch, tokens   fixed + a(sequences) + b(tokens)        DSpark's tables, in SGLang and TensorRT-LLM
=============== ======================================= ==========================================================

f, a and b never fall, and are linear between at most `MAX_KNOTS` values that were seen, and beyond. A cost file of the
form linear takes any of them as its ``target``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specsim.cost.batches import BatchTokens
from specsim.cost.model import MAX_SECONDS, MIN_SECONDS, check_seconds
from specsim.io.arrays import Bools, Floats, Seconds
from specsim.io.errors import InputError

MAX_KNOTS = 8
# Knots of the curve along each of these facts of a step; 2 are those of a straight line through 0.
FORMS: Mapping[str, Mapping[str, int]] = {
    "linear": {"tokens": 2, "cached_tokens": 2},
    "tokens, cached": {"tokens": MAX_KNOTS, "cached_tokens": 2},
    "batch, tokens": {"sequences": MAX_KNOTS, "tokens": MAX_KNOTS},
}
CURVES = ("sequences", "tokens")  # that a pass of a cost file may have
MIN_KINDS = 8  # of steps, so that each half determines something


class Steps(NamedTuple):
    """Recorded steps, an array [N] per quantity.

    sequences : that take part
    tokens : new ones, of all sequences
    cached_tokens : in all their caches before
    seconds : that the step took
    """

    sequences: Floats
    tokens: Floats
    cached_tokens: Floats
    seconds: Seconds

    def select(self, rows: Bools) -> Steps:
        return Steps(*(column[rows] for column in self))


@dataclass(frozen=True)
class CurveDocument:
    """A `Curve` in a file: seconds at these values, beyond those at the first."""

    at: list[float]
    seconds: list[float]


class Curve(NamedTuple):
    """Rise of seconds with a quantity: by `rise_s` [M - 1] between the knots `at` [M], continued beyond the last."""

    at: Floats
    rise_s: Seconds

    def __call__(self, values: Floats) -> Seconds:
        return np.asarray(_shares(values, self.at) @ self.rise_s)

    @property
    def slope_s(self) -> float | None:
        """Of a straight line through 0."""
        return float(self.rise_s[0] / self.at[1]) if len(self.at) == 2 and not self.at[0] else None

    def as_dict(self) -> dict[str, list[float]]:
        return {"at": self.at.tolist(), "seconds": np.append(0.0, np.cumsum(self.rise_s)).tolist()}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a pass, or of a step: `fixed_s` where all curves begin, and the curves by a fact of `Steps`."""

    fixed_s: float
    curves: Mapping[str, Curve]

    def __post_init__(self) -> None:
        check_seconds(self, "fixed_s", least=MIN_SECONDS)

    def seconds(self, steps: Steps) -> Seconds:
        """Predicted seconds of every step."""
        return np.asarray(self.fixed_s + sum(curve(getattr(steps, name)) for name, curve in self.curves.items()))

    def batch_seconds(self, tokens: BatchTokens) -> Seconds:
        """Seconds of passes over ragged batches."""
        return self.seconds(Steps(*np.broadcast_arrays(tokens.sequences, tokens.new, tokens.cached, 0.0)))

    def as_dict(self) -> dict[str, Any]:
        """A pass in a cost file of the form linear; a straight line as its slope."""
        document: dict[str, Any] = {"fixed_s": self.fixed_s}
        for name, curve in self.curves.items():
            slope_s = curve.slope_s
            document |= {name: curve.as_dict()} if slope_s is None else {f"{name[:-1]}_s": slope_s}
        return document


@dataclass(frozen=True)
class Judged:
    """A form fitted to all steps, and its error on held-out steps.

    median_error, p90_error : absolute and relative; rmse_s : of seconds
    """

    form: str
    fitted: StepTime
    held_out: int
    median_error: float
    p90_error: float
    rmse_s: float

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "fitted": self.fitted.as_dict()}


def fit_step_time(steps: Steps, form: str) -> StepTime:
    """Fit a form to steps by least squares of relative errors, no coefficient negative.

    form : {"linear", "tokens, cached", "batch, tokens"}

    References: Lawson, Hanson 1974: ``scipy.optimize.nnls``.

    >>> import numpy as np
    >>> from specsim.cost.step_times import Steps, fit_step_time
    >>> tokens, cached = np.array([1.0, 8.0, 64.0, 512.0]), np.array([900.0, 100.0, 5000.0, 0.0])
    >>> steps = Steps(np.ones(4), tokens, cached, 0.006 + 2e-5 * tokens + 4e-8 * cached)
    >>> {name: float(f"{value:.3g}") for name, value in fit_step_time(steps, "linear").as_dict().items()}
    {'fixed_s': 0.006, 'token_s': 2e-05, 'cached_token_s': 4e-08}
    """
    from scipy.optimize import nnls

    knots = {name: _knots(getattr(steps, name), count) for name, count in FORMS[form].items()}
    columns = [np.ones((len(steps.seconds), 1)), *(_shares(getattr(steps, name), at) for name, at in knots.items())]
    relative = np.hstack(columns) / steps.seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    coefficients = nnls(relative / scale, np.ones(len(relative)))[0] / scale
    ends = np.cumsum([column.shape[1] for column in columns])
    _, *rises = np.split(coefficients, ends[:-1])
    return StepTime(
        max(float(coefficients[0]), MIN_SECONDS),
        {name: Curve(at, rise) for (name, at), rise in zip(knots.items(), rises, strict=True)},
    )


def step_time(document: Mapping[str, Any]) -> StepTime:
    """Read a pass as `StepTime.as_dict` writes it, with curves as `CurveDocument`.

    Raises InputError for a curve that falls, or whose values do not increase, or a curve together with a slope.
    """
    curves = {}
    for name in ("sequences", "tokens", "cached_tokens"):
        slope_s, curve = document.get(f"{name[:-1]}_s"), document.get(name)
        if curve is not None and slope_s is not None:
            raise InputError(f"cost: {name[:-1]}_s and {name} exclude each other; give either")
        if slope_s is not None:
            if not 0 <= slope_s <= MAX_SECONDS:
                raise InputError(f"cost: {name[:-1]}_s={slope_s} seconds; give 0 to {MAX_SECONDS:g}")
            curves[name] = Curve(np.array([0.0, 1.0]), np.array([slope_s]))
        elif curve is not None:
            at, seconds = np.array(curve.at), np.array(curve.seconds)
            if not len(at) or (np.diff(at, prepend=-1.0) <= 0).any():
                raise InputError(f"cost: {name} at {curve.at!r:.60}: give increasing values of 0 or more")
            if len(seconds) != len(at) or seconds[0] or (np.diff(seconds) < 0).any() or seconds[-1] > MAX_SECONDS:
                raise InputError(f"cost: {name} have seconds that do not rise from 0, one for each value; correct them")
            curves[name] = Curve(at, np.diff(seconds))
    return StepTime(document["fixed_s"], curves)


def judge_step_times(steps: Steps, *, seed: int = 0) -> list[Judged]:
    """Judge every form on held-out steps: a random half of the distinct ones.

    Raises InputError for fewer than MIN_KINDS distinct steps.
    """
    _, kind = np.unique(np.stack(steps[:3], axis=1), axis=0, return_inverse=True)
    kinds = int(kind.max(initial=-1)) + 1
    if kinds < MIN_KINDS:
        raise InputError(f"{kinds} distinct steps; give at least {MIN_KINDS}, of several batches and contexts")
    seen = (np.random.default_rng(seed).permutation(kinds) < kinds / 2)[kind.ravel()]
    train, rest = steps.select(seen), steps.select(~seen)
    judged = []
    for form in FORMS:
        predicted_s = fit_step_time(train, form).seconds(rest)
        error = np.abs(predicted_s / rest.seconds - 1)
        median_error, p90_error = float(np.median(error)), float(np.quantile(error, 0.9))
        rmse_s = float(np.sqrt(np.mean((predicted_s - rest.seconds) ** 2)))
        judged.append(Judged(form, fit_step_time(steps, form), len(error), median_error, p90_error, rmse_s))
    return judged


def _knots(values: Floats, count: int) -> Floats:
    """Where a curve along these values bends."""
    if count == 2:
        return np.array([0.0, max(float(values.max()), 1.0)])
    return np.unique(np.quantile(np.unique(values), np.linspace(0, 1, count), method="nearest"))


def _shares(values: Floats, at: Floats) -> Floats:
    """Share of the rise between each two knots that is reached at these values [..., M - 1]."""
    shares = np.maximum((np.asarray(values, dtype=np.float64)[..., None] - at[:-1]) / np.diff(at), 0.0)
    shares[..., :-1] = np.minimum(shares[..., :-1], 1.0)
    return shares
