"""EESD's drafter: the target's first N layers, then an early-exit layer with its own norm and head.

    p(y_t) = softmax(W^T RMSNorm(Transformer^e(H_t^N)))      (Liu et al. 2024, Eq. 1)

Keys, values and states of the first N layers are the target's own (`realrun.lm.split_target`): what
is drafted needs no second run through them, in verification or after it. The exit layer has
a cache of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedModel

from realrun.decode.acceptance_predictor import Predictor
from realrun.decode.draft import Draft
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.drafters.kind import DrafterKind
from realrun.drafters.static.eesd import StaticEarlyExit
from realrun.lm.cached import CachedLM
from realrun.lm.layer_stack import model_parts
from realrun.lm.open import static_serves
from realrun.lm.split_target import RowsAhead, SplitTarget
from realrun.lm.static.split import StaticSplitTarget
from realrun.lm.variants.block_expansion import layers_below
from realrun.proposals.recorder import Recorder
from specsim.errors import InputError
from specsim.policy.tree.base import TreePolicy


class EarlyExit(torch.nn.Module):
    """What EESD trains: E exit layers, a norm and a head; as many layers of the target stay below.

    layers : int, N; with no exit layer (E = 0) the norm and the head stand on the first N layers alone
    """

    def __init__(self, target: Any, layers: int, exit_layers: int = 1):
        super().__init__()
        depth = len(target.model.layers)
        if not 1 <= layers < depth:
            raise InputError(f"an early exit after {layers} of {depth} layers; choose 1 to {depth - 1}")
        if not 0 <= exit_layers <= depth - layers:
            raise InputError(f"{exit_layers} early-exit layers; choose 0 to {depth - layers}")
        self.split = layers
        # Initialised from the target's last layers, its norm and its head, as the paper has it.
        self.layers = copy.deepcopy(target.model.layers[depth - exit_layers :])
        for number, layer in enumerate(self.layers):
            layer.self_attn.layer_idx = layers + number
        self.norm = copy.deepcopy(target.model.norm)
        self.head = copy.deepcopy(target.get_output_embeddings())


def as_model(target: Any, early_exit: EarlyExit) -> PreTrainedModel:
    """The drafter as a language model of N + E layers, which shares the target's embedding and first N layers.

    What an independent drafter can do, such as being recorded at every position at once, this model can.
    """
    model = copy.copy(target)
    model._modules = dict(target._modules)
    model.config = copy.deepcopy(target.config)
    model.config.num_hidden_layers = early_exit.split + len(early_exit.layers)
    if getattr(model.config, "layer_types", None):
        types, exits = model.config.layer_types, len(early_exit.layers)
        model.config.layer_types = [*types[: early_exit.split], *types[len(types) - exits :]]
    model.config.tie_word_embeddings = False
    inner = copy.copy(target.model)
    inner._modules = dict(target.model._modules)
    inner.config = model.config
    inner.layers = torch.nn.ModuleList([*target.model.layers[: early_exit.split], *early_exit.layers])
    inner.norm = early_exit.norm
    model.model, model.lm_head = inner, early_exit.head
    return model


class EarlyExitLM(CachedLM):
    """The drafter's pass over what the split target holds; `length` counts the slots of the exit layer.

    shared : the model's layers that the target runs, perhaps with identity blocks behind each
    """

    def __init__(self, target: SplitTarget, model: Any, shared: int):
        self.target = target
        self.exit = target.pieces.stack(model.model.layers[shared:])
        self.norm, self.head = model.model.norm, model.get_output_embeddings()
        super().__init__(model)

    def reset(self) -> None:
        self.length = self.nodes = 0
        self.hidden = None

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        target, pieces = self.target, self.target.pieces
        start, n = self.length, len(tokens)
        known = target.length + len(target.ahead) - start
        if known < n:
            target.feed_ahead(tokens[known:])
        states = target.states[start : start + n]
        x = self.exit.run(states, start, slice(start, start + n), pieces.causal_mask(n, start + n))
        return self._finish(x, keep)

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        target = self.target
        start, n = self.length + self.nodes, len(tokens)
        positions = [self.length + depth for depth in depths]
        target.feed_nodes_ahead(tokens, positions, visible)
        at, mask = torch.tensor(positions, device=self.device), target.pieces.tree_mask(visible, start + n)
        return self._finish(self.exit.run(target.states[start : start + n], start, at, mask), keep=0)

    def _finish(self, x: torch.Tensor, keep: int) -> torch.Tensor:
        hidden = self.target.pieces.normed(x[-keep:] if keep else x, self.norm)
        if self.keep_hidden:
            self.hidden = hidden
        return self.target.pieces.logits(hidden, self.head)

    def _check_trees(self) -> None:
        """As the target."""

    def _crop(self, end: int) -> None:
        """The buffers need not know where the tokens end."""

    def _move_nodes(self, path: Sequence[int]) -> None:
        self.exit.move([self.length + node for node in path], self.length)


class EarlyExitDrafter(DraftModel):
    """Drafts as an independent model of N + E layers would, and tells the target which nodes it has fed already."""

    def __init__(self, target: RowsAhead, lm: CachedLM, eos_token_ids: Sequence[int], predictor: Predictor | None):
        super().__init__(lm, eos_token_ids, predictor)
        self.target = target

    def propose_tree(
        self,
        tokens: Sequence[int],
        context: RoundContext,
        policy: TreePolicy,
        state: Any,
    ) -> tuple[Draft, Any]:
        draft, state = super().propose_tree(tokens, context, policy, state)
        self.target.row_nodes = self._grower.slot[draft.nodes].tolist()
        return draft, state


@dataclass(frozen=True, eq=False)
class EESDKind(DrafterKind):
    """An early exit as a model (`as_model`), and N, the target's layers that it shares.

    Its file holds the state of `EarlyExit`; facts "layers" (N) and "exit_layers" (E).
    """

    model: Any
    split: int

    name: ClassVar[str] = "eesd"
    paper_policy: ClassVar[str | None] = "cali_ts"

    @classmethod
    def check_target(cls, target: Any) -> None:
        model_parts(target)

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        early_exit = EarlyExit(target, facts["layers"], facts["exit_layers"])
        early_exit.load_state_dict(tensors)
        return target, cls(as_model(target, early_exit.eval()), early_exit.split)

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        if static_serves(target):
            static = StaticSplitTarget(target, layers_below(target, self.split))
            exit_pass = StaticEarlyExit(static, self.model, self.split)
            return static, EarlyExitDrafter(static, exit_pass, eos_token_ids, predictor)
        split = SplitTarget(target, layers_below(target, self.split))
        return split, EarlyExitDrafter(split, EarlyExitLM(split, self.model, self.split), eos_token_ids, predictor)

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        """An early exit proposes what an independent model of its layers would."""
        return IndependentKind(self.model).make_recorder(target, sampler)

    @property
    def facts(self) -> dict[str, Any]:
        return {"layers": self.split, "exit_layers": int(self.model.config.num_hidden_layers) - self.split}

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (self.model,)
