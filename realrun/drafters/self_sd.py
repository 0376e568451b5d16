"""Self-SD's drafter (Draft & Verify, Zhang et al. 2023b): the target with some of its sublayers skipped.

It reads the target's own keys and values of all verified tokens, writes those of the pending
token and of what it drafts behind them, and verification overwrites these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from realrun.decode.acceptance_predictor import Predictor
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.kind import DrafterKind
from realrun.drafters.static.self_sd import StaticSkipping
from realrun.lm.cached import CachedLM
from realrun.lm.layer_stack import model_parts
from realrun.lm.open import static_serves
from realrun.lm.split_target import SplitTarget
from realrun.lm.static.llama import StaticLlama
from realrun.lm.variants.block_expansion import with_blocks
from realrun.lm.variants.over_target import OverTarget
from realrun.lm.variants.skipped_layers import NOTHING, SkippedSublayers
from realrun.proposals.recorder import Recorder
from realrun.proposals.target_cache import target_cache_recorder


class SkippingLM(OverTarget, CachedLM):
    """The target's layers less the skipped sublayers, over its cache."""

    def __init__(self, target: SplitTarget, skips: SkippedSublayers):
        assert target.split == 0
        self.target, self.skips = target, skips
        super().__init__(target.model)

    def append_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, keep: int = 0
    ) -> torch.Tensor:
        start = self.length + self.nodes
        at = torch.tensor(positions, device=self.device)
        logits = self._run(tokens, start, at, self.target.pieces.tree_mask(seen, start + len(tokens)), keep)
        self.nodes += len(tokens)
        return logits

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        start, end = self.length, self.length + len(tokens)
        return self._run(tokens, start, slice(start, end), self.target.pieces.causal_mask(len(tokens), end), keep)

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        start = self.length + self.nodes
        at = torch.tensor([self.length + depth for depth in depths], device=self.device)
        return self._run(tokens, start, at, self.target.pieces.tree_mask(visible, start + len(tokens)), keep=0)

    def _run(
        self,
        tokens: Sequence[int],
        start: int,
        positions: slice | torch.Tensor,
        mask: torch.Tensor | None,
        keep: int,
    ) -> torch.Tensor:
        target = self.target
        x = target.upper.run(target.pieces.embed(tokens), start, positions, mask, self.skips)
        hidden = target.pieces.normed(x[-keep:] if keep else x, target.norm)
        if self.keep_hidden:
            self.hidden = hidden
        return target.pieces.logits(hidden, target.head)

    def _check_trees(self) -> None:
        """As the target."""


@dataclass(frozen=True, eq=False)
class SelfSDKind(DrafterKind):
    """What the target passes over. Its file holds no tensors; facts "attention" and "mlp", the skipped sublayers."""

    skips: SkippedSublayers = NOTHING

    name: ClassVar[str] = "self-sd"
    recipe: ClassVar[tuple[str, ...]] = ("settings", "calibration", "prompts")

    @classmethod
    def check_target(cls, target: Any) -> None:
        model_parts(target)

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        skipped = SkippedSublayers(frozenset(facts["attention"]), frozenset(facts["mlp"]))
        if not skipped.attention | skipped.mlp <= set(range(int(target.config.num_hidden_layers))):
            raise ValueError("it skips layers that the target does not have")
        return target, cls(skipped)

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        if static_serves(target):
            static = StaticLlama(target)
            return static, DraftModel(StaticSkipping(static, self._skips(target)), eos_token_ids, predictor)
        split, lm = self._passes(target)
        return split, DraftModel(lm, eos_token_ids, predictor)

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        return target_cache_recorder(*self._passes(target), sampler)

    def _passes(self, target: Any) -> tuple[SplitTarget, SkippingLM]:
        split = SplitTarget(target, 0)
        return split, SkippingLM(split, self._skips(target))

    def _skips(self, target: Any) -> SkippedSublayers:
        """The sublayers to skip, each with those of its identity blocks."""
        return SkippedSublayers(*(with_blocks(target, layers) for layers in self.skips))

    @property
    def facts(self) -> dict[str, Any]:
        return self.skips.in_order

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (target,)
