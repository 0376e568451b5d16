"""What a step of a serving engine takes, fitted to recorded steps in the forms that papers and engines have for it.

=============== ======================================= ==========================================================
form            seconds                                 used by
=============== ======================================= ==========================================================
linear          fixed + a tokens + k cached             arXiv 2601.11580, of vLLM; a linear cost file's ``target``
tokens, cached  f(tokens) + k cached                    regressions on vLLM's steps
batch, tokens   fixed + a(sequences) + b(tokens)        DSpark's tables, in SGLang and TensorRT-LLM
=============== ======================================= ==========================================================

f, a and b never fall, and are linear between at most `MAX_KNOTS` values that were seen, and beyond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specsim.arrays import Bools, Floats, Seconds
from specsim.cost.batch_profile import BatchProfileCost
from specsim.cost.batches import BatchTokens
from specsim.cost.model import MAX_SECONDS, MIN_SECONDS
from specsim.errors import InputError
from specsim.files import read_csv

MAX_KNOTS = 8
# Knots of the curve along each of these facts of a step; 2 are those of a straight line through 0.
FORMS: Mapping[str, Mapping[str, int]] = {
    "linear": {"tokens": 2, "cached_tokens": 2},
    "tokens, cached": {"tokens": MAX_KNOTS, "cached_tokens": 2},
    "batch, tokens": {"sequences": MAX_KNOTS, "tokens": MAX_KNOTS},
}
MIN_KINDS = 8  # of steps, so that each half determines something


class Steps(NamedTuple):
    """Recorded steps, one array [N] per fact.

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


class Curve(NamedTuple):
    """How seconds rise with one fact: by `rise_s` [M - 1] between the knots `at` [M], the last rise going on."""

    at: Floats
    rise_s: Seconds

    def __call__(self, values: Floats) -> Seconds:
        return np.asarray(_shares(values, self.at) @ self.rise_s)

    def as_dict(self) -> dict[str, list[float]]:
        return {"at": self.at.tolist(), "seconds": np.append(0.0, np.cumsum(self.rise_s)).tolist()}


@dataclass(frozen=True)
class StepTime:
    """A fitted form: seconds where all curves begin, and the curves by fact."""

    form: str
    fixed_s: float
    curves: Mapping[str, Curve]

    def seconds(self, steps: Steps) -> Seconds:
        """What it says of every step."""
        return np.asarray(self.fixed_s + sum(curve(getattr(steps, name)) for name, curve in self.curves.items()))

    def as_dict(self) -> dict[str, Any]:
        """The JSON form; a straight line as its slope."""
        found: dict[str, Any] = {"form": self.form, "fixed_s": self.fixed_s}
        for name, curve in self.curves.items():
            line = FORMS[self.form][name] == 2
            found[f"{name[:-1]}_s" if line else name] = _slope(curve) if line else curve.as_dict()
        return found


@dataclass(frozen=True)
class Judged:
    """A form fitted to all steps, and how far it is off on steps that it was not fitted to.

    median_error, p90_error : absolute and relative; rmse_s : of seconds
    """

    fitted: StepTime
    held_out: int
    median_error: float
    p90_error: float
    rmse_s: float

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "fitted": self.fitted.as_dict()}


def fit_step_time(steps: Steps, form: str) -> StepTime:
    """Fit a form to steps by least squares of relative errors, no coefficient negative.

    Parameters
    ----------
    steps : Steps
    form : {"linear", "tokens, cached", "batch, tokens"}

    Returns
    -------
    StepTime

    References
    ----------
    Lawson, Hanson 1974: ``scipy.optimize.nnls``.

    Examples
    --------
    >>> import numpy as np
    >>> from specsim.cost.step_times import Steps, fit_step_time
    >>> tokens, cached = np.array([1.0, 8.0, 64.0, 512.0]), np.array([900.0, 100.0, 5000.0, 0.0])
    >>> steps = Steps(np.ones(4), tokens, cached, 0.006 + 2e-5 * tokens + 4e-8 * cached)
    >>> _, *constants = fit_step_time(steps, "linear").as_dict().values()
    >>> [float(f"{value:.3g}") for value in constants]
    [0.006, 2e-05, 4e-08]
    """
    from scipy.optimize import nnls

    knots = {name: _knots(getattr(steps, name), count) for name, count in FORMS[form].items()}
    columns = [np.ones((len(steps.seconds), 1)), *(_shares(getattr(steps, name), at) for name, at in knots.items())]
    relative = np.hstack(columns) / steps.seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    found = nnls(relative / scale, np.ones(len(relative)))[0] / scale
    ends = np.cumsum([column.shape[1] for column in columns])
    _, *rises = np.split(found, ends[:-1])
    return StepTime(
        form, float(found[0]), {name: Curve(at, rise) for (name, at), rise in zip(knots.items(), rises, strict=True)}
    )


def judge_step_times(steps: Steps, *, seed: int = 0) -> list[Judged]:
    """Every form, on steps that it has not seen: half of the distinct ones, drawn by chance.

    Raises InputError for fewer than MIN_KINDS distinct steps.
    """
    _, kind = np.unique(np.stack(steps[:3], axis=1), axis=0, return_inverse=True)
    kinds = int(kind.max(initial=-1)) + 1
    if kinds < MIN_KINDS:
        raise InputError(f"{kinds} distinct steps; give at least {MIN_KINDS}, of several batches and contexts")
    seen = (np.random.default_rng(seed).permutation(kinds) < kinds / 2)[kind.ravel()]
    train, rest = steps.select(seen), steps.select(~seen)
    found = []
    for form in FORMS:
        told = fit_step_time(train, form).seconds(rest)
        error = np.abs(told / rest.seconds - 1)
        rmse_s = float(np.sqrt(np.mean((told - rest.seconds) ** 2)))
        fitted = fit_step_time(steps, form)
        found.append(Judged(fitted, len(error), float(np.median(error)), float(np.quantile(error, 0.9)), rmse_s))
    return found


def profile_steps(profile: BatchProfileCost) -> Steps:
    """The passes of the target that a batch profile measured, each with what a step takes beside its pass."""
    axes = np.meshgrid(profile.batches, profile.contexts, profile.tokens, indexing="ij")
    batch, context, tokens = (axis.ravel() for axis in axes)
    held = BatchTokens.alike(batch, tokens, context)
    return Steps(held.sequences, held.new, held.cached, profile.verify_s.ravel() + profile.step_s)


def read_steps(path: Path) -> Steps:
    """Steps of a CSV file with the columns sequences, tokens, cached_tokens and seconds, or of a batch profile (.json).

    Raises InputError for another file, and for values that are none.
    """
    name = f"steps {path}"
    if path.suffix.lower() == ".json":
        return profile_steps(_profile(path))
    import pandas as pd  # slow to import

    wanted = f"give a CSV file with the columns {','.join(Steps._fields)}, or a batch profile (.json)"
    frame = read_csv(path, name, wanted)
    if not set(Steps._fields) <= set(frame.columns):
        raise InputError(f"{name} has the columns {', '.join(map(str, frame.columns))}; {wanted}")
    steps = Steps(*(pd.to_numeric(frame[field], errors="coerce").to_numpy(np.float64) for field in Steps._fields))
    bounds = {"tokens": (1, 2**40), "sequences": (1, steps.tokens), "cached_tokens": (0, 2**40),
              "seconds": (MIN_SECONDS, MAX_SECONDS)}  # fmt: skip
    for field, (low, high) in bounds.items():
        values = getattr(steps, field)
        wrong = ~((low <= values) & (values <= high))  # also where it is no number
        if wrong.any():
            row = int(wrong.argmax())
            raise InputError(
                f"{name}: line {row + 2} has {field}={frame[field][row]}; give a pass's sequences, of which each has a "
                "token at least, cached tokens of 0 or more, and positive seconds"
            )
    return steps


def _profile(path: Path) -> BatchProfileCost:
    from specsim.cost.files import read_cost

    profile = read_cost(path)
    if not isinstance(profile, BatchProfileCost):
        raise InputError(
            f"steps {path} are no batch profile; make one with `realrun batch-profile`, or give a CSV file"
        )
    return profile


def _knots(values: Floats, count: int) -> Floats:
    """Where a curve along these values bends."""
    if count == 2:
        return np.array([0.0, max(float(values.max()), 1.0)])
    return np.unique(np.quantile(np.unique(values), np.linspace(0, 1, count), method="nearest"))


def _shares(values: Floats, at: Floats) -> Floats:
    """Of the rise between each two knots, what has come about at these values [N, M - 1]."""
    found = np.maximum((np.asarray(values, dtype=np.float64)[:, None] - at[:-1]) / np.diff(at), 0.0)
    found[:, :-1] = np.minimum(found[:, :-1], 1.0)
    return found


def _slope(curve: Curve) -> float:
    return float(curve.rise_s[0] / curve.at[1])
