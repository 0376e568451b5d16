"""Read the shape of a decoder from its config.json, by the traits of its family.

``families.json`` lists the traits of each model_type; the keys of the config give the sizes. Traits:

"experts" : a mixture of experts in some layers at least
"two" : MLPs of two matrices, without a gate
"tied" : embedding and output head share weights unless the config says otherwise
"positions" : learned position embeddings
"latent" : multi-head latent attention
"sparse", "indexed" : an indexer selects the cached tokens, in all layers or in those that the config lists
"gate", "head-gate" : a gate on attention's output, one value per element or per head
"delta", "kda", "lightning", "mamba", "mamba2", "conv", "rg_lru" : the recurrent block that replaces attention
"beside" : the recurrent block runs in parallel with attention in each layer
"alone" : a layer has one block, a mixer or an MLP
"double" : a layer has two attention blocks and two MLPs, and experts in parallel with the second half
"compressed", "relative", "gemma4", "gemma3n" : rules of a single family
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from specsim.cost.roofline.config import INVALID, ModelConfig
from specsim.cost.roofline.shape import (
    Architecture,
    Attention,
    Block,
    Experts,
    Indexer,
    LatentAttention,
    Layer,
    LinearAttention,
    Mlp,
)
from specsim.io.errors import InputError
from specsim.io.json import checked
from specsim.io.names import nearest_names

FAMILIES = Path(__file__).parent / "families.json"
MAX_LAYERS = 10_000
# Keys under which configs store the same size.
HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_attention_groups")
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
DENSE = ("intermediate_size_mlp", "dense_intermediate_size", "prefix_dense_intermediate_size", "intermediate_size",
         "ffn_dim", "n_inner", "ffn_hidden_size")  # fmt: skip
EXPERT = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
COUNT = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts", "moe_top_k")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
SHARED_WIDTH = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
                "shared_experts_intermediate_size", "share_expert_dim")  # fmt: skip
WINDOW = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "attention_chunk_size")
FULL, SLIDING, LINEAR, INDEXED, SPARSE, HEAVY, MOE, MLP = (
    "full", "sliding", "linear", "indexed", "compressed sparse", "heavily compressed", "experts", "mlp",
)  # fmt: skip
KINDS = {
    name: kind
    for kind, names in {
        FULL: "full_attention attention global hybrid *",
        SLIDING: "sliding_attention chunked_attention local hybrid_sliding",
        LINEAR: "linear_attention mamba conv recurrent M",
        INDEXED: "indexed_attention minimax_m3_sparse deepseek_sparse_attention qwen_sparse_attention",
        SPARSE: "compressed_sparse_attention",
        HEAVY: "heavily_compressed_attention",
        MOE: "moe E",
        MLP: "mlp -",
    }.items()
    for name in names.split()
}
RECURRENT = frozenset({"delta", "kda", "lightning", "mamba", "mamba2", "conv", "rg_lru"})


class Families(NamedTuple):
    """What `families.json` says of each model_type.

    traits : of the supported ones
    refused : the reason why others are not supported
    full_every : each n-th layer has full attention; 0: none
    defaults : values of keys that a config.json leaves out, those of its class in transformers
    """

    traits: dict[str, frozenset[str]]
    refused: dict[str, str]
    full_every: dict[str, int]
    defaults: dict[str, dict[str, int]]


@cache
def families() -> Families:
    """Read `families.json`."""
    document = json.loads(FAMILIES.read_text())
    traits, refused = ({name: text for text, names in document[key].items() for name in names.split()}
                       for key in ("traits", "refused"))  # fmt: skip
    by_type = {name: frozenset(text.split()) for name, text in traits.items()}
    return Families(by_type, refused, document["full_every"], document["defaults"])


def architecture_from_config(config: ModelConfig, name: str = "") -> Architecture:
    """The shape in a config.json; InputError for missing keys or an unsupported model_type. name : default: its own"""
    config = ModelConfig(config, name or config.name)
    where, whole = config.where, ""
    if "text_config" in config:  # a multimodal model
        text = ModelConfig.from_json(config["text_config"], f"{config.name}: text_config")
        whole, outer = (
            str(config.get("model_type")),
            {key: config[key] for key in ("tie_word_embeddings",) if key in config},
        )
        config = ModelConfig({"model_type": config.get("model_type"), **text, **outer}, config.name)
    traits, refused, _, defaults = families()
    kind = whole if whole in refused else str(config.get("model_type"))
    if kind in refused:
        raise InputError(f"{where} has model_type {kind!r}, whose passes are not priced: {refused[kind]}")
    if kind not in traits:
        nearest = nearest_names(kind, [*traits])
        raise InputError(f"{where} has model_type {kind!r}, whose passes are not known; {nearest}")
    config = ModelConfig(defaults.get(kind, {}), config.name) | config
    try:
        return Reading(config, traits[kind]).architecture()
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{where}: its sizes contradict each other ({error}); {INVALID}") from error


class Reading:
    """The reader of one config.json. traits : those of its model_type"""

    def __init__(self, config: ModelConfig, traits: frozenset[str]):
        self.traits, self.kind = traits, str(config["model_type"])
        layers = config.get("num_layers")
        for part in (config.inner(key) for key in ("attn_config", "ffn_config", "sparse_attention_config")):
            config |= {key: value for key, value in part.items() if key not in ("model_type", "hidden_size")}
        if "double" in traits and layers is not None:  # its num_hidden_layers counts attention blocks
            config |= {"num_hidden_layers": layers}
        if linear := config.inner("linear_attn_config"):  # Kimi-Linear's keys
            names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim",
                     "short_conv_kernel_size": "linear_conv_kernel_dim"}  # fmt: skip
            config |= {new: linear[old] for old, new in names.items() if old in linear}
            config |= {"full_attn_idxs": [layer - 1 for layer in linear.get("full_attn_layers", [])]}
        self.config, self.where, self.size, self.listed = config, config.where, config.size, config.listed

    def architecture(self) -> Architecture:
        size = self.size
        self.hidden = size(*HIDDEN)
        heads_needed = not self.traits >= {"alone"} or self.kind == "nemotron_h"
        if not self.hidden or (heads_needed and not size(*HEADS)):
            raise InputError(f"{self.where}: hidden_size or the number of heads is 0; {INVALID}")
        kinds = self.kinds()
        count = len(kinds) if self.kind == "nemotron_h" else size(*LAYERS)
        if not count <= len(kinds) <= count + size("num_nextn_predict_layers", default=0):
            raise InputError(f"{self.where}: its layer types are of {len(kinds)} layers, not {count}; {INVALID}")
        layers = tuple(self.layer(place, kind, count) for place, kind in enumerate(kinds[:count]))
        experts = next((block for layer in layers for block in layer if isinstance(block, Experts)), None)
        # Drafters of models without a dense MLP have one as wide as all experts of a token together.
        dense = experts and experts.per_token * experts.intermediate_size + experts.shared_intermediate_size
        tables, projected = self.tables(count)
        return Architecture(
            name=self.config.name,
            hidden_size=self.hidden,
            vocab_size=size("vocab_size"),
            layers=layers,
            tied=bool(self.config.get("tie_word_embeddings", self.config.get("tie_embedding", "tied" in self.traits))),
            intermediate_size=size(*DENSE, default=dense or 4 * self.hidden),
            mtp_layer=self.mtp_layer(kinds[count:]),
            tables=tables,
            projected_width=projected,
            streams=size("hc_mult", "hc_count", default=1),
        )

    def kinds(self) -> list[str]:
        """The kind of each layer's attention or recurrent block, or of its only block."""
        if "compressed" in self.traits and (ratios := self.listed("compress_ratios", int)):
            return [{0: SLIDING, 4: SPARSE}.get(ratio, HEAVY) for ratio in ratios]
        for key in ("layer_types", "layers_block_type", "attention_layers", "hybrid_override_pattern"):
            listed = self.config.get(key)
            if isinstance(listed, str) and key == "hybrid_override_pattern":
                listed = [*listed]
            if isinstance(listed, list):
                kinds = [KINDS.get(str(kind), "") for kind in listed]
                unknown = [str(kind) for kind in listed if str(kind) not in KINDS]
                if unknown:
                    raise InputError(f"{self.where} has layers of unknown type {unknown[0]!r}; {INVALID}")
                return kinds
        count = self.size(*LAYERS)
        if count > MAX_LAYERS:
            raise InputError(f"{self.where} has {count} layers; give at most {MAX_LAYERS}")
        return [self._kind(place, count) for place in range(count)]

    def _kind(self, place: int, count: int) -> str:
        """The kind of a layer's attention or recurrent block, if the config does not list one per layer."""
        config, number = self.config, place + 1
        for key, zero, other in (("attn_type_list", LINEAR, FULL), ("hybrid_layer_pattern", FULL, SLIDING),
                                 ("sparse_attention_freq", FULL, INDEXED)):  # fmt: skip
            if flags := self.listed(key, int):
                return other if flags[place] else zero
        for key in ("full_attn_idxs", "attn_layer_indices"):
            if config.get(key) is not None:
                return FULL if place in self.listed(key, int) else LINEAR
        if blocks := self.listed("block_types"):
            return KINDS.get(blocks[place % len(blocks)], FULL)
        if "attn_layer_period" in config:
            return FULL if place % self.size("attn_layer_period") == self.size("attn_layer_offset") else LINEAR
        if "layer_group_size" in config:
            return FULL if number % self.size("layer_group_size") == 0 else LINEAR
        if "delta" in self.traits:
            return LINEAR if number % max(self.size("full_attention_interval", default=4), 1) else FULL
        if self.traits & {"mamba", "mamba2"} and "beside" not in self.traits:
            return LINEAR
        if self.traits & (RECURRENT - {"mamba", "mamba2"}):
            raise InputError(f"{self.where} has no layer_types, which say what layers have attention; {INVALID}")
        if "compressed" in self.traits:
            return HEAVY if place < 2 or place % 2 == 0 else SPARSE
        every = families().full_every.get(self.kind)
        for key in ("sliding_window_pattern", "global_attn_every_n_layers"):
            stated = config.get(key)
            every = stated if type(stated) is int else every
        if every is None or not self.window() or not config.get("use_sliding_window", True):
            return FULL
        if "gemma4" in self.traits and number == count:
            return FULL
        return FULL if every and number % every == 0 else SLIDING

    def window(self) -> int:
        return self.size(*WINDOW, default=0)

    def layer(self, place: int, kind: str, count: int) -> Layer:
        """The blocks of a layer."""
        overrides = {int(key): value for key, value in self.config.inner("per_layer_config").items()}
        config = self.config | overrides.get(place, {})
        if "alone" in self.traits:
            if kind in (MLP, MOE):
                return (self.mlp() if kind == MLP else self.experts(config),)
            return (self.linear() if kind == LINEAR else self.attention(config, kind, place),)
        mixer: Block = self.linear() if kind == LINEAR else self.attention(config, kind, place)
        if "double" in self.traits:  # experts run in parallel with the second half
            return (mixer, self.mlp(), mixer, self.mlp(), self.experts(config))
        also = (self.linear(),) if "beside" in self.traits else ()
        return (mixer, *also, *self.feed_forward(config, place, count))

    def attention(self, config: ModelConfig, kind: str, place: int) -> Attention | LatentAttention:
        size, traits, hidden = self.size, self.traits, self.hidden
        if kind == SLIDING:
            config |= {key[4:]: value for key, value in config.items() if key.startswith("swa_") and value}
            config |= config.inner("attention_other_setting")  # Step's
        elif "gemma4" in traits and "per_layer_config" not in config:
            config |= {"head_dim": size("global_head_dim", default=512)}
            if config.get("attention_k_eq_v", True) and config.get("num_global_key_value_heads"):
                config |= {"num_key_value_heads": size("num_global_key_value_heads")}
        per_layer = config.get("num_attention_heads_per_layer")
        heads = per_layer[place] if isinstance(per_layer, list) else config.size(*HEADS)
        head_dim = config.size(*HEAD_DIM, default=hidden // heads)
        index, window = self.index(kind, place), self.window() if kind == SLIDING else 0
        chunked = kind == SLIDING and self.kind == "llama4_text"
        if "latent" in traits:
            nope, rope = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
            if (rotated := self.listed("no_rope_layers", int)) and not rotated[place]:
                nope, rope = nope + rope, 0
            value_dim = config.size("v_head_dim", default=hidden // heads)
            rank = config.size("q_lora_rank", default=0)
            return LatentAttention(
                heads=heads,
                index=index,
                window=window,
                chunked=chunked,
                kv_rank=config.size("kv_lora_rank"),
                rope_dim=rope,
                query_rank=rank,
                nope_dim=nope,
                value_dim=value_dim,
                gate_width=self.gate(heads, value_dim),
                gate_rank=rank if self.kind == "axk2" else 0,  # projected from the queries' latent vector
                extra_width=self.extra_width(kind),
            )
        kv_heads = config.size(*KV_HEADS, default=heads)
        if self.kind == "mimo_v2_flash" and kind == SLIDING and "swa_num_key_value_heads" not in self.config:
            kv_heads *= 2  # as the class in transformers does
        if config.get("multi_query") and not config.get("new_decoder_architecture"):
            kv_heads = 1
        value_dim = config.size("v_head_dim", default=0)
        compressed = "compressed" in traits
        attention = Attention(
            heads=heads,
            index=index,
            window=self.window() if compressed else window,
            chunked=chunked,
            ratio=self.ratio(kind) if compressed else 0,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            gate_width=self.gate(heads, value_dim or head_dim),
            extra_width=self.extra_width(kind),
        )
        shared = size("num_kv_shared_layers", default=0)
        if shared and place >= size(*LAYERS) - shared:
            return replace(attention, values="shared")
        if compressed:
            query_rank, output_rank, groups = size("q_lora_rank"), size("o_lora_rank"), size("o_groups")
            return replace(
                attention, values="keys", query_rank=query_rank, output_rank=output_rank, output_groups=groups
            )
        if "gemma4" in traits and config.get("attention_k_eq_v") and kind == FULL:
            return replace(attention, values="projected keys")
        return attention

    def ratio(self, kind: str) -> int:
        """Tokens per entry of a compressed cache; 0: the cache is not compressed."""
        own = self.config.inner("compress_rates")
        usual = {SPARSE: ("compressed_sparse_attention", 4), HEAVY: ("heavily_compressed_attention", 128)}
        return own.size(usual[kind][0], default=usual[kind][1]) if kind in usual else 0

    def gate(self, heads: int, value_dim: int) -> int:
        """Width of the gate on attention's output; 0: no gate."""
        stated = self.config.get("use_attention_gate", self.config.get("gating", True))
        if not stated or not self.traits & {"gate", "head-gate"}:
            return 0
        return heads * value_dim if "gate" in self.traits or stated == "per-element" else heads

    def extra_width(self, kind: str) -> int:
        """Width of a layer's projections of the hidden state other than queries, keys and values."""
        size, traits, width = self.size, self.traits, 0
        if "hc_mult" in self.config:  # mixing of residual streams, before attention and before the MLP
            streams = size("hc_mult")
            mixes = 2 * streams if self.kind == "hy_v4" else (2 + streams) * streams
            width += 2 * streams * mixes
        if "hc_count" in self.config:
            streams, rank = size("hc_count"), size("hc_lowrank")
            width += 2 * streams * (2 * rank + streams)
        if kind in (SPARSE, HEAVY):
            head_dim, index_dim = size("head_dim"), size("index_head_dim")
            width += 4 * head_dim + 3 * index_dim if kind == SPARSE else 2 * head_dim
        if "relative" in traits:
            heads = size(*HEADS)
            width += size("d_rel") * heads + heads * (self.kind == "inkling2_text")
        if "index_kpool" in self.config and kind == INDEXED:
            width += size("index_head_dim")
        if self.kind == "axk2":  # gated norms; queries and gates read the latent vector before and after its norm
            made = size(*HEADS) * (size("qk_nope_head_dim") + size("qk_rope_head_dim") + size("v_head_dim"))
            width += 4 * size("gated_norm_rank") + size("q_lora_rank") * made // self.hidden
        width += 2 * size("hidden_size_per_layer_input", default=0) + 2 * size("laurel_rank", default=0)
        return width

    def index(self, kind: str, place: int) -> Indexer | None:
        """The indexer of a layer's attention; None: it attends to all tokens."""
        size, traits = self.size, self.traits
        if self.kind.startswith("minimax_m3") and kind == INDEXED:  # selects blocks of tokens
            top_k = size("index_block_size", "sparse_block_size") * size("index_topk_blocks", "sparse_topk_blocks")
            heads, dim = size("index_n_heads", "sparse_num_index_heads"), size("index_head_dim", "sparse_index_dim")
            return Indexer(top_k, heads, dim, key_bytes=2 * dim, weighted=False)
        if self.kind == "qwen4_exp_text" and kind in (INDEXED, FULL) and self.config.get("indexer_n_heads"):
            heads, dim, ratio = size("indexer_n_heads"), size("indexer_head_dim"), size("indexer_compress_ratio")
            return Indexer(size("indexer_budget"), heads, dim, ratio=ratio, key_bytes=2 * dim, weighted=False)
        always = "sparse" in traits and kind != SLIDING
        if not (always or kind == SPARSE or ("indexed" in traits and kind == INDEXED)):
            return None
        types, every = self.listed("indexer_types"), max(size("index_topk_freq", default=1), 1)
        since_first = max(place + 1 - size("index_skip_topk_offset", default=2), 0)
        dim, rank = size("index_head_dim"), size("q_lora_rank", default=0)
        return Indexer(
            top_k=size("index_topk"),
            heads=size("index_n_heads"),
            dim=dim,
            query_rank=rank,
            ratio=self.ratio(kind) or size("index_kpool", default=1),
            key_bytes=dim + 4,  # float8 with a scale in float32
            own=types[place : place + 1] != ["shared"] if types else since_first % every == 0,
        )

    def linear(self) -> LinearAttention:
        """The recurrent block of a layer."""
        size, hidden, kind = self.size, self.hidden, next(iter(self.traits & RECURRENT), "")
        state = inner_weights = 0
        products, kernel = 3, size("linear_conv_kernel_dim", "short_conv_kernel_size", "conv_kernel", default=4)
        match kind:
            case "delta":
                heads = size("linear_num_value_heads")
                output = heads * size("linear_value_head_dim")
                state = output * size("linear_key_head_dim")
                convolved = 2 * size("linear_num_key_heads") * size("linear_key_head_dim") + output
                inputs = convolved + output + 2 * heads
            case "kda":
                heads, dim = size("linear_num_heads", *HEADS), size("linear_head_dim", "head_dim")
                output, convolved = heads * dim, 3 * heads * dim
                state, inputs = output * dim, convolved + heads
                if self.kind == "bailing_hybrid":  # decays and gates projected from the hidden state
                    inputs += 2 * output
                else:  # projected from latent vectors
                    inputs, inner_weights = inputs + 2 * dim, 2 * dim * output
            case "lightning":
                heads = size(*HEADS)
                output = heads * size("head_dim", default=hidden // heads)
                state, convolved, inputs = output**2 // heads, 3 * output, 4 * output
                products, kernel = 2, 0
            case "mamba2":
                heads, products = size("mamba_n_heads", "mamba_num_heads", "num_heads"), 2
                keys = ("mamba_d_head", "mamba_head_dim", "head_dim")
                head = next((self.config[key] for key in keys if key in self.config), None)
                expanded = size("mamba_expand", "expand", default=2) * hidden
                output = size("mamba_d_ssm", default=heads * head if type(head) is int else expanded)
                width = size("mamba_d_state", "ssm_state_size", "state_size")
                state = output * width
                convolved = output + 2 * size("mamba_n_groups", "n_groups", default=1) * width
                inputs, kernel = output + convolved + heads, size("mamba_d_conv", "conv_kernel")
            case "mamba":
                output = size("intermediate_size") if "alone" in self.traits else size("mamba_expand") * hidden
                heads, products, convolved, inputs = output, 2, output, 2 * output
                width = size("mamba_d_state", "state_size")
                rank = size("mamba_dt_rank", "time_step_rank", default=-(-hidden // 16))
                state, kernel = output * width, size("mamba_d_conv", "conv_kernel")
                inner_weights = output * (rank + 2 * width) + rank * output + state
            case "conv":
                heads = output = convolved = hidden
                inputs, kernel = 3 * hidden, size("conv_L_cache")
            case "rg_lru":
                heads, products = size(*HEADS), 1
                state = output = convolved = size("lru_width", default=hidden)
                inputs, kernel, inner_weights = 2 * output, size("conv1d_width"), 2 * output**2 // heads
            case _:
                raise InputError(
                    f"{self.where} has recurrent layers, unlike other models of model_type {self.kind!r}; {INVALID}"
                )
        return LinearAttention(
            state_size=state,
            convolved_width=convolved,
            input_width=inputs + self.extra_width(LINEAR),
            output_width=output,
            kernel=kernel,
            products=products,
            inner_weights=inner_weights,
            heads=heads,
        )

    def mlp(self, width: int | None = None) -> Mlp:
        width = self.size(*DENSE, default=4 * self.hidden) if width is None else width
        return Mlp(width, 2 if "two" in self.traits else 3)

    def feed_forward(self, config: ModelConfig, place: int, count: int) -> Iterator[Block]:
        """The MLP of a layer or its mixture of experts."""
        if self.sparse(place, count):
            yield self.experts(config)
            return
        shared_cache = place >= count - self.size("num_kv_shared_layers", default=0)
        if self.kind == "recurrent_gemma":
            yield self.mlp(self.size("intermediate_size") // 2)
        elif self.kind.startswith("lfm2") and config.get("block_auto_adjust_ff_dim"):
            width = 2 * self.size("block_ff_dim", "intermediate_size") // 3
            width = int(width * float(config.get("block_ffn_dim_multiplier") or 1))
            multiple = self.size("block_multiple_of", default=256)
            yield self.mlp(multiple * -(-width // multiple))
        elif self.kind == "granitemoehybrid":
            yield self.mlp(self.size("shared_intermediate_size"))
        elif config.get("use_double_wide_mlp") and shared_cache:
            yield self.mlp(2 * self.size(*DENSE))
        else:
            widths = self.config.get("intermediate_size")
            yield self.mlp(widths[place] if isinstance(widths, list) else None)

    def sparse(self, place: int, count: int) -> bool:
        """Whether a layer has a mixture of experts instead of an MLP."""
        size, config = self.size, self.config
        if self.kind.startswith("gemma4"):
            return bool(config.get("enable_moe_block"))
        if "experts" not in self.traits or size(*COUNT, default=0) == 0:
            return False
        if kinds := self.listed("mlp_layer_types"):
            return bool(kinds[place] != "dense")
        if flags := self.listed("moe_layer_freq", int):
            return bool(flags[place])
        listed = config.get("moe_layers_enum")
        if isinstance(listed, str):
            return str(place) in listed.replace(" ", "").split(",")
        if moe_layers := self.listed("moe_layers", int):
            return place in moe_layers
        if "expert_layer_period" in config:
            return place % size("expert_layer_period") == size("expert_layer_offset")
        if "moe_layer_start_index" in config:
            end = config["moe_layer_end_index"]
            last = end if type(end) is int and end >= 0 else count
            within = size("moe_layer_start_index") <= place <= last
            return within and (place + 1) % max(size("moe_layer_interval", default=1), 1) == 0
        step = max(size("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", default=1), 1)
        first = size("first_k_dense_replace", "num_dense_layers", default=0)
        plain = place < first or place in self.listed("mlp_only_layers", int)
        return not plain and (place + 1) % step == 0

    def experts(self, config: ModelConfig) -> Experts:
        size = self.size
        own = {"routing": config["routing"]} if "routing" in config else {}
        probs = checked(config.get("router_probs", []), f"{self.where}: router_probs", list[float], invalid=INVALID)
        width = config.size(*EXPERT)
        shared = size(*SHARED, default=0) * width
        if self.kind in ("llama4_text", "hunyuan_v1_moe"):
            shared = width
        if self.kind.startswith("gemma4"):
            shared = size(*DENSE)
        stated = size(*SHARED_WIDTH, default=shared)
        count, per_token = config.size(*COUNT), config.size(*PER_TOKEN)
        return Experts(
            count=count,
            # Some of a token's experts may return their input (zero experts); this is the average number of others.
            per_token=per_token * count // (count + size("zero_expert_num", default=0)),
            intermediate_size=width,
            shared_intermediate_size=stated,
            probs=tuple(probs),
            matrices=2 if "two" in self.traits else 3,
            latent=size("moe_latent_size", default=0),
            **own,
        )

    def mtp_layer(self, kinds: list[str]) -> Layer:
        """The layer of the MTP module if it differs from the model's own layers; else empty.

        kinds : kinds of the layers after the model's own, if the config lists them
        """
        kinds = kinds or [KINDS.get(kind, FULL) for kind in self.listed("mtp_layer_types")]
        if self.kind.startswith("mimo_v2"):  # dense, with a sliding window
            return (self.attention(self.config, SLIDING, 0), self.mlp())
        if not kinds or "alone" in self.traits:
            return ()
        place = self.size(*LAYERS)
        dense = self.listed("mtp_mlp_layer_types")[:1] == ["dense"] or "moe_layers_enum" in self.config
        blocks = (self.mlp(),) if dense else self.feed_forward(self.config, place, place + 1)
        return (self.attention(self.config, kinds[0], place), *blocks)

    def tables(self, layers: int) -> tuple[int, int]:
        """Weights of lookup tables other than the embedding, and input width of their projection to hidden states."""
        size, tables, projected = self.size, 0, 0
        if "positions" in self.traits:
            tables += self.hidden * size("n_positions", "max_position_embeddings")
        if width := size("hidden_size_per_layer_input", default=0):
            projected = layers * width
            tables += size("vocab_size_per_layer_input", default=self.size("vocab_size")) * projected
        if "gemma3n" in self.traits:
            projected += 2 * (size("altup_num_inputs") - 1) * self.hidden
        if places := self.listed("ple_layer_ids", int):
            width = size("ple_embed_dim", default=self.hidden)
            tables += len(places) * size("ngram_vocab_size_base") * width
            projected += len(places) * width * (1 + size("hc_count"))
        if "hc_count" in self.config:
            projected += 2 * size("hc_count") * size("hc_lowrank")
        return tables, projected
