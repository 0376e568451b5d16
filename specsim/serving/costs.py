"""What a round of a batch costs, in which every sequence has its own context and its own draft."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specsim.arrays import Ints, Seconds
from specsim.cost.batches import BatchCost, BatchTokens
from specsim.cost.model import CostModel
from specsim.errors import InputError


class RoundSeconds(NamedTuple):
    """Seconds of every round of a batch [Q], and the sequences in it."""

    draft_s: Seconds
    verify_s: Seconds
    other_s: Seconds
    sequences: Ints

    @property
    def total_s(self) -> Seconds:
        return self.draft_s + self.verify_s + self.other_s


def batch_cost(model: CostModel | BatchCost) -> BatchCost:
    """The cost model, if it knows what a batch costs."""
    if not isinstance(model, BatchCost):
        raise InputError(
            f"costs of the form {type(model).__name__} do not say what a batch of mixed contexts costs; give linear, "
            "roofline or silicon costs or a batch profile, such as vllm-llama3.1-8b-eagle-h100"
        )
    return model


def round_seconds(
    cost: BatchCost, batch_round: Ints, drafted: Ints, behind: Ints, cached: Ints, speculates: npt.ArrayLike
) -> RoundSeconds:
    """Seconds of rounds of a batch, but for what policies take to decide.

    A draft is one drafter pass per token. Sequences whose drafts are complete take no part in the passes that follow,
    but wait for them. Verification is one target pass over all pending and drafted tokens.

    Parameters
    ----------
    batch_round : int [R], the round of the batch, counted from 0 and without a gap, that each of the sequences' rounds
        is part of
    drafted, cached : int [R], tokens of the draft, and of the cache that the pass finds
    behind : int [R], tokens beside the pending one that the drafter has yet to take in
    speculates : bool [R] or one for all, whether the step was one of speculation; one without takes no `round_s`
    """
    count = int(batch_round.max(initial=-1)) + 1

    def summed(values: npt.ArrayLike, which: npt.NDArray[np.bool_] | slice = slice(None)) -> Seconds:
        weights = np.broadcast_to(values, batch_round.shape)[which]
        return np.bincount(batch_round[which], weights, minlength=count).astype(np.float64)

    def held(new: Ints, before: Ints, which: npt.NDArray[np.bool_] | slice = slice(None)) -> BatchTokens:
        return BatchTokens(
            summed(1, which), summed(new, which), summed(before, which), summed(new * (before + new), which)
        )

    tokens = held(drafted + 1, cached)
    draft_s = np.zeros(count)
    for step in range(int(drafted.max(initial=0))):
        passes = held(1 + behind * (step == 0), cached + step, drafted > step)
        active = passes.sequences > 0
        draft_s[active] += cost.batch_draft(step, passes.select(active))
    other_s = cost.step_s + np.where(summed(speculates) > 0, cost.round_s, 0.0)
    return RoundSeconds(draft_s, cost.batch_verify(tokens), other_s, tokens.sequences.astype(np.int64))
