"""Many configurations of policies over many traces, costs and batches, in many processes.

A cell is a trace under a cost model at a batch size. Every configuration is replayed on both parts of every cell's
sequences; the fastest on the tuning part is reported on the other. Workers read a trace when its first cell is due, and
results do not depend on the worker. Optuna's journal storage keeps them, so that a sweep that was killed can resume.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from specsim.cost.model import CostModel
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.files import digest, replacing, write_json, write_table
from specsim.io.progress import Counter, no_progress
from specsim.io.workers import Workers
from specsim.learn.evaluate import evaluate_many
from specsim.learn.search import fixed_settings
from specsim.learn.space import search_space
from specsim.learn.storage import cost_digest, program, source_digest, trace_digest
from specsim.policy.base import Settings
from specsim.policy.registry import find_policy
from specsim.replaying.checks import unsupported_reason
from specsim.replaying.prediction import summarise
from specsim.replaying.priced import PricedTrace
from specsim.trace.files import read_trace_at
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

if TYPE_CHECKING:
    from optuna.study import Study

KIND, VERSION = "specsim-sweep", 1
RESULT, TABLE, JOURNAL = "sweep.json", "sweep.parquet", "sweep.journal"
TOGETHER = 1024  # configurations of a task, which share a cell's cost table


class Configuration(NamedTuple):
    """A policy by name or FILE.py, and its settings."""

    policy: str
    settings: Settings


@dataclass(frozen=True)
class Cell:
    """A trace (folder, packed file or URL) under a cost model. batch : as asked; None for the costs' own"""

    trace: str
    cost_name: str
    cost: CostModel
    batch: int | None = None


@dataclass(frozen=True)
class Task:
    """Configurations of a policy in a cell. run : identifies the sweep, so that long-lived workers never mix up two"""

    run: str
    number: int
    cell: Cell
    policy: str
    points: list[Settings]
    tuning_share: float
    seed: int


@dataclass(frozen=True)
class Best:
    """The fastest configuration on a cell's tuning part. holdout : its prediction on the other part, as JSON"""

    configuration: int
    policy: str
    settings: str
    tuning_speedup: float
    holdout: dict[str, Any]


@dataclass(frozen=True)
class Swept:
    """A sweep's answer.

    tuning, holdout : speedups [cells, configurations]; 0 where trace or costs cannot serve a configuration
    best : of every cell; None where nothing is served
    reasons : of every cell, the first reason for which a configuration was refused; "" if none was
    """

    cells: list[Cell]
    configurations: list[Configuration]
    tuning: Floats
    holdout: Floats
    best: list[Best | None]
    reasons: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The best of every cell, as JSON."""
        rows = []
        for cell, best, refused, reason in zip(self.cells, self.best, self.tuning == 0, self.reasons, strict=True):
            row: dict[str, Any] = {"trace": cell.trace, "cost": cell.cost_name, "batch": cell.batch}
            row |= {"refused": int(refused.sum()), "reason": reason, "best": None}
            if best is not None:
                row["best"] = {"settings": best.settings, "tuning_speedup": best.tuning_speedup, **best.holdout}
            rows.append(row)
        return {"kind": KIND, "version": VERSION, "configurations": len(self.configurations), "cells": rows}

    def table(self) -> pa.Table:
        """A row per cell and configuration."""
        rows, columns = self.tuning.shape

        def repeated(values: Sequence[Any], index: Any) -> pa.Array:
            encoded = pa.array(values).dictionary_encode()  # bytes on disk depend on repeated values
            return pa.DictionaryArray.from_arrays(encoded.indices.take(pa.array(index)), encoded.dictionary)

        cells, points = np.repeat(np.arange(rows), columns), np.tile(np.arange(columns), rows)
        return pa.table(
            {
                "trace": repeated([cell.trace for cell in self.cells], cells),
                "cost": repeated([cell.cost_name for cell in self.cells], cells),
                "batch": np.repeat([cell.batch or 0 for cell in self.cells], columns),  # 0: the costs' own
                "policy": repeated([name for name, _ in self.configurations], points),
                "settings": repeated([json.dumps(settings) for _, settings in self.configurations], points),
                "tuning_speedup": self.tuning.ravel(),
                "holdout_speedup": self.holdout.ravel(),
            }
        )


def configurations_of(policies: Sequence[str], trials: int, *, depth: int, seed: int = 0) -> list[Configuration]:
    """At most `trials` configurations of every policy: all of a space that small, else a Sobol sequence over it."""
    if trials < 1:
        raise InputError(f"trials={trials}; give at least 1")
    configurations: list[Configuration] = []
    for name in policies:
        kind = find_policy(name)
        limits = {"depth": depth}
        fixed = fixed_settings(kind, {}, limits)
        space = search_space(kind, fixed, limits)
        points = space.grid(int(space.size)) if space.size <= trials else space.sobol(trials, seed)
        configurations += [Configuration(name, {**fixed, **point}) for point in points]
    return configurations


def sweep(
    cells: Sequence[Cell],
    configurations: Sequence[Configuration],
    workers: Workers,
    *,
    tuning_share: float = 0.5,
    seed: int = 0,
    progress: Counter = no_progress,
    study: Study | None = None,
) -> Swept:
    """Replay every configuration in every cell; the answer does not depend on the workers.

    study : keeps every task's answer as an attribute; a task that has one is not run again
    """
    run = secrets.token_hex(8)
    tasks = {}
    for number, cell in enumerate(cells):
        for start, policy, points in _chunks(configurations):
            tasks[number, start] = Task(run, number, cell, policy, points, tuning_share, seed)
    speedups = np.zeros((2, len(cells), len(configurations)))
    reasons = [""] * len(cells)
    done, total = 0, len(cells) * len(configurations)

    def take(number: int, start: int, part: Floats, reason: str) -> None:
        nonlocal done
        speedups[:, number, start : start + part.shape[1]] = part
        reasons[number] = min(filter(None, (reasons[number], reason)), default="")
        done += part.shape[1]

    for key, (part, reason) in study.user_attrs.items() if study else ():
        number, start = map(int, key.split())
        take(number, start, np.array(part), reason)
        del tasks[number, start]
    progress(done, total)
    best: list[Best | None] = [None] * len(cells)
    with workers.ready() as run_tasks:
        for number, start, part, reason in run_tasks(_evaluate, [(task, start) for (_, start), task in tasks.items()]):
            if study:
                study.set_user_attr(f"{number} {start}", [part.tolist(), reason])
            take(number, start, part, reason)
            progress(done, total)
        last = []
        for number, at in enumerate(speedups[0].argmax(axis=1).tolist()):
            if speedup := float(speedups[0, number, at]):
                policy, point = configurations[at]
                last.append((Task(run, number, cells[number], policy, [point], tuning_share, seed), at, speedup))
        for number, report in run_tasks(_report, last):
            best[number] = report
    return Swept([*cells], [*configurations], speedups[0], speedups[1], best, reasons)


def sweep_job_as_dict(
    cells: Sequence[Cell], configurations: Sequence[Configuration], *, tuning_share: float = 0.5, seed: int = 0
) -> dict[str, Any]:
    """Everything that determines a sweep's answer, in plain values and digests; reads every trace once."""
    traces: dict[str, Trace] = {}
    costs = []
    for cell in cells:
        if cell.trace not in traces:
            traces[cell.trace] = read_trace_at(cell.trace)
        try:
            costs.append(cost_digest(PricedTrace(traces[cell.trace], cell.cost)))
        except InputError as error:  # a cell that is refused
            costs.append(str(error))
    return {
        "cells": [[cell.trace, cell.cost_name, cell.batch] for cell in cells],
        "traces": {place: trace_digest(trace) for place, trace in traces.items()},
        "costs": costs,
        "configurations": digest(json.dumps(configurations)),
        "policies": {
            name: source_digest(find_policy(name)) for name in dict.fromkeys(name for name, _ in configurations)
        },
        "tuning_share": tuning_share,
        "seed": seed,
        **program(),
    }


def _chunks(configurations: Sequence[Configuration]) -> Iterator[tuple[int, str, list[Settings]]]:
    """Runs of at most TOGETHER configurations of the same policy, with the index of the first."""
    start = 0
    while start < len(configurations):
        policy, end = configurations[start].policy, start
        while end < min(start + TOGETHER, len(configurations)) and configurations[end].policy == policy:
            end += 1
        yield start, policy, [point for _, point in configurations[start:end]]
        start = end


def _evaluate(task: Task, start: int) -> tuple[int, int, Floats, str]:
    """In a worker: speedups [2, points] on both parts, and the first reason for a refusal."""
    speedups, reason = np.zeros((2, len(task.points))), ""
    kind = find_policy(task.policy)
    try:
        train, holdout = _halves(task)
        reason = unsupported_reason(train.trace, kind) or ""
        if not reason:
            for part, priced in enumerate((train, holdout)):
                evaluated = evaluate_many(kind, task.points, priced, train=train, seed=task.seed, jobs=1)
                speedups[part] = evaluated.speedup
                reason = reason or next(filter(None, evaluated.reasons), "")
    except InputError as error:
        speedups[:], reason = 0.0, str(error)
    return task.number, start, speedups, reason


def _report(task: Task, configuration: int, tuning_speedup: float) -> tuple[int, Best]:
    """In a worker: the prediction on the held-out part."""
    train, holdout = _halves(task)
    kind = find_policy(task.policy)
    (policy,) = evaluate_many(kind, task.points, holdout, train=train, seed=task.seed, jobs=1).policies
    assert policy is not None  # it was served before
    prediction = summarise(holdout.replay(policy, seed=task.seed)).as_dict()
    return task.number, Best(configuration, task.policy, str(policy), tuning_speedup, prediction)


_last_cell: dict[tuple[str, int], tuple[PricedTrace, PricedTrace]] = {}  # of a worker


def _halves(task: Task) -> tuple[PricedTrace, PricedTrace]:
    key = task.run, task.number
    if key not in _last_cell:
        train, holdout = _parts(task.run, task.cell.trace, task.tuning_share, task.seed)
        _last_cell.clear()
        _last_cell[key] = PricedTrace(train, task.cell.cost), PricedTrace(holdout, task.cell.cost)
    return _last_cell[key]


@lru_cache(maxsize=2)
def _parts(run: str, place: str, tuning_share: float, seed: int) -> tuple[Trace, Trace]:
    trace = read_trace_at(place)
    tuning, rest = split_sequences(trace, tuning_share=tuning_share, seed=seed)
    return trace.select(tuning), trace.select(rest)


def write_sweep(folder: Path, swept: Swept, options: Mapping[str, Any]) -> None:
    """sweep.json, the best of every cell, and sweep.parquet, all speedups; each whole or not at all."""
    write_json({**swept.as_dict(), "options": dict(options)}, folder / RESULT)
    with replacing(folder / TABLE) as temporary:
        write_table(swept.table(), temporary)
