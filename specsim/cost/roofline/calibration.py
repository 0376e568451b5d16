"""Roofline costs fitted to measured costs: the reached share of the ceilings, and the overhead of rounds.

A cell is a measured time. The target's derating is fitted to its passes, the drafter's derating and overhead to draft
steps, by bounded least squares of relative errors (on the logarithm).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specsim.cost.batch_profile import BatchProfileCost
from specsim.cost.batches import BatchTokens
from specsim.cost.grid import GridPairCost
from specsim.cost.profile import ProfileCost
from specsim.cost.roofline.cost import Covered, Overheads, RooflineCost
from specsim.cost.roofline.hardware import Derating
from specsim.cost.roofline.passes import Operation, Roofline, seconds_of
from specsim.io.arrays import Bools, Floats, Ints, Seconds
from specsim.io.errors import InputError

Measured = ProfileCost | GridPairCost | BatchProfileCost
DRAFT, DRAFT_PASS, VERIFY, PLAIN = "draft", "draft pass", "verify", "autoregressive"
MICROSECOND = 1e-6
# Derating as it is fitted: memory, compute, launch in microseconds, overlap.
LOW, HIGH = np.array([0.005, 0.005, 0.0, 0.0]), np.array([1.0, 1.0, 1000.0, 1.0])
STARTS = [[0.8, 0.8, 2.0, 0.9], [0.5, 0.2, 2.0, 0.5], [0.3, 0.5, 50.0, 0.5], [0.8, 0.1, 200.0, 0.9]]
RATIO_HIGH = 0.95  # of what is left of a cold start from step to step


@dataclass(frozen=True)
class Cells:
    """Measured times, a row each.

    kind : "draft" (the draft step at the place `tokens`, from 1), "draft pass" and "verify" (a pass over `tokens`
        tokens), or "autoregressive"
    tokens, context, batch : int [N]; seconds : [N]
    """

    kind: Any
    tokens: Ints
    context: Ints
    batch: Ints
    seconds: Seconds

    def select(self, rows: Bools) -> Cells:
        return Cells(self.kind[rows], self.tokens[rows], self.context[rows], self.batch[rows], self.seconds[rows])

    @property
    def alternate(self) -> Bools:
        """Every other cell, as on a chessboard of sizes and contexts."""
        ranks = [np.unique(values, return_inverse=True)[1] for values in (self.tokens, self.context, self.batch)]
        return np.asarray(np.sum(ranks, axis=0) % 2 == 0)


@dataclass(frozen=True)
class Residuals:
    """Relative errors of a region's cells: predicted over measured, less 1."""

    region: str
    cells: int
    median_abs: float
    bias: float
    worst: float


def measured_cells(measured: Measured) -> Cells:
    """The measured cells; gaps of a grid are left out."""
    rows: list[tuple[str, int, int, int, float]] = []
    if isinstance(measured, ProfileCost):
        contexts = measured.contexts
        for kind, table in ((DRAFT, measured.draft_step_s), (VERIFY, measured.verify_s)):
            rows += [(kind, n + 1, int(c), 1, float(s)) for n, row in enumerate(table)
                     for c, s in zip(contexts, row, strict=True)]  # fmt: skip
        rows += [(PLAIN, 1, int(c), 1, float(s)) for c, s in zip(contexts, measured.autoregressive_s, strict=True)]
    elif isinstance(measured, BatchProfileCost):
        at = measured.batches, measured.contexts
        places = np.arange(measured.draft_s.shape[2]) + 1
        rows = [*_rows(VERIFY, *at, measured.tokens, measured.verify_s), *_rows(DRAFT, *at, places, measured.draft_s)]
    else:
        for kind, grid in ((VERIFY, measured.target), (DRAFT_PASS, measured.drafter)):
            rows += _rows(kind, grid.batches, grid.contexts, grid.tokens, grid.median_s)
    kinds, tokens, contexts, batches, seconds = map(np.array, zip(*(row for row in rows if row[-1] > 0), strict=True))
    return Cells(kinds, tokens, contexts, batches, seconds)


def _rows(
    kind: str, batches: Ints, contexts: Ints, tokens: Ints, seconds: Seconds
) -> list[tuple[str, int, int, int, float]]:
    """Of a table [batches, contexts, tokens]."""
    axes = np.meshgrid(batches, contexts, tokens, indexing="ij")
    columns = [axis.ravel().tolist() for axis in (*axes, seconds)]
    return [(kind, n, c, b, s) for b, c, n, s in zip(*columns, strict=True) if np.isfinite(s)]


def predicted_seconds(cost: RooflineCost, cells: Cells) -> Seconds:
    """The cost model's seconds of every cell."""
    seconds = np.empty(len(cells.seconds))
    for kind, tokens, batch in {*zip(cells.kind, cells.tokens.tolist(), cells.batch.tolist(), strict=True)}:
        here = (cells.kind == kind) & (cells.tokens == tokens) & (cells.batch == batch)
        at, context = replace(cost, batch=batch), cells.context[here]
        if kind == DRAFT:
            seconds[here] = at.draft_step(tokens - 1, context)
        elif kind == VERIFY:
            seconds[here] = at.verify(tokens, context)
        elif kind == PLAIN:
            seconds[here] = at.autoregressive_step(context)
        else:
            seconds[here] = _draft_passes(cost).seconds(tokens, context, batch)
    return seconds


def residuals(cost: RooflineCost, cells: Cells) -> list[Residuals]:
    """Errors by region: draft steps, short and long passes of the target, small and large contexts, batches, all."""
    error = predicted_seconds(cost, cells) / cells.seconds - 1
    passes = cells.kind == VERIFY
    middle = np.median(cells.tokens[passes]) if passes.any() else 0
    half, batches = np.median(cells.context), np.unique(cells.batch)
    regions = {
        "draft": np.isin(cells.kind, [DRAFT, DRAFT_PASS]),
        "autoregressive": cells.kind == PLAIN,
        f"verify, up to {middle:g} tokens": passes & (cells.tokens <= middle),
        f"verify, more than {middle:g} tokens": passes & (cells.tokens > middle),
        f"context up to {half:g}": cells.context <= half,
        f"context above {half:g}": cells.context > half,
        **({f"batch {batch}": cells.batch == batch for batch in batches} if len(batches) > 1 else {}),
        "all": np.ones(len(error), bool),
    }
    return [
        Residuals(name, int(rows.sum()), float(np.median(abs(error[rows]))), float(np.median(error[rows])),
                  float(abs(error[rows]).max()))
        for name, rows in regions.items()
        if rows.any()
    ]  # fmt: skip


def calibrate(cost: RooflineCost, measured: Measured, cells: Cells | None = None) -> RooflineCost:
    """Fit the derating and overheads of a roofline to measured cells, by default all of `measured`.

    A profile that is not of batches is of batch 1.
    """
    cells = measured_cells(measured) if cells is None else cells
    target, drafting = cells.select(np.isin(cells.kind, [VERIFY, PLAIN])), cells.select(np.isin(cells.kind, [DRAFT]))
    passes = cells.select(cells.kind == DRAFT_PASS)
    if not len(target.seconds):
        raise InputError("calibration: no pass of the target was measured; give a profile with target passes")
    verifying = _operations(target, cost.verify_operations)
    fitted = replace(cost, target=fit_passes(cost.target, verifying, target.seconds))
    if len(passes.seconds):
        drafter = _draft_passes(cost)
        drafter = fit_passes(drafter, _operations(passes, drafter.batch_operations), passes.seconds)
        fitted = replace(fitted, draft_passes=drafter)
    overheads = Overheads()
    if len(drafting.seconds):
        fitted, overheads = _fit_drafting(fitted, drafting)
    step_s = measured.step_s if isinstance(measured, BatchProfileCost) else 0.0
    round_s = max(measured.round_overhead() - step_s, 0.0)  # step_s is part of rounds and of plain tokens
    overheads = replace(overheads, step_s=step_s, round_s=round_s, policy_step_s=measured.policy_step())
    return replace(fitted, overheads=overheads, covered=_covered(cost, cells))


def _draft_passes(cost: RooflineCost) -> Roofline:
    if cost.draft_passes is None:
        raise InputError(f"calibration: {cost.drafter.kind} drafts without the grid's passes; give a draft model")
    return cost.draft_passes


def _covered(cost: RooflineCost, cells: Cells) -> Covered:
    verify, drafts = cells.tokens[cells.kind == VERIFY], cells.tokens[cells.kind == DRAFT]
    contexts = (int(cells.context.min()), int(cells.context.max()))
    # A grid of passes prices drafts of any length.
    longest = int(drafts.max()) if len(drafts) else int(verify.max()) - 1
    batches = tuple(np.unique(cells.batch).tolist())
    return Covered(cost.subject, (1, longest), (int(verify.min()), int(verify.max())), contexts, batches)


@dataclass(frozen=True)
class Work:
    """What the operations of every cell do: [R, N] each, operations by cells."""

    bytes: Floats
    flops: Floats
    launches: Floats
    link_bytes: Floats
    all_reduces: Floats
    products: list[str]  # [R]

    def seconds(self, passes: Roofline, derating: Derating) -> Seconds:
        """[N]"""
        work = self.bytes, self.flops, self.launches, self.link_bytes, self.all_reduces
        memory, _, link = passes.ceilings()
        throughput = np.array([passes.ceilings(products)[1] for products in self.products])[:, None]
        return np.asarray(seconds_of(*work, (memory, throughput, link), derating).sum(axis=0))

    @classmethod
    def of(cls, each: Sequence[Sequence[Operation]]) -> Work:
        """Of N passes with the same R operations."""
        numbers = {
            name: np.array([[float(getattr(operation, name)) for operation in cell] for cell in each]).T
            for name in ("bytes", "flops", "launches", "link_bytes", "all_reduces")
        }
        return cls(products=[operation.products for operation in each[0]], **numbers)


def _operations(cells: Cells, operations: Callable[[BatchTokens], list[Operation]]) -> list[list[Operation]]:
    """The operations of passes over the cells' tokens, at their contexts and batches."""
    columns = zip(cells.batch.tolist(), cells.tokens.tolist(), cells.context.tolist(), strict=True)
    return [operations(BatchTokens.alike(*cell)) for cell in columns]


def _derating(values: Floats, passes: Roofline) -> Derating:
    memory, compute, launch, overlap = values[:4].tolist()
    return Derating(memory, compute, launch * MICROSECOND, overlap, passes.derating.all_reduce_s)


def fit_passes(passes: Roofline, operations: Sequence[Sequence[Operation]], seconds: Seconds) -> Roofline:
    """Fit the derating of passes to measured times.

    operations : of each measured pass, N lists; seconds : measured, [N]
    """
    work = Work.of(operations)
    fitted = _least_squares(lambda x: work.seconds(passes, _derating(x, passes)), seconds, np.array(STARTS), LOW, HIGH)
    return replace(passes, derating=_derating(fitted, passes))


def _fit_drafting(cost: RooflineCost, cells: Cells) -> tuple[RooflineCost, Overheads]:
    """Fit the drafter's derating and the overhead of a draft step to the measured draft steps."""
    place, passes = cells.tokens - 1, cost.draft_passes
    most_s = float(cells.seconds.max())
    # Beside a pass: a cold start, what is left of it at each step, and, where no pass would show it, a step's own.
    low, high = np.zeros(3), np.array([2 * most_s, RATIO_HIGH, most_s])
    start = [most_s / 2, 0.5, float(cells.seconds.min()) / 2]
    by_pass = passes is not None and not cost.drafter.at_once

    def overhead_s(x: Floats) -> Seconds:
        return np.asarray(x[0] * x[1] ** place + (0.0 if by_pass else x[2]))

    if passes is None:
        fitted = _least_squares(overhead_s, cells.seconds, np.array([start]), low, high)
        return cost, _overheads(fitted, by_pass)
    steps = replace(cells, tokens=np.ones_like(cells.tokens), context=cells.context + place)
    work = Work.of(_operations(steps, passes.batch_operations))
    runs = (place == 0) if cost.drafter.at_once else np.ones(len(place), bool)
    fitted = _least_squares(
        lambda x: work.seconds(passes, _derating(x, passes)) * runs + overhead_s(x[4:]),
        cells.seconds,
        np.array([[*derating, *start] for derating in STARTS]),
        np.append(LOW, low),
        np.append(HIGH, high),
    )
    return replace(cost, draft_passes=replace(passes, derating=_derating(fitted, passes))), _overheads(
        fitted[4:], by_pass
    )


def _overheads(values: Floats, by_pass: bool) -> Overheads:
    cold, ratio, step = values.tolist()
    return Overheads(draft_step_s=0.0 if by_pass else step, cold_start_s=cold, cold_start_ratio=ratio)


def _least_squares(
    seconds: Callable[[Floats], Seconds], measured: Seconds, starts: Floats, low: Floats, high: Floats
) -> Floats:
    """The parameters within bounds whose seconds have the least squares of log errors, from the best of the starts."""
    from scipy.optimize import least_squares

    spread = high - low

    def errors(share: Floats) -> Floats:  # every parameter as a share of its range
        return np.log(np.maximum(seconds(low + share * spread), 1e-12) / measured)

    runs = [least_squares(errors, (start - low) / spread, bounds=(0, 1), x_scale="jac") for start in starts]
    best = min(runs, key=lambda run: float(run.cost))
    return np.clip(low + best.x * spread, low, high)
