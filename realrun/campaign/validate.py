"""Stage validate: predicted against measured speedup.

By scripted acceptance at true shapes, and on a lab pair with all its text real.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from realrun.campaign.job import Job, OutOfTime
from realrun.campaign.lab import CHOICES
from realrun.experiment.run import validate
from realrun.experiment.scripted.run import ScriptedSettings, run_scripted
from realrun.experiment.settings import ValidationSettings
from realrun.measure.record import RecordSettings
from realrun.measure.reuse import recorded_trace
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import lab_prompts
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace

# (target, drafter, tokens of context before every prompt); the most wanted first.
PAIRS = (
    ("llama-3.1-8b", "llama-3.2-1b", 1024),
    ("llama-2-7b", "one-layer-7b", 1024),
    ("llama-2-13b", "one-layer-13b", 1024),
    ("llama-2-7b", "llama-2-drafter-115m", 0),
    ("llama-3.1-8b", "llama-3.2-1b", 8192),
)
LAB_SHARE = 0.35  # of the stage's time, kept for the lab
LEAST_LAB_MINUTES = 0.1  # since 0 would be no limit
LEAST_PAIR_S = 150  # models, graphs, two profile slices and two sequences take about so long
MOST_SEQUENCES = 16  # of the trace, in scripted runs


def run(job: Job) -> dict[str, Any]:
    previous = job.previous()
    scripted: dict[str, Any] = previous.get("scripted", {})
    errors: dict[str, str] = {}
    late: dict[str, str] = {}
    pairs = PAIRS if job.full else PAIRS[:1]
    trace = _trace(job)
    lab = previous.get("lab")

    def attempt(label: str, task: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """A task's result, or None and its error: the other tasks are worth having."""
        try:
            return task()
        except OutOfTime as reason:
            late[label] = str(reason)
            return None
        except Exception as error:
            errors[label] = f"{type(error).__name__}: {error}"
            return None
        finally:
            gc.collect()

    # The lab comes second: behind the most wanted pair, before the others, which may take all the time.
    for number, (target, draft, context) in enumerate(pairs):
        label = f"{target} + {draft}, context {context}"
        if label not in scripted and (number == 0 or job.left_s() > (LEAST_PAIR_S if job.full else 1)):
            share = (1 - LAB_SHARE if lab is None else 1) / (len(pairs) - number)
            document = attempt(label, partial(_scripted, job, target, draft, context, trace, job.minutes(share)))
            if document is not None:
                scripted[label] = document
        if lab is None and number == 0:
            lab = attempt("lab", partial(_lab, job))
        job.save({"scripted": scripted, "lab": lab, "errors": errors, "left": late})
    medians = [document["median_abs_error_percent"] for document in scripted.values()]
    return {
        "scripted": scripted,
        "lab": lab,
        "errors": errors,
        "left": late,
        "scripted_median_abs_error_percent": float(np.median(medians)) if medians else None,
        "lab_median_abs_error_percent": lab["median_abs_error_percent"] if lab else None,
        "complete": lab is not None and len(scripted) == len(pairs),
    }


def _scripted(job: Job, target: str, draft: str, context: int, trace: Trace, minutes: float) -> dict[str, Any]:
    settings = ScriptedSettings(
        context=context if job.full else 0,
        trials=60 if job.full else 8,
        seed=job.seed,
        minutes=max(minutes, 0.01),
    )
    machine = {"device": str(job.device), "dtype": job.dtype_name}
    return run_scripted(target, draft, trace, settings, smoke=not job.full, progress=job.on_time, **machine)


def _trace(job: Job) -> Trace:
    """The stage lab's Gumbel trace if it is there, else a short trace of the bundled lab."""
    packed = job.out / "lab-gumbel.zip"
    if packed.is_file():
        trace = read_trace(packed)
    else:
        pair = load_pair(device=str(job.device), dtype=job.dtype_name)
        settings = RecordSettings(16, 128 if job.full else 32, CHOICES["gumbel"])
        trace = recorded_trace(
            pair,
            lab_prompts(pair.tokenizer, MOST_SEQUENCES),
            settings,
            job.work / f"trace-embedded-{job.device.type}",
            partial(job.on_time, "validate: record"),
        )
    return trace.select(np.arange(min(MOST_SEQUENCES, trace.sequences)))


def _lab(job: Job) -> dict[str, Any]:
    """The main job on the pair that the stage lab trained, else on the bundled pair."""
    trained = job.work / ("lab-large" if job.full else "lab-smoke")
    there = (trained / "target").is_dir() and (trained / "draft").is_dir()
    names = [str(trained / role) if there else "lab" for role in ("target", "draft")]
    pair = load_pair(*names, device=str(job.device), dtype=job.dtype_name)
    count, tokens, depth = (24, 128, 16) if job.full else (4, 24, 8)
    settings = ValidationSettings(
        record=RecordSettings(depth, tokens, CHOICES["gumbel"]),
        trials=60 if job.full else 8,
        seed=job.seed,
        minutes=max(job.minutes(LAB_SHARE if job.full else 1.0), LEAST_LAB_MINUTES),
    )
    folder = job.work / f"validation-{pair.fingerprint}-{job.device.type}"  # where a second call goes on
    return validate(pair, lab_prompts(pair.tokenizer, count), settings, folder, job.on_time)
