"""EAGLE-3's drafter: a layer on fused low, middle and high states of the target (Li et al. 2025, arXiv:2503.01840).

A projection fuses the target's hidden states after a low, a middle and a high layer, [3 d -> d]. One decoder layer
reads a token's embedding beside the fused state of the position before it, each normed, [2 d], and adds to that state.
A norm and a head of its own, over a part of the vocabulary, make logits of the result. In a round that starts with
token n pending, the rows of tokens 1 .. n have fused states of the target before them, and the rows of drafted tokens
the drafter's own output, before its norm. The first token has no row because no state is before it.

Published drafters differ in the number of states they read; in the number of layers (those above the first are plain
decoder layers); in norms before the projection (`norm_before_fc`, `fc_norm`); in whether the first layer's residual is
the normed state (`norm_before_residual`); and in whether the next row reads the output after the norm (`norm_output`,
EAGLE-3.1).

References: vLLM's model_executor/models/llama_eagle3.py, whose weight names are used here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from realrun.drafters.eagle import EagleKind, EagleLM, RowsOfStates, StaticRowsOfStates
from realrun.drafters.kind import DrafterFacts, draft_vocabulary
from realrun.drafters.state_drafter import StateDrafterLM, StaticStateDrafter
from realrun.lm.head import Float32Head, PartialHead, gives_float32
from realrun.lm.layer_stack import PartsLM
from realrun.lm.llama import FusedParts, supported
from realrun.lm.split_target import SplitTarget
from realrun.lm.static.sizes import Rows
from realrun.lm.static.split import StaticSplitTarget
from realrun.lm.variants import core_of, layers_below
from specsim.cost.roofline.config import ModelConfig
from specsim.io.errors import InputError

STATES = 3  # low, middle and high, unless a checkpoint says otherwise
ARCHITECTURE, LAYERS_KEY = "LlamaForCausalLMEagle3", "eagle_aux_hidden_state_layer_ids"  # in config.json
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"  # the latter in files of others
OFFSETS, MASK = "d2t", "t2d"  # in the file: target token less draft token, int64 [n]; which are drafted, bool [V]
ROTARY = {  # what rotary embeddings of the supported types state
    "rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
}  # fmt: skip
# Where EAGLE-3 checkpoints differ from each other: the values that are supported, which are also the defaults.
PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_aux_hidden_state": True}
QWEN3 = "qwen3"  # the model type whose attention norms its queries and keys


def default_states(layers: int) -> tuple[int, ...]:
    """Choose the layers after which hidden states are read; with 7 layers or more as vLLM and SGLang do."""
    if layers < STATES:
        raise InputError(f"EAGLE-3 reads {STATES} states and this target has {layers} layers; train EAGLE instead")
    return (2, layers // 2, layers - 3) if layers >= 7 else (1, max(2, layers // 2), max(3, layers - 1))


def default_config(target: Any) -> ModelConfig:
    """Make the configuration of a drafter's layer: a Llama layer of the target's sizes."""
    config = target.config.get_text_config()
    last = getattr(config, "per_layer_config", [config])[-1]  # heads may differ from layer to layer
    size, heads = int(config.hidden_size), int(last.num_attention_heads)
    rotary = dict(getattr(config, "rope_parameters", None) or {})
    if rotary.get("rope_type") not in ("default", "llama3", "linear") or not rotary.keys() <= ROTARY:
        rotary = {"rope_type": "default"}
    theta = float(rotary.pop("rope_theta", 10_000.0))
    keys = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": int(getattr(last, "intermediate_size", 4 * size)),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(last, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(last, "head_dim", None) or size // heads),
        "hidden_act": "silu",
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": None if rotary["rope_type"] == "default" else rotary,
        "max_position_embeddings": int(config.max_position_embeddings),
        "vocab_size": int(config.vocab_size),
        "tie_word_embeddings": False,
        LAYERS_KEY: default_states(int(config.num_hidden_layers)),
    }
    return ModelConfig(keys)


class MidLayer:
    """Mixin of a decoder layer that reads an embedding and a hidden state [..., 2 d]; the latter is its residual.

    norm_before_residual : whether the residual is the hidden state after its norm
    """

    norm_before_residual = False
    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def widen(self, size: int, eps: float) -> None:
        """Widen the attention's projections to inputs [..., 2 d], and add the norm of the hidden state."""
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            setattr(self.self_attn, name, torch.nn.Linear(2 * narrow.in_features, narrow.out_features, bias=False))
        self.hidden_norm = LlamaRMSNorm(size, eps=eps)

    def opened(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual [..., d] and the attention's normed input [..., 2 d] of rows [..., 2 d]."""
        embedded, hidden = x.chunk(2, dim=-1)
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return normed if self.norm_before_residual else hidden, both

    def forward(self, hidden_states: torch.Tensor, **attention: Any) -> torch.Tensor:
        x, both = self.opened(hidden_states)
        x = x + self.self_attn(hidden_states=both, **attention)[0]
        added: torch.Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + added


class LlamaMidLayer(MidLayer, LlamaDecoderLayer):  # type: ignore[misc]
    """`MidLayer` of a Llama layer."""


class Qwen3MidLayer(MidLayer, Qwen3DecoderLayer):  # type: ignore[misc]
    """`MidLayer` of a Qwen3 layer."""


def plain_layer(config: Any, number: int) -> Any:
    """Make a decoder layer with this number, of the configuration's model type."""
    return (Qwen3DecoderLayer if isinstance(config, Qwen3Config) else LlamaDecoderLayer)(config, number)


def mid_layer(config: Any) -> Any:
    """Make a drafter's first layer; its configuration says what the residual is."""
    kind = Qwen3MidLayer if isinstance(config, Qwen3Config) else LlamaMidLayer
    layer = kind(config, 0)
    layer.widen(int(config.hidden_size), config.rms_norm_eps)
    layer.norm_before_residual = bool(getattr(config, "norm_before_residual", False))
    return layer


def layer_config(stated: ModelConfig) -> Any:
    """Make the configuration of a drafter's layers from its config.json."""
    config: Any = (Qwen3Config if stated.get("model_type") == QWEN3 else LlamaConfig)(**{**stated, "layer_types": None})
    config._attn_implementation = "sdpa"
    return config


class Fusion(torch.nn.Module):
    """Norms and projection that fuse k states of the target [..., k d] into one [..., d].

    The tensors have the names of checkpoints: fc, input_norm, fc_norm.
    config : of the drafter; states : k
    """

    def __init__(self, config: Any, states: int):
        super().__init__()
        size, eps = int(config.hidden_size), config.rms_norm_eps
        self.fc = torch.nn.Linear(states * size, size, bias=False)
        self.input_norm = LlamaRMSNorm(states * size, eps=eps) if getattr(config, "norm_before_fc", False) else None
        norms = [LlamaRMSNorm(size, eps=eps) for _ in range(states)]
        self.fc_norm = torch.nn.ModuleList(norms) if getattr(config, "fc_norm", False) else None

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the fused state [..., d]."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, states.chunk(len(self.fc_norm), dim=-1), strict=True)
            states = torch.cat([norm(part) for norm, part in parts], dim=-1)
        fused: torch.Tensor = self.fc(states)
        return fused


class Eagle3(Fusion):
    """The trained modules, under the names of published checkpoints.

    config : of the layer, as config.json of a checkpoint has it; by default of the target's sizes
    tokens : int64 [n], the tokens that it drafts; None for all
    states_after : layer counts, ascending: hidden states are read after so many of the target's layers
    """

    def __init__(
        self,
        target: Any,
        config: ModelConfig | None = None,
        seed: int = 0,
        tokens: torch.Tensor | None = None,
    ):
        stated = default_config(target) if config is None else config
        chosen = states_after(stated, target)
        _check(stated, target)
        # The target's positions: published drafters often state fewer, and their angles do not depend on it.
        positions = {"max_position_embeddings": int(target.config.get_text_config().max_position_embeddings)}
        sizes = layer_config(stated | {**positions, "vocab_size": int(target.config.vocab_size)})
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            super().__init__(sizes, len(chosen))
            self.midlayer = mid_layer(sizes)
            above = range(1, int(sizes.num_hidden_layers))
            self.layers = torch.nn.ModuleDict({str(number): plain_layer(sizes, number) for number in above})
        self.config_json, self.states_after, self.config = stated, chosen, sizes
        self.norm = LlamaRMSNorm(int(sizes.hidden_size), eps=sizes.rms_norm_eps)
        self.to(target.device, target.dtype)
        self.norm.load_state_dict(target.model.norm.state_dict(), strict=False)  # trains faster, like the head's start
        self.draft_only(target, tokens)

    def draft_only(self, target: Any, tokens: torch.Tensor | None) -> None:
        """Draft these tokens, int64 [n], None for all; the head begins as the target's."""
        weight = target.get_output_embeddings().weight.detach()
        weight = (weight if tokens is None else weight[tokens.to(weight.device)]).to(self.fc.weight.dtype, copy=True)
        kind = Float32Head if gives_float32(target) else torch.nn.Linear
        self.tokens, self.lm_head = tokens, kind(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.lm_head.weight = torch.nn.Parameter(weight)

    def fused(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Make the layer's input [..., 2 d] of embeddings of tokens and the hidden states before them, [..., d]."""
        return torch.cat([embedded, hidden], dim=-1)

    def whole(self, target: Any) -> Any:
        """Make a model of these layers, the target's embedding, and a head over the target's vocabulary."""
        with torch.device("meta"):
            model: Any = (Qwen3ForCausalLM if isinstance(self.config, Qwen3Config) else LlamaForCausalLM)(self.config)
        inner = model.model
        inner.embed_tokens, inner.norm = target.get_input_embeddings(), self.norm
        inner.layers = torch.nn.ModuleList([self.midlayer, *self.layers.values()])
        inner.rotary_emb = LlamaRotaryEmbedding(self.config).to(target.device)
        size = int(self.config.vocab_size)
        model.lm_head = self.lm_head if self.tokens is None else PartialHead(self.lm_head, self.tokens, size)
        return model.eval()


def states_after(facts: ModelConfig, target: Any) -> tuple[int, ...]:
    """Find the layers after which a checkpoint's drafter reads hidden states; InputError if it names none that fit.

    vLLM's key counts layers; SGLang's, which is nested, numbers the layers whose output is read, from 0.
    """
    layers = int(target.config.num_hidden_layers)
    counts, numbers = facts.get(LAYERS_KEY), (facts.get("eagle_config") or {}).get(LAYERS_KEY)
    chosen = tuple(counts or [number + 1 for number in numbers or ()]) or default_states(layers)
    if list(chosen) != sorted({*chosen}) or not 0 <= chosen[0] <= chosen[-1] <= layers:
        raise InputError(
            f"EAGLE-3 states after {', '.join(map(str, chosen))} of {layers} layers; give different numbers in "
            "ascending order, and the target that the drafter was trained for"
        )
    return chosen


def _check(facts: ModelConfig, target: Any) -> None:
    stated = {**(facts.get("eagle_config") or {}), **facts}
    for key, value in PLAIN.items():
        if stated.get(key, value) != value:
            raise InputError(f"the EAGLE-3 drafter has {key} {stated[key]!r}, only {value!r} is supported")
    size = int(target.config.get_text_config().hidden_size)
    if (stated["hidden_size"], stated.get("target_hidden_size") or size) != (size, size):
        raise InputError(
            f"the EAGLE-3 drafter has hidden size {stated['hidden_size']}, this target {size}; give the target that "
            "it was trained for"
        )


def vocabulary_tables(tokens: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """Make the two tables of a checkpoint that drafts these tokens, int64 [n] ascending, of `size` tokens."""
    mask = torch.zeros(size, dtype=torch.bool)
    mask[tokens] = True
    return {OFFSETS: tokens - torch.arange(len(tokens)), MASK: mask}


def cut_vocabulary(tensors: dict[str, torch.Tensor], size: int, *names: str) -> torch.Tensor | None:
    """Cut the head to the `size` tokens of the target, in place, and remove the two tables of the vocabulary.

    names : tensors with a row for each drafted token; without the first, all tokens are drafted

    Returns the drafted tokens, int64 [n]; None for all.
    """
    offsets, _ = tensors.pop(OFFSETS, None), tensors.pop(MASK, None)
    if names[0] not in tensors:
        return None
    rows = len(tensors[names[0]])
    if offsets is None and rows < size:
        raise ValueError(f"{names[0]} has {rows} of {size} tokens, and {OFFSETS}, which names them, is missing")
    tokens = torch.arange(rows) + (0 if offsets is None else offsets.long())
    known = tokens < size  # the target's vocabulary ends where its tokenizer's does, without padding
    for name in names:
        if name in tensors:
            tensors[name] = tensors[name][known]
    tokens = tokens[known]
    return None if len(tokens) == size else tokens


class Eagle3LM(RowsOfStates, EagleLM):
    """The drafter's pass over a target that keeps its hidden states after several of its layers."""

    def __init__(self, target: SplitTarget, eagle: Eagle3):
        model = eagle.whole(target.model)
        self.eagle, self.norm, self.head = eagle, eagle.norm, model.lm_head
        StateDrafterLM.__init__(self, target, model, FusedParts(model), model.model.layers)

    def _features_of(self, states: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.eagle.fuse(states)
        return features

    def handed_on(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x) if getattr(self.eagle.config, "norm_output", False) else x
        return normed

    def finish(self, x: torch.Tensor, keep: int = 0) -> torch.Tensor:
        return PartsLM.finish(self, x, keep)


class StaticEagle3(StaticRowsOfStates):
    """`Eagle3LM` over static caches."""

    def __init__(self, target: StaticSplitTarget, eagle: Eagle3):
        self.fc = eagle.fuse
        StaticStateDrafter.__init__(self, target, eagle.whole(target.model))
        self.norm_after = self.norm_out
        self._keep_features(eagle.fused)

    def _state_input(self, rows: Rows) -> torch.Tensor:
        return self.fuse(self._embedded(rows), self.fc(self.target.states[rows.slots]))


@dataclass(frozen=True, eq=False)
class Eagle3Kind(EagleKind):
    """Its file holds the tensors of a published checkpoint, and the checkpoint's config.json as fact "config"."""

    name: ClassVar[str] = "eagle3"

    @property
    def passes(self) -> tuple[Any, Any]:
        return Eagle3LM, StaticEagle3

    @property
    def static(self) -> bool:  # type: ignore[override]
        return not self.eagle.layers and not getattr(self.eagle.config, "norm_output", False)

    @classmethod
    def check_target(cls, target: Any) -> None:
        super().check_target(target)
        default_states(int(core_of(target).config.num_hidden_layers))

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        own, size = dict(tensors), int(target.config.vocab_size)
        embedding = own.pop(EMBEDDING, None)
        if embedding is not None:
            theirs = target.get_input_embeddings().weight
            if not torch.allclose(embedding[:size].to(theirs), theirs, rtol=0.01, atol=1e-4):  # in 16 bits
                raise InputError("the EAGLE-3 drafter has other embeddings than this target; give its own target")
        eagle = Eagle3(target, ModelConfig(facts["config"]), tokens=cut_vocabulary(own, size, HEAD))
        eagle.load_state_dict(own)
        if not supported(eagle.whole(target)):
            raise InputError(
                f"the EAGLE-3 drafter has rotary embeddings {facts['config'].get('rope_scaling')}; only plain, linear "
                "and llama3 ones are supported"
            )
        return target, cls(eagle.eval())

    @property
    def facts(self) -> DrafterFacts:
        return {"states_after": list(self.eagle.states_after), **draft_vocabulary(self.eagle.tokens)}

    def splits(self, target: Any) -> Sequence[int]:
        return [layers_below(target, layers) for layers in self.eagle.states_after]
