"""The command `realrun campaign`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.cli.console import MAX_SEED, print_json, print_table, progress_bar


def campaign(
    out: Annotated[Path, typer.Option(help="Folder of result files; a second run goes on there.", show_default=False)],
    minutes: Annotated[float, typer.Option(help="Time for all stages together.", min=0.1)] = 30,
    stage: Annotated[
        list[str],
        typer.Option(help="smoke, kernels, profile, lab, validate; repeat for several. Default: all of them."),
    ] = [],  # noqa: B006 (typer reads the default, nobody changes it)
    work: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints and scratch; default: OUT-work.", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, cpu, ...; default: cuda where there is one.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all randomness.", min=0, max=MAX_SEED)] = 0,
    overwrite: Annotated[bool, typer.Option(help="Run stages again whose results are complete.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Everything that needs a GPU, in short stages that each write one result file.

    smoke: 90 s at most, whether everything runs here and agrees with the CPU. kernels: the tests
    for a GPU, a memory and race check, the benchmark. profile: cost grids at true
    model shapes. lab: train a larger lab pair and record its traces. validate: predicted
    against measured speedup, on the lab and by scripted acceptance at 7B to 13B.

    Without a GPU the same stages run at reduced sizes. `specsim data list --folder OUT` reads
    the results.
    """
    begun = time.monotonic()  # on a busy machine what follows takes many seconds

    from transformers.utils import logging

    from realrun.campaign.run import ALL, run_campaign
    from specsim.files import working_in

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with working_in(out), progress_bar() as report:
        results = run_campaign(
            out,
            minutes=minutes,
            stages=stage or [ALL],
            work=work,
            device=device,
            overwrite=overwrite,
            seed=seed,
            progress=report,
            begun=begun,
        )
    if json:
        print_json({"out": str(out), "stages": results})
    else:
        rows = []
        for result in results:
            rows.append([result["stage"], f"{result['seconds']:.0f}", state_in_words(result)])
        print_table(f"campaign in {out}", ["stage", "seconds", "state"], rows)
    if any(result.get("error") or result.get("errors") for result in results):
        raise typer.Exit(1)


def state_in_words(result: Mapping[str, Any]) -> str:
    """How a stage ended, in words."""
    if result["complete"]:
        return "complete"
    if "error" in result:
        return str(result["error"])
    if result.get("errors"):
        return "; ".join(f"{what}: {why}" for what, why in result["errors"].items())
    left = result.get("left") or ""
    told = left if isinstance(left, str) else f"{', '.join(left)} left"
    return f"out of time{f' ({told})' if told else ''}: run again to go on"
