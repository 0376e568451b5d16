"""The frame of trainings that leave the target as it is: text, loop, and a drafter's file with its facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from realrun.pairs.drafter_files import describe_target, save_drafter
from realrun.pairs.pair import Pair
from realrun.provenance import provenance
from realrun.training.common.distill import check_length, training_text
from realrun.training.common.loop import Job, LoopSettings, refuse_another, run_facts, run_loop
from specsim.progress import Progress


def train_on_frozen_target(
    pair: Pair,
    kind: str,
    method: str,
    job: Job,
    settings: Any,
    loop: LoopSettings,
    out: Path,
    progress: Progress,
    *,
    cache: Path | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Train the job's tensors beside the pair's frozen target, write OUT/drafter.safetensors; facts and history.

    Goes on from what OUT holds of a run with the same settings.

    kind : of the drafter's file; method : what the paper calls the drafter
    settings : a dataclass of what decides the result beside loop and target, `text` among it
    cache : for the encoded and the generated text, OUT unless given; several trainings may share it
    dtype : of the file
    """
    described = describe_target(pair.target, pair.target_name)
    own = {name: value for name, value in vars(settings).items() if name != "text"}
    plan = {"drafter": method, "target": described, **own}
    refuse_another(out, {**plan, **loop.decisive})  # before any text is made
    check_length(pair.target, loop.window_tokens, "windows")
    source = training_text(pair, settings.text, cache or out, progress)
    history = run_loop(job, loop, source.sources, source.held_out, out, {**plan, "text": source.facts}, progress)
    trained = [parameter for group in job.parameter_groups() for parameter in group["params"]]
    facts = {
        "target": described,
        "method": method,
        **own,
        "parameters": sum(parameter.numel() for parameter in trained),
        "text": source.facts,
        **run_facts(loop, history, out),
        "provenance": provenance(pair.device, pair.dtype),
    }
    path = save_drafter(out, kind, {name: value.to(dtype) for name, value in job.state().items()}, facts)
    return {"drafter": str(path), "kind": kind, **facts, "history": history}
