"""Use a trace again: in place of recording it anew, or for the settings and prompts it was recorded with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.kept_files import read_kept, refuse_file, refuse_other
from realrun.measure.record import IDENTITY, Partial, RecordSettings, partial_of, record
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_digest
from speckernels import backend_for
from specsim.io.arrays import Ints
from specsim.io.errors import InputError, Interrupted
from specsim.io.files import clear_left, remove_folder
from specsim.io.progress import Counter
from specsim.trace.files import read_trace, write_trace
from specsim.trace.split import split_by_domain
from specsim.trace.trace import Trace

MIN_PROMPT_TOKENS = 3  # the pending token and the least context that is profiled


def sampler_of(trace: Trace, name: str) -> Sampler:
    """Read how the tokens of a trace were chosen. name : the trace's, for errors"""
    decoding = trace.meta["decoding"]
    try:
        return Sampler(**decoding)
    except TypeError:
        raise InputError(f"{name} does not say how its tokens were chosen; record it with `realrun record`") from None


def settings_of(trace: Trace, name: str) -> RecordSettings:
    """Read the settings that a trace was recorded with."""
    prompts, tree = trace.meta.get("prompts"), trace.tree
    return RecordSettings(
        max_draft_tokens=trace.depth,
        max_new_tokens=int(trace.budget_tokens[0]),
        sampler=sampler_of(trace, name),
        tree_nodes=0 if tree is None else tree.nodes,
        tree_width=RecordSettings.tree_width if tree is None else tree.width,
        prompts_source=prompts["source"] if isinstance(prompts, dict) else "",
    )


def prompts_of(trace: Trace, name: str) -> list[Prompt]:
    """Read the prompts that a trace was recorded from; InputError if it does not hold them."""
    if trace.prompts is None:
        raise InputError(f"{name} does not hold its prompts; record it again, or validate with --prompts alone")
    sources: list[Any] = [""] * trace.sequences if trace.source is None else trace.source.tolist()
    return [
        Prompt(domain, tokens.tolist(), source)
        for domain, tokens, source in zip(trace.domain.tolist(), trace.prompts, sources, strict=True)
    ]


def check_pair(trace: Trace, pair: Pair, name: str) -> None:
    """Raise InputError unless the trace was recorded with this pair; synthetic traces fit any pair."""
    meta = trace.meta
    wanted = {"drafter_kind": pair.drafter.name, "dtype": pair.number_type}
    wanted["weights"] = pair.fingerprint
    for key, value in wanted.items():
        if meta.get("weights") is not None and meta.get(key) != value:
            raise InputError(
                f"{name} was recorded with target {meta['target']}, drafter {meta['drafter']} and "
                f"{key.replace('_', ' ')} {meta.get(key)}, this pair has {value}; give the models of the trace"
            )


def check_first_drafts(trace: Trace, name: str) -> None:
    """Raise InputError if the trace has no drafts at first positions, because an engine without such drafts made it."""
    engine = trace.meta.get("engine")
    if engine is not None and not engine["first_position_drafted"]:
        raise InputError(
            f"{name} was recorded inside {engine['name']} and has no draft at the first position of an output, where "
            "this run drafts; make another trace by `realrun record` without an engine"
        )


def check_job(out: Path, prompts: Sequence[Prompt], *, tuning_share: float, seed: int) -> tuple[Ints, Ints]:
    """Split the prompts into (tuning, held-out) numbers, as `split_sequences` splits their trace.

    Raises InputError if a job that records, profiles and tunes cannot write to OUT or use these prompts.
    """
    refuse_file(out)
    domains, sources = (np.array([getattr(prompt, name) for prompt in prompts]) for name in ("domain", "source"))
    parts = split_by_domain(domains, sources, tuning_share=tuning_share, seed=seed)
    shortest = min(len(prompt.tokens) for prompt in prompts)
    if shortest < MIN_PROMPT_TOKENS:
        raise InputError(f"the shortest prompt has {shortest} tokens, profiling needs {MIN_PROMPT_TOKENS}; lengthen it")
    return parts


def recorded_trace(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: RecordSettings,
    folder: Path,
    progress: Counter,
    *,
    overwrite: bool = False,
    sequences: Ints | None = None,
    texts: Mapping[int, Sequence[int]] | None = None,
    together: int = 1,
) -> Trace:
    """Read the trace in the folder if it was recorded with these settings, else record it.

    An interrupted recording continues with the sequences beside the folder. A KeyboardInterrupt becomes Interrupted,
    which explains how to continue. Models are compared by their weights, not by their paths.

    sequences : numbers of the prompts to read or record now; a later call for all records the others and writes the
        folder
    texts, together : as of `realrun.record`
    """
    wanted = recording_identity(pair, prompts, settings)
    if folder.exists() and not overwrite:
        clear_finished(folder)
        trace = read_trace(folder)
        check_first_drafts(trace, str(folder))
        recorded = {key: _made_with(trace, key) for key in wanted}
        models = f"{trace.meta.get('target')} and {trace.meta.get('drafter')}"
        advice = f"give --overwrite or another folder ({models} there, {pair.target_name} and {pair.draft_name} here)"
        refuse_other(f"{folder} was recorded", recorded, wanted, advice)
        return trace if sequences is None else trace.select(sequences)
    partial = Partial(folder, wanted)
    try:
        if sequences is not None:
            return record(pair, prompts, settings, progress, partial, sequences.tolist(), texts, together)
        trace = record(pair, prompts, settings, progress, partial, texts=texts, together=together)
        write_trace(trace, folder, overwrite=overwrite)
    except KeyboardInterrupt:
        raise Interrupted(
            f"{partial.count} of {len(prompts)} sequences are kept in {partial.folder}; the same command goes on"
        ) from None
    partial.remove()
    return trace


def recording_identity(pair: Pair, prompts: Sequence[Prompt], settings: RecordSettings) -> dict[str, Any]:
    """Return all that a recorded trace depends on."""
    return {
        "weights": pair.fingerprint,
        "drafter_kind": pair.drafter.name,
        "device": pair.device.type,
        "kernels": backend_for(pair.device),
        "decoding": settings.sampler.as_dict(),
        "depth": min(settings.max_draft_tokens, pair.drafter.max_depth or settings.max_draft_tokens),
        "tree": None if settings.tree is None else settings.tree._asdict(),
        "max_new_tokens": settings.max_new_tokens,
        "dtype": pair.number_type,
        "prompts": prompt_digest(prompts),
        "predictor": None if pair.predictor is None else pair.predictor.digest,
        **({"typical": True} if settings.typical else {}),  # a trace that holds more serves as well
    }


def clear_finished(folder: Path) -> None:
    """Remove the sequences that a kill at the very end of a recording left beside the complete trace."""
    clear_left(folder)
    clear_left(partial_of(folder))
    if folder.exists() and (identity := read_kept(partial_of(folder) / IDENTITY)):
        trace = read_trace(folder)
        if all(_made_with(trace, key) == value for key, value in identity.items()):
            remove_folder(partial_of(folder))


def _made_with(trace: Trace, key: str) -> Any:
    """Read a setting of a trace's recording; old traces hold only the digest of their prompts."""
    value = trace.meta.get(key)
    return value["digest"] if key == "prompts" and isinstance(value, dict) else value
