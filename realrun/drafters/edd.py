"""EDD, the Effective Draft Decoder: one layer that reads the target's states as soft prompts ("Faster Speculative
Decoding via Effective Draft Decoder with Pruned Candidate Tree", section 3.1).

It has the target's structure with one layer; embedding and head start as copies of the target's. In a
round that starts with token n pending it sees the target's states h_0 .. h_{n-1}, those of a layer a few
below the last, and behind them the embeddings of the pending token and of what it has drafted.
States and embeddings stand at the positions of their tokens (errata B8 to B10).

The same decoder without the states is the paper's VDM, an independent draft model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedModel

from realrun.decode.acceptance_predictor import Predictor
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.drafters.kind import DrafterKind, Origin
from realrun.drafters.state_drafter import StateDrafterLM
from realrun.drafters.static.edd import StaticDraftDecoder
from realrun.lm.cached import CachedLM
from realrun.lm.layer_stack import model_parts
from realrun.lm.number_type import in_number_type, number_type
from realrun.lm.open import static_serves
from realrun.lm.split_target import SplitTarget
from realrun.lm.static.split import StaticSplitTarget
from realrun.lm.variants.block_expansion import layers_below
from realrun.proposals.recorder import Recorder
from realrun.proposals.target_cache import target_cache_recorder
from specsim.errors import InputError

LAYERS_ABOVE = 3  # of the fourth-to-last state, of a list that starts with the embeddings: 29 of 32 layers below it


def default_split(target: Any) -> int:
    """Layers below the states that EDD reads by default, at least one."""
    return max(1, int(target.config.num_hidden_layers) - LAYERS_ABOVE)


def one_layer_model(target: Any, seed: int = 0) -> PreTrainedModel:
    """A model of the target's kind with one random layer, and its embedding, final norm and head."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[-1:]
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model: Any = type(target)(config)
    model = in_number_type(model.to(target.device, target.dtype), number_type(target))
    own = model.state_dict()
    with torch.no_grad():
        for name, value in target.state_dict().items():
            if name in own and ".layers." not in name:
                own[name].copy_(value)
    return model.eval()


def check_split(target: Any, split: int) -> None:
    """InputError unless the target has so many layers and states."""
    depth = int(target.config.num_hidden_layers)
    if not 1 <= split <= depth:
        raise InputError(f"states after {split} of {depth} layers; choose 1 to {depth}")


def own_state(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors, each once: without a head that is the embedding itself."""
    state: dict[str, torch.Tensor] = model.state_dict()
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        state = {name: value for name, value in state.items() if name != "lm_head.weight"}
    return state


def load_own_state(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Take up what `own_state` gave; RuntimeError where it does not fit."""
    whole = dict(tensors)
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        whole["lm_head.weight"] = whole["model.embed_tokens.weight"]
    model.load_state_dict(whole)


class EffectiveDraftDecoderLM(StateDrafterLM):
    """The decoder's pass; given rows are soft prompts, of which only keys and values matter."""

    def __init__(self, target: SplitTarget, model: Any):
        self.norm, self.head = model.model.norm, model.get_output_embeddings()
        super().__init__(target, model, model_parts(model), model.model.layers)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        start, end = self.length, self.length + len(tokens)
        known = min(max(self.target.length - start, 0), len(tokens))
        if known:
            self.given = start + known
            self.stack.fill(self.target.states[start : self.given], start, slice(start, self.given))
        own = tokens[known:]
        if not own:
            return self._nothing()
        first = end - len(own)
        mask = self.pieces.causal_mask(len(own), end)
        return self._finish(self.stack.run(self.pieces.embed(own), first, slice(first, end), mask), keep)

    def _own_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, roots: bool
    ) -> torch.Tensor:
        start, at = self.length + self.nodes, torch.tensor(positions, device=self.device)
        mask = self.pieces.tree_mask(seen, start + len(tokens))
        return self._finish(self.stack.run(self.pieces.embed(tokens), start, at, mask), keep=0)

    def _finish(self, x: torch.Tensor, keep: int) -> torch.Tensor:
        hidden = self.pieces.normed(x[-keep:] if keep else x, self.norm)
        if self.keep_hidden:
            self.hidden = hidden
        return self.pieces.logits(hidden, self.head)


@dataclass(frozen=True, eq=False)
class EDDKind(DrafterKind):
    """The decoder as a model, and how many of the target's layers lie below the states that it reads.

    Its file holds `own_state` of the decoder; fact "states_after", that number.
    """

    decoder: Any
    split: int

    name: ClassVar[str] = "edd"
    paper_policy: ClassVar[str | None] = "pct"

    @classmethod
    def check_target(cls, target: Any) -> None:
        model_parts(target)

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        decoder = one_layer_model(target)
        load_own_state(decoder, tensors)
        check_split(target, facts["states_after"])
        return target, cls(decoder, facts["states_after"])

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        if static_serves(target):
            static = StaticSplitTarget(target, layers_below(target, self.split))
            return static, DraftModel(StaticDraftDecoder(static, self.decoder), eos_token_ids, predictor)
        split, lm = self._passes(target)
        return split, DraftModel(lm, eos_token_ids, predictor)

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        return target_cache_recorder(*self._passes(target), sampler)

    def _passes(self, target: Any) -> tuple[SplitTarget, EffectiveDraftDecoderLM]:
        split = SplitTarget(target, layers_below(target, self.split))
        return split, EffectiveDraftDecoderLM(split, self.decoder)

    @property
    def facts(self) -> dict[str, Any]:
        return {"states_after": self.split}

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
        decoder = one_layer_model(target)
        load_own_state(decoder, tensors)
        return target, cls(decoder)
