"""Traces of the same outputs with several drafters, joined, so that every round may draft with another drafter.

Under lossless decoding the output is the target's, and so is the noise of Gumbel-coupled sampling: whichever drafter
a round drafts with, the next round starts after the same prefix. So the drafters can be recorded separately. Under
rejection sampling the output is the target's own sample too, and each drafter's drafts are drawn together with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Array, Bools, Floats
from specsim.io.errors import InputError
from specsim.trace.trace import NO_TOKEN, Trace

MAX_DRAFTERS = 3
JOINED, LOOKUP, SPACE, SUFFIX = "joined", "lookup", "space", "suffix"  # as a trace's "drafter_kind"
UNKNOWN = "unknown"  # decoding of a trace made from texts


class DrafterColumns(NamedTuple):
    """Proposals of D drafters at N positions, to depth K.

    draft_limit, match_len : uint8 [D, N]; confidence : float32 [D, N, K]
    foretold : float64 [N, D], as `foretold` gives it
    """

    draft_limit: Array
    match_len: Array
    confidence: Array
    foretold: Array


@dataclass(frozen=True, repr=False, eq=False)
class JoinedTrace(Trace):
    """A dense trace with several drafters. Columns of a drafter are the first drafter's; `parts` has the others'.

    parts : the drafters' traces, in order, of the same outputs and depth
    """

    parts: tuple[Trace, ...] = ()

    @cached_property
    def columns(self) -> DrafterColumns:
        """The proposals of all drafters."""
        return DrafterColumns(
            draft_limit=np.stack([part.draft_limit for part in self.parts]),
            match_len=np.stack([part.match_len for part in self.parts]),
            confidence=np.stack([part.confidence for part in self.parts]),
            foretold=np.stack([foretold(part) for part in self.parts], axis=1),
        )

    def select(self, sequences: npt.ArrayLike) -> JoinedTrace:
        return _joined([part.select(sequences) for part in self.parts])

    def shortened(self, max_output_tokens: int) -> JoinedTrace:
        return _joined([part.shortened(max_output_tokens) for part in self.parts])

    def shallower(self, depth: int) -> JoinedTrace:
        return _joined([part.shallower(depth) for part in self.parts])


def foretold(trace: Trace) -> Floats:
    """Return the probability [N] of the first drafted token that is known before drafting, 0 where there is none.

    Lookups know it; it is 1 for drafters that must run to tell, and for lookups recorded without probabilities.
    """
    known = trace.drafter_kind in (LOOKUP, SUFFIX) and trace.informed
    proposed = trace.draft_token[:, 0] != NO_TOKEN
    return proposed * (trace.prob[:, 0].astype(np.float64) if known else 1.0)


def join_traces(traces: Mapping[str, Trace]) -> JoinedTrace:
    """Join recorded traces; see `specsim.trace.files.join_traces`, which also takes paths."""
    if not 2 <= len(traces) <= MAX_DRAFTERS:
        raise InputError(f"{len(traces)} traces to join; give 2 to {MAX_DRAFTERS}, each of another drafter")
    for name, trace in traces.items():
        if trace.drafter_kind in (JOINED, SPACE):
            raise InputError(
                f"{name} cannot be joined: its drafter is of kind {trace.meta['drafter_kind']}; "
                "give traces of plain drafters"
            )
    recorded = [(name, trace) for name, trace in traces.items() if trace.meta["decoding"] != UNKNOWN]
    (first_name, first), *others = recorded or traces.items()
    for name, trace in others:
        _check_same_meta(f"{first_name} and {name}", first, trace, ("target", "decoding", "eos_token_id"))
    for name, trace in traces.items():
        if trace is not first:
            _check_same_output(f"{first_name} and {name}", first, trace)
    depth, end = min(trace.depth for trace in traces.values()), {"eos_token_id": first.meta["eos_token_id"]}
    parts = [replace(trace, tree=None).shallower(depth) for trace in traces.values()]
    return _joined([replace(part, meta={**part.meta, "tree": None, **end}) for part in parts])


def _joined(parts: Sequence[Trace]) -> JoinedTrace:
    first = parts[0]
    meta = {
        **first.meta,
        "drafter": " + ".join(str(part.meta["drafter"]) for part in parts),
        "drafter_kind": JOINED,
        "drafter_facts": {},
    }
    fields = {name: getattr(first, name) for name in Trace.__dataclass_fields__}  # without cached properties
    return JoinedTrace(**{**fields, "meta": meta}, parts=tuple(parts))


def _check_same_meta(names: str, first: Trace, second: Trace, keys: Sequence[str]) -> None:
    """Raise InputError unless both traces have the same values of these keys of their metadata."""
    for key in keys:
        ours, theirs = (_comparable(trace, key) for trace in (first, second))
        if ours != theirs:
            raise InputError(
                f"{names} cannot be joined: {key} differs, {ours} and {theirs}; record both with the same settings"
            )


def _comparable(trace: Trace, key: str) -> Any:
    """Return a value of the metadata to compare; greedy decoding has no seed or temperature, which have no effect."""
    value = trace.meta[key]
    if key == "eos_token_id":
        return sorted(trace.eos_token_ids)
    return "greedy" if isinstance(value, dict) and value["mode"] == "greedy" else value


def _check_same_output(names: str, first: Trace, second: Trace) -> None:
    """Raise InputError, with the first difference, unless prompts, limits and outputs are the same."""
    if first.sequences != second.sequences:
        raise InputError(
            f"{names} cannot be joined: {first.sequences} and {second.sequences} sequences; record the same prompts"
        )

    def refuse_where(what: str, differing: Bools) -> None:
        if differing.any():
            place = int(differing.argmax())
            raise InputError(f"{names} cannot be joined: {what} of sequence {place} differs; record the same prompts")

    refuse_where("the number", first.sequence_id != second.sequence_id)
    refuse_where("the prompt's length", first.prompt_tokens != second.prompt_tokens)
    if first.prompt is not None and second.prompt is not None and (first.prompt != second.prompt).any():
        place = int((first.prompt != second.prompt).argmax())
        sequence = int(np.searchsorted(np.cumsum(first.prompt_tokens), place, side="right"))
        refuse_where("the prompt", np.arange(first.sequences) == sequence)
    refuse_where("the limit on output tokens", first.budget_tokens != second.budget_tokens)
    for sequence in range(first.sequences):
        texts = [trace.token[trace.offsets[sequence] : trace.offsets[sequence + 1]] for trace in (first, second)]
        shorter = min(map(len, texts))
        differing = np.flatnonzero(texts[0][:shorter] != texts[1][:shorter])
        if differing.size or len(texts[0]) != len(texts[1]):
            t = int(differing[0]) if differing.size else shorter
            ours, theirs = (int(text[t]) if t < len(text) else "none" for text in texts)
            raise InputError(
                f"{names} cannot be joined: output token {t} of sequence {sequence} differs, {ours} and {theirs}; "
                "record both with the same target, dtype and decoding"
            )
