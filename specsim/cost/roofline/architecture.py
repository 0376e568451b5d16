"""The shape of a decoder: what decides how many bytes a pass reads and how many FLOPs it does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.json import checked, read_json

SHAPES = Path(__file__).parent / "shapes.json"
GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")  # dense, three matrices in an MLP
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
INVALID = "give a decoder's config.json as Hugging Face has it"
MAX_SIZE = 2**31  # of any number of a shape

Routing = Literal["uniform", "balanced"]


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
    projected_inputs : states and embeddings that are projected to a single state before the first layer; EAGLE: 2
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
    projected_inputs: int = 0
    medusa_heads: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim") else 0
            if type(value) is int and not least <= value < MAX_SIZE:
                raise InputError(f"architecture {self.name}: {field.name}={value}; give at least {least}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"architecture {self.name}: {self.num_heads} heads over {self.num_kv_heads} key-value heads; "
                "give a multiple"
            )

    @property
    def expert_layers(self) -> int:
        return self.num_layers - self.dense_layers if self.experts else 0

    @property
    def kv_width(self) -> int:
        """Numbers that a token adds to the cache of a layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def stack_parameters(self) -> int:
        """Weights of the layers' matrices: what quantisation packs."""
        attention = self.hidden_size * (2 * self.num_heads * self.head_dim + self.kv_width)
        mlp = 3 * self.hidden_size * self.intermediate_size
        total = self.num_layers * attention + (self.num_layers - self.expert_layers) * mlp
        if self.experts:
            expert = 3 * self.hidden_size * self.experts.intermediate_size
            shared = 3 * self.hidden_size * self.experts.shared_intermediate_size
            router = self.hidden_size * self.experts.count
            total += self.expert_layers * (self.experts.count * expert + shared + router)
        total += self.projected_inputs * self.hidden_size**2
        return total + self.medusa_heads * self.hidden_size**2

    @property
    def parameters(self) -> int:
        """All weights but biases and the norms within attention, tied ones once."""
        tables = (1 if self.tied else 2) + self.medusa_heads
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.stack_parameters + tables * self.vocab_size * self.hidden_size + norms

    def attended(self, context: Floats) -> Floats:
        """Cached tokens that the layers attend to at this context, all together."""
        return (self.num_layers - self.window_layers) * context + self.window_layers * np.minimum(context, self.window)

    def first(self, layers: int, name: str = "") -> Architecture:
        """The first layers of it, under the same head."""
        windows = round(self.window_layers * layers / self.num_layers)
        dense = min(self.dense_layers, layers)
        name = name or f"{self.name}, {layers} layers"
        return replace(self, name=name, num_layers=layers, dense_layers=dense, window_layers=windows)


@cache
def public_shapes() -> dict[str, dict[str, Any]]:
    """The published config.json of public models by name, less what does not decide times."""
    shapes: dict[str, dict[str, Any]] = json.loads(SHAPES.read_text())["models"]
    return shapes


def find_architecture(model: str | Mapping[str, Any], name: str = "") -> Architecture:
    """The shape of a model.

    model : a name of `public_shapes`, a path to a config.json or its folder, or its content
    name : name of the model; default: as in `model`

    Raises InputError for a model that is not known, or of a kind whose passes are not.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> find_architecture("mixtral-8x7b").experts.per_token
    2
    """
    if isinstance(model, Mapping):
        return architecture_from_config(model, name or "inline")
    if model in public_shapes():
        return architecture_from_config(public_shapes()[model], name or model)
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        known = ", ".join(public_shapes())
        raise InputError(f"architecture {model!r} is neither a config.json nor a known shape; choose one of {known}")
    config = read_json(path, f"architecture {path}", missing=INVALID, invalid=INVALID)
    return architecture_from_config(config, name or str(model))


def architecture_from_config(config: Any, name: str) -> Architecture:
    """The shape in a parsed config.json; InputError for keys that are missing or a kind that is not known."""
    where = f"architecture {name}"
    checked(config, where, dict[str, Any], invalid=INVALID)
    if "text_config" in config:  # a model of texts and images
        config = checked(config["text_config"], f"{where}: text_config", dict[str, Any], invalid=INVALID)
    kind = config.get("model_type")
    if kind not in (*GATED, *MIXTURES):
        known = ", ".join((*GATED, *MIXTURES))
        raise InputError(f"{where} has model_type {kind!r}, whose passes are not known; known: {known}")

    def size(*keys: str, default: int | None = None) -> int:
        value = next((config[key] for key in keys if config.get(key) is not None), default)
        if type(value) is not int or not 0 <= value < MAX_SIZE:
            raise InputError(f"{where} has no {' or '.join(keys)} that is a whole number; {INVALID}")
        return value

    hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    if not hidden or not heads:
        raise InputError(f"{where} has no states or no heads; {INVALID}")
    window, window_layers = _windows(config, size("sliding_window", default=0), layers)
    experts, dense_layers = None, 0
    if kind in MIXTURES:
        own = {"routing": config["routing"]} if "routing" in config else {}
        probs = checked(config.get("router_probs", []), f"{where}: router_probs", list[float], invalid=INVALID)
        experts = Experts(
            count=size("num_local_experts", "num_experts"),
            per_token=size("num_experts_per_tok"),
            intermediate_size=size("moe_intermediate_size", "intermediate_size"),
            shared_intermediate_size=size("shared_expert_intermediate_size", default=0),
            probs=tuple(probs),
            **own,
        )
        step = max(size("decoder_sparse_step", default=1), 1)
        plain = checked(config.get("mlp_only_layers") or [], f"{where}: mlp_only_layers", list[int], invalid=INVALID)
        dense_layers = len({*range(layers)} - {*range(step - 1, layers, step)} | {*plain} & {*range(layers)})
    return Architecture(
        name=name,
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        vocab_size=size("vocab_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads),
        tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),  # the library's own defaults
        experts=experts,
        dense_layers=dense_layers,
        window=window,
        window_layers=window_layers,
    )


def _windows(config: Mapping[str, Any], window: int, layers: int) -> tuple[int, int]:
    """Tokens of the sliding window, and how many layers have it."""
    if not window or not config.get("use_sliding_window", True):
        return 0, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return window, kinds.count("sliding_attention")
    match config["model_type"]:
        case "gemma2" | "gpt_oss":  # every other layer
            return window, (layers + 1) // 2
        case "gemma3_text":
            return window, layers - layers // 6
        case "mistral" | "mixtral":
            return window, layers
    return 0, 0  # of Qwen's, unless layer_types says so
