"""Real shapes of public models with random weights, and pairs of them, for runs without their weights.

The time of a dense model depends only on its shape. The shapes are those of `specsim.cost.roofline`; `random_model`
fills a shape with noise.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerBase, Qwen3Config

from realrun.drafters.independent import IndependentKind
from realrun.lm.number_type import find_dtype, in_number_type
from realrun.pairs.pair import Pair, find_device
from specsim.cost.roofline.architecture import public_shapes
from specsim.io.errors import InputError

INIT_STD = 0.02  # of weight matrices; with norms of 1 the largest shapes stay far below float16's limit
REDUCED_LAYERS, REDUCED_HEADS, REDUCED_HEAD_DIM, REDUCED_VOCAB = 2, 4, 16, 384


@dataclass(frozen=True)
class Entries:
    """Entries of config.json beside the shape that `public_shapes` has."""

    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: dict[str, str | float]


LLAMA = Entries(4096, 1e-5, {"rope_type": "default", "rope_theta": 10000.0})
SHORT = replace(LLAMA, max_position_embeddings=2048)
OLD = replace(SHORT, rms_norm_eps=1e-6)  # of LLaMA, before Llama 2
QWEN3 = Entries(40960, 1e-6, {"rope_type": "default", "rope_theta": 1000000.0})


def _llama3(factor: float) -> Entries:
    frequencies: dict[str, str | float] = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **frequencies, "original_max_position_embeddings": 8192}
    return Entries(131072, 1e-5, rope)


TARGETS = {
    "llama-2-7b": LLAMA,  # Touvron et al. 2023; Vicuna-7B v1.5 too
    "llama-2-13b": LLAMA,  # Vicuna-13B v1.5 too
    "llama-2-70b": LLAMA,
    "llama-3.1-8b": _llama3(8.0),
    "qwen3-8b": QWEN3,
    "vicuna-33b": OLD,  # LLaMA-33B, MEDUSA Table 1's largest model
}

# Drafters, each with the vocabulary of its targets.
ONE_LAYER = {"one-layer-7b": "llama-2-7b", "one-layer-13b": "llama-2-13b"}
DRAFTERS = {
    "llama-2-drafter-115m": LLAMA,  # AdaEDL section 4.1's, made by direct alignment
    # One decoder layer of the target's shape with the target's embedding and head: EDD (section 3.1) and
    # its baselines VDM and EAGLE. EDD's cross-attention and EAGLE's input projection (2 hidden x hidden)
    # are left out.
    **dict.fromkeys(ONE_LAYER, LLAMA),
    # Vanilla SD in EESD's Tables 1 to 3: Vicuna-68M, of LLaMA-68M's shape, and TinyLLaMA-1.1B (Zhang et al.
    # 2024), also the drafter of AdaEDL's Figure 4.
    "llama-68m": OLD,
    "tinyllama-1.1b": SHORT,
    "llama-160m": OLD,  # a usual drafter of Llama 2 in later work
    # The smallest sisters of the newer targets.
    "llama-3.2-1b": _llama3(32.0),
    "qwen3-0.6b": QWEN3,
}
SHAPES = {**TARGETS, **DRAFTERS}
CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def shape_config(name: str, *, positions: int | None = None, smoke: bool = False) -> PretrainedConfig:
    """Make the configuration of this shape; InputError lists the known names.

    positions : stretch the model to at least so many positions. Its time per pass does not depend on that
    limit, so long contexts can be timed on a shape that was published with a short limit.
    smoke : the reduced shape instead
    """
    if name not in SHAPES:
        raise InputError(f"shape {name!r} is unknown; known: {', '.join(SHAPES)}")
    layers = {"num_hidden_layers": 1} if name in ONE_LAYER else {}
    values = {**public_shapes()[ONE_LAYER.get(name, name)], **asdict(SHAPES[name]), **layers}
    config = CONFIGS[values.pop("model_type")](**values)
    if positions is not None:
        config.max_position_embeddings = max(positions, config.max_position_embeddings)
    return reduced(config) if smoke else config


def reduced(config: PretrainedConfig) -> PretrainedConfig:
    """Shrink the architecture so that it runs anywhere: at most two layers, width 64.

    It keeps tied weights, the rotary kind and, up to 4, the query heads per key-value head.
    """
    groups = min(config.num_attention_heads // config.num_key_value_heads, REDUCED_HEADS)
    small = {
        "vocab_size": REDUCED_VOCAB,
        "hidden_size": REDUCED_HEADS * REDUCED_HEAD_DIM,
        "intermediate_size": 2 * REDUCED_HEADS * REDUCED_HEAD_DIM,
        "num_hidden_layers": min(REDUCED_LAYERS, config.num_hidden_layers),
        "num_attention_heads": REDUCED_HEADS,
        "num_key_value_heads": REDUCED_HEADS // groups,
        "head_dim": REDUCED_HEAD_DIM,
    }
    values = {**config.to_dict(), **small}
    for derived in ("layer_types", "max_window_layers", "model_type"):  # follow from the others
        values.pop(derived, None)
    return type(config)(**values)


@torch.inference_mode()
def random_model(config: PretrainedConfig, device: str | torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Make a model of this shape with normal weights and norms of 1, on the device itself.

    No copy passes through the host's memory. Raises InputError if the device is missing or its memory too small.
    """
    device = find_device(device)
    need, free = weight_bytes(config, dtype), free_bytes(device)
    if need > free:
        raise InputError(
            f"{parameter_count(config) / 1e9:.1f} billion parameters need {need / 1e9:.0f} GB on {device}, "
            f"{free / 1e9:.0f} GB are free; choose a smaller shape"
        )
    model = _on_meta(config, dtype).to_empty(device=device)
    model.tie_weights()  # to_empty gives each of two tied weights its own memory
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, INIT_STD, generator=generator)
        else:
            parameter.fill_(1.0)
    # Rotary frequencies are computed when a module is made, and a meta device computes nothing.
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval().requires_grad_(False)


def _on_meta(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def parameter_count(config: PretrainedConfig) -> int:
    """Count the parameters of a model of this shape, tied parameters once."""
    return sum(parameter.numel() for parameter in _on_meta(config, torch.float32).parameters())


def weight_bytes(config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """Count the bytes of the weights."""
    return parameter_count(config) * dtype.itemsize


def pass_weight_bytes(config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """Count the bytes of weights that a decoding pass reads: all but the embedding table, which is indexed.

    Over the memory bandwidth, this is the floor of a pass's time.
    """
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return weight_bytes(config, dtype) - table * dtype.itemsize


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """Count the bytes of keys and values per cached token of a sequence, over all layers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize)


def free_bytes(device: torch.device) -> int:
    """Measure the free memory of a device, in bytes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return int(available[1]) * 1024 if available else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe(config: PretrainedConfig, dtype: torch.dtype) -> dict[str, str | int]:
    """Describe a shape in numbers, for result files."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {
        "architecture": config.model_type,
        **{key: getattr(config, key) for key in (*keys, "vocab_size", "max_position_embeddings")},
        "parameters": parameter_count(config),
        "weight_bytes": weight_bytes(config, dtype),
        "pass_weight_bytes": pass_weight_bytes(config, dtype),
        "kv_bytes_per_token": kv_bytes_per_token(config, dtype),
    }


class _Vocabulary:
    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size


def vocabulary(pair: Pair) -> int:
    """Give the pair's common vocabulary size; InputError if the sizes differ."""
    sizes = [int(config.vocab_size) for config in (pair.target.config, pair.draft_config)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"{pair.target_name} has {sizes[0]} tokens in its vocabulary, {pair.draft_name} has {sizes[1]}; "
            "choose a drafter with the target's vocabulary"
        )
    return sizes[0]


def random_pair(
    target: str,
    draft: str,
    *,
    device: str = "cuda",
    dtype: str = "bfloat16",
    positions: int | None = None,
    smoke: bool = False,
    seed: int = 0,
) -> Pair:
    """Make a pair of `realrun.pairs.shapes` with random weights; positions, smoke : see `shape_config`."""
    configs = [shape_config(name, positions=positions, smoke=smoke) for name in (target, draft)]
    whole = [shape_config(name).vocab_size for name in (target, draft)]
    if whole[0] != whole[1]:  # reduced vocabularies are all equal
        raise InputError(f"{target} and {draft} have vocabularies of {whole[0]} and {whole[1]} tokens; choose a pair")
    weights = find_dtype(dtype)
    models = [in_number_type(random_model(c, device, weights, seed + i), dtype) for i, c in enumerate(configs)]
    tokenizer = cast(PreTrainedTokenizerBase, _Vocabulary(configs[0].vocab_size))
    suffix = " (reduced)" if smoke else ""
    return Pair(models[0], IndependentKind(models[1]), tokenizer, target + suffix, draft + suffix, ())
