"""EESD's drafter: the target's first N layers, then an early-exit layer with its own norm and head.

    p(y_t) = softmax(W^T RMSNorm(Transformer^e(H_t^N)))      (Liu et al. 2024, Eq. 1)

Keys, values and states of the first N layers are the target's own (`realrun.lm.split_target`), so that drafted tokens
pass through these layers once. The exit layer has a cache of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping, Sequence
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
from realrun.drafters.kind import (
    DRAFT_TOKENS,
    DrafterFacts,
    InsideTargetKind,
    StaticInsideTarget,
    draft_tokens,
    draft_vocabulary,
)
from realrun.lm.cached import CachedLM
from realrun.lm.choice import static_serves
from realrun.lm.head import partial_head, tokens_of_head
from realrun.lm.layer_stack import PartsLM
from realrun.lm.split_target import RowsAhead, SplitTarget
from realrun.lm.static.llama import StaticLlama
from realrun.lm.static.sizes import Rows
from realrun.lm.static.split import StaticSplitTarget
from realrun.lm.variants import layers_below, with_layers
from realrun.proposals.recorder import Recorder
from specsim.io.errors import InputError
from specsim.policy.tree.base import TreePolicy


class EarlyExit(torch.nn.Module):
    """The modules that EESD trains: E exit layers, a norm and a head, above the first N layers of the target.

    layers : N
    exit_layers : E; with 0 the norm and the head stand on the first N layers alone
    shared : whether the head is the target's own, and no part of the state
    tokens : int64 [n], the tokens that a shared head drafts; None for all
    """

    def __init__(
        self,
        target: Any,
        layers: int,
        exit_layers: int = 1,
        shared: bool = False,
        tokens: torch.Tensor | None = None,
    ):
        super().__init__()
        depth = len(target.model.layers)
        if not 1 <= layers < depth:
            raise InputError(f"an early exit after {layers} of {depth} layers; choose 1 to {depth - 1}")
        if not 0 <= exit_layers <= depth - layers:
            raise InputError(f"{exit_layers} early-exit layers; choose 0 to {depth - layers}")
        self.split = layers
        # Initialised from the target's last layers, its norm and its head, as in the paper.
        self.layers = copy.deepcopy(target.model.layers[depth - exit_layers :])
        for number, layer in enumerate(self.layers):
            layer.self_attn.layer_idx = layers + number
        self.norm = copy.deepcopy(target.model.norm)
        head = target.get_output_embeddings()
        if shared:
            vars(self)["head"] = partial_head(head, tokens)  # no child, whose parameters would be trained and saved
        else:
            self.head = copy.deepcopy(head)


def as_model(target: Any, early_exit: EarlyExit) -> PreTrainedModel:
    """Make a language model of N + E layers of the drafter, which shares the target's embedding and first N layers.

    This model can be recorded as an independent drafter is, at every position at once.
    """
    split, exits, config = early_exit.split, len(early_exit.layers), copy.deepcopy(target.config)
    config.num_hidden_layers = split + exits
    if getattr(config, "layer_types", None):
        types = config.layer_types
        config.layer_types = [*types[:split], *types[len(types) - exits :]]
    config.tie_word_embeddings = False
    model = with_layers(target, [*target.model.layers[:split], *early_exit.layers], config)
    model.model.norm, model.lm_head = early_exit.norm, early_exit.head
    return model


class EarlyExitLM(PartsLM):
    """The drafter's pass over the states of a split target; `length` counts the slots of the exit layer.

    shared : number of the model's layers that the target runs, perhaps with identity blocks behind each
    """

    def __init__(self, target: SplitTarget, model: Any, shared: int):
        self.target, self.parts = target, target.parts
        self.exit = target.parts.stack(model.model.layers[shared:])
        self.norm, self.head = model.model.norm, model.get_output_embeddings()
        super().__init__(model)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        target, parts = self.target, self.target.parts
        start, n = self.length, len(tokens)
        known = target.length + len(target.ahead) - start
        if known < n:
            target.feed_ahead(tokens[known:])
        states = target.states[start : start + n]
        x = self.exit.run(states, start, slice(start, start + n), parts.causal_mask(n, start + n))
        return self.finish(x, keep)

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        target = self.target
        start, n = self.length + self.nodes, len(tokens)
        positions = [self.length + depth for depth in depths]
        target.feed_nodes_ahead(tokens, positions, visible)
        at, mask = torch.tensor(positions, device=self.device), target.parts.tree_mask(visible, start + n)
        return self.finish(self.exit.run(target.states[start : start + n], start, at, mask), keep=0)

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


class StaticEarlyExit(StaticInsideTarget):
    """`EarlyExitLM` over static caches.

    A pass's variant is how many of its first rows have been through the target's lower layers; the others run through
    them in the same pass.
    """

    def __init__(self, target: StaticSplitTarget, model: Any, shared: int):
        self.target = target
        target.runs_ahead = True
        super().__init__(target, with_layers(model, model.model.layers[shared:]))

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        self.target.reserve(length)
        super().reserve(length)

    def warm(self, sizes: Iterable[int], length: int = 0, tree_nodes: int = 0) -> None:
        if tree_nodes:
            self.reserve(length)
            self.target.warm_lower(tree_nodes)
        super().warm(sizes, length, tree_nodes)

    def _open(self, tokens: Sequence[int]) -> tuple[Sequence[int], int, Hashable]:
        target = self.target
        known = min(target.length + len(target.ahead) - self.length, len(tokens))
        target.ahead += tokens[known:]
        return tokens, self.length, known

    def _variants(self, n: int) -> Sequence[Hashable]:
        return (0, n - 1) if n > 1 else (0,)

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        assert len(self.target.ahead) == 1
        logits = super()._forward_nodes(tokens, depths, visible)
        self.target.nodes_ahead += len(tokens)
        return logits

    def _input(self, rows: Rows, variant: Hashable) -> torch.Tensor:
        states: torch.Tensor = self.target.lower_states(rows, variant)
        return states

    def _prompt(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        start, end, target = self.length, self.length + len(tokens), self.target
        known = target.length + len(target.ahead) - start
        if known < len(tokens):
            target.prompt_ahead(tokens[known:])
        _, hidden = self.stack.prompt(target.states[start:end], start, self.norm_out)
        self.hidden = hidden[-keep:].clone() if keep else hidden
        return self.logits_of(self.hidden)


@dataclass(frozen=True, eq=False)
class EESDKind(InsideTargetKind):
    """An early exit as a model (`as_model`), and N, the number of the target's layers that it shares.

    Its file holds the state of `EarlyExit`, without a head if that is the target's; facts "layers" (N) and
    "exit_layers" (E).
    """

    model: Any
    split: int

    name: ClassVar[str] = "eesd"
    paper_policy: ClassVar[str | None] = "cali_ts"

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        shared, tokens = "head.weight" not in tensors, draft_tokens(tensors)
        early_exit = EarlyExit(target, facts["layers"], facts["exit_layers"], shared, tokens)
        early_exit.load_state_dict({name: tensor for name, tensor in tensors.items() if name != DRAFT_TOKENS})
        return target, cls(as_model(target, early_exit.eval()), early_exit.split)

    def make_passes(self, target: Any) -> tuple[SplitTarget, CachedLM]:
        split = SplitTarget(target, layers_below(target, self.split))
        return split, EarlyExitLM(split, self.model, self.split)

    def make_static_passes(self, target: Any) -> tuple[StaticLlama, StaticLlama]:
        static = StaticSplitTarget(target, layers_below(target, self.split))
        return static, StaticEarlyExit(static, self.model, self.split)

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        split: Any
        split, draft = self.make_static_passes(target) if static_serves(target) else self.make_passes(target)
        return split, EarlyExitDrafter(split, draft, eos_token_ids, predictor)

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        """Record the independent model of the same layers, which makes the same proposals."""
        return IndependentKind(self.model).make_recorder(target, sampler)

    @property
    def facts(self) -> DrafterFacts:
        exits = int(self.model.config.num_hidden_layers) - self.split
        return {"layers": self.split, "exit_layers": exits, **draft_vocabulary(tokens_of_head(self.model))}

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (self.model,)
