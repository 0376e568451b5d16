"""Self-SD's drafter (Draft & Verify, Zhang et al. 2023b): the target with some of its sublayers skipped.

It reads the target's own keys and values of all verified tokens and writes those of the pending token and of the
tokens that it drafts behind them. Verification overwrites the latter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from realrun.drafters.kind import DrafterFacts, InsideTargetKind, StaticInsideTarget
from realrun.lm.cached import CachedLM
from realrun.lm.layer_stack import PartsLM
from realrun.lm.split_target import SplitTarget
from realrun.lm.static.llama import StaticLlama
from realrun.lm.variants import NOTHING, SkippedSublayers, with_blocks


class TargetLength:
    """Mixed into a pass over the target's own cache: `length` follows the target's, and no state outlives a round.

    ahead : tokens fed since the target's last pass
    """

    target: Any
    ahead: int
    nodes: int
    hidden: Any

    @property
    def length(self) -> int:
        return int(self.target.length) + self.ahead

    @length.setter
    def length(self, length: int) -> None:
        self.ahead = length - self.target.length

    def reset(self) -> None:
        self.ahead = self.nodes = 0
        self.hidden = None

    def prefill(self, tokens: Sequence[int]) -> None:
        """Do nothing: the target has fed these tokens."""

    def truncate(self, length: int) -> None:
        self.ahead = self.nodes = 0

    def keep_nodes(self, path: Sequence[int]) -> None:
        self.truncate(0)


class SkippingLM(TargetLength, PartsLM):
    """The target's layers without the skipped sublayers, over its cache."""

    def __init__(self, target: SplitTarget, skips: SkippedSublayers):
        assert target.split == 0
        self.target, self.skips = target, skips
        self.parts, self.norm, self.head = target.parts, target.norm, target.head
        super().__init__(target.model)

    def append_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, keep: int = 0
    ) -> torch.Tensor:
        start = self.length + self.nodes
        at = torch.tensor(positions, device=self.device)
        logits = self._run(tokens, start, at, self.parts.tree_mask(seen, start + len(tokens)), keep)
        self.nodes += len(tokens)
        return logits

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        start, end = self.length, self.length + len(tokens)
        return self._run(tokens, start, slice(start, end), self.parts.causal_mask(len(tokens), end), keep)

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        start = self.length + self.nodes
        at = self.node_positions(depths)
        return self._run(tokens, start, at, self.parts.tree_mask(visible, start + len(tokens)), keep=0)

    def _run(
        self,
        tokens: Sequence[int],
        start: int,
        positions: slice | torch.Tensor,
        mask: torch.Tensor | None,
        keep: int,
    ) -> torch.Tensor:
        x = self.target.upper.run(self.parts.embed(tokens), start, positions, mask, self.skips)
        return self.finish(x, keep)


class StaticSkipping(TargetLength, StaticInsideTarget):
    """`SkippingLM` over the target's static cache."""

    def __init__(self, target: StaticLlama, skips: SkippedSublayers):
        self.target, self.skips = target, skips
        super().__init__(target, target.model)

    def _make_stack(self, capacity: int | None) -> None:
        self.stack = self.target.stack

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        self.target.reserve(length)


@dataclass(frozen=True, eq=False)
class SelfSDKind(InsideTargetKind):
    """The sublayers to skip. Its file holds no tensors, only these as facts "attention" and "mlp"."""

    skips: SkippedSublayers = NOTHING

    name: ClassVar[str] = "self-sd"
    recipe: ClassVar[tuple[str, ...]] = ("settings", "calibration", "prompts")

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        skipped = SkippedSublayers(frozenset(facts["attention"]), frozenset(facts["mlp"]))
        if not skipped.attention | skipped.mlp <= set(range(int(target.config.num_hidden_layers))):
            raise ValueError("it skips layers that the target does not have")
        return target, cls(skipped)

    def make_passes(self, target: Any) -> tuple[SplitTarget, CachedLM]:
        split = SplitTarget(target, 0)
        return split, SkippingLM(split, self._skips(target))

    def make_static_passes(self, target: Any) -> tuple[StaticLlama, StaticLlama]:
        static = StaticLlama(target)
        return static, StaticSkipping(static, self._skips(target))

    def _skips(self, target: Any) -> SkippedSublayers:
        """Add to the sublayers to skip those of their identity blocks."""
        return SkippedSublayers(*(with_blocks(target, layers) for layers in self.skips))

    @property
    def facts(self) -> DrafterFacts:
        return self.skips.in_order

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (target,)
