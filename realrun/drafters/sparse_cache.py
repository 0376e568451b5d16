"""Self-speculation with a sparse cache: the target drafts from the first few and the last tokens of its cache.

At long contexts a pass of a batch reads more of the caches than of the weights, so that the same model over a part of
the cache is a fast drafter (Chen et al. 2024, MagicDec, arXiv:2408.11049). The first tokens, attention's sinks, are
kept because attention needs them (Xiao et al. 2023, StreamingLLM, arXiv:2309.17453). Here a mask hides the rest, which
tells what is accepted and saves no time; a roofline prices such drafters (sparse-cache:N).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from realrun.drafters.inside_target import InsideTargetKind
from realrun.drafters.kind import Origin
from realrun.drafters.self_sd import SkippingLM
from realrun.lm.cached import CachedLM
from realrun.lm.split_target import SplitTarget
from realrun.lm.variants.skipped_layers import NOTHING
from specsim.io.errors import InputError

SINKS, WINDOW = 4, 512  # tokens
SPARSE_CACHE = "sparse-cache"


def window_facts(drafter: str) -> tuple[str, dict[str, int]]:
    """Split the name of a drafter into its kind and facts: sparse-cache:64 sees 64 tokens; others are a kind alone."""
    kind, colon, tokens = drafter.partition(":")
    if kind != SPARSE_CACHE or not colon:
        return drafter, {}
    if not tokens.isdecimal() or int(tokens) < 1:
        raise InputError(f"drafter {drafter}: give the tokens that it reads of its cache, as in sparse-cache:{WINDOW}")
    return kind, {"window": int(tokens)}


class SparseCacheLM(SkippingLM):
    """The target's layers over its own cache, of whose verified tokens a row sees the sinks and the last ones.

    seen_tokens : verified tokens that a row sees at most, sinks included, besides the pending and drafted tokens
    """

    def __init__(self, target: SplitTarget, seen_tokens: int):
        self.seen_tokens = seen_tokens
        super().__init__(target, NOTHING)

    def append_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, keep: int = 0
    ) -> torch.Tensor:
        return super().append_rows(tokens, positions, self._sparse(seen, positions), keep)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        start, end = self.length, self.length + len(tokens)
        seen = torch.ones(len(tokens), end, dtype=torch.bool).tril_(start)
        mask = self.parts.tree_mask(self._sparse(seen, range(start, end)), end)
        return self._run(tokens, start, slice(start, end), mask, keep)

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        cached = torch.ones(len(tokens), self.length, dtype=torch.bool)
        positions = [self.length + depth for depth in depths]
        return super()._forward_nodes(tokens, depths, self._sparse(torch.cat([cached, visible], dim=1), positions))

    def _sparse(self, seen: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Hide from rows at these positions the verified tokens between sinks and window; seen : bool [n, slots]."""
        slot = torch.arange(self.target.length)
        sinks = min(SINKS, self.seen_tokens // 2)
        first = torch.tensor(list(positions))[:, None] - (self.seen_tokens - sinks)
        seen = seen.clone()
        seen[:, : len(slot)] &= (slot < sinks) | (slot >= first)
        return seen


@dataclass(frozen=True, eq=False)
class SparseCacheKind(InsideTargetKind):
    """A drafter without training, for any target. window : verified tokens that a draft step reads, sinks included"""

    window: int = WINDOW

    name: ClassVar[str] = SPARSE_CACHE
    origin: ClassVar[Origin] = "target"

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        return target, cls(**facts)

    def make_passes(self, target: Any) -> tuple[SplitTarget, CachedLM]:
        split = SplitTarget(target, 0)
        return split, SparseCacheLM(split, self.window)

    def make_static_passes(self, target: Any) -> tuple[Any, Any]:  # kernels do not read such masks
        return self.make_passes(target)

    @property
    def facts(self) -> dict[str, Any]:
        return {"window": self.window}

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (target,)
