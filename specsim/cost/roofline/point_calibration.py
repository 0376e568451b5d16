"""Roofline costs calibrated on a few measured points: times per output token of an engine, with and without drafts.

Without speculation, the time per output token is modelled as a + b R + c:

R : seconds of a decode step by the roofline, without transfers between GPUs
a : overhead of the engine per step
b : ratio of measured to predicted pass times
c : seconds of transfers between GPUs and of each sequence, which points do not determine; they keep their preset values

With drafts of K tokens and mean acceptance length tau, a round takes tau times the time per output token. It is
modelled as a + b V(K + 1) + b D(K) + x K + y + c:

V, D : seconds of verification and drafting by the roofline
x : overhead of the engine per draft step; below 0 if draft steps are faster than the roofline predicts, but the
    predicted time of a draft step stays at 0 or above
y : overhead of the engine per round
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from specsim.cost.model import NOISE
from specsim.cost.roofline.cost import Covered, Overheads, RooflineCost
from specsim.cost.roofline.hardware import LARGEST_CEILING
from specsim.cost.roofline.passes import Roofline
from specsim.io.arrays import Floats
from specsim.io.errors import InputError

MILLISECOND = 1e-3
LEAST_FACTOR, LARGEST_FACTOR = 0.8, 3.0  # of the roofline; beyond, points and models do not belong together
FITTED = ("step_s", "round_s", "draft_step_s")  # overheads
FORM = '"batch=1 context=500 tpot_ms=7.07", and with drafts "... k=3 acceptance=2.29"'


@dataclass(frozen=True)
class Point:
    """A measured time per output token.

    tpot_ms : milliseconds per output token of a sequence
    batch : sequences decoded at once
    context : cached tokens of a sequence, on average
    k : draft tokens of a round; 0 without speculation
    acceptance : mean acceptance length, output tokens of a round, with drafts
    """

    tpot_ms: float
    batch: int = 1
    context: float = 1000.0
    k: int = 0
    acceptance: float = 1.0

    def __post_init__(self) -> None:
        if not self.tpot_ms > 0 or self.batch < 1 or self.context < 1 or self.k < 0:
            raise InputError(
                f"measured point {self}: give tpot_ms above 0, batch and context of at least 1, and k of at least 0"
            )
        if not 1 <= self.acceptance <= self.k + 1:
            raise InputError(
                f"measured point {self}: acceptance={self.acceptance:g} output tokens a round; with k={self.k} give 1 "
                f"to {self.k + 1}"
            )

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name):g}" for field in fields(self))

    @property
    def round_s(self) -> float:
        """Give the seconds of a round, or of a step without speculation."""
        return self.tpot_ms * MILLISECOND * self.acceptance


def read_point(text: str) -> Point:
    """Read a point as it is written on the command line.

    >>> read_point("batch=1 k=3 acceptance=2.29 tpot_ms=4.29").k
    3
    """
    kinds = {field.name: int if field.name in ("batch", "k") else float for field in fields(Point)}
    pairs = [part.partition("=") for part in text.replace(",", " ").split()]
    try:
        values: dict[str, Any] = {name: kinds[name](value) for name, _, value in pairs}
        if "tpot_ms" not in values or len(values) < len(pairs) or ("k" in values) != ("acceptance" in values):
            raise KeyError
    except (KeyError, ValueError):
        raise InputError(f"measured point {text!r}: write it as {FORM}") from None
    return Point(**values)


@dataclass(frozen=True)
class Fitted:
    """Roofline costs calibrated on measured points, and their errors at these points.

    cost : calibrated
    factor : b, times of passes over those of the roofline
    errors_percent : of the predicted time per token at each point, with its sign
    contradictions : a line that names the points whose error exceeds the measurement noise; empty if none does
    held_out_percent : the same where the point itself is left out of the fit; None where too few are left
    """

    cost: RooflineCost
    factor: float
    errors_percent: list[float]
    held_out_percent: list[float | None]
    contradictions: tuple[str, ...] = ()


def calibrated_on_points(cost: RooflineCost, points: Sequence[Point]) -> Fitted:
    """Calibrate on measured points.

    Parameters
    ----------
    cost : RooflineCost
        Target, drafter and hardware; its overheads are replaced, but for what no point tells.
    points : sequence of Point
        At least one without speculation.

    Returns
    -------
    Fitted

    Raises
    ------
    InputError
        If no point is without speculation, or passes take less than 0.8 or more than 3 times what the roofline says.
    """
    fitted, factor = _fit(cost, points)
    fitted = replace(fitted, covered=_covered(fitted, points))
    held_out: list[float | None] = []
    for number, point in enumerate(points):
        others = [*points[:number], *points[number + 1 :]]
        same = sum(bool(other.k) == bool(point.k) for other in others)
        held_out.append(_error(_fit(cost, others)[0], point) if same else None)
    errors = [_error(fitted, point) for point in points]
    return Fitted(fitted, factor, errors, held_out, tuple(_contradictions(points, errors)))


def _contradictions(points: Sequence[Point], errors_percent: Sequence[float]) -> list[str]:
    """Name the points whose time per token the fit misses by more than the measurement noise."""
    off = [
        f"{point} ({error:+.0f} %)"
        for point, error in zip(points, errors_percent, strict=True)
        if abs(error) > 100 * NOISE
    ]
    return [f"points contradict each other, measure them again: {'; '.join(off)}"] if off else []


def predicted_s(cost: RooflineCost, point: Point) -> float:
    """Predict the seconds of a point's round, or of its step without speculation."""
    return replace(cost, batch=point.batch).round_seconds(point.k, point.context)


def _error(cost: RooflineCost, point: Point) -> float:
    return 100 * (predicted_s(cost, point) / point.round_s - 1)


def _fit(cost: RooflineCost, points: Sequence[Point]) -> tuple[RooflineCost, float]:
    plain = [point for point in points if not point.k]
    drafted = [point for point in points if point.k]
    if not plain:
        raise InputError(f"no point is without speculation; measure one, such as {FORM.partition(',')[0]}")
    of_sequences = replace(cost.overheads, **dict.fromkeys(FITTED, 0.0))  # no point tells them apart from passes
    bare = replace(cost, overheads=of_sequences)
    seconds = [predicted_s(_without_link(replace(cost, overheads=Overheads())), point) for point in plain]
    beside = [predicted_s(bare, point) - alone for point, alone in zip(plain, seconds, strict=True)]
    measured = [point.round_s - more for point, more in zip(plain, beside, strict=True)]
    sizes = {(point.batch, point.context) for point in plain}
    columns = [seconds] if len(sizes) == 1 else [seconds, [1.0] * len(plain)]  # a single size does not tell a from b
    factor, *rest = _shares(columns, measured, [point.round_s for point in plain])
    if not LEAST_FACTOR <= factor <= LARGEST_FACTOR:
        raise InputError(
            f"the points without speculation take {factor:.2f} times the roofline of {cost.subject}; check model, "
            f"hardware, number types and units (between {LEAST_FACTOR:g} and {LARGEST_FACTOR:g} times is credible)"
        )
    step_s = rest[0] if rest else 0.0
    scaled = replace(
        bare,
        target=_slower(cost.target, factor),
        draft_passes=None if cost.draft_passes is None else _slower(cost.draft_passes, factor),
        overheads=replace(cost.overheads, step_s=step_s),
    )
    if not drafted:
        return scaled, factor
    bare = replace(scaled, overheads=replace(of_sequences, step_s=step_s))
    lengths = [float(point.k) for point in drafted]
    columns = [[1.0] * len(drafted)] if len(set(lengths)) == 1 else [[1.0] * len(drafted), lengths]
    # nnls finds no negative time. So the shortest draft step is taken out of the prediction before the fit, and
    # subtracted from the fitted time per draft step afterwards.
    least_s = _least_draft_s(bare, drafted) if len(columns) > 1 else 0.0
    left = [max(point.round_s - predicted_s(bare, point) + least_s * point.k, 0.0) for point in drafted]
    round_s, *draft = _shares(columns, left, [point.round_s for point in drafted])
    found = {"step_s": step_s, "round_s": round_s, "draft_step_s": draft[0] - least_s if draft else 0.0}
    return replace(scaled, overheads=replace(of_sequences, **found)), factor


def _least_draft_s(cost: RooflineCost, points: Sequence[Point]) -> float:
    """Seconds of the shortest draft step in the points' rounds; 0 for drafters that do not run a pass per token."""
    if cost.draft_passes is None or cost.drafter.at_once:
        return 0.0
    return min(
        float(replace(cost, batch=point.batch).draft_step(place, point.context))
        for point in points
        for place in range(point.k)
    )


def _covered(cost: RooflineCost, points: Sequence[Point]) -> Covered:
    lengths, contexts = [point.k for point in points], [round(point.context) for point in points]
    drafts = min(filter(None, lengths), default=0), max(lengths)
    batches = tuple(sorted({point.batch for point in points}))
    return Covered(cost.subject, drafts, (1, max(lengths) + 1), (min(contexts), max(contexts)), batches)


def _shares(columns: Sequence[Sequence[float]], values: Iterable[float], scale: Sequence[float] | None = None) -> Any:
    """Find the parts, none below 0, whose sum is nearest to the values, in shares of `scale` (default: the values)."""
    from scipy.optimize import nnls

    target: Floats = np.array([*values])
    weights = 1 / (target if scale is None else np.array(scale))
    return nnls(np.array(columns).T * weights[:, None], target * weights)[0].tolist()


def _without_link(cost: RooflineCost) -> RooflineCost:
    """Price passes without sending bytes between devices: a derating does not scale that."""
    hardware = replace(cost.target.hardware, link_bytes_s=LARGEST_CEILING)
    return replace(cost, target=replace(cost.target, hardware=hardware))


def _slower(passes: Roofline, factor: float) -> Roofline:
    """Scale the seconds of passes."""
    of = passes.derating
    shares = {name: min(getattr(of, name) / factor, 1.0) for name in ("memory", "compute")}
    times = {name: getattr(of, name) * factor for name in ("launch_s", "all_reduce_s")}
    return replace(passes, derating=replace(of, **shares, **times))
