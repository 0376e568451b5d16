"""Interface of a drafting mechanism, and the part that drafters inside the target have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch

from realrun.decode.acceptance_predictor import Predictor
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from realrun.lm.choice import static_serves
from realrun.lm.fused_ops import PLAIN
from realrun.lm.layer_stack import model_parts
from realrun.lm.split_target import SplitTarget
from realrun.lm.static.llama import StaticLlama
from realrun.proposals.recorder import Recorder
from realrun.proposals.target_cache import target_cache_columns
from specsim.io.errors import InputError

Origin = Literal["file", "model", "target"]
DrafterFacts = Mapping[str, int | str | list[int]]  # what a trace says of its drafter, by name
DRAFT_TOKENS = "draft_tokens"  # in the file: int32 [n], the tokens that are drafted, if not all


def draft_tokens(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Read the tokens that a drafter drafts, int64 [n]; None for all."""
    some = tensors.get(DRAFT_TOKENS)
    return None if some is None else some.long()


def draft_vocabulary(tokens: torch.Tensor | None) -> DrafterFacts:
    """Describe the tokens that a drafter drafts, as a part of its facts."""
    return {} if tokens is None else {"draft_vocabulary": len(tokens)}


class DrafterKind(ABC):
    """A drafter with its weights. Methods take the target that it drafts for.

    A new mechanism is a subclass in a new file and a line in `realrun.drafters.registry.DRAFTERS`.

    name : its name in traces and profiles
    origin : where it comes from: a file from `realrun train`, a draft model (--draft-model), or any target
    trees : whether it can draft trees
    has_states : whether an acceptance predictor can read the states behind its tokens
    paper_policy : the drafting policy that its paper proposes, if any
    mask_groups : whether each verified token brings mask tokens into the target's pass, which are then profiled as well
    needs_own_pass : whether it runs or reads the target's pass that it comes with; joined drafters share a single pass
    """

    name: ClassVar[str]
    origin: ClassVar[Origin] = "file"
    trees: ClassVar[bool] = True
    has_states: ClassVar[bool] = True
    # Facts that together with the settings define a training; older files lack some.
    recipe: ClassVar[tuple[str, ...]] = (
        "objective", "optimizer", "schedule", "learning_rates", "loop", "text", "text_digests",
    )  # fmt: skip
    paper_policy: ClassVar[str | None] = None
    mask_groups: ClassVar[bool] = False
    needs_own_pass: ClassVar[bool] = True

    @classmethod  # noqa: B027 (some serve any target)
    def check_target(cls, target: Any) -> None:
        """Raise InputError, before anything is trained or loaded, if this target cannot have such a drafter."""

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        """Load the drafter from its file's tensors and facts, which are empty if any target has it.

        Returns the target itself, or a tuned copy of it that the drafter needs, and the drafter.
        """
        raise InputError(f"a drafter of kind {cls.name} does not come from a file; give its name instead")

    @abstractmethod
    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        """Make the target's pass and the drafter for decoding; drafts end at eos tokens."""

    @abstractmethod
    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        """Make the recorder of the proposals at every position of an output, in the sampler's mode.

        Raises InputError for a mode in which this mechanism is not recorded.
        """

    @property
    def max_depth(self) -> int | None:
        """Give the maximum number of tokens drafted in a round, None for no limit."""
        return None

    @property
    def facts(self) -> DrafterFacts:
        """Describe the drafter, for a trace's "drafter_facts"."""
        return {}

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        """List the modules that identify this drafter's weights, beside the target."""
        return ()

    def config(self, target: Any) -> Any:
        """Give the configuration with the sizes of its vocabulary and of its states."""
        return target.config

    def profiling_text(self, tokens: list[int]) -> list[int]:
        """Change random tokens so that it drafts after them."""
        return tokens


class InsideTargetKind(DrafterKind):
    """A drafter whose pass reads the target's caches or states, and therefore comes with a pass of the target.

    static : whether it has passes over static caches
    """

    static: ClassVar[bool] = True

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
        make = self.make_static_passes if self.static and static_serves(target) else self.make_passes
        whole, draft = make(target)
        return whole, DraftModel(draft, eos_token_ids, predictor)

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        return partial(target_cache_columns, *self.make_passes(target))


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
