"""How each kind of drafter is recorded at every position at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from realrun.decode.sampling import Sampler
from realrun.drafters.acceptance_predictor import Scorer
from realrun.drafters.eagle import EagleLM
from realrun.drafters.edd import EffectiveDraftDecoderLM
from realrun.drafters.self_sd import SkippingLM
from realrun.lm.cached import CachedLM
from realrun.lm.split_target import SplitTarget
from realrun.pairs.pair import Pair
from realrun.recording.chain import Columns, dense_columns
from realrun.recording.heads import heads_columns
from realrun.recording.lookup import lookup_columns
from realrun.recording.masks import masks_columns
from realrun.recording.rejection import rejection_columns
from realrun.recording.target_cache import shared_columns
from realrun.recording.trees import TreeSize
from specsim.errors import InputError


class DensePass(Protocol):
    """What the drafter proposes after prompt + output[:t], for every t at once; see `recording.chain.dense_columns`."""

    def __call__(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        depth: int,
        sampler: Sampler,
        sequence: int,
        scorer: Scorer | None = None,
        tree: TreeSize | None = None,
    ) -> Columns: ...


def open_dense(pair: Pair, sampler: Sampler) -> DensePass:
    """The dense pass of this pair's drafter in this mode."""
    if pair.kind in ("model", "eesd"):  # an early exit proposes what an independent model of its layers would
        if sampler.mode == "rejection":
            judged = partial(rejection_columns, CachedLM(pair.draft), CachedLM(pair.target))
            return lambda *asked: judged(*asked[:6])
        return partial(dense_columns, CachedLM(pair.draft))
    if pair.kind == "lookup":
        if sampler.mode == "rejection":
            raise InputError("prompt lookup is recorded in greedy and Gumbel mode only; choose one of them")
        return partial(lookup_columns, int(pair.target.config.vocab_size))
    if pair.kind == "medusa":
        return partial(heads_columns, pair.target, pair.draft)
    if pair.kind == "space":
        return partial(masks_columns, pair.target, pair.draft)
    if sampler.mode == "rejection":
        raise InputError(
            "drafters that read the target's cache or states are recorded in greedy and Gumbel mode only; choose one "
            "of them"
        )
    split = SplitTarget(pair.target, pair.split)
    if pair.kind == "edd":
        return partial(shared_columns, EffectiveDraftDecoderLM(split, pair.draft))
    if pair.kind == "eagle":
        return partial(shared_columns, EagleLM(split, pair.draft))
    return partial(shared_columns, SkippingLM(split, pair.skips))
