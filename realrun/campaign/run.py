"""Run the stages of a campaign in order, each inside its share of the time."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from realrun.campaign.job import KIND, VERSION, Job, OutOfTime, read_result
from realrun.provenance import provenance
from specsim.io.errors import InputError
from specsim.io.files import write_json
from specsim.io.progress import Progress

# Modules of this package and their shares of the time. A stage is imported when its turn comes: on a machine that lacks
# what a stage needs, the others run.
STAGES: dict[str, float] = {"smoke": 1.2, "kernels": 1.2, "profile": 1.2, "lab": 1.0, "validate": 1.0}
MOST_S = {"smoke": 90.0}
GRACE = 0.05  # of the minutes given
ALL = "all"


def load_stage(name: str) -> Any:
    """Import the stage's module."""
    return import_module(f"realrun.campaign.{name}")


def stage_names(stages: Sequence[str]) -> list[str]:
    """Return the distinct stages to run, in order; raises InputError for an unknown stage."""
    names = list(STAGES) if ALL in stages else list(dict.fromkeys(stages))
    if unknown := [name for name in names if name not in STAGES]:
        raise InputError(f"stage {unknown[0]!r} is unknown; known: {ALL}, {', '.join(STAGES)}")
    return names


def run_campaign(
    out: Path,
    *,
    minutes: float,
    stages: Sequence[str] = (ALL,),
    work: Path | None = None,
    device: str | None = None,
    overwrite: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    begun: float | None = None,
) -> list[dict[str, Any]]:
    """Run stages into `out`; return their result documents, in order.

    A stage whose result is complete is not run again unless `overwrite` is set; a stage that
    ran out of time goes on where it stopped. A stage that fails leaves its error in its
    result, and the next one runs: time on a GPU is too rare to lose. work : scratch folder,
    by default beside `out`. device : default "cuda" where there is one. begun : time.monotonic() when the
    minutes began, now by default.

    Raises InputError for an unknown stage or no time.
    """
    names = stage_names(stages)
    if not minutes > 0:
        raise InputError(f"minutes={minutes}; give the campaign some time")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    out.mkdir(parents=True, exist_ok=True)
    work = work or out.with_name(f"{out.name}-work")
    work.mkdir(parents=True, exist_ok=True)
    end = (time.monotonic() if begun is None else begun) + 60 * minutes
    results = []
    for index, name in enumerate(names):
        path = out / f"{name}.json"
        done = read_result(path)
        if done and done["complete"] and not overwrite:
            results.append(done)
            continue
        if overwrite:
            path.unlink(missing_ok=True)
        left = sum(STAGES[later] for later in names[index:])
        start = time.monotonic()
        deadline = start + min((end - start) * STAGES[name] / left, MOST_S.get(name, math.inf))
        reduced = where.type != "cuda"
        header = {"kind": KIND, "version": VERSION, "stage": name, "reduced": reduced, "complete": False}

        def save(part: dict[str, Any], header: dict[str, Any] = header, path: Path = path) -> None:
            write_json(header | part, path)

        job = Job(
            name,
            out,
            work,
            deadline,
            where,
            seed,
            progress or (lambda what, done, total: None),
            save,
            GRACE * 60 * minutes,
        )
        header["provenance"] = provenance(job.device, job.dtype_name)
        results.append(_run_stage(job, header))
    return results


def _run_stage(job: Job, header: dict[str, Any]) -> dict[str, Any]:
    start = time.monotonic()
    try:
        result = load_stage(job.name).run(job)
    except OutOfTime as late:
        result = _kept(job) | {"complete": False, "left": str(late)}
    except Exception as error:
        # The reason must come back from a machine that is gone afterwards, and so must what was measured.
        result = _kept(job) | {"complete": False, "error": f"{type(error).__name__}: {error}"}
        result["traceback"] = traceback.format_exc()
    document = result | header | {"complete": result["complete"], "seconds": round(time.monotonic() - start, 1)}
    job.save(document)
    return document


def _kept(job: Job) -> dict[str, Any]:
    """Read the results that the stage saved before it ended early."""
    return {key: value for key, value in job.previous().items() if key not in ("error", "left", "traceback")}
