"""Vanilla speculative decoding's drafter: an independent model with the target's tokenizer (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from realrun.decode.acceptance_predictor import Predictor
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.kind import DrafterKind, Origin
from realrun.lm.cached import CachedLM
from realrun.lm.choice import library_lm, make_lm
from realrun.proposals.chain import branch_columns
from realrun.proposals.recorder import Recorder


@dataclass(frozen=True, eq=False)
class IndependentKind(DrafterKind):
    """A draft model, which sees only tokens."""

    model: Any

    name: ClassVar[str] = "model"
    origin: ClassVar[Origin] = "model"
    needs_own_pass: ClassVar[bool] = False

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        return make_lm(target), DraftModel(self.model, eos_token_ids, predictor)

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        return partial(branch_columns, library_lm(self.model, drafting=True), target=CachedLM(target))

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (self.model,)

    def config(self, target: Any) -> Any:
        return self.model.config
