"""`specsim sweep`: many configurations of policies over many traces, costs and batches."""

from __future__ import annotations

from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.cli.console import parse_numbers, print_json, print_table, progress_bar
from specsim.cli.options import TUNED, JsonOption, SeedOption
from specsim.errors import InputError


class Backend(StrEnum):
    """Who does the work."""

    loky = "loky"
    dask = "dask"
    ray = "ray"


def sweep(
    traces: Annotated[
        list[str],
        typer.Argument(
            help="Trace folders, packed traces (.zip), or URLs of either, such as s3://bucket/trace, which every "
            "worker fetches when it comes to them.",
            metavar="TRACE...",
            show_default=False,
        ),
    ],
    cost: Annotated[
        list[str],
        typer.Option(help="Cost file, or a name of `specsim cost list`; repeat for more.", show_default=False),
    ],
    batch: Annotated[
        str, typer.Option(help="Sequences in lockstep, as 1,8,64; default the costs' own.", show_default=False)
    ] = "",
    policy: Annotated[list[str], typer.Option(help="A policy to sweep, by name or FILE.py; repeat for more.")] = TUNED,
    trials: Annotated[int, typer.Option(help="Configurations per policy; fewer where it has no more.", min=1)] = 100,
    tuning_share: Annotated[float, typer.Option(help="Share of the sequences to tune on.")] = 0.5,
    backend: Annotated[
        Backend, typer.Option(help="Processes of this machine, or a Dask or Ray cluster.")
    ] = Backend.loky,
    jobs: Annotated[
        int | None,
        typer.Option(help="Processes; default one per core, or all of a cluster. The answer is the same.", min=1),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help="Address of a cluster; default: one on this machine.", metavar="ADDRESS", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for sweep.json and sweep.parquet; where a sweep was interrupted, the same command goes on.",
            show_default=False,
        ),
    ] = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Sweep configurations of policies over traces, costs and batches, on one machine or a cluster.

    Every configuration is replayed on both parts of every trace's sequences, under every cost
    and batch. Of each of these cells the table shows the configuration that is fastest on the
    tuning part, with its speedup on the other and the 95 % interval; --out has all speedups in a
    Parquet file. A lost Dask worker's tasks are done again; the answer is the same with every
    backend and any number of workers.

    Example: specsim sweep a/ b/ --cost h100.json --cost l40s.json --batch 1,8 --trials 1000 --backend dask
    """
    from specsim.cost.files import read_cost
    from specsim.files import check_writable, working_in
    from specsim.ranking.sweep import JOURNAL, RESULT, TABLE, Cell, configurations_of, sweep_job, write_sweep
    from specsim.ranking.sweep import sweep as run
    from specsim.ranking.workers import Workers
    from specsim.trace.remote import depth_at
    from specsim.tuning.journal import Journal

    if out is not None:
        check_writable(out / RESULT)
    for kind, given in (("trace", traces), ("cost", cost)):
        for one in given:
            if given.count(one) > 1:
                raise InputError(f"{kind} {one} is given twice; give each once")
    workers = Workers(backend.value, jobs, scheduler)
    batches = parse_numbers(batch, "--batch", int, "1,8,64") if batch else [None]
    costs = [(name, size, read_cost(name, batch=size)) for name in cost for size in batches]
    depth = min(depth_at(trace) for trace in traces)
    cells = [Cell(trace, name, model, size) for trace in traces for name, size, model in costs]
    points = configurations_of(policy, trials, depth=depth, seed=seed)
    split: dict[str, Any] = {"tuning_share": tuning_share, "seed": seed}

    with nullcontext() if out is None else working_in(out):
        kept = (None, {}) if out is None else (out / JOURNAL, sweep_job(cells, points, **split))
        with Journal(*kept) as journal, progress_bar() as bar:
            swept = run(cells, points, workers, **split, progress=lambda *at: bar("replays", *at), journal=journal)
        if out is not None:
            write_sweep(out, swept, {"policies": policy, "trials": trials, **split})
            (out / JOURNAL).unlink()
    document = swept.as_dict()
    if json:
        print_json(document)
        return
    _print(document)
    if out is not None:
        print(f"{out / TABLE} has all speedups")


def _print(document: dict[str, Any]) -> None:
    from specsim.speedup.intervals import against_baseline, interval_text

    rows = []
    for cell in document["cells"]:
        best = cell["best"]
        told = (
            [
                f"{best['tuning_speedup']:.3f}",
                interval_text(best["speedup"]),
                against_baseline(best["speedup"]),
                f"{best['tau']:.2f}",
                best["settings"],
            ]
            if best
            else ["", "", "", "", f"none: {cell['reason']}"]
        )
        rows.append([cell["trace"], cell["cost"], str(cell["batch"] or ""), *told])
    title = f"{document['configurations']:,} configurations in each of {len(rows):,} cells: the best on the tuning part"
    notes = dict.fromkeys(note for cell in document["cells"] if cell["best"] for note in cell["best"]["cost_notes"])
    columns = [
        "trace",
        "cost",
        "batch",
        "tuning speedup",
        "held-out speedup [95 %]",
        "than no speculation",
        "tau",
        "policy",
    ]
    print_table("; ".join([title, *notes]), columns, rows, labels=3)
