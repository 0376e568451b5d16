"""Seconds of a batch's round, in which every sequence has its own context and its own draft."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from specsim.cost.batches import BatchCost, BatchTokens, Pad, PaddedCost
from specsim.cost.linear import OTHERS, LinearCost
from specsim.cost.model import CostModel
from specsim.cost.roofline.cost import RooflineCost
from specsim.io.arrays import Ints, Seconds
from specsim.io.errors import InputError

if TYPE_CHECKING:
    from specsim.replaying.tree import Links


class Prompts(NamedTuple):
    """Parts of prompts that are read in steps, [P] each: the step, new tokens, and tokens of it read before.

    drafter : whether the drafter reads them, too, in the first draft pass
    """

    batch_round: Ints
    new: Ints
    cached: Ints
    drafter: bool


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
            "this cost model is for batch size 1 alone; give batch-aware costs (linear, roofline or a batch "
            "profile), such as specdecode-bench-llama3.1-8b-eagle-h100"
        )
    if isinstance(model, LinearCost) and model.only_batch is not None:
        raise InputError(f"these costs were measured at batch {model.only_batch} alone; {OTHERS}")
    if pad not in get_args(Pad):
        raise InputError(f"unknown padding {pad!r}; choose one of {', '.join(get_args(Pad))}")
    return model if pad == "none" else PaddedCost(model, pad)


def known_error(cost: CostModel, batch: int) -> tuple[float, float]:
    """Mean and standard deviation of log(measured / predicted speedup) of so many sequences; 0, 0 where unknown."""
    own = cost.cost if isinstance(cost, PaddedCost) else cost
    if not isinstance(own, RooflineCost) or not (at := replace(own, batch=batch)).error_known:
        return 0.0, 0.0
    return at.speedup_error


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
    prompts: Prompts | None = None,
    masks: int = 0,
) -> RoundSeconds:
    """Seconds of rounds of a batch, without the time of the policy's decisions.

    A draft takes a drafter pass per token, or per level of a tree. Sequences whose drafts are complete take no part in
    later passes, but wait for them. Verification is a single target pass over all pending tokens and the drafted tokens
    that are verified. Where speedups with such costs are known to come out lower or higher than predicted, rounds that
    speculate take longer or shorter in proportion, but no shorter than without drafts.

    batch_round : int [R], round of the batch, counted from 0 without a gap, of each sequence's round
    drafted, cached : int [R], tokens of the draft, and of the cache before the pass
    behind : int [R], tokens besides the pending token that the drafter has yet to take in
    speculates : bool [R] or a single bool, whether the step speculates; a step without speculation takes no `round_s`
    tree : that all drafts are of, each cut at some depth; chains otherwise
    verified : int [R], drafted tokens that are verified; default: all
    prompts : read in the same passes, or in steps in which no sequence decodes
    masks : of SPACE, behind the pending token and each verified token. These make the drafts, so that no drafter runs;
        a sequence's pass is a tree, or a chain of as many tokens if the costs price no trees, as in `SpaceCost`

    Raises InputError where costs do not price such trees.
    """
    most = (int(drafted.max(initial=0)) + 1) * (masks + 1)
    if (tree is not None or (masks and cost.max_tree_tokens)) and cost.max_tree_tokens < most:
        priced = f"of up to {cost.max_tree_tokens} tokens" if cost.max_tree_tokens else "of chains alone"
        raise InputError(f"costs are {priced}, a tree has {most}; give linear or roofline costs")
    last = -1 if prompts is None else int(prompts.batch_round.max(initial=-1))
    count = max(int(batch_round.max(initial=-1)), last) + 1

    def held(new: Ints, before: Ints, which: npt.NDArray[np.bool_] | slice = slice(None)) -> BatchTokens:
        return _by_round(batch_round[which], new[which], before[which], count)

    read = None
    if prompts is not None:
        read = _by_round(prompts.batch_round, prompts.new, prompts.cached, count)
        read = read._replace(prompts=read.new)

    checked = drafted if verified is None else verified
    if cost.pads_to_longest:
        drafted, checked = (_longest(tokens, batch_round, count) for tokens in (drafted, checked))
    tokens = held((checked + 1) * (masks + 1), cached)
    levels = np.zeros_like(drafted) if masks else draft_levels(drafted, tree)
    draft_s = np.zeros(count)
    read_by_drafter = read if prompts is not None and prompts.drafter else None
    for step in range(max(int(levels.max(initial=0)), int(read_by_drafter is not None))):
        drafting = levels > step
        passes = held(1 + behind * (step == 0), cached + step, drafting)
        if step == 0:
            passes = passes.plus(read_by_drafter)
        active = passes.sequences > 0
        draft_s[active] += cost.batch_draft(step, passes.select(active))
        if tree is not None and tree.expanded[step] > 1:
            wide, narrow = (held(np.full_like(cached, n), cached, drafting) for n in (tree.expanded[step], 1))
            draft_s[active] += cost.batch_wider(wide.select(active), narrow.select(active))
    verify_s = cost.batch_verify(tokens.plus(read))
    if tree is not None or (masks and cost.max_tree_tokens):
        decoding = tokens.sequences > 0
        trees = tokens.select(decoding)
        verify_s[decoding] += cost.batch_tree_verify(trees) - cost.batch_verify(trees)
    speculating = np.bincount(batch_round, np.broadcast_to(speculates, batch_round.shape), minlength=count) > 0
    other_s = cost.step_s + np.where(speculating, cost.round_s, 0.0)
    sequences = tokens.sequences.astype(np.int64)
    known, which = np.unique(sequences, return_inverse=True)
    bias = speculating * np.array([known_error(cost, size)[0] if size else 0.0 for size in known.tolist()])[which]
    factor = np.exp(-bias)
    if (bias > 0).any():
        plain_s = cost.batch_verify(held(np.ones_like(cached), cached).plus(read)) + cost.step_s
        least = np.minimum(plain_s / (draft_s + verify_s + other_s), 1.0)
        factor = np.where(bias > 0, np.maximum(factor, least), factor)
    return RoundSeconds(draft_s * factor, verify_s * factor, other_s * factor, sequences)


def _by_round(batch_round: Ints, new: Ints, before: Ints, count: int) -> BatchTokens:
    columns = (np.ones(len(new)), new, before, new * (before + new))
    return BatchTokens(*(np.bincount(batch_round, column, minlength=count).astype(np.float64) for column in columns))


def _longest(tokens: Ints, batch_round: Ints, count: int) -> Ints:
    most = np.zeros(count, dtype=np.int64)
    np.maximum.at(most, batch_round, tokens)
    return most[batch_round]
