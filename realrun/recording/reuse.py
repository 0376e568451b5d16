"""A trace that lies in a folder, used again if it was made with the settings asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_digest
from realrun.recording.partial import Partial
from realrun.recording.record import RecordSettings, record
from speckernels import backend_for
from specsim.errors import InputError, Interrupted
from specsim.progress import Counter
from specsim.trace.files import read_trace, write_trace
from specsim.trace.trace import Trace

MIN_PROMPT_TOKENS = 3  # the pending token and the least context that is profiled


def check_job(out: Path, prompts: Sequence[Prompt]) -> None:
    """InputError if a job that records and profiles cannot write there, or not with these prompts."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give a folder as --out")
    shortest = min(len(prompt.tokens) for prompt in prompts)
    if shortest < MIN_PROMPT_TOKENS:
        raise InputError(f"the shortest prompt has {shortest} tokens, profiling needs {MIN_PROMPT_TOKENS}; lengthen it")


def recorded_trace(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: RecordSettings,
    folder: Path,
    progress: Counter,
    *,
    overwrite: bool = False,
) -> Trace:
    """The trace in the folder if it was made with these settings, else a new one.

    Of a recording that was interrupted the sequences that it kept beside the folder are taken. A KeyboardInterrupt
    becomes Interrupted, which says how to go on. Models are compared by their weights, whatever path they came from.
    """
    wanted = {
        "weights": pair.fingerprint,
        "drafter_kind": pair.drafter.name,
        "device": pair.device.type,
        "kernels": backend_for(pair.device),
        "decoding": settings.sampler.as_dict(),
        "depth": min(settings.max_draft_tokens, pair.drafter.max_depth or settings.max_draft_tokens),
        "tree": None if settings.tree is None else settings.tree._asdict(),
        "max_new_tokens": settings.max_new_tokens,
        "dtype": str(pair.dtype).removeprefix("torch."),
        "prompts": prompt_digest(prompts),
        "predictor": None if pair.predictor is None else pair.predictor.digest,
    }
    if folder.exists() and not overwrite:
        trace = read_trace(folder)
        there = {**trace.meta, "prompts": _digest_there(trace)}
        for key, value in wanted.items():
            if there.get(key) != value:
                raise InputError(
                    f"{folder} was recorded with {key}={json.dumps(there.get(key))}, asked for {json.dumps(value)} "
                    f"({there.get('target')} and {there.get('drafter')} there, {pair.target_name} and "
                    f"{pair.draft_name} here); give --overwrite or another folder"
                )
        return trace
    partial = Partial(folder, wanted)
    try:
        trace = record(pair, prompts, settings, progress, partial)
        write_trace(trace, folder, overwrite=overwrite)
    except KeyboardInterrupt:
        raise Interrupted(
            f"{partial.count} of {len(prompts)} sequences are kept in {partial.folder}; the same command goes on"
        ) from None
    partial.remove()
    return trace


def _digest_there(trace: Trace) -> str | None:
    """Of the prompts that a trace was recorded from; traces of before hold it alone."""
    prompts = trace.meta.get("prompts")
    return prompts["digest"] if isinstance(prompts, dict) else prompts
