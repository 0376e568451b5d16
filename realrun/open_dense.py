"""How each kind of drafter is recorded at every position at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from realrun.cached_lm import CachedLM
from realrun.choice import Choice
from realrun.dense import Columns, dense_columns
from realrun.dense_heads import heads_columns
from realrun.dense_shared import shared_columns
from realrun.dense_trees import TreeSize
from realrun.drafters.self_sd import SkippingLM
from realrun.models import Pair
from realrun.predictor import Scorer
from realrun.record_rejection import rejection_columns
from realrun.split_target import SplitTarget
from specsim.errors import InputError


class DensePass(Protocol):
    """What the drafter proposes after prompt + output[:t], for every t at once; see `realrun.dense.dense_columns`."""

    def __call__(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        depth: int,
        choice: Choice,
        sequence: int,
        scorer: Scorer | None = None,
        tree: TreeSize | None = None,
    ) -> Columns: ...


def open_dense(pair: Pair, choice: Choice) -> DensePass:
    """The dense pass of this pair's drafter in this mode."""
    if pair.kind in ("model", "eesd"):  # an early exit proposes what an independent model of its layers would
        if choice.mode == "rejection":
            judged = partial(rejection_columns, CachedLM(pair.draft), CachedLM(pair.target))
            return lambda *asked: judged(*asked[:6])
        return partial(dense_columns, CachedLM(pair.draft))
    if pair.kind == "medusa":
        return partial(heads_columns, pair.target, pair.draft)
    if choice.mode == "rejection":
        raise InputError(
            "drafters that share the target's cache are recorded in greedy and Gumbel mode only; choose one of them"
        )
    return partial(shared_columns, SkippingLM(SplitTarget(pair.target, split=0), pair.skips))
