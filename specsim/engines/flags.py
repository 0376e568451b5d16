"""Draft lengths as the flags of engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from specsim.cost.roofline.cost import KINDS
from specsim.io.errors import InputError
from specsim.io.names import find_name, known_name

OFF = "turn speculation off"
DRAFTER = {"method": "eagle", "model": "<drafter>"}  # to be replaced
# Kinds of drafters of costs on a GPU, and the engines' own words, as vLLM, SGLang and llama.cpp name them.
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
NAMES = {"vllm": VLLM_METHODS, "sglang": SGLANG_ALGORITHMS}
WITHOUT_MODEL = ("mtp", "prompt-lookup", "suffix")  # the target's own weights, or none
# What a method takes beside its model and K. Of vLLM's n-grams the lengths are its own default.
VLLM_KEYS: dict[str, dict[str, int]] = {
    "prompt-lookup": {"prompt_lookup_min": 5, "prompt_lookup_max": 5},
    "p-eagle": {"parallel_drafting": True},
    "pard": {"parallel_drafting": True},
}
# Drafted in a single step. SGLang counts the last token of the text among the draft tokens.
SGLANG_BLOCKS = ("block", "dflash", "dspark")
PLACEHOLDER = "<drafter>"


def generation_config(k: int, p_min: float = 0.0) -> dict[str, float | str]:
    """Fields of a draft model in transformers: drafts of K tokens, or up to a token with probability below p_min.

    The library's own threshold is 0.4, under which few drafts are whole.
    """
    return {
        "num_assistant_tokens": k,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": p_min,
    }


def llamacpp(options: str) -> str:
    """Options of llama-server, with a reminder: without --spec-type it never uses the draft model."""
    return f"{options} (also pass --spec-type and --spec-draft-model)"


def speculative_config(**config: Any) -> str:
    """The speculative configuration of vLLM as a flag."""
    return f"--speculative-config '{json.dumps(config)}'"


def tensorrt_llm(fields: str) -> str:
    """The speculative configuration of TensorRT-LLM."""
    return f"speculative_config: {{{fields}}} (also set decoding_type and model)"


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

    drafter : its kind in costs on a GPU, such as "eagle3", or a draft model's name, for flags of vLLM and SGLang
    model : where the drafter's weights are, for a method that takes them
    """
    engine = known_name("engine", engine, [*FLAGS])
    names = NAMES.get(engine)
    kind = None if drafter is None else kind_of(drafter)
    if kind is not None and names is not None and kind not in names:
        raise InputError(f"{engine} has no drafters of kind {kind}; choose another engine")
    if not k:
        return OFF
    if drafter is None or kind is None or names is None:
        return FLAGS[engine](k)
    if engine == "vllm":
        return speculative_config(**vllm_drafter(drafter, model), num_speculative_tokens=k)
    length = f"--speculative-num-draft-tokens {k + 1}" if kind in SGLANG_BLOCKS else FLAGS[engine](k)
    return f"--speculative-algorithm {names[kind]} {length}"


def of_hub(name: str) -> bool:
    """Whether llama.cpp downloads a model of this name, OWNER/NAME or OWNER/NAME:TYPE, rather than opens a file."""
    owner, slash, rest = name.partition("/")
    return bool(slash and owner.strip(".~") and rest) and "/" not in rest and not rest.endswith(".gguf")


def server_command(
    engine: str, k: int, *, target: str = "<target>", drafter: str | None = None, model: str = PLACEHOLDER
) -> str:
    """The whole command that starts a server which drafts K tokens, or none.

    engine : of those with a server's command: vllm, sglang and llamacpp; of others the flags alone
    target, model : ids or paths, as the engine takes them
    drafter : kind of drafter, as `draft_length_flags` takes it

    >>> from specsim.engines.flags import server_command
    >>> server_command("vllm", 2, target="Qwen/Qwen3.5-27B", drafter="mtp")
    'vllm serve Qwen/Qwen3.5-27B --speculative-config \'{"method": "mtp", "num_speculative_tokens": 2}\''
    """
    engine = known_name("engine", engine, [*FLAGS])
    if drafter is None and engine == "sglang":
        drafter = DRAFTER["method"]  # which vLLM's flags have, too
    flags = draft_length_flags(engine, k, drafter, model)
    start = {"vllm": f"vllm serve {target}", "sglang": f"sglang serve --model-path {target}",
             "llamacpp": f"llama-server {'-hf' if of_hub(target) else '-m'} {target}"}.get(engine)  # fmt: skip
    if start is None:
        return flags
    if not k:
        return start
    kind = "model" if drafter is None else kind_of(drafter)
    own = kind in WITHOUT_MODEL
    if engine == "sglang":
        path = "" if own else f"--speculative-draft-model-path {model} "
        return f"{start} {path}{flags}"
    if engine == "llamacpp":
        if kind not in LLAMACPP_TYPES:
            raise InputError(f"llamacpp has no drafters of kind {kind}; choose another engine")
        path = "" if own else f"--spec-draft-{'hf' if of_hub(model) else 'model'} {model} "
        return f"{start} --spec-type {LLAMACPP_TYPES[kind]} {path}--spec-draft-n-max {k}"
    return f"{start} {flags}"
