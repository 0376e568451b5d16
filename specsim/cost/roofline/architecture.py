"""The shape of a decoder: what decides how many bytes a pass reads and how many FLOPs it does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from specsim.cost.roofline.drafters import drafter_config
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.json import checked, read_json
from specsim.io.names import find_name, known_name, nearest_names


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: all heads share a latent vector per token, which is all that the cache holds.

    While decoding, the matrices that expand latents to keys and values of every head are applied to queries and results
    instead ("absorbed"), so that attention's products are as wide as a latent.

    kv_rank, rope_dim : widths of a cached token's latent and of its rotated key
    query_rank : width of the queries' latent; 0: queries are made from states
    nope_dim, value_dim : of a head, widths of the part of a key that is not rotated, and of a value
    index_tokens : cached tokens that a query attends to under sparse attention, which an indexer chooses; 0: all
    index_heads, index_dim : heads of the indexer and their width

    References: DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1; of the indexer, DeepSeek-V3.2-Exp.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> find_architecture("deepseek-v3").latent.cached_width
    576
    """

    kv_rank: int
    rope_dim: int
    query_rank: int
    nope_dim: int
    value_dim: int
    index_tokens: int = 0
    index_heads: int = 0
    index_dim: int = 0

    @property
    def cached_width(self) -> int:
        """Values that a token adds to a layer's cache, without the indexer's keys."""
        return self.kv_rank + self.rope_dim

    @property
    def index_key_bytes(self) -> int:
        """Bytes of a cached key of the indexer: float8 with a scale in float32, as DeepSeek released it."""
        return self.index_dim + 4

    def shared_weights(self, hidden: int) -> int:
        """Weights of a layer that all heads share: every device has them."""
        index = self.index_heads * self.query_rank * self.index_dim + hidden * (self.index_dim + self.index_heads)
        return hidden * (self.query_rank + self.cached_width) + index

    def head_weights(self, hidden: int) -> int:
        """Weights of a layer that belong to a head."""
        queries = (self.query_rank or hidden) * (self.nope_dim + self.rope_dim)
        return queries + self.kv_rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden


@dataclass(frozen=True)
class LinearAttention:
    """Gated DeltaNet: a state matrix per value head in place of a KV cache; its size does not depend on the context.

    key_heads, value_heads, key_dim, value_dim : heads and their widths
    kernel : tokens that the convolution over queries, keys and values covers

    References: Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> find_architecture("qwen3-next-80b-a3b").linear.state_size
    524288
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def state_size(self) -> int:
        """Numbers of a layer's state of a sequence, in float32."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def convolved_width(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.output_width

    @property
    def input_width(self) -> int:
        """All that is projected from a state: what is convolved, the output's gate, decay and update rate of a head."""
        return self.convolved_width + self.output_width + 2 * self.value_heads

    @property
    def output_width(self) -> int:
        """Values of a token."""
        return self.value_heads * self.value_dim


SHAPES = Path(__file__).parent / "shapes.json"
GATED = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", "gemma", "gemma2", "gemma3_text", "minicpm3",
)  # dense, three matrices in an MLP  # fmt: skip
MIXTURES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "gpt_oss", "minimax_m2", "llama4_text",
    "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa",
)  # fmt: skip
LATENT = ("minicpm3", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa")  # multi-head latent attention
SPARSE = ("deepseek_v32", "glm_moe_dsa")  # of these, the ones whose queries attend to chosen tokens alone
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # gated delta networks beside attention with a gate
INVALID = "give a decoder's config.json as Hugging Face has it"
MAX_SIZE = 2**31  # of any number of a shape

Routing = Literal["uniform", "balanced"]
Part = Literal["attention", "mlp", "experts", "head"]
LINEAR = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # keys of linear attention  # fmt: skip
INDEX = {"tokens": "index_topk", "heads": "index_n_heads", "dim": "index_head_dim"}  # keys of an indexer


class Size(Protocol):
    """Read a whole number from a config: the value of the first of these keys that the config has."""

    def __call__(self, *keys: str, default: int | None = None) -> int: ...


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in place of a layer's MLP.

    count, per_token : experts of a layer, and how many of them a token goes to
    intermediate_size : inner width of an expert
    shared_intermediate_size : inner width of the expert that every token goes to; 0: there is none
    routing : whether tokens choose experts uniformly and independently, or so that as many experts as possible get a
        token
    probs : router statistics in place of `routing`: the probability that a token goes to each expert; `count` numbers
        that sum to `per_token`

    Raises InputError for probabilities that are none, or more experts a token than there are.

    >>> from specsim.cost.roofline.architecture import Experts
    >>> mixtral = Experts(count=8, per_token=2, intermediate_size=14336)
    >>> mixtral.read([1, 2, 4]).tolist()
    [2.0, 3.5, 5.46875]
    """

    count: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    routing: Routing = "uniform"
    probs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise InputError(f"architecture: {self.per_token} experts a token of {self.count}; give 1 to {self.count}")
        if self.routing not in ("uniform", "balanced"):
            raise InputError(f"architecture: routing {self.routing!r} is unknown; known: uniform, balanced")
        if not self.probs:
            return
        if len(self.probs) != self.count or not all(0 <= p <= 1 for p in self.probs):
            raise InputError(f"architecture: router statistics are not {self.count} probabilities; give all experts'")
        if abs(sum(self.probs) - self.per_token) > 0.01 * self.per_token:
            raise InputError(
                f"architecture: router statistics sum to {sum(self.probs):g}, a token goes to {self.per_token} "
                "experts; give the probability that a token goes to each"
            )

    def read(self, n_tokens: npt.ArrayLike) -> Floats:
        """Expected number of experts that n tokens of a pass go to, and so are read."""
        n = np.asarray(n_tokens, dtype=np.float64)
        if self.probs:
            return np.asarray(np.sum(1 - (1 - np.array(self.probs)) ** n[..., None], axis=-1))
        if self.routing == "balanced":
            return np.minimum(self.count, self.per_token * n)
        return np.asarray(self.count * (1 - (1 - self.per_token / self.count) ** n))


@dataclass(frozen=True)
class Architecture:
    """A decoder of transformer layers, dense or with mixtures of experts.

    name : as errors call it
    hidden_size, intermediate_size, vocab_size : widths of states, of a dense MLP, of the head
    num_layers, num_heads, num_kv_heads, head_dim : layers; query heads, key-value heads and their width
    tied : whether the head is the embedding's table
    experts : of all layers but the first `dense_layers` ones
    window, window_layers : tokens that a layer with a sliding window attends to, and how many layers have such a window
    chunked : whether such a layer attends within chunks of `window` tokens, on average to half of one, once the context
        is longer
    latent : multi-head latent attention in place of key-value heads
    gated_attention : whether attention's results are multiplied by a gate as wide as the queries
    linear, linear_layers : linear attention, and how many layers have it in place of attention
    projected_width : width of all states and embeddings that are projected to a state before the first layer; EAGLE:
        that of two states
    attended_states : states side by side that attention's queries, keys and values are made from; EAGLE-3: 2
    medusa_heads : residual blocks on the last state, each with a head of its own

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> model = find_architecture("llama-2-7b")
    >>> model.parameters
    6738415616
    """

    name: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool = False
    experts: Experts | None = None
    dense_layers: int = 0
    window: int = 0
    window_layers: int = 0
    chunked: bool = False
    latent: LatentAttention | None = None
    gated_attention: bool = False
    linear: LinearAttention | None = None
    linear_layers: int = 0
    projected_width: int = 0
    attended_states: int = 1
    medusa_heads: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim") else 0
            if type(value) is int and not least <= value < MAX_SIZE:
                raise InputError(f"architecture {self.name}: {field.name}={value}; give at least {least}")
        if self.window_layers + self.linear_layers > self.num_layers:
            raise InputError(
                f"architecture {self.name}: layer_types names more than {self.num_layers} layers; {INVALID}"
            )
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"architecture {self.name}: {self.num_heads} heads over {self.num_kv_heads} key-value heads; "
                "give a multiple"
            )

    @property
    def expert_layers(self) -> int:
        return self.num_layers - self.dense_layers if self.experts else 0

    @property
    def attention_layers(self) -> int:
        """Layers whose cache grows with the context."""
        return self.num_layers - self.linear_layers

    @property
    def query_width(self) -> int:
        """Width of the queries, and of the gate where there is one."""
        return (2 if self.gated_attention else 1) * self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers that a token adds to the cache of a layer, but for an indexer's keys."""
        return self.latent.cached_width if self.latent else 2 * self.num_kv_heads * self.head_dim

    @property
    def matrices(self) -> dict[Part, int]:
        """Weights of the matrices that quantisation packs, by part; projections of inputs count as MLPs."""
        hidden = self.hidden_size
        if self.latent:
            attention = self.latent.shared_weights(hidden) + self.num_heads * self.latent.head_weights(hidden)
        else:
            made = self.attended_states * hidden * (self.query_width + self.kv_width)
            attention = made + hidden * self.num_heads * self.head_dim
        attention *= self.attention_layers
        if self.linear:
            linear = hidden * (self.linear.input_width + self.linear.output_width)
            attention += self.linear_layers * (linear + self.linear.kernel * self.linear.convolved_width)
        mlp = (self.num_layers - self.expert_layers) * 3 * hidden * self.intermediate_size
        mlp += self.projected_width * hidden + self.medusa_heads * hidden**2
        experts = 0
        if self.experts:
            mlp += self.expert_layers * 3 * hidden * self.experts.shared_intermediate_size
            experts = self.expert_layers * self.experts.count * 3 * hidden * self.experts.intermediate_size
        return {"attention": attention, "mlp": mlp, "experts": experts}

    @property
    def stack_parameters(self) -> int:
        """Weights of the layers' matrices, routers included."""
        routers = self.expert_layers * self.hidden_size * self.experts.count if self.experts else 0
        return sum(self.matrices.values()) + routers

    @property
    def head_parameters(self) -> int:
        """Weights of the head, or of all heads."""
        return (1 + self.medusa_heads) * self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All weights but biases and the norms within attention, tied ones once."""
        embedding = 0 if self.tied else self.vocab_size * self.hidden_size
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.stack_parameters + self.head_parameters + embedding + norms

    def attended(self, context: Floats) -> Floats:
        """Cached tokens that the layers attend to at this context, all together."""
        return self._cached_or_attended(context, self.window / 2 if self.chunked else self.window)

    def cached(self, context: Floats) -> Floats:
        """Tokens that the caches of the layers hold at this context, all together."""
        return self._cached_or_attended(context, self.window)

    def _cached_or_attended(self, context: Floats, within: float) -> Floats:
        if not self.window_layers:
            return self.attention_layers * context
        local = np.where(context < self.window, context, within)
        return (self.attention_layers - self.window_layers) * context + self.window_layers * local

    def first(self, layers: int, name: str = "") -> Architecture:
        """The first layers of it, under the same head."""
        share = layers / self.num_layers
        return replace(
            self,
            name=name or f"{self.name}, {layers} layers",
            num_layers=layers,
            dense_layers=min(self.dense_layers, layers),
            window_layers=round(self.window_layers * share),
            linear_layers=round(self.linear_layers * share),
        )


@cache
def public_shapes() -> dict[str, dict[str, Any]]:
    """The published config.json of public models by name, less what does not decide times."""
    document = json.loads(SHAPES.read_text())
    shapes: dict[str, dict[str, Any]] = document["models"]
    return {**shapes, **{name: shapes[other] for name, other in document["same_shape"].items()}}


@cache
def released_weights() -> dict[str, str | dict[str, str]]:
    """The formats of the weights of models that were released in fewer than 16 bits, by name."""
    released: dict[str, str | dict[str, str]] = json.loads(SHAPES.read_text())["released"]
    return released


class NamedModel(NamedTuple):
    """What a model's name says.

    shape : a name of `public_shapes`
    weights : the format of its weights, as it is written at the end of the name; else empty
    """

    shape: str
    weights: str = ""


OTHER_MODEL = "give one of the same shape, or the model's config.json"
OWNERS = ("meta", "qwen", "openai", "google", "nvidia", "mistralai")  # as copies' names begin: Qwen_Qwen3-8B
ENDINGS = re.compile(
    "instruct|chat|base|it|hf|thinking|preview|exp|terminus|gguf|mlx|dynamic|block|kv|ud|unsloth|bnb|quantized|"
    r"v\d+(\.\d+)?|\d{4}"
)  # of a name, which do not change the shape
STORED = re.compile(
    r"(mx|nv)?fp[48](a16)?|fp16|bf16|f16|awq|gptq|nf4|w4a16|w8a16|w8a8|int[48]|[48]-?bit|q\d_[a-z0-9_]+|iq\d_[a-z_]+",
    re.IGNORECASE,
)  # a format in a model's name


def config_path(model: str) -> Path:
    """The config.json at a path, or in the folder there."""
    return Path(model) / "config.json" if Path(model).is_dir() else Path(model)


def find_model(name: str) -> NamedModel | None:
    """What a model's name says: one of `public_shapes`, a hub id, a GGUF file; None for others.

    >>> find_model("Qwen/Qwen3-32B-FP8"), find_model("unsloth/Qwen3-8B-GGUF:Q4_K_M")
    (NamedModel(shape='qwen3-32b', weights='fp8'), NamedModel(shape='qwen3-8b', weights='q4_k_m'))
    """
    known, weights = [*public_shapes()], ""
    if name in known:
        return NamedModel(name)
    if config_path(name).is_file() and not name.endswith(".gguf"):
        return None
    text = re.sub(r"(-\d+-of-\d+)?\.gguf$", "", name.replace("\\", "/").rpartition("/")[2].lower())
    tokens = re.split(r"[-:/ .](?=[a-z])|[-:/ ]|(?<!q\d)_(?=i?q\d_|[a-z]{3,})", text)
    while tokens:
        if len(tokens) > 1 and tokens[0] in OWNERS and (shape := find_name("model", " ".join(tokens[1:]), known)):
            return NamedModel(shape, weights)
        if shape := find_name("model", " ".join(tokens), known):
            return NamedModel(shape, weights)
        last = tokens.pop()
        if STORED.fullmatch(last):
            weights = weights or last
        elif not ENDINGS.fullmatch(last):
            return None
    return None


def model_config(model: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of a model, as `find_architecture` takes it."""
    if isinstance(model, Mapping):
        return model
    if named := find_model(model):
        return public_shapes()[named.shape]
    path, known = config_path(model), [*public_shapes()]
    if not path.is_file() and path.suffix != ".json":
        return public_shapes()[known_name("model", model, known, other=OTHER_MODEL)]
    config = read_json(path, f"architecture {path}", missing=INVALID, invalid=INVALID)
    return dict(checked(config, f"architecture {model}", dict[str, Any], invalid=INVALID))


def find_architecture(model: str | Mapping[str, Any], name: str = "") -> Architecture:
    """The shape of a model.

    model : a name of `public_shapes`, also as a hub id such as "Qwen/Qwen3-32B-FP8"; a path to a config.json or its
        folder, or its content
    name : name of the model; default: as in `model`

    Raises InputError for a model that is not known, or of a kind whose passes are not.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> find_architecture("mixtral-8x7b").experts.per_token
    2
    """
    config = model_config(model)
    if drafter := drafter_config(config):
        shown = name or ("config.json" if isinstance(model, Mapping) else model)
        raise InputError(f"{shown} is a drafter's ({drafter.method}), not a model's; give it as --drafter")
    if isinstance(model, Mapping):
        return architecture_from_config(config, name or "inline")
    named = find_model(model)
    return architecture_from_config(config, name or (named.shape if named else model))


def architecture_from_config(config: Any, name: str) -> Architecture:
    """The shape in a parsed config.json; InputError for keys that are missing or a kind that is not known."""
    where = f"architecture {name}"
    checked(config, where, dict[str, Any], invalid=INVALID)
    if "text_config" in config:  # a model of texts and images
        outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = outer | checked(config["text_config"], f"{where}: text_config", dict[str, Any], invalid=INVALID)
    kind = config.get("model_type")
    if kind not in (*GATED, *MIXTURES):
        nearest = nearest_names(str(kind), [*GATED, *MIXTURES])
        raise InputError(f"{where} has model_type {kind!r}, whose passes are not known; {nearest}")

    def size(*keys: str, default: int | None = None) -> int:
        value = next((config[key] for key in keys if config.get(key) is not None), default)
        if type(value) is not int or not 0 <= value < MAX_SIZE:
            raise InputError(f"{where} has no {' or '.join(keys)} that is a whole number; {INVALID}")
        return value

    hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    if not hidden or not heads:
        raise InputError(f"{where} has no states or no heads; {INVALID}")
    window = size("attention_chunk_size" if kind == "llama4_text" else "sliding_window", default=0)
    window, window_layers = _windows(config, window, layers)
    experts, dense_layers, dense_width = None, 0, None
    if kind in MIXTURES:
        experts = _experts(config, where, size)
        dense_layers = _dense_layers(config, where, size, layers)
        # An MLP as wide as all experts of a token together, for drafters of models that have no dense MLP.
        dense_width = experts.per_token * experts.intermediate_size + experts.shared_intermediate_size
    latent = _latent(config, where, size, hidden // heads) if kind in LATENT else None
    return Architecture(
        name=name,
        hidden_size=hidden,
        intermediate_size=size("intermediate_size_mlp", "intermediate_size", default=dense_width),
        vocab_size=size("vocab_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", default=heads),
        head_dim=latent.value_dim if latent else size("head_dim", default=hidden // heads),
        tied=bool(config.get("tie_word_embeddings", kind.startswith(("gemma", "minicpm")))),  # the library's defaults
        experts=experts,
        dense_layers=dense_layers,
        window=window,
        window_layers=window_layers,
        chunked=kind == "llama4_text",
        latent=latent,
        gated_attention=kind in HYBRID,
        linear=LinearAttention(*map(size, LINEAR)) if kind in HYBRID else None,
        linear_layers=_linear_layers(config, size, layers) if kind in HYBRID else 0,
    )


def _experts(config: Mapping[str, Any], where: str, size: Size) -> Experts:
    """The experts in a mixture's config."""
    own = {"routing": config["routing"]} if "routing" in config else {}
    probs = checked(config.get("router_probs", []), f"{where}: router_probs", list[float], invalid=INVALID)
    width = size("moe_intermediate_size", "intermediate_size")
    shared = width if config["model_type"] == "llama4_text" else size("n_shared_experts", default=0) * width
    return Experts(
        count=size("num_local_experts", "num_experts", "n_routed_experts"),
        per_token=size("num_experts_per_tok"),
        intermediate_size=width,
        shared_intermediate_size=size("shared_expert_intermediate_size", default=shared),
        probs=tuple(probs),
        **own,
    )


def _dense_layers(config: Mapping[str, Any], where: str, size: Size, layers: int) -> int:
    """Layers of a mixture that have a dense MLP."""
    step = max(size("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", default=1), 1)
    plain = checked(config.get("mlp_only_layers") or [], f"{where}: mlp_only_layers", list[int], invalid=INVALID)
    first = range(min(size("first_k_dense_replace", default=0), layers))
    return len({*range(layers)} - {*range(step - 1, layers, step)} | ({*plain} | {*first}) & {*range(layers)})


def _latent(config: Mapping[str, Any], where: str, size: Size, head_dim: int) -> LatentAttention:
    """The latent attention in a config."""
    sparse, kinds = config["model_type"] in SPARSE, config.get("indexer_types")
    if sparse and (size("index_topk_freq", default=1) > 1 or (isinstance(kinds, list) and "shared" in kinds)):
        raise InputError(f"{where} has layers that share an indexer (index_topk_freq), which is not priced")
    index = {f"index_{name}": size(key) for name, key in INDEX.items()} if sparse else {}
    return LatentAttention(
        kv_rank=size("kv_lora_rank"),
        rope_dim=size("qk_rope_head_dim"),
        query_rank=size("q_lora_rank", default=0),
        nope_dim=size("qk_nope_head_dim"),
        value_dim=size("v_head_dim", default=head_dim),
        **index,
    )


def _linear_layers(config: Mapping[str, Any], size: Size, layers: int) -> int:
    """Layers with linear attention; every fourth has full attention unless the config says otherwise."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return kinds.count("linear_attention")
    return layers - layers // max(size("full_attention_interval", default=4), 1)


def _windows(config: Mapping[str, Any], window: int, layers: int) -> tuple[int, int]:
    """Tokens of the sliding window, and how many layers have it."""
    if not window or not config.get("use_sliding_window", True):
        return 0, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return window, kinds.count("sliding_attention") + kinds.count("chunked_attention")
    match config["model_type"]:
        case "gemma2" | "gpt_oss":  # every other layer
            return window, (layers + 1) // 2
        case "gemma3_text":
            return window, layers - layers // 6
        case "llama4_text":  # every fourth layer attends to all tokens, and has no rotation
            return window, layers - layers // 4
        case "mistral" | "mixtral":
            return window, layers
    return 0, 0  # of Qwen's, unless layer_types says so
