"""A training measured before and after on held-out text, window by window, so that differences have intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from realrun.train.common.distill import TrainingText
from realrun.train.common.loop import Job, LoopSettings, run_loop, training_seconds, windows
from specsim.io.files import write_json
from specsim.io.progress import Progress
from studies.common import Document

DONE = "measured.json"


def held_out_windows(text: TrainingText, count: int, length: int) -> torch.Tensor:
    """Windows [count, length + 1] of text that no training sees, the same for all."""
    return windows([(text.held_out, 1.0)], count, length, (0, 1, 0))


def measured(
    folder: Path,
    make_job: Callable[[], Job],
    loop: LoopSettings,
    text: TrainingText,
    plan: Mapping[str, Any],
    figures: Callable[[Job], Document],
    report: Progress,
) -> Document:
    """Train a job, or go on with it; `figures` of it before and after, and the rows of its log."""
    done = folder / DONE
    if not done.is_file():
        job = make_job()
        try:
            before = figures(job)
            history = run_loop(job, loop, text.sources, text.held_out, folder, plan, report)
            parameters = sum(parameter.numel() for group in job.parameter_groups() for parameter in group["params"])
            facts = {"tokens": loop.tokens, "seconds": training_seconds(folder), "parameters": parameters}
            write_json({**facts, "history": history, "before": before, "after": figures(job)}, done)
        finally:
            job.close()
    return dict(json.loads(done.read_text()))
