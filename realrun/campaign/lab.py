"""Stage lab: train a larger lab pair, then record a greedy and a Gumbel trace of it.

Writes lab-greedy.zip and lab-gumbel.zip, packed traces, beside the result. The trained
models stay in the work folder, where the stage validate finds them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from realrun.campaign.job import Job
from realrun.choice import Choice
from realrun.lab.evaluate import evaluate
from realrun.lab.models import Size
from realrun.lab.train import TrainSettings, export, train
from realrun.models import load_pair
from realrun.prompts import lab_prompts
from realrun.record import RecordSettings, record
from specsim.trace import pack_trace, write_trace

NAME = "lab"
SHARE = 1.0

TRAIN_SHARE = 0.7  # of the stage's time
PROBE_BATCHES = 24  # trained first, to learn how many tokens fit the time
CHOICES = {"greedy": Choice(), "gumbel": Choice("gumbel", 0.8)}
MILLION = 1_000_000
# Most training tokens, in millions: target, then draft model. The large target sees the corpus four times.
MOST_TOKENS: dict[Size, tuple[int, int]] = {"large": (70, 30), "smoke": (1, 1)}


def run(job: Job) -> dict[str, Any]:
    size: Size = "large" if job.full else "smoke"
    weights = job.work / f"lab-{size}"
    trained = _train(job, size, weights)
    pair = load_pair(str(weights / "target"), str(weights / "draft"), device=str(job.device), dtype=_name(job.dtype))
    count, tokens, depth = (96, 256, 16) if job.full else (6, 32, 8)
    prompts = lab_prompts(pair.tokenizer, count)
    traces = {}
    for name, choice in CHOICES.items():
        trace = record(
            pair,
            prompts,
            RecordSettings(depth, tokens, choice),
            lambda done, total: job.progress(f"lab: record {name}", done, total),  # noqa: B023 (called at once)
        )
        folder = job.work / f"trace-{name}"
        write_trace(trace, folder, overwrite=folder.exists())
        pack_trace(folder, job.out / f"lab-{name}.zip")
        traces[name] = {
            "file": f"lab-{name}.zip",
            "sequences": trace.sequences,
            "output_tokens": int(trace.output_tokens.sum()),
            "mean_match_len": float(trace.match_len.mean()),
        }
    return {"size": size, "trained": trained, "held_out": evaluate(pair), "traces": traces, "complete": True}


def _train(job: Job, size: Size, weights: Path) -> dict[str, Any]:
    """Train both models in their share of the time; training resumes from checkpoints."""
    work = job.work / f"train-{size}"
    end = time.monotonic() + job.left_s() * TRAIN_SHARE
    most_target, most_draft = MOST_TOKENS[size]
    trained: dict[str, Any] = {}
    for role, most, share in (("target", most_target, 0.7), ("draft", most_draft, 1.0)):
        probe = _settings(job, role, size, PROBE_BATCHES)
        teacher = weights / "target" if role == "draft" else None
        train(_settings(job, role, size, 2), work)  # first steps compile and allocate
        start = time.monotonic()
        train(probe, work)
        batch_s = (time.monotonic() - start) / (PROBE_BATCHES - 2)
        seconds = (end - time.monotonic()) * share
        # A distilled batch also runs the teacher; the probe did not.
        affordable = int(seconds / batch_s / (1 if role == "target" else 2))
        batches = max(PROBE_BATCHES, min(affordable, most * MILLION // probe.batch_tokens))
        settings = _settings(job, role, size, batches)
        start = time.monotonic()
        train(settings, work, teacher)
        export(work, role, weights, size)  # type: ignore[arg-type]
        trained[f"{role}_tokens"] = settings.tokens
        trained[f"{role}_train_s"] = round(time.monotonic() - start, 1)
    return trained


def _settings(job: Job, role: Any, size: Size, batches: int) -> TrainSettings:
    batch = 32768 if job.full else 1024
    half = batches * batch // 2  # the draft model learns from text first, then from the target
    return TrainSettings(
        role,
        batches * batch,
        size,
        batch_tokens=batch,
        warmup_steps=50 if job.full else 5,
        distill_after_tokens=half,
        checkpoint_s=60.0,
        seed=job.seed,
        device=str(job.device),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
