"""What a drafting mechanism is to the rest of the program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch

from realrun.decode.acceptance_predictor import Predictor
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from realrun.proposals.recorder import Recorder
from specsim.errors import InputError

Origin = Literal["file", "model", "target"]


class DrafterKind(ABC):
    """A drafter of one mechanism with its weights. Methods are given the target that it drafts for.

    A new mechanism is a subclass in a file of its own and one line in `realrun.drafters.registry.DRAFTERS`.

    Attributes
    ----------
    name : str
        What traces and profiles call it.
    origin : {"file", "model", "target"}
        Where it comes from: a file that `realrun train` made, a model of its own (--draft-model), or nowhere, since
        any target has it.
    trees : bool
        Whether it can draft trees.
    has_states : bool
        Whether there are states behind its tokens that an acceptance predictor can read.
    paper_policy : str or None
        The policy that its paper drafts with, if it has one of its own.
    mask_groups : bool
        Whether each verified token brings mask tokens into the target's pass, which then are profiled as well.
    needs_own_pass : bool
        Whether it runs or reads the target's pass that it comes with, of which a decoder of several drafters has one.
    """

    name: ClassVar[str]
    origin: ClassVar[Origin] = "file"
    trees: ClassVar[bool] = True
    has_states: ClassVar[bool] = True
    # Facts that together with its settings decide a training; older files lack some.
    recipe: ClassVar[tuple[str, ...]] = (
        "objective", "optimizer", "schedule", "learning_rates", "loop", "text", "text_digests",
    )  # fmt: skip
    paper_policy: ClassVar[str | None] = None
    mask_groups: ClassVar[bool] = False
    needs_own_pass: ClassVar[bool] = True

    @classmethod  # noqa: B027 (some serve any target)
    def check_target(cls, target: Any) -> None:
        """InputError, before anything is trained or loaded, where no drafter of this kind can serve this target."""

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        """The drafter from its file's tensors and facts, which are empty where any target has it.

        Returns
        -------
        (target, drafter)
            The target itself, or a tuned copy of it that the drafter needs.
        """
        raise InputError(f"a drafter of kind {cls.name} does not come from a file; load it otherwise")

    @abstractmethod
    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        """The target's pass and, over it or beside it, the drafter that decodes for real; drafts end at eos tokens."""

    @abstractmethod
    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        """The pass that gives the proposals at every position of an output, in the sampler's mode.

        Raises InputError for a mode in which this mechanism is not recorded.
        """

    @property
    def max_depth(self) -> int | None:
        """Most tokens that it can draft in a round, None for no limit."""
        return None

    @property
    def facts(self) -> dict[str, Any]:
        """What it is made of, for a trace's "drafter_facts"."""
        return {}

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        """The modules that, after the target, tell this drafter's weights from another's."""
        return ()

    def config(self, target: Any) -> Any:
        """The configuration that has the sizes of its vocabulary and of its states."""
        return target.config

    def profiling_text(self, tokens: list[int]) -> list[int]:
        """Random tokens, changed so that it drafts after them."""
        return tokens
