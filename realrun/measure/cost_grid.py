"""Measure cost grids: seconds of a pass at a real model's shape, by new tokens, context and batch.

Passes use the static cache and, on a GPU, its graphs, as in decoding. The text is random because time does not depend
on it. `specsim.cost.grid` reads the result.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from realrun.lm.clock import device_clock
from realrun.lm.number_type import find_dtype, in_number_type, number_type
from realrun.lm.static.llama import StaticLlama
from realrun.pairs.shapes import describe, free_bytes, kv_bytes_per_token, random_model, shape_config
from realrun.provenance import provenance
from specsim.cost.grid import GRID_VERSION
from specsim.cost.profile import GRID_KIND
from specsim.io.arrays import Floats, Ints, finite_or_null
from specsim.io.errors import InputError
from specsim.io.progress import Progress

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXTS = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LEAST_SAMPLES = 2  # points with fewer are left out
MEMORY_MARGIN = 0.9  # share of the free memory that is planned for
FIXED_BYTES = 256e6  # libraries' own workspaces

Samples = dict[tuple[int, int], list[float]]  # (context, tokens) -> seconds


@dataclass(frozen=True)
class Axes:
    """The points to measure; every list increases.

    tokens : new tokens per sequence and pass; contexts : cached tokens per sequence; batches : sequences
    """

    tokens: Sequence[int] = TOKENS
    contexts: Sequence[int] = CONTEXTS
    batches: Sequence[int] = BATCHES

    def __post_init__(self) -> None:
        for name in ("tokens", "contexts", "batches"):
            values = list(getattr(self, name))
            least = 0 if name == "contexts" else 1
            if not values or values != sorted(set(values)) or values[0] < least:
                raise InputError(f"{name} {values} must increase and start at {least} or more; correct the list")

    @property
    def positions(self) -> int:
        """Count the tokens of the longest sequence after the largest pass."""
        return self.contexts[-1] + self.tokens[-1]


class Missing(NamedTuple):
    """Passes that were not timed, and why."""

    batch: int
    context: int
    tokens: list[int]
    reason: str


@dataclass
class MeasuredGrid:
    """Passes of a model: [B, C, T] seconds (NaN where unknown), and why points are missing.

    shape, provenance : of the model, in numbers; where and when it was timed
    minutes : limit; None for none
    """

    model: str
    axes: Axes
    shape: dict[str, str | int]
    repeats: int
    seed: int
    minutes: float | None
    provenance: dict[str, str | int]
    spent_minutes: float = 0.0
    tables: dict[str, Floats] = field(init=False)
    samples: Ints = field(init=False)
    missing: list[Missing] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = tuple(len(axis) for axis in (self.axes.batches, self.axes.contexts, self.axes.tokens))
        self.tables = {name: np.full(shape, np.nan) for name in ("median_s", "p25_s", "p75_s")}
        self.samples = np.zeros(shape, dtype=np.int64)

    def miss(self, batch: int, context: int, tokens: Sequence[int], reason: str) -> None:
        if tokens:
            self.missing.append(Missing(batch, context, list(tokens), reason))

    def miss_unfitting(self, batch: int, contexts: Sequence[int], tokens: Sequence[int], free: float) -> None:
        """Note as missing the points beyond these contexts and passes, which fit into `free` bytes."""
        for context in self.axes.contexts:
            missing = self.axes.tokens[len(tokens) :] if context in contexts else self.axes.tokens
            self.miss(batch, context, missing, f"memory: does not fit {free / 1e9:.1f} GB beside the weights")

    def add(self, batch: int, samples: Samples) -> None:
        """Add a batch's samples; points with too few samples are noted as missing for lack of time."""
        b = self.axes.batches.index(batch)
        for context in sorted({context for context, _ in samples}):
            late = []
            for tokens in sorted(n for c, n in samples if c == context):
                values = samples[context, tokens]
                if len(values) < LEAST_SAMPLES:
                    late.append(tokens)
                    continue
                place = b, self.axes.contexts.index(context), self.axes.tokens.index(tokens)
                self.samples[place] = len(values)
                for name, q in (("p25_s", 0.25), ("median_s", 0.5), ("p75_s", 0.75)):
                    self.tables[name][place] = np.quantile(values, q)
            self.miss(batch, context, late, "time: the minutes given were over")

    def as_dict(self) -> dict[str, Any]:
        """Make the JSON document of a cost grid."""
        return {
            "kind": GRID_KIND,
            "version": GRID_VERSION,
            "batches": list(self.axes.batches),
            "contexts": list(self.axes.contexts),
            "tokens": list(self.axes.tokens),
            **{name: finite_or_null(table) for name, table in self.tables.items()},
            "samples": self.samples.tolist(),
            "missing": [missing._asdict() for missing in self.missing],
            **{name: getattr(self, name) for name in ("model", "shape", "repeats", "seed", "minutes", "spent_minutes")},
            "provenance": self.provenance,
        }


def fitting(config: Any, dtype: torch.dtype, batch: int, axes: Axes, free: float) -> tuple[list[int], list[int]]:
    """Find the contexts and passes of the axes that fit into `free` bytes beside the weights.

    The estimate counts keys and values, the logits of every pass size, which stay with its graph, and the activations
    of the largest pass. Passes that do not fit behind the shortest context are left out first, then contexts that do
    not fit together with the longest remaining pass.
    """
    per_token = batch * kv_bytes_per_token(config, dtype)

    def need(contexts: Sequence[int], tokens: Sequence[int]) -> float:
        logits = batch * sum(tokens) * config.vocab_size * dtype.itemsize
        wide = 4 * config.intermediate_size + 8 * config.hidden_size  # gate and up, their product, queries, sums
        activations = batch * tokens[-1] * (wide + config.vocab_size) * max(dtype.itemsize, 4)
        return FIXED_BYTES + per_token * (contexts[-1] + tokens[-1]) + logits + activations

    contexts, tokens = list(axes.contexts), list(axes.tokens)
    while tokens and need(contexts[:1], tokens) > free:
        tokens.pop()
    while tokens and need(contexts, tokens) > free:
        contexts.pop()
    return (contexts, tokens) if tokens else ([], [])


@torch.inference_mode()
def measure_grid(
    model: Any,
    name: str,
    *,
    axes: Axes | None = None,
    repeats: int = 10,
    seed: int = 0,
    minutes: float | None = None,
    begun: float | None = None,
    progress: Progress | None = None,
) -> MeasuredGrid:
    """Time the passes of a model.

    Every batch size runs all points in shuffled order, `repeats` times, each time with a warm-up pass and a timed
    pass. The host reads the clock while the device is idle, as between a decoder's passes. Points that exceed the
    memory or the minutes are null, with the reason in `missing`. The minutes are shared evenly among the batch sizes;
    unused time goes to the next batch size. They start at `begun` on time.monotonic(), by default now.
    """
    axes = axes or Axes()
    if repeats < LEAST_SAMPLES:
        raise InputError(f"repeats={repeats}; give at least {LEAST_SAMPLES}")
    room = int(model.config.max_position_embeddings)
    if axes.positions > room:
        raise InputError(
            f"context {axes.contexts[-1]} and {axes.tokens[-1]} tokens exceed the {room} positions of {name}; "
            "shorten the axes"
        )
    begun = time.monotonic() if begun is None else begun
    deadline = np.inf if minutes is None else begun + 60 * minutes
    report, rng = progress or (lambda stage, done, total: None), np.random.default_rng(seed)
    grid = MeasuredGrid(
        name,
        axes,
        describe(model.config, model.dtype),
        repeats,
        seed,
        None if minutes is None else float(minutes),
        provenance(model.device, number_type(model)),
    )
    total = len(axes.batches) * repeats
    for number, batch in enumerate(axes.batches):
        free = MEMORY_MARGIN * free_bytes(model.device)
        contexts, tokens = fitting(model.config, model.dtype, batch, axes, free)
        grid.miss_unfitting(batch, contexts, tokens, free)
        share_s = (deadline - time.monotonic()) / (len(axes.batches) - number)
        samples: Samples = {(context, n): [] for context in contexts for n in tokens}
        try:
            if samples and (number == 0 or share_s > 0):
                _measure_batch(
                    model, batch, samples, repeats, rng, share_s, LEAST_SAMPLES if number == 0 else 0,
                    lambda done, before=number * repeats: report(f"cost grid {name}", before + done, total),  # type: ignore[misc]
                )  # fmt: skip
        except torch.OutOfMemoryError:
            for context in contexts:
                grid.miss(batch, context, tokens, "memory: ran out of it in spite of the estimate")
            samples = {}
        grid.add(batch, samples)
        report(f"cost grid {name}", (number + 1) * repeats, total)
        gc.collect()  # the batch's buffers and graphs
    grid.spent_minutes = (time.monotonic() - begun) / 60
    return grid


def _measure_batch(
    model: Any,
    batch: int,
    samples: Samples,
    repeats: int,
    rng: np.random.Generator,
    limit_s: float,
    least: int,
    report: Callable[[int], None],
) -> None:
    """Add samples to every point of `samples` until `repeats` are done or the time is over.

    The first `least` repeats ignore the time limit; if least > 0, the time starts after compilation and recording.
    """
    start_s = time.monotonic()
    points = list(samples)
    longest, largest = max(c for c, _ in points), max(n for _, n in points)
    lm = StaticLlama(model, batch=batch, capacity=longest + largest)
    lm.warm({n for _, n in points}, longest + largest)
    # A chip draws less power on the zeros of an empty cache.
    lm.keys.normal_()
    lm.values.normal_()
    clock = device_clock(lm.device)
    vocab = int(model.config.vocab_size)
    feeds = {n: torch.from_numpy(rng.integers(0, vocab, (batch, n))).to(lm.device) for _, n in points}
    lengths = {c: torch.full((batch,), c, dtype=torch.int32, device=lm.device) for c, _ in points}
    if least:
        start_s = time.monotonic()
    for repeat in range(repeats):
        for index in rng.permutation(len(points)).tolist():
            if repeat >= least and time.monotonic() > start_s + limit_s:
                return
            context, n = points[index]
            lm.step(feeds[n], lengths[context])
            start = clock()
            lm.step(feeds[n], lengths[context])
            samples[context, n].append(clock() - start)
        report(repeat + 1)


def run_cost_grid(
    shape_name: str,
    *,
    axes: Axes | None = None,
    repeats: int = 10,
    device: str = "cuda",
    dtype: str = "bfloat16",
    smoke: bool = False,
    seed: int = 0,
    minutes: float | None = None,
    progress: Progress | None = None,
) -> MeasuredGrid:
    """Run `measure_grid` on a named shape with random weights and as many positions as the axes need.

    The minutes include the time to make the model.
    """
    begun = time.monotonic()
    torch.compiler.reset()  # what was compiled for other shapes counts against a limit
    axes = axes or Axes()
    config = shape_config(shape_name, positions=axes.positions, smoke=smoke)
    model = in_number_type(random_model(config, device, find_dtype(dtype), seed), dtype)
    name = f"{shape_name} (reduced)" if smoke else shape_name
    return measure_grid(
        model, name, axes=axes, repeats=repeats, seed=seed, minutes=minutes, begun=begun, progress=progress
    )
