"""The common part of drafters that run layers of the target, or layers over its states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from realrun.decode.acceptance_predictor import Predictor
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.kind import DrafterKind
from realrun.lm.cached import CachedLM
from realrun.lm.choice import static_serves
from realrun.lm.fused_ops import PLAIN
from realrun.lm.layer_stack import model_parts
from realrun.lm.split_target import SplitTarget
from realrun.lm.static.llama import StaticLlama
from realrun.proposals.recorder import Recorder
from realrun.proposals.target_cache import target_cache_recorder


class InsideTargetKind(DrafterKind):
    """A drafter whose pass reads the target's caches or states, and therefore comes with a pass of the target."""

    @classmethod
    def check_target(cls, target: Any) -> None:
        model_parts(target)

    @abstractmethod
    def make_passes(self, target: Any) -> tuple[SplitTarget, CachedLM]:
        """Make the target's pass and the drafter's pass over it, for every model that comes in parts."""

    @abstractmethod
    def make_static_passes(self, target: Any) -> tuple[StaticLlama, StaticLlama]:
        """Make the same two passes over static caches."""

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        whole, draft = self.make_static_passes(target) if static_serves(target) else self.make_passes(target)
        return whole, DraftModel(draft, eos_token_ids, predictor)

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        return target_cache_recorder(*self.make_passes(target), sampler)


class StaticInsideTarget(StaticLlama):
    """A pass that reads the target's static buffers: recorded as the target's passes are, and anew when they move."""

    def __init__(self, target: StaticLlama, model: Any):
        self.target: Any = target
        super().__init__(model, graphs=False, compiled=target._ops is not PLAIN)
        self.recorded.graphs = target.recorded.graphs
        target.stack.readers.append(self.recorded)

    def warm(self, sizes: Iterable[int], length: int = 0, tree_nodes: int = 0) -> None:
        super().warm(sizes, length, tree_nodes)
        self.target.warm_again()
