"""Stage lab: train a larger lab pair, then record a greedy and a Gumbel trace of it.

Writes lab-greedy.zip and lab-gumbel.zip, packed traces, beside the result. The trained
models stay in the work folder, where the stage validate finds them.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from realrun.campaign.job import Job
from realrun.decode.sampling import Sampler
from realrun.lab.evaluate import evaluate
from realrun.lab.models import Role, Size
from realrun.lab.train import TrainSettings, encode_split, export, train
from realrun.measure.record import RecordSettings
from realrun.measure.reuse import recorded_trace
from realrun.pairs.lab_drafters import LAB_WEIGHTS
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import lab_prompts
from specsim.io.files import remove_folder
from specsim.trace.packed import pack_trace

# Of the time left when training begins.
TRAIN_SHARES: dict[Role, float] = {"target": 0.45, "draft": 0.45}
CHOICES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8)}
# The large target sees the corpus about four times.
MOST_TOKENS: dict[Size, dict[Role, int]] = {
    "large": {"target": 70_000_000, "draft": 40_000_000},
    "smoke": {"target": 300_000, "draft": 100_000},
}


def run(job: Job) -> dict[str, Any]:
    size: Size = "large" if job.full else "smoke"
    weights = job.work / f"lab-{size}"
    trained: dict[str, Any] = job.previous().get("trained", {})
    if trained.keys() != TRAIN_SHARES.keys():
        trained = _train(job, size, weights)
        job.save({"size": size, "trained": trained})
        for name in CHOICES:  # of weights that are no more
            remove_folder(_folder(job, name))
    pair = load_pair(str(weights / "target"), str(weights / "draft"), device=str(job.device), dtype=job.dtype_name)
    count, tokens, depth = (96, 256, 16) if job.full else (6, 32, 8)
    prompts = lab_prompts(pair.tokenizer, count)
    traces = {}
    for name, sampler in CHOICES.items():
        trace = recorded_trace(
            pair, prompts, RecordSettings(depth, tokens, sampler), _folder(job, name), partial(_report, job, name)
        )
        pack_trace(_folder(job, name), job.out / f"lab-{name}.zip")
        traces[name] = {
            "file": f"lab-{name}.zip",
            "prompts": trace.meta["prompts"],
            "sequences": trace.sequences,
            "output_tokens": int(trace.output_tokens.sum()),
            "mean_match_len": float(trace.match_len.mean()),
        }
        job.save({"size": size, "trained": trained, "traces": traces})
    return {"size": size, "trained": trained, "held_out": evaluate(pair), "traces": traces, "complete": True}


def _folder(job: Job, name: str) -> Path:
    return job.work / f"trace-{name}"


def _report(job: Job, name: str, done: int, total: int) -> None:
    job.on_time(f"lab: record {name}", done, total)


def _train(job: Job, size: Size, weights: Path) -> dict[str, Any]:
    """Train the target, then distil the draft model from it; training resumes from checkpoints."""
    trained: dict[str, Any] = {}
    work = job.work / f"train-{size}"
    _prepare(work, every=1 if job.full else 60)
    for role, share in TRAIN_SHARES.items():
        start = time.monotonic()
        settings = TrainSettings(
            role,
            MOST_TOKENS[size][role],
            size,
            batch_tokens=32768 if job.full else 1024,
            warmup_steps=50 if job.full else 5,
            checkpoint_s=60.0,
            limit_s=job.left_s() * share,
            seed=job.seed,
            device=str(job.device),
        )
        steps = train(settings, work, weights / "target" if role == "draft" else None)
        export(work, role, weights, size)
        trained[role] = {"tokens": steps * settings.batch_tokens, "seconds": round(time.monotonic() - start, 1)}
    return trained


def _prepare(work: Path, every: int) -> None:
    """Tokenizer and token files, before any clock of training runs. The tokenizer is the embedded lab's."""
    tokenizer = AutoTokenizer.from_pretrained(LAB_WEIGHTS / "target")
    if not (work / "tokenizer").is_dir():
        tokenizer.save_pretrained(work / "tokenizer")
    encode_split(tokenizer, "train", work, every)
    encode_split(tokenizer, "held_out", work, every)
