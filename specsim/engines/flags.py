"""Draft lengths as the flags of engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from specsim.cost.roofline.cost import KINDS
from specsim.cost.roofline.hardware import GGUF_BITS
from specsim.io.errors import InputError
from specsim.io.names import find_name, known_name

OFF = "turn speculation off"
DRAFTER = {"method": "eagle", "model": "<drafter>"}  # to be replaced
# Kinds of drafters of costs on a GPU, and the engines' own words. TensorRT-LLM's are values of decoding_type, as its
# page on speculative decoding lists them, and DSpark of llm_args.py.
VLLM_METHODS = {
    "model": "draft_model", "eagle": "eagle", "eagle3": "eagle3", "mtp": "mtp", "medusa": "medusa",
    "prompt-lookup": "ngram", "suffix": "suffix", "block": "dflash", "dflash": "dflash", "dspark": "dspark",
    "p-eagle": "eagle3", "pard": "draft_model",
}  # fmt: skip
SGLANG_ALGORITHMS = {
    "model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "prompt-lookup": "NGRAM",
    "block": "DFLASH", "dflash": "DFLASH", "dspark": "DSPARK",
}  # fmt: skip
LLAMACPP_TYPES = {
    "model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp", "prompt-lookup": "ngram-mod",
    "block": "draft-dflash", "dflash": "draft-dflash", "dspark": "draft-dspark",
}  # fmt: skip
TENSORRT_LLM_TYPES = {
    "model": "DraftTarget", "eagle3": "Eagle3", "mtp": "MTP", "prompt-lookup": "NGram", "block": "DFlash",
    "dflash": "DFlash", "dspark": "DSpark", "pard": "PARD",
}  # fmt: skip
NAMES = {
    "vllm": VLLM_METHODS, "sglang": SGLANG_ALGORITHMS, "llamacpp": LLAMACPP_TYPES, "tensorrt-llm": TENSORRT_LLM_TYPES,
    "transformers": {"model": "assistant_model", "prompt-lookup": "prompt_lookup_num_tokens"},
}  # fmt: skip
WITHOUT_MODEL = ("mtp", "prompt-lookup", "suffix")  # the target's own weights, or none
# What a method takes beside its model and K. Of vLLM's n-grams the lengths are its own default.
VLLM_KEYS: dict[str, dict[str, int]] = {
    "prompt-lookup": {"prompt_lookup_min": 5, "prompt_lookup_max": 5},
    "p-eagle": {"parallel_drafting": True},
    "pard": {"parallel_drafting": True},
}
# Drafted in a single step. SGLang counts the last token of the text among the draft tokens.
SGLANG_BLOCKS = ("block", "dflash", "dspark")
PLACEHOLDER, TYPE = "<drafter>", "<type>"  # to be filled in
# Options of a server for what costs on a GPU assume and the engine does not do by itself.
TENSOR_PARALLEL = {
    "vllm": "--tensor-parallel-size {}", "sglang": "--tp-size {}", "tensorrt-llm": "--tp_size {}",
    "llamacpp": "--split-mode tensor",  # over all GPUs that it sees
}  # fmt: skip
QUANTIZED = {"vllm": ("float8",), "sglang": ("float8",)}  # weights of 16 bits, as they are loaded
CACHES = {
    "vllm": {"float8": "--kv-cache-dtype fp8"},
    "sglang": {"float8": "--kv-cache-dtype fp8_e4m3"},
    "tensorrt-llm": {"float8": "kv_cache_config: {dtype: fp8}"},
    "llamacpp": {
        name: f"--cache-type-k {name} --cache-type-v {name}"
        for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
    },
}
CONFIG, CONFIG_KEY = "config.yaml", "speculative_config: "  # of trtllm-serve


def generation_config(k: int, p_min: float = 0.0) -> dict[str, float | str]:
    """Fields of a draft model in transformers: drafts of K tokens, or up to a token with probability below p_min.

    The library's own threshold is 0.4, under which few drafts are whole.
    """
    return {
        "num_assistant_tokens": k,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": p_min,
    }


def llamacpp(options: str, kind: str | None = None, model: str = PLACEHOLDER) -> str:
    """Options of llama-server: without --spec-type, of which there is a reminder, it never uses the draft model."""
    if kind is None:
        return f"{options} (also pass --spec-type and --spec-draft-model)"
    option, value = gguf(model)
    path = "" if kind in WITHOUT_MODEL else f"--spec-draft-{option} {value} "
    return f"--spec-type {LLAMACPP_TYPES.get(kind, TYPE)} {path}{options}"


def speculative_config(**config: Any) -> str:
    """The speculative configuration of vLLM as a flag."""
    return f"--speculative-config '{json.dumps(config)}'"


def tensorrt_llm(fields: str, kind: str | None = None, model: str = PLACEHOLDER) -> str:
    """The speculative configuration of TensorRT-LLM."""
    if kind is None:
        return f"speculative_config: {{{fields}}} (also set decoding_type and speculative_model)"
    path = "" if kind in WITHOUT_MODEL else f", speculative_model: {model}"
    return f"speculative_config: {{decoding_type: {TENSORRT_LLM_TYPES.get(kind, TYPE)}, {fields}{path}}}"


def as_arguments(fields: Mapping[str, object]) -> str:
    """Fields of a configuration as Python arguments."""
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def sglang_tree(depth: int, top_k: int, nodes: int) -> str:
    """A tree of SGLang's EAGLE, which counts the root among the draft tokens; a chain of K tokens is (K, 1, K)."""
    return (
        f"--speculative-num-steps {depth} --speculative-eagle-topk {top_k} --speculative-num-draft-tokens {nodes + 1}"
    )


FLAGS: dict[str, Callable[[int], str]] = {
    "vllm": lambda k: speculative_config(**DRAFTER, num_speculative_tokens=k),
    "sglang": lambda k: sglang_tree(k, 1, k),
    "llamacpp": lambda k: llamacpp(f"--spec-draft-n-max {k}"),
    "tensorrt-llm": lambda k: tensorrt_llm(f"max_draft_len: {k}"),
    "transformers": lambda k: f"{as_arguments(generation_config(k))} in the draft model's generation_config",
}


def kind_of(drafter: str) -> str:
    """The kind of a drafter: an engine's word, a kind of costs on a GPU, or "model" for a model's name."""
    kinds = dict.fromkeys((*KINDS, *VLLM_METHODS, *SGLANG_ALGORITHMS, *LLAMACPP_TYPES))
    return find_name("drafter", drafter.partition(":")[0], kinds) or "model"


def vllm_drafter(drafter: str, model: str = PLACEHOLDER) -> dict[str, str | int]:
    """vLLM's method, and the model if the method takes one, as keys of the speculative configuration."""
    kind = kind_of(drafter)
    named = {} if kind in WITHOUT_MODEL else {"model": model}
    return {"method": VLLM_METHODS[kind], **named, **VLLM_KEYS.get(kind, {})}


def draft_length_flags(engine: str, k: int, drafter: str | None = None, model: str = PLACEHOLDER) -> str:
    """The flags that make an engine draft K tokens in every round; InputError for an unknown engine or drafter.

    drafter : its kind in costs on a GPU, such as "eagle3", or a draft model's name
    model : where the drafter's weights are, for a method that takes them
    """
    engine = known_name("engine", engine, [*FLAGS])
    names = NAMES[engine]
    kind = None if drafter is None else kind_of(drafter)
    if kind is not None and kind not in names:
        raise InputError(f"{engine} has no drafters of kind {kind}; choose another engine")
    if not k:
        return OFF
    if drafter is None or kind is None:
        return FLAGS[engine](k)
    if engine == "vllm":
        return speculative_config(**vllm_drafter(drafter, model), num_speculative_tokens=k)
    if engine == "sglang":
        length = f"--speculative-num-draft-tokens {k + 1}" if kind in SGLANG_BLOCKS else FLAGS[engine](k)
        return f"--speculative-algorithm {names[kind]} {length}"
    if engine == "llamacpp":
        return llamacpp(f"--spec-draft-n-max {k}", kind, model)
    if engine == "tensorrt-llm":
        return tensorrt_llm(f"max_draft_len: {k}", kind, model)
    return FLAGS[engine](k) if kind == "model" else f"{names[kind]}={k} in the target's generation_config"


def gguf(model: str, weights: object = None) -> tuple[str, str]:
    """llama.cpp's option for a model, "hf" or "model", and its value.

    A file, or a repository of GGUF files, OWNER/NAME or OWNER/NAME:TYPE; a file to be named for a model of another
    repository, from which llama.cpp loads nothing. weights : a type of llama.cpp, which is one of a repository's files

    >>> gguf("unsloth/Qwen3-32B-GGUF", "q4_k_m"), gguf("Qwen/Qwen3-8B")
    (('hf', 'unsloth/Qwen3-32B-GGUF:Q4_K_M'), ('model', '<Qwen3-8B.gguf>'))
    """
    owner, slash, rest = model.partition("/")
    if not (slash and owner.strip(".~") and rest) or "/" in rest or rest.endswith(".gguf"):
        return "model", model
    kind = weights.upper() if isinstance(weights, str) and weights in GGUF_BITS else ""
    if "gguf" not in rest.lower():
        return "model", f"<{'-'.join(filter(None, (rest, kind)))}.gguf>"
    return "hf", f"{model}:{kind}" if kind and ":" not in rest else model


def server_command(
    engine: str,
    k: int,
    *,
    target: str = "<target>",
    drafter: str | None = None,
    model: str = PLACEHOLDER,
    tensor_parallel: int = 1,
    weights: object = None,
    cache: str | None = None,
    dtype: str = "bfloat16",
) -> str:
    """The whole command that starts a server which drafts K tokens, or none.

    engine : of those with a server's command: vllm, sglang, llamacpp and tensorrt-llm; of others the flags alone
    target, model : ids or paths, as the engine takes them
    drafter : kind of drafter, as `draft_length_flags` takes it; None: to be filled in
    tensor_parallel, weights, cache, dtype : as of `Roofline`, weights if they are not the checkpoint's. What the
        engine has no option for is left out, see `without_option`

    >>> from specsim.engines.flags import server_command
    >>> server_command("vllm", 2, target="Qwen/Qwen3.5-27B", drafter="mtp", tensor_parallel=2)
    'vllm serve Qwen/Qwen3.5-27B --tensor-parallel-size 2 --speculative-config \'{"method": "mtp", \
"num_speculative_tokens": 2}\''
    """
    engine = known_name("engine", engine, [*FLAGS])
    flags = ""
    if k:
        flags = _of_any_kind(engine, k, model) if drafter is None else draft_length_flags(engine, k, drafter, model)
    if engine == "transformers":
        return flags or OFF
    options = [TENSOR_PARALLEL[engine].format(tensor_parallel)] if tensor_parallel > 1 else []
    kept = CACHES[engine].get(cache or "", "")
    if engine == "tensorrt-llm":
        narrow = "" if dtype == "bfloat16" else f"dtype: {dtype}"
        config = ", ".join(filter(None, (narrow, kept, flags)))
        start = " ".join(("trtllm-serve", target, *options))
        return f"echo '{{{config}}}' > {CONFIG}; {start} --config {CONFIG}" if config else start
    if engine == "llamacpp":
        option, value = gguf(target, weights)
        start = f"llama-server -{option if option == 'hf' else 'm'} {value}"
        return " ".join(filter(None, (start, *options, kept, flags)))
    options += ["--quantization fp8"] if weights in QUANTIZED[engine] else []
    options += [kept] if kept else []
    options += [] if dtype == "bfloat16" else [f"--dtype {dtype}"]
    if engine == "vllm":
        return " ".join(filter(None, (f"vllm serve {target}", *options, flags)))
    if flags and (drafter is None or kind_of(drafter) not in WITHOUT_MODEL):
        flags = f"--speculative-draft-model-path {model} {flags}"
    return " ".join(filter(None, (f"sglang serve --model-path {target}", *options, flags)))


def _of_any_kind(engine: str, k: int, model: str) -> str:
    """Flags of a drafter whose kind is to be filled in."""
    if engine == "vllm":
        return speculative_config(method="<method>", model=model, num_speculative_tokens=k)
    if engine == "llamacpp":
        return llamacpp(f"--spec-draft-n-max {k}", "", model)
    if engine == "tensorrt-llm":
        return tensorrt_llm(f"max_draft_len: {k}", "", model)
    return f"{'--speculative-algorithm <algorithm> ' * (engine == 'sglang')}{FLAGS[engine](k)}"


def without_option(engine: str, target: str, weights: object, cache: str | None) -> list[str]:
    """Formats that no option of the engine sets, each in a line; arguments as of `server_command`."""
    engine = known_name("engine", engine, [*FLAGS])
    lines = []
    in_file = engine == "llamacpp" and gguf(target, weights) != gguf(target)
    if weights is not None and not in_file and weights not in QUANTIZED.get(engine, ()):
        parts = weights.items() if isinstance(weights, Mapping) else ()
        shown = ", ".join(f"{part} {name}" for part, name in parts) or weights
        lines.append(f"no option of {engine} makes weights {shown}: serve a checkpoint that is stored so")
    if cache is not None and cache not in CACHES.get(engine, {}):
        lines.append(f"no option of {engine} that is known here makes a cache in {cache}: set it yourself")
    return lines
