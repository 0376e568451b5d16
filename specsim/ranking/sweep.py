"""Many configurations of policies over many traces, costs and batches, in many processes.

A cell is one trace under one cost model at one batch. Every configuration is replayed on both parts of every cell's
sequences; the one that is fastest on the tuning part is reported on the other. Workers read a trace when its first cell
is due, and what they find does not depend on who finds it. A journal keeps what is found, so that a sweep that was
killed goes on.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa

from specsim.arrays import Floats
from specsim.cost.model import CostModel
from specsim.errors import InputError
from specsim.files import digest, replacing, write_json, write_table
from specsim.json_files import checked
from specsim.policy.registry import find_policy
from specsim.progress import Counter, no_progress
from specsim.ranking.workers import Workers
from specsim.replaying.checks import unsupported_reason
from specsim.replaying.priced import PricedTrace
from specsim.speedup.prediction import summarise
from specsim.trace.remote import read_trace_at
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from specsim.tuning.evaluate import evaluate_many
from specsim.tuning.journal import Journal, cost_digest, program, source_digest, trace_digest
from specsim.tuning.search import fixed_settings
from specsim.tuning.space import search_space

KIND, VERSION = "specsim-sweep", 1
RESULT, TABLE, JOURNAL = "sweep.json", "sweep.parquet", "sweep.journal"
TOGETHER = 1024  # configurations of one task, which share a cell's cost table
Configuration = tuple[str, dict[str, Any]]  # a policy by name or FILE.py, and its settings


@dataclass(frozen=True)
class Cell:
    """A trace, a folder, packed file or URL, under one cost model. batch : as asked; None for the costs' own"""

    trace: str
    cost_name: str
    cost: CostModel
    batch: int | None = None


@dataclass(frozen=True)
class Task:
    """Configurations of one policy in one cell. run : of one sweep, so that long-lived workers mix up no two"""

    run: str
    number: int
    cell: Cell
    policy: str
    points: list[dict[str, Any]]
    tuning_share: float
    seed: int


class Found(TypedDict):
    """A line of the journal: a task's answer. speedups : on the tuning part, and on the other"""

    cell: int
    start: int
    speedups: list[list[float]]
    reason: str


@dataclass(frozen=True)
class Best:
    """What was fastest on a cell's tuning part. holdout : its prediction on the other part, as JSON"""

    configuration: int
    policy: str
    settings: str
    tuning_speedup: float
    holdout: dict[str, Any]


@dataclass(frozen=True)
class Swept:
    """A sweep's answer.

    tuning, holdout : speedups [cells, configurations]; 0 where trace or costs cannot serve one
    best : of every cell; None where nothing is served
    reasons : the first reason for which something was refused, of every cell; "" where nothing was
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
        cells, points = self.tuning.shape

        def repeated(values: Sequence[Any], index: Any) -> pa.Array:
            each = pa.array(values).dictionary_encode()  # of one with a value twice, bytes on disk are not determined
            return pa.DictionaryArray.from_arrays(each.indices.take(pa.array(index)), each.dictionary)

        cell, point = np.repeat(np.arange(cells), points), np.tile(np.arange(points), cells)
        return pa.table(
            {
                "trace": repeated([one.trace for one in self.cells], cell),
                "cost": repeated([one.cost_name for one in self.cells], cell),
                "batch": np.repeat([one.batch or 0 for one in self.cells], points),  # 0: the costs' own
                "policy": repeated([name for name, _ in self.configurations], point),
                "settings": repeated([json.dumps(settings) for _, settings in self.configurations], point),
                "tuning_speedup": self.tuning.ravel(),
                "holdout_speedup": self.holdout.ravel(),
            }
        )


def configurations_of(policies: Sequence[str], trials: int, *, depth: int, seed: int = 0) -> list[Configuration]:
    """At most `trials` configurations of every policy: all of a space that small, else a Sobol sequence over it."""
    if trials < 1:
        raise InputError(f"trials={trials}; give at least 1")
    found = []
    for name in policies:
        kind = find_policy(name)
        limits = {"depth": depth}
        fixed = fixed_settings(kind, {}, limits)
        space = search_space(kind, fixed, limits)
        points = space.grid(int(space.size)) if space.size <= trials else space.sobol(trials, seed)
        found += [(name, {**fixed, **point}) for point in points]
    return found


def sweep(
    cells: Sequence[Cell],
    configurations: Sequence[Configuration],
    workers: Workers,
    *,
    tuning_share: float = 0.5,
    seed: int = 0,
    progress: Counter = no_progress,
    journal: Journal | None = None,
) -> Swept:
    """Replay every configuration in every cell; the answer does not depend on the workers.

    journal : of `sweep_job`, as of `specsim.tuning.journal`: what is in it is not replayed again
    """
    run, journal = secrets.token_hex(8), journal or Journal(None, {})
    tasks = {}
    for number, cell in enumerate(cells):
        for start, policy, points in _chunks(configurations):
            tasks[number, start] = Task(run, number, cell, policy, points, tuning_share, seed)
    speedups = np.zeros((2, len(cells), len(configurations)))
    reasons = [""] * len(cells)
    done, total = 0, len(cells) * len(configurations)

    def take(number: int, start: int, found: Floats, reason: str) -> None:
        nonlocal done
        speedups[:, number, start : start + found.shape[1]] = found
        reasons[number] = min(filter(None, (reasons[number], reason)), default="")
        done += found.shape[1]

    for line in journal.ahead:
        take(*_from_line(line, tasks, journal))
    progress(done, total)
    best: list[Best | None] = [None] * len(cells)
    with workers.ready() as each:
        for number, start, found, reason in each(_evaluate, [(task, start) for (_, start), task in tasks.items()]):
            journal.keep({"cell": number, "start": start, "speedups": found.tolist(), "reason": reason})
            take(number, start, found, reason)
            progress(done, total)
        last = []
        for number, at in enumerate(speedups[0].argmax(axis=1).tolist()):
            if speedup := float(speedups[0, number, at]):
                policy, point = configurations[at]
                last.append((Task(run, number, cells[number], policy, [point], tuning_share, seed), at, speedup))
        for number, one in each(_report, last):
            best[number] = one
    return Swept([*cells], [*configurations], speedups[0], speedups[1], best, reasons)


def sweep_job(
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


def _from_line(
    line: dict[str, Any], tasks: dict[tuple[int, int], Task], journal: Journal
) -> tuple[int, int, Floats, str]:
    """What an earlier run found of a task, which is done with it."""
    invalid = "delete the file to sweep anew"
    found = checked(line, f"{journal.path}", Found, invalid=invalid)
    task = tasks.pop((found["cell"], found["start"]), None)
    if task is None or [len(part) for part in found["speedups"]] != 2 * [len(task.points)]:
        raise InputError(f"{journal.path} holds speedups that are none of this sweep's; {invalid}")
    return found["cell"], found["start"], np.array(found["speedups"]), found["reason"]


def _chunks(configurations: Sequence[Configuration]) -> Iterator[tuple[int, str, list[dict[str, Any]]]]:
    """Runs of configurations of one policy, at most TOGETHER of them, with the place of the first."""
    start = 0
    while start < len(configurations):
        policy, end = configurations[start][0], start
        while end < min(start + TOGETHER, len(configurations)) and configurations[end][0] == policy:
            end += 1
        yield start, policy, [point for _, point in configurations[start:end]]
        start = end


def _evaluate(task: Task, start: int) -> tuple[int, int, Floats, str]:
    """In a worker: speedups [2, points] on both parts, and the first reason to refuse one."""
    found, reason = np.zeros((2, len(task.points))), ""
    kind = find_policy(task.policy)
    try:
        train, holdout = _halves(task)
        reason = unsupported_reason(train.trace, kind) or ""
        if not reason:
            for part, priced in enumerate((train, holdout)):
                each = evaluate_many(kind, task.points, priced, train=train, seed=task.seed, jobs=1)
                found[part] = each.speedup
                reason = reason or next(filter(None, each.reasons), "")
    except InputError as error:
        found[:], reason = 0.0, str(error)
    return task.number, start, found, reason


def _report(task: Task, configuration: int, tuning_speedup: float) -> tuple[int, Best]:
    """In a worker: the prediction on the part that did not tune."""
    train, holdout = _halves(task)
    kind = find_policy(task.policy)
    (policy,) = evaluate_many(kind, task.points, holdout, train=train, seed=task.seed, jobs=1).policies
    assert policy is not None  # it was served before
    prediction = summarise(holdout.replay(policy, seed=task.seed)).as_dict()
    return task.number, Best(configuration, task.policy, str(policy), tuning_speedup, prediction)


_kept: dict[tuple[str, int], tuple[PricedTrace, PricedTrace]] = {}  # a worker's last cell


def _halves(task: Task) -> tuple[PricedTrace, PricedTrace]:
    """The tuning part of a cell, and the other."""
    key = task.run, task.number
    found = _kept.get(key)
    if found is None:
        parts = _parts(task.run, task.cell.trace, task.tuning_share, task.seed)
        train, holdout = (PricedTrace(part, task.cell.cost) for part in parts)
        found = train, holdout
        _kept.clear()
        _kept[key] = found
    return found


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
