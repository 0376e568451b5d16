"""Seconds of a batch's round, in which every sequence has its own context and its own draft."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from specsim.cost.batches import BatchCost, BatchTokens, Pad, PaddedCost
from specsim.cost.linear import OTHERS, LinearCost
from specsim.cost.model import CostModel
from specsim.io.arrays import Ints, Seconds
from specsim.io.errors import InputError

if TYPE_CHECKING:
    from specsim.replaying.static_tree import Links


class RoundSeconds(NamedTuple):
    """Seconds and sequences of every round of a batch, [Q] each."""

    draft_s: Seconds
    verify_s: Seconds
    other_s: Seconds
    sequences: Ints

    @property
    def total_s(self) -> Seconds:
        return self.draft_s + self.verify_s + self.other_s


def batch_cost(model: CostModel | BatchCost, pad: Pad = "none") -> BatchCost:
    """The cost model, if it knows what a batch costs, with this padding of ragged batches."""
    if not isinstance(model, BatchCost):
        raise InputError(
            "this cost model is for batch size 1 alone; give batch-aware costs (linear, roofline, silicon or a batch "
            "profile), such as specdecode-bench-llama3.1-8b-eagle-h100"
        )
    if isinstance(model, LinearCost) and model.only_batch is not None:
        raise InputError(f"these costs were measured at batch {model.only_batch} alone; {OTHERS}")
    if pad not in get_args(Pad):
        raise InputError(f"unknown padding {pad!r}; choose one of {', '.join(get_args(Pad))}")
    return model if pad == "none" else PaddedCost(model, pad)


def draft_levels(drafted: Ints, tree: Links | None) -> Ints:
    """Number of draft passes: a token each for chains, a level each for a static tree cut at some depth."""
    return drafted if tree is None else np.searchsorted(tree.level_end - 1, drafted)


def round_seconds(
    cost: BatchCost,
    batch_round: Ints,
    drafted: Ints,
    behind: Ints,
    cached: Ints,
    speculates: npt.ArrayLike,
    tree: Links | None = None,
    verified: Ints | None = None,
) -> RoundSeconds:
    """Seconds of rounds of a batch, without the time of the policy's decisions.

    A draft takes a drafter pass per token, or per level of a tree. Sequences whose drafts are complete take no part in
    later passes, but wait for them. Verification is a single target pass over all pending tokens and the drafted tokens
    that are verified.

    batch_round : int [R], round of the batch, counted from 0 without a gap, of each sequence's round
    drafted, cached : int [R], tokens of the draft, and of the cache before the pass
    behind : int [R], tokens besides the pending token that the drafter has yet to take in
    speculates : bool [R] or a single bool, whether the step speculates; a step without speculation takes no `round_s`
    tree : that all drafts are of, each cut at some depth; chains otherwise
    verified : int [R], drafted tokens that are verified; default: all

    Raises InputError where costs do not price such trees.
    """
    if tree is not None and cost.max_tree_tokens < (most := int(drafted.max(initial=0)) + 1):
        priced = f"of up to {cost.max_tree_tokens} tokens" if cost.max_tree_tokens else "of chains alone"
        raise InputError(f"costs are {priced}, a tree has {most}; give linear, roofline or silicon costs")
    count = int(batch_round.max(initial=-1)) + 1

    def summed(values: npt.ArrayLike, which: npt.NDArray[np.bool_] | slice = slice(None)) -> Seconds:
        weights = np.broadcast_to(values, batch_round.shape)[which]
        return np.bincount(batch_round[which], weights, minlength=count).astype(np.float64)

    def held(new: Ints, before: Ints, which: npt.NDArray[np.bool_] | slice = slice(None)) -> BatchTokens:
        return BatchTokens(
            summed(1, which), summed(new, which), summed(before, which), summed(new * (before + new), which)
        )

    checked = drafted if verified is None else verified
    if cost.pads_to_longest:
        drafted, checked = (_longest(tokens, batch_round, count) for tokens in (drafted, checked))
    tokens = held(checked + 1, cached)
    levels = draft_levels(drafted, tree)
    draft_s = np.zeros(count)
    for step in range(int(levels.max(initial=0))):
        drafting = levels > step
        passes = held(1 + behind * (step == 0), cached + step, drafting)
        active = passes.sequences > 0
        draft_s[active] += cost.batch_draft(step, passes.select(active))
        if tree is not None and tree.expanded[step] > 1:
            wide, narrow = (held(np.full_like(cached, n), cached, drafting) for n in (tree.expanded[step], 1))
            draft_s[active] += cost.batch_wider(wide.select(active), narrow.select(active))
    verify_s = cost.batch_verify(tokens) if tree is None else cost.batch_tree_verify(tokens)
    other_s = cost.step_s + np.where(summed(speculates) > 0, cost.round_s, 0.0)
    return RoundSeconds(draft_s, verify_s, other_s, tokens.sequences.astype(np.int64))


def _longest(tokens: Ints, batch_round: Ints, count: int) -> Ints:
    """The most tokens in the round of each sequence."""
    most = np.zeros(count, dtype=np.int64)
    np.maximum.at(most, batch_round, tokens)
    return most[batch_round]
