"""Read from a trace how it was recorded, to profile or validate the same pair in the same way."""

from __future__ import annotations

from typing import Any

from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.io.errors import InputError
from specsim.trace.trace import Trace


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
