"""What a round of a batch costs, in which every sequence has its own context and its own draft."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from specsim.arrays import Ints, Seconds
from specsim.cost.model import CostModel
from specsim.errors import InputError


class BatchPass(Protocol):
    """One model's passes over ragged batches."""

    def total_seconds(
        self, new_tokens: npt.ArrayLike, cached_tokens: npt.ArrayLike, sequences: npt.ArrayLike
    ) -> Seconds:
        """Seconds of a pass, by the new tokens and the cached ones of all its sequences together."""


class BatchCost(Protocol):
    """A cost model that knows batches, such as `specsim.cost.linear.LinearCost`."""

    @property
    def target(self) -> BatchPass: ...

    @property
    def drafter(self) -> BatchPass: ...

    @property
    def step_s(self) -> float:
        """Seconds of an engine step beside its passes."""

    @property
    def round_s(self) -> float:
        """Seconds that a step with speculation takes beyond that."""


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
    if not all(hasattr(getattr(model, part, None), "total_seconds") for part in ("target", "drafter")):
        raise InputError(
            f"costs of the form {type(model).__name__} do not say what a batch of mixed contexts costs; give a linear "
            "cost, such as vllm-llama3.1-8b-eagle-h100"
        )
    return model  # type: ignore[return-value]  # its parts were just looked at


def round_seconds(
    cost: BatchCost, batch_round: Ints, drafted: Ints, behind: Ints, cached: Ints, speculates: npt.ArrayLike
) -> RoundSeconds:
    """Seconds of rounds of a batch.

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

    sequences = summed(1)
    verify_s = cost.target.total_seconds(summed(drafted + 1), summed(cached), sequences)
    draft_s = np.zeros(count)
    for step in range(int(drafted.max(initial=0))):
        drafting = drafted > step
        active = summed(1, drafting)
        new = active + summed(behind, drafting) if step == 0 else active
        pass_s = cost.drafter.total_seconds(new, summed(cached + step, drafting), active)
        draft_s += np.where(active > 0, pass_s, 0.0)
    other_s = cost.step_s + np.where(summed(speculates) > 0, cost.round_s, 0.0)
    return RoundSeconds(draft_s, verify_s, other_s, sequences.astype(np.int64))
