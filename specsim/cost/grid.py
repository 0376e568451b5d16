"""Cost from measured grids of true model shapes: a grid for the target and a grid for the drafter.

A grid says how long a pass over n new tokens takes behind a context, at a batch size. Between
measured points:

- batch: never interpolated; it must have been measured.
- n tokens: the running maximum over the measured n (noise must not make a longer pass look
  cheaper), then linear, so time never falls as n grows.
- context: linear.

Whatever lies outside the grid, or next to a point that was left out of it, is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypedDict

import numpy as np
import numpy.typing as npt

from specsim.cost.model import CostModel, checked_axis, checked_table
from specsim.cost.profile import GRID_KIND
from specsim.io.arrays import Floats, Ints, Seconds
from specsim.io.errors import InputError
from specsim.io.json import checked, read_json

GRID_VERSION = 1
POINT = ("batch", "context", "tokens")
MAX_REASON = 200  # characters
AGAIN = "measure again"


class Missing(TypedDict):
    """A point that was left out, and why."""

    batch: int
    context: int
    tokens: int | list[int]
    reason: str


class GridOrigin(TypedDict):
    """Where and how a grid was measured."""

    device: str
    dtype: str


class GridDocument(TypedDict):
    """A grid's file, see `GridCost`; null is a point that was left out."""

    model: str
    batches: list[int]
    contexts: list[int]
    tokens: list[int]
    median_s: list[list[list[float | None]]]
    missing: list[Missing]
    provenance: GridOrigin


@dataclass(frozen=True, repr=False)
class GridCost:
    """One model's measured passes.

    model : its name, also in error messages; device, dtype : where and how it ran
    batches : int [B]; contexts : int [C], cached tokens per sequence; tokens : int [T], new
        tokens per sequence; each increasing
    median_s : [B, C, T], seconds for the whole batch; NaN where the point was left out
    missing : [B, C, T], why a point was left out, or ""
    """

    model: str
    device: str
    dtype: str
    batches: Ints
    contexts: Ints
    tokens: Ints
    median_s: Seconds
    missing: npt.NDArray[np.str_]

    def __repr__(self) -> str:
        sizes = f"batches to {self.batches[-1]}, contexts to {self.contexts[-1]:,}, passes to {self.tokens[-1]} tokens"
        return f"GridCost: {self.model} on {self.device}, {self.dtype}, {sizes}"

    def pass_s(self, batch: int, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        """Seconds of a pass over n_tokens new tokens per sequence, behind context cached tokens.

        Raises InputError outside the grid.
        """
        row = self._batch_row(batch)
        left, right, share = self._bracket(self.tokens, np.array(float(n_tokens)), "passes over", "new tokens")
        rising = np.fmax.accumulate(self.median_s[row], axis=1)
        rising[np.isnan(self.median_s[row])] = np.nan
        by_context = rising[:, left] + (rising[:, right] - rising[:, left]) * share  # [C]
        asked = np.asarray(context, dtype=np.float64)
        first, second, shares = self._bracket(self.contexts, asked, "contexts of", "tokens")
        seconds = by_context[first] + (by_context[second] - by_context[first]) * shares
        if np.isnan(seconds).any():
            self._refuse(row, n_tokens, asked, {int(left), int(right)}, {*np.ravel(first), *np.ravel(second)})
        return seconds

    def whole_tokens(self, batch: int) -> int:
        """Most new tokens up to which no point of this batch was left out."""
        whole = ~np.isnan(self.median_s[self._batch_row(batch)]).any(axis=0)  # [T]
        first_gap = len(whole) if whole.all() else int(whole.argmin())
        return int(self.tokens[first_gap - 1]) if first_gap else 0

    def _batch_row(self, batch: int) -> int:
        if batch not in self.batches:
            known = ", ".join(map(str, self.batches))
            raise InputError(f"cost grid of {self.model} has batch sizes {known}, asked for {batch}; choose from these")
        return int(np.flatnonzero(self.batches == batch)[0])

    def _bracket(self, grid: Ints, asked: Floats, what: str, unit: str) -> tuple[Ints, Ints, Seconds]:
        """Indices of the grid points around each value, and its share of the way between them.

        A value that lies on a point is bracketed by that point alone, so it needs no neighbour.
        """
        if asked.size and not (asked.min() >= grid[0] and asked.max() <= grid[-1]):  # also catches NaN
            raise InputError(
                f"cost grid of {self.model} covers {what} {grid[0]} to {grid[-1]} {unit}, asked for "
                f"{asked.min():g} to {asked.max():g}; measure a larger grid with `realrun cost-grid`"
            )
        right = np.searchsorted(grid, asked, side="left")
        left = np.where(grid[right] == asked, right, right - 1)
        share = np.where(left == right, 0.0, (asked - grid[left]) / np.maximum(grid[right] - grid[left], 1))
        return left, right, share

    def _refuse(self, row: int, n_tokens: int, asked: Seconds, columns: set[int], rows: set[int]) -> NoReturn:
        context, column = next((c, n) for c in sorted(rows) for n in columns if np.isnan(self.median_s[row, c, n]))
        raise InputError(
            f"cost grid of {self.model} has no time for batch {self.batches[row]}, context {self.contexts[context]}, "
            f"{self.tokens[column]} tokens ({self.missing[row, context, column]}), which {n_tokens} tokens at "
            f"contexts {asked.min():g} to {asked.max():g} need; measure it"
        )


@dataclass(frozen=True, repr=False)
class GridPairCost(CostModel):
    """The cost model of a target's grid and a drafter's, measured separately, at a batch size: passes, no overhead."""

    target: GridCost
    drafter: GridCost
    batch: int = 1

    def __post_init__(self) -> None:
        for grid in (self.target, self.drafter):
            grid._batch_row(self.batch)
        ours, others = ((g.device, g.dtype) for g in (self.target, self.drafter))
        if ours != others:
            raise InputError(
                f"cost grids of {self.target.model} ({', '.join(ours)}) and {self.drafter.model} "
                f"({', '.join(others)}) were measured differently; measure both on the same device in the same dtype"
            )

    @property
    def contexts(self) -> Ints:
        """Cached tokens per sequence at which the target was measured [C]."""
        return self.target.contexts

    @property
    def max_tree_tokens(self) -> int:
        return min(grid.whole_tokens(self.batch) for grid in (self.target, self.drafter))

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return n_tokens * self.drafter.pass_s(self.batch, 1, context)

    def catch_up(self, context: npt.ArrayLike) -> Seconds:
        return self.wider(2, context)

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return self.target.pass_s(self.batch, n_tokens, context)

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        return self.target.pass_s(self.batch, 1, context)

    def wider(self, n_nodes: int, context: npt.ArrayLike) -> Seconds:
        return self.drafter.pass_s(self.batch, n_nodes, context) - self.drafter.pass_s(self.batch, 1, context)


def read_grid(path: Path | str) -> GridCost:
    """Read a model's grid, made by `realrun cost-grid`, or FILE:MODEL of a result of `realrun gpu`.

    InputError says what is wrong with it.
    """
    path, model = Path(path), ""
    if not path.is_file() and ":" in path.name:
        name, model = path.name.split(":", 1)
        path = path.with_name(name)
    make = "make a grid with `realrun cost-grid`"
    data = read_json(path, f"cost grid {path}", missing=make, invalid="make it again")
    grids = data.get("grids") if isinstance(data, Mapping) else None
    if isinstance(grids, Mapping):
        if model not in grids:
            raise InputError(f"{path} holds the grids of {', '.join(grids)}; name a model, as {path}:MODEL")
        return grid_from_json(grids[model], f"{path}:{model}")
    return grid_from_json(data, str(path))


def read_grid_pair(target: Path | str, draft: Path | str, *, batch: int = 1) -> GridPairCost:
    """The cost model of two grid files."""
    return GridPairCost(read_grid(target), read_grid(draft), batch)


def grid_from_json(data: Any, where: str) -> GridCost:
    """The grid of a parsed document; InputError where it is malformed."""
    if not isinstance(data, Mapping) or data.get("kind") != GRID_KIND:
        raise InputError(f"{where} is not a {GRID_KIND} file; make a grid with `realrun cost-grid`")
    if data.get("version") != GRID_VERSION:
        raise InputError(
            f"cost grid {where} has version {data.get('version')}, this program reads {GRID_VERSION}; measure again"
        )
    name = f"cost grid {where}"
    checked(data, name, GridDocument, invalid="measure again")
    axes = [checked_axis(data[key], f"{name}: {key}", AGAIN) for key in ("batches", "contexts", "tokens")]
    gaps = np.array([[[cell is None for cell in row] for row in rows] for rows in data["median_s"]], dtype=object)
    filled = [[[1.0 if cell is None else cell for cell in row] for row in rows] for rows in data["median_s"]]
    median_s = checked_table(filled, [len(points) for points in axes], f"{name}: median_s", AGAIN, positive=True)
    median_s[gaps.astype(bool)] = np.nan
    reasons = np.full(median_s.shape, "not measured", dtype=object)
    reasons[np.isfinite(median_s)] = ""
    for entry in data["missing"]:
        places = (np.flatnonzero(np.isin(points, entry[key])) for points, key in zip(axes, POINT, strict=True))
        reasons[np.ix_(*places)] = entry["reason"][:MAX_REASON]
    origin = data["provenance"]
    batches, contexts, tokens = axes
    names = data["model"], origin["device"], origin["dtype"]
    return GridCost(*names, batches, contexts, tokens, median_s, reasons.astype(np.str_))
