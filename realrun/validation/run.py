"""`realrun validate` from end to end, with its files."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.profiling.profile import profile
from realrun.profiling.trees import Samples
from realrun.recording.record import RecordSettings, record
from realrun.validation.document import as_document, rounds_table
from realrun.validation.validate import validate
from speckernels import backend_for
from specsim.cost.contexts import context_range
from specsim.cost.profile import ProfileCost, profile_from_json
from specsim.errors import InputError
from specsim.files import write_json
from specsim.policy.base import Policy
from specsim.trace.files import read_trace, write_trace
from specsim.trace.trace import Trace

Progress = Callable[[str, int, int], None]
TREE_TOKENS = 65  # largest tree that is profiled, the pending token included
SLICE_REPEATS = 10  # of the profile, before decoding and after every repeat of it
MIN_PROMPT_TOKENS = 3  # the pending token and the least context that is profiled


@dataclass(frozen=True)
class Settings:
    """Settings of the main job. kinds : policies to compare; None: all that the trace can serve."""

    record: RecordSettings
    kinds: tuple[type[Policy], ...] | None = None
    trials: int = 100
    repeats: int = 3
    tuning_share: float = 0.5
    seed: int = 0
    overwrite: bool = False


def run_main_job(
    pair: Pair, prompts: Sequence[Prompt], settings: Settings, out: Path, progress: Progress
) -> dict[str, Any]:
    """Record, profile, tune, decode, compare; the result as written to validation.json."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give a folder as --out")
    shortest = min(len(prompt.tokens) for prompt in prompts)
    if shortest < MIN_PROMPT_TOKENS:
        raise InputError(f"the shortest prompt has {shortest} tokens, profiling needs {MIN_PROMPT_TOKENS}; lengthen it")
    out.mkdir(parents=True, exist_ok=True)
    trace = recorded_trace(
        pair,
        prompts,
        settings.record,
        out / "trace",
        lambda done, total: progress("record", done, total),
        overwrite=settings.overwrite,
    )
    low, high = context_range(trace)
    contexts = sorted({int(c) for c in np.linspace(low, high, 4).round()})
    samples: Samples = defaultdict(list)
    slices = itertools.count()

    def profile_slice() -> ProfileCost:
        before, total = next(slices) * len(contexts), (1 + settings.repeats) * len(contexts)
        measured = profile(
            pair,
            contexts=contexts,
            depth=settings.record.depth,
            repeats=SLICE_REPEATS,
            sampler=settings.record.sampler,
            seed=settings.seed,
            tree_tokens=TREE_TOKENS if settings.record.tree_nodes else 0,
            samples=samples,
            progress=lambda done, _: progress("profile", before + done, total),
        )
        write_json(measured, out / "profile.json")
        return profile_from_json(measured, "just measured")

    result = validate(
        pair,
        trace,
        prompts,
        profile_slice(),
        kinds=settings.kinds,
        trials=settings.trials,
        repeats=settings.repeats,
        tuning_share=settings.tuning_share,
        seed=settings.seed,
        reprofile=profile_slice,
        progress=progress,
    )
    document = as_document(result)
    pq.write_table(rounds_table(result), out / "rounds.parquet")
    write_json(document, out / "validation.json")
    from specsim.report.validation import write_validation_report  # matplotlib is slow to load

    write_validation_report(out / "report.html", document)
    return document


def recorded_trace(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: RecordSettings,
    folder: Path,
    progress: Callable[[int, int], None],
    *,
    overwrite: bool = False,
) -> Trace:
    """The trace in the folder if it was made with these settings, else a new one."""
    if folder.exists() and not overwrite:
        trace = read_trace(folder)
        wanted = {
            "target": pair.target_name,
            "drafter": pair.draft_name,
            "weights": pair.fingerprint,
            "device": pair.device.type,
            "kernels": backend_for(pair.device),
            "decoding": settings.sampler.as_dict(),
            "depth": min(settings.depth, pair.deepest or settings.depth),
            "tree": None if settings.tree is None else settings.tree._asdict(),
            "max_new_tokens": settings.max_new_tokens,
            "dtype": str(pair.dtype).removeprefix("torch."),
            "prompts": prompt_digest(prompts),
            "predictor": None if pair.predictor is None else pair.predictor.digest,
        }
        for key, value in wanted.items():
            if trace.meta.get(key) != value:
                raise InputError(
                    f"{folder} was recorded with {key}={json.dumps(trace.meta.get(key))}, asked for "
                    f"{json.dumps(value)}; pass --overwrite or another --out"
                )
        return trace
    trace = record(pair, prompts, settings, progress)
    trace.meta["prompts"] = prompt_digest(prompts)
    write_trace(trace, folder, overwrite=overwrite)
    return trace


def prompt_digest(prompts: Sequence[Prompt]) -> str:
    """A short hash of all prompts' tokens."""
    import hashlib

    return hashlib.sha256(json.dumps([p.tokens for p in prompts]).encode()).hexdigest()[:16]
