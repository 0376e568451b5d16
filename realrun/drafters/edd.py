"""EDD, the Effective Draft Decoder: a layer that reads the target's states as soft prompts ("Faster Speculative
Decoding via Effective Draft Decoder with Pruned Candidate Tree", section 3.1).

It has the target's structure with a single layer; embedding and head start as copies of the target's. In a round that
starts with token n pending, it sees the target's states h_0 .. h_{n-1}, which come from a layer a few below the last,
and behind them the embeddings of the pending token and of the tokens that it has drafted. States and embeddings stand
at the positions of their tokens (errata B8 to B10).

The same decoder without the states is the paper's VDM, an independent draft model.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedModel

from realrun.drafters.independent import IndependentKind
from realrun.drafters.kind import DRAFT_TOKENS, DrafterFacts, InsideTargetKind, Origin, draft_tokens, draft_vocabulary
from realrun.drafters.state_drafter import STATE_ROWS, StateDrafterLM, StatePass, StaticStateDrafter
from realrun.lm.cached import CachedLM
from realrun.lm.head import partial_head, tokens_of_head
from realrun.lm.layer_stack import model_parts
from realrun.lm.number_type import cast_like, in_number_type, number_type
from realrun.lm.split_target import SplitTarget
from realrun.lm.static.llama import StaticLlama
from realrun.lm.static.sizes import Rows
from realrun.lm.static.split import StaticSplitTarget
from realrun.lm.variants import config_of_layers, layers_below
from specsim.io.errors import InputError

LAYERS_ABOVE = 3  # of the fourth-to-last state, of a list that starts with the embeddings: 29 of 32 layers below it

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # in the file


def default_split(target: Any) -> int:
    """Choose how many layers lie below the states that EDD reads: all but 3, at least 1."""
    return max(1, int(target.config.num_hidden_layers) - LAYERS_ABOVE)


def one_layer_model(target: Any, seed: int = 0, *, like: int | None = None) -> PreTrainedModel:
    """Make a model of the target's kind: a single random layer, and copies of its embedding, final norm and head.

    like : number of the target's layer whose structure it copies. By default it has the attention type of the last
        layer, and a dense MLP if the target's first layers are dense and the others mixtures of experts
    """
    last = len(target.model.layers) - 1
    number = last if like is None else like % (last + 1)
    config = config_of_layers(target.config, [number])
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model: Any = type(target)(config)
        theirs = target.model.layers[number]
        if like is not None and _shapes(model.model.layers[0]) != _shapes(
            theirs
        ):  # the layer's structure depends on its number
            layer = type(theirs)(target.config, number)
            layer.apply(model._init_weights)
            layer.self_attn.layer_idx = 0
            model.model.layers[0] = layer
    model = in_number_type(cast_like(model, target), number_type(target))
    own = model.state_dict()
    with torch.no_grad():
        for name, value in target.state_dict().items():
            if name in own and ".layers." not in name:
                own[name].copy_(value)
    return model.eval()


def _shapes(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}


def check_split(target: Any, split: int) -> None:
    """Raise InputError unless the target has states after this many layers."""
    depth = int(target.config.num_hidden_layers)
    if not 1 <= split <= depth:
        raise InputError(f"states after {split} of {depth} layers; choose 1 to {depth}")


def share_vocabulary(model: Any, target: Any, tokens: torch.Tensor | None = None) -> None:
    """Give the model the target's embedding and head in place of its own; the head of these tokens, None for all."""
    model.set_input_embeddings(target.get_input_embeddings())
    model.set_output_embeddings(partial_head(target.get_output_embeddings(), tokens))


def own_state(model: Any, *, shared: bool = False) -> dict[str, torch.Tensor]:
    """Collect the model's tensors, each once: without the head if it is tied to the embedding.

    shared : whether embedding and head are the target's and left out
    """
    state: dict[str, torch.Tensor] = model.state_dict()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    left_out = (EMBEDDING, HEAD) if shared else (HEAD,) if tied else ()
    return {name: value for name, value in state.items() if name not in left_out}


def load_own_state(model: Any, tensors: Mapping[str, torch.Tensor], target: Any) -> None:
    """Load what `own_state` collected; RuntimeError if it does not fit. target : the one whose vocabulary is shared"""
    if EMBEDDING not in tensors:
        inner = {name: tensor for name, tensor in tensors.items() if name != DRAFT_TOKENS}
        own = {EMBEDDING: model.get_input_embeddings().weight, HEAD: model.get_output_embeddings().weight}
        model.load_state_dict(own | inner)
        share_vocabulary(model, target, draft_tokens(tensors))
        return
    whole = dict(tensors)
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        whole[HEAD] = whole[EMBEDDING]
    model.load_state_dict(whole)


class EffectiveDraftDecoderLM(StateDrafterLM):
    """The decoder's pass; state rows are soft prompts, of which only keys and values matter."""

    def __init__(self, target: SplitTarget, model: Any):
        self.norm, self.head = model.model.norm, model.get_output_embeddings()
        super().__init__(target, model, model_parts(model), model.model.layers)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        start, end = self.length, self.length + len(tokens)
        known = min(max(self.target.length - start, 0), len(tokens))
        if known:
            self.state_rows = start + known
            self.stack.fill(self.target.states[start : self.state_rows], start, slice(start, self.state_rows))
        drafted = tokens[known:]
        if not drafted:
            return self._no_logits()
        first = end - len(drafted)
        mask = self.parts.causal_mask(len(drafted), end)
        return self.finish(self.stack.run(self.parts.embed(drafted), first, slice(first, end), mask), keep)

    def _draft_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, roots: bool
    ) -> torch.Tensor:
        start, at = self.length + self.nodes, torch.tensor(positions, device=self.device)
        mask = self.parts.tree_mask(seen, start + len(tokens))
        return self.finish(self.stack.run(self.parts.embed(tokens), start, at, mask), keep=0)


class StaticDraftDecoder(StaticStateDrafter):
    """`EffectiveDraftDecoderLM` over static caches."""

    def _state_input(self, rows: Rows) -> torch.Tensor:
        return self.target.states[rows.slots]

    def _open(self, tokens: Sequence[int]) -> tuple[Sequence[int], int, Hashable]:
        start = self.length
        known = min(max(self.target.length - start, 0), len(tokens))
        if known:
            self.state_rows = start + known
        variant = StatePass(self._prepare_state_rows(tokens[:known], start), of_state=False)
        return tokens[known:], start + known, variant

    def _variants(self, n: int) -> Sequence[Hashable]:
        return tuple(StatePass(rows, of_state=False) for rows in ((0, *STATE_ROWS) if n == 1 else (0,)))

    def _input(self, rows: Rows, variant: Hashable) -> torch.Tensor:
        assert isinstance(variant, StatePass)
        if variant.rows:
            self._fill_state_rows(variant)
        return super()._input(rows, variant)


@dataclass(frozen=True, eq=False)
class EDDKind(InsideTargetKind):
    """The decoder as a model, and how many of the target's layers lie below the states that it reads.

    Its file holds `own_state` of the decoder, without embedding and head if they are the target's, and that number as
    fact "states_after".
    """

    decoder: Any
    split: int

    name: ClassVar[str] = "edd"
    paper_policy: ClassVar[str | None] = "pct"

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        decoder = one_layer_model(target, like=-1)
        load_own_state(decoder, tensors, target)
        check_split(target, facts["states_after"])
        return target, cls(decoder, facts["states_after"])

    def make_passes(self, target: Any) -> tuple[SplitTarget, CachedLM]:
        split = SplitTarget(target, layers_below(target, self.split))
        return split, EffectiveDraftDecoderLM(split, self.decoder)

    def make_static_passes(self, target: Any) -> tuple[StaticLlama, StaticLlama]:
        static = StaticSplitTarget(target, layers_below(target, self.split))
        return static, StaticDraftDecoder(static, self.decoder)

    @property
    def facts(self) -> DrafterFacts:
        return {"states_after": self.split, **draft_vocabulary(tokens_of_head(self.decoder))}

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (self.decoder,)


class VDMKind(IndependentKind):
    """The same decoder trained without states: an independent model, which its file holds as EDD's does."""

    origin: ClassVar[Origin] = "file"

    @classmethod
    def check_target(cls, target: Any) -> None:
        model_parts(target)

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        decoder = one_layer_model(target, like=0)
        load_own_state(decoder, tensors, target)
        return target, cls(decoder)

    @property
    def facts(self) -> DrafterFacts:
        return draft_vocabulary(tokens_of_head(self.model))
