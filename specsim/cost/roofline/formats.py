"""Formats of weights: by name, in a model's name, as a model was released, and in a config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from specsim.cost.roofline.architecture import find_model, model_config, published
from specsim.cost.roofline.config import ModelConfig
from specsim.cost.roofline.hardware import BITS
from specsim.cost.roofline.shape import Part
from specsim.io.errors import InputError
from specsim.io.names import known_name

Weights = str | dict[str, str]
HINT = "pass the format with --weights, such as --weights int4"
PACKED = re.compile(r"(?<![a-z])(gguf|mlx|bnb|quantized)(?![a-z])")  # words of a name that leave the bits open

# By the words of vLLM and SGLang, for what they quantise themselves or take only in a single format.
ENGINE_FORMATS = {
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fbgemm_fp8", "ptpc_fp8", "w8a8_fp8"), "float8"),
    "modelopt_fp8": "float8", "modelopt_fp4": "nvfp4", "petit_nvfp4": "nvfp4", "nvfp4": "nvfp4",
    "nvfp4_online": "nvfp4", "awq": "int4", "awq_marlin": "int4", "w8a8_int8": "int8", "int8": "int8",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "half": "float16",
}  # fmt: skip


class Stored(NamedTuple):
    """The format in which a checkpoint stores its weights, and where it is written."""

    weights: Weights
    source: str


def find_format(name: str) -> str:
    """The name in `BITS` of a format as people write it: fp8, AWQ, Q4_K_M; InputError for an unknown one.

    >>> find_format("fp8"), find_format("AWQ"), find_format("Q4_K_M")
    ('float8', 'int4', 'q4_k_m')
    """
    return known_name("weight format", name, list(BITS), other="give one with --weights")


def read_weights(text: str) -> Weights:
    """A format, or a format by part of the model.

    >>> read_weights("experts=mxfp4,attention=fp8")
    {'experts': 'mxfp4', 'attention': 'float8'}
    """
    if "=" not in text:
        return find_format(text)
    pairs = (pair.partition("=") for pair in text.split(","))
    return {part.strip(): find_format(name.strip()) for part, _, name in pairs}


def weights_text(weights: str | Mapping[str, str]) -> str:
    """Formats in words."""
    if isinstance(weights, str):
        return weights
    return ", ".join(f"{part} {name}" for part, name in weights.items())


def stored_weights(model: str | ModelConfig) -> Stored | None:
    """The format in which a model is stored, if that is not a 16-bit type.

    model : as `find_architecture` takes it. A model's name says it where it ends in a format, such as -FP8 or
        :Q4_K_M; else the format in which it was released counts. A config.json says it under quantization_config.

    Raises InputError for a quantization_config that is not known, and for a name that says of the format only that
    there is one, such as -GGUF.

    >>> stored_weights("openai/gpt-oss-20b")
    Stored(weights={'experts': 'mxfp4'}, source='as gpt-oss-20b was released')
    >>> stored_weights("Qwen/Qwen3-32B-FP8").weights
    'float8'
    """
    named = None if isinstance(model, ModelConfig) else find_model(model)
    if named is not None:
        name = str(model).casefold()
        if named.weights == "fp4" and name.startswith("nvidia/"):  # NVFP4, by TensorRT-LLM's page on DeepSeek-R1
            return Stored("nvfp4", f"by the name {model}")
        if named.weights:
            return Stored(find_format(named.weights), f"by the name {model}")
        if packed := PACKED.search(name.replace("\\", "/").rpartition("/")[2]):
            example = "q4_k_m" if packed[0] == "gguf" else "int4"
            raise InputError(f"{model} does not tell the format of its weights; add it, such as --weights {example}")
        released = published().released.get(named.shape)
        return None if released is None else Stored(released, f"as {named.shape} was released")
    where = "config.json" if isinstance(model, ModelConfig) else model
    config = model_config(model)
    found = config.get("quantization_config") or config.inner("text_config").get("quantization_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise InputError(f"{where}: quantization_config is not an object; {HINT}")
    weights = _stored(ModelConfig(found), where)
    if found.get("expert_dtype", config.get("expert_dtype")) == "fp4":  # DeepSeek-V4: one scale per 32 weights
        parts = weights if isinstance(weights, dict) else {"attention": weights, "mlp": weights}
        weights = {**parts, "experts": "mxfp4"}
    return Stored(weights, f"by quantization_config of {where}")


def _stored(config: ModelConfig, where: str) -> Weights:
    """The format that a quantization_config names."""
    method = str(config.get("quant_method", config.get("quant_algo", ""))).lower()
    if method == "mxfp4":  # gpt-oss; its modules_to_not_convert name all but the experts
        return {"experts": "mxfp4"}
    name = ""
    if method in ("awq", "gptq", "auto-round", "autoround"):
        name = _integers(config.get("bits"), config.get("group_size"))
    elif method in ("fp8", "fbgemm_fp8"):
        name = "float8"
    elif method == "bitsandbytes":
        name = "int4" if config.get("load_in_4bit") else "int8"
    elif method.startswith("modelopt") or "quant_algo" in config:
        algorithm = str(config.get("quant_algo", "")).lower()
        name = next((name for word, name in (("nvfp4", "nvfp4"), ("fp8", "float8")) if word in algorithm), "")
    elif method == "compressed-tensors":
        name = _compressed(config)
    if name not in BITS:
        bits = f" {config['bits']} bits" if "bits" in config else ""
        raise InputError(f"{where} stores its weights in {method or 'an unknown format'}{bits}; {HINT}")
    return _parts(name, config)


def _integers(bits: object, group: object) -> str:
    """Packed integers of so many bits, with a scale per group."""
    return "int4-g32" if bits == 4 and group == 32 else f"int{bits}"


def _compressed(config: ModelConfig) -> str:
    """The format of the first group of compressed-tensors."""
    groups = config.inner("config_groups")
    weights = groups.inner(next(iter(groups), "")).inner("weights")
    if not weights:
        return ""
    bits, group = weights.get("num_bits"), weights.get("group_size")
    if weights.get("type") == "float":
        return {8: "float8", 4: "mxfp4" if group == 32 else "nvfp4"}.get(bits, "") if isinstance(bits, int) else ""
    return _integers(bits, group)


def _parts(name: str, config: ModelConfig) -> Weights:
    """The format of the parts that are not left out of quantisation in all layers."""
    skipped = config.get("ignore") or config.get("modules_to_not_convert") or config.get("exclude_modules") or []
    patterns = [str(pattern) for pattern in skipped if not re.search(r"layers\.\d", str(pattern))]
    words: dict[Part, str] = {
        "attention": "self_attn|attention",
        "mlp": r"shared_experts?(?!_gate)|mlp\W*(gate\||gate_up|gate_proj|up_proj|down_proj)",  # not a router, mlp.gate
    }
    kept = {part for part, word in words.items() if any(re.search(word, pattern) for pattern in patterns)}
    parts: tuple[Part, ...] = ("attention", "mlp", "experts")
    return {part: name for part in parts if part not in kept} if kept else name
