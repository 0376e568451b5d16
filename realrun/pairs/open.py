"""The passes that decode a pair for real: the target's, and the drafter's, which may share it."""

from __future__ import annotations

from collections.abc import Sequence

from realrun.drafters.draft_model import DraftModel
from realrun.drafters.eagle import EagleLM
from realrun.drafters.edd import EffectiveDraftDecoderLM
from realrun.drafters.eesd import EarlyExitDrafter
from realrun.drafters.lookup import LookupDrafter
from realrun.drafters.medusa import MedusaDrafter
from realrun.drafters.self_sd import SkippingLM
from realrun.drafters.space import MaskedTarget, SpaceDrafter
from realrun.lm.cached import CachedLM
from realrun.lm.open import open_lm
from realrun.lm.split_target import SplitTarget
from realrun.pairs.pair import Pair


def open_drafter(pair: Pair, eos_token_ids: Sequence[int] | None = None) -> tuple[CachedLM, DraftModel]:
    """The target's pass and the drafter of this pair; eos_token_ids : where drafts end, the pair's unless given."""
    eos = pair.eos_token_ids if eos_token_ids is None else eos_token_ids
    if pair.kind == "model":
        return open_lm(pair.target), DraftModel(pair.draft, eos, pair.predictor)
    if pair.kind == "medusa":
        target = open_lm(pair.target)
        return target, MedusaDrafter(target, pair.draft, eos, pair.predictor)
    if pair.kind == "lookup":
        target = open_lm(pair.target)
        return target, LookupDrafter(target, eos)
    if pair.kind == "space":
        masked = MaskedTarget(pair.target, len(pair.draft))
        return masked, SpaceDrafter(masked, pair.draft, eos, pair.predictor)
    split = SplitTarget(pair.target, pair.split)
    if pair.kind == "eesd":
        return split, EarlyExitDrafter(split, pair.draft, eos, pair.predictor)
    if pair.kind in ("edd", "eagle"):
        follower = EffectiveDraftDecoderLM if pair.kind == "edd" else EagleLM
        return split, DraftModel(follower(split, pair.draft), eos, pair.predictor)
    return split, DraftModel(SkippingLM(split, pair.skips), eos, pair.predictor)
