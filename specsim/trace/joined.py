"""Traces of the same outputs with several drafters, joined, so that every round may draft with another one.

Under loss-free decoding the output is the target's, and so is the noise of Gumbel-coupled sampling: whichever drafter
a round drafts with, the next one starts behind the same prefix. So nothing is lost by recording drafters one by one.
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
UNKNOWN = "unknown"  # the decoding of a trace that was made from texts


class DrafterColumns(NamedTuple):
    """What D drafters propose at N positions, to depth K.

    draft_limit, match_len : uint8 [D, N]; confidence : float32 [D, N, K]
    foretold : float64 [N, D], as `foretold` gives it
    """

    draft_limit: Array
    match_len: Array
    confidence: Array
    foretold: Array


@dataclass(frozen=True, repr=False)
class JoinedTrace(Trace):
    """A dense trace with several drafters. What belongs to a drafter is the first one's, but in `parts`.

    parts : the drafters' traces, in order, of the same outputs and of one depth
    """

    parts: tuple[Trace, ...] = ()

    @cached_property
    def columns(self) -> DrafterColumns:
        """What all drafters propose."""
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
    """How likely the drafter finds its first token before it drafts [N]: lookups know it, 0 where they have none.

    Of drafters that must run to tell it is 1.
    """
    if trace.meta.get("drafter_kind") not in (LOOKUP, SUFFIX):
        return np.ones(len(trace.token))
    return np.where(trace.draft_token[:, 0] == NO_TOKEN, 0.0, trace.prob[:, 0].astype(np.float64))


def join_traces(traces: Mapping[str, Trace]) -> JoinedTrace:
    """Join recorded traces; see `specsim.trace.join.join_traces`, which takes their names and folders too."""
    if not 2 <= len(traces) <= MAX_DRAFTERS:
        raise InputError(f"{len(traces)} traces to join; give 2 to {MAX_DRAFTERS}, each of another drafter")
    for name, trace in traces.items():
        if trace.meta.get("drafter_kind") in (JOINED, SPACE):
            raise InputError(
                f"{name} cannot be joined: its drafts are {trace.meta['drafter_kind']}; give traces of plain drafters"
            )
        if not trace.has_text:
            raise InputError(
                f"{name} cannot be joined: it holds match lengths without the text that they belong to; give traces "
                "made by `realrun record` or `specsim record-text`"
            )
        if trace.sampled_by_rejection:
            raise InputError(
                f"{name} cannot be joined: under rejection sampling the output depends on the drafter; record greedily "
                "or by `realrun record --mode gumbel`"
            )
    recorded = [(name, trace) for name, trace in traces.items() if trace.meta["decoding"] != UNKNOWN]
    (first_name, first), *others = recorded or traces.items()
    for name, trace in others:
        _check_alike(f"{first_name} and {name}", first, trace, ("target", "decoding", "eos_token_id"))
    for name, trace in traces.items():
        if trace is not first:
            _check_same_output(f"{first_name} and {name}", first, trace)
    depth, said = min(trace.depth for trace in traces.values()), {"eos_token_id": first.meta["eos_token_id"]}
    parts = [replace(trace, tree=None).shallower(depth) for trace in traces.values()]
    return _joined([replace(part, meta={**part.meta, "tree": None, **said}) for part in parts])


def _joined(parts: Sequence[Trace]) -> JoinedTrace:
    first = parts[0]
    meta = {
        **first.meta,
        "drafter": " + ".join(str(part.meta["drafter"]) for part in parts),
        "drafter_kind": JOINED,
        "drafter_facts": {},
    }
    return JoinedTrace(**{**vars_of(first), "meta": meta}, parts=tuple(parts))


def vars_of(trace: Trace) -> dict[str, Any]:
    """The fields of a trace, without what is derived from them."""
    return {name: getattr(trace, name) for name in Trace.__dataclass_fields__}


def _check_alike(names: str, one: Trace, other: Trace, keys: Sequence[str]) -> None:
    """InputError unless both say the same of these."""
    for key in keys:
        ours, theirs = (_said(trace, key) for trace in (one, other))
        if ours != theirs:
            raise InputError(f"{names} cannot be joined: {key} differs, {ours} and {theirs}; record both alike")


def _said(trace: Trace, key: str) -> Any:
    """What a trace says of itself: of greedy decoding no seed or temperature, as they decide nothing."""
    value = trace.meta[key]
    if key == "eos_token_id":
        return sorted(trace.eos_token_ids)
    return "greedy" if isinstance(value, dict) and value["mode"] == "greedy" else value


def _check_same_output(names: str, one: Trace, other: Trace) -> None:
    """InputError, with the first place, unless prompts, limits and outputs are the same."""
    if one.sequences != other.sequences:
        raise InputError(
            f"{names} cannot be joined: {one.sequences} and {other.sequences} sequences; record the same prompts"
        )

    def refuse(what: str, differing: Bools) -> None:
        if differing.any():
            place = int(differing.argmax())
            raise InputError(f"{names} cannot be joined: {what} of sequence {place} differs; record the same prompts")

    refuse("the number", one.sequence_id != other.sequence_id)
    refuse("the prompt's length", one.prompt_tokens != other.prompt_tokens)
    if one.prompt is not None and other.prompt is not None and (one.prompt != other.prompt).any():
        place = int((one.prompt != other.prompt).argmax())
        sequence = int(np.searchsorted(np.cumsum(one.prompt_tokens), place, side="right"))
        refuse("the prompt", np.arange(one.sequences) == sequence)
    refuse("the limit on output tokens", one.budget_tokens != other.budget_tokens)
    for sequence in range(one.sequences):
        texts = [trace.token[trace.offsets[sequence] : trace.offsets[sequence + 1]] for trace in (one, other)]
        shorter = min(map(len, texts))
        differing = np.flatnonzero(texts[0][:shorter] != texts[1][:shorter])
        if differing.size or len(texts[0]) != len(texts[1]):
            t = int(differing[0]) if differing.size else shorter
            ours, theirs = (int(text[t]) if t < len(text) else "none" for text in texts)
            raise InputError(
                f"{names} cannot be joined: output token {t} of sequence {sequence} differs, {ours} and {theirs}; "
                "record both with one target, one type of numbers and one way of decoding"
            )
