"""`specsim sweep`: many configurations of policies over many traces, costs and batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.cli.command import Answer
from specsim.cli.console import print_table, progress_bar
from specsim.cli.options import TUNED, SplitSettings, WorkerSettings
from specsim.io.errors import InputError
from specsim.io.settings import argument, setting

if TYPE_CHECKING:
    from specsim.compare.sweep import Swept


@dataclass(frozen=True, kw_only=True)
class SweepOptions(SplitSettings):
    """Policies to sweep, and the workers."""

    traces: list[str] = argument(
        "Trace folders, packed traces (.zip), or URLs of either, such as s3://bucket/trace, fetched by every worker.",
        metavar="TRACE...",
    )
    cost: list[str] = setting(..., "Cost file, or a name of `specsim cost list`; repeat for more.")
    batch: tuple[int, ...] | None = setting(None, "Batch sizes, as 1,8,64 (default: the costs' own).")
    policy: list[str] = setting(TUNED, "Policy to sweep, by name or FILE.py; repeat for more.")
    trials: int = setting(100, "Configurations per policy; fewer where it has no more.", low=1)
    workers: WorkerSettings = setting(WorkerSettings)
    out: Path | None = setting(None, "Folder for sweep.json and sweep.parquet; an interrupted sweep resumes from it.")


def sweep(options: SweepOptions) -> Answer:
    """Sweep policies over traces, costs, batches.

    Every configuration is replayed on both parts of every trace's sequences, under every cost and batch size, on this
    machine or a cluster. The table shows, for each of these cells, the configuration that is fastest on the tuning
    part, with its held-out speedup and 95 % interval; --out writes all speedups to a Parquet file. A lost Dask
    worker's tasks are repeated; the result is the same with every backend and any number of workers.

    Example: specsim sweep a/ b/ --cost h100.json --cost l40s.json --batch 1,8 --trials 1000 --backend dask
    """
    from specsim.compare.sweep import JOURNAL, RESULT, TABLE, Cell, configurations_of, sweep_job_as_dict, write_sweep
    from specsim.compare.sweep import sweep as run
    from specsim.cost.files import read_cost
    from specsim.io.files import check_writable, working_in
    from specsim.learn.storage import job_name, open_study
    from specsim.trace.files import depth_at

    out = options.out
    if out is not None:
        check_writable(out / RESULT)
    _check_distinct("trace", options.traces)
    _check_distinct("cost", options.cost)
    workers = options.workers.ready
    costs = [(name, size, read_cost(name, batch=size)) for name in options.cost for size in options.batch or [None]]
    depth = min(depth_at(trace) for trace in options.traces)
    cells = [Cell(trace, name, model, size) for trace in options.traces for name, size, model in costs]
    points = configurations_of(options.policy, options.trials, depth=depth, seed=options.seed)
    split: dict[str, Any] = {"tuning_share": options.tuning_share, "seed": options.seed}

    if out is None:
        with progress_bar() as bar:
            swept = run(cells, points, workers, **split, progress=partial(bar, "replays"))
    else:
        with working_in(out):
            name = job_name(sweep_job_as_dict(cells, points, **split))
            with open_study(out / JOURNAL, name) as study, progress_bar() as bar:
                swept = run(cells, points, workers, **split, progress=partial(bar, "replays"), study=study)
            write_sweep(out, swept, {"policies": options.policy, "trials": options.trials, **split})
            (out / JOURNAL).unlink()
    return Answer(swept.as_dict(), partial(_print_sweep, swept, None if out is None else out / TABLE))


def _check_distinct(kind: str, values: list[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise InputError(f"{kind} {value} is given twice; give each once")


def _print_sweep(swept: Swept, table: Path | None) -> None:
    from specsim.replaying.intervals import Estimate, against_baseline

    rows = []
    for cell, best, reason in zip(swept.cells, swept.best, swept.reasons, strict=True):
        if best:
            speedup = Estimate(**best.holdout["speedup"])
            figures = [f"{best.tuning_speedup:.3f}", str(speedup), against_baseline(speedup)]
            figures += [f"{best.holdout['tau']:.2f}", best.settings]
        else:
            figures = ["", "", "", "", f"none: {reason}"]
        rows.append([cell.trace, cell.cost_name, str(cell.batch or ""), *figures])
    title = f"{len(swept.configurations):,} configurations in each of {len(rows):,} cells: the best on the tuning part"
    notes = dict.fromkeys(note for best in swept.best if best for note in best.holdout["cost_notes"])
    columns = ["trace", "cost", "batch", "tuning speedup", "held-out speedup [95 %]", "than no speculation"]
    print_table("; ".join([title, *notes]), [*columns, "tau", "policy"], rows, labels=3)
    if table is not None:
        print(f"all speedups: {table}")
