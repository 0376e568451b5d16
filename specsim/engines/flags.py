"""Draft lengths as the flags of engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from specsim.cost.roofline.cost import KINDS
from specsim.io.errors import InputError
from specsim.io.names import known_name

OFF = "turn speculation off"
DRAFTER = {"method": "eagle", "model": "<drafter>"}  # to be replaced
# Kinds of drafters of costs on a GPU, as vLLM and SGLang name them.
VLLM_METHODS = {
    "model": "draft_model", "eagle": "eagle", "eagle3": "eagle3", "mtp": "mtp", "medusa": "medusa",
    "prompt-lookup": "ngram",
}  # fmt: skip
SGLANG_ALGORITHMS = {
    "model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "prompt-lookup": "NGRAM",
}  # fmt: skip
NAMES = {"vllm": VLLM_METHODS, "sglang": SGLANG_ALGORITHMS}


def generation_config(k: int, p_min: float = 0.0) -> dict[str, Any]:
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


def as_arguments(fields: dict[str, Any]) -> str:
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


def vllm_method(drafter: str) -> str:
    """Name vLLM's method for a kind of drafter, or for a draft model's name."""
    return VLLM_METHODS[drafter if drafter in KINDS else "model"]


def draft_length_flags(engine: str, k: int, drafter: str | None = None) -> str:
    """The flags that make an engine draft K tokens in every round; InputError for an unknown engine or drafter.

    drafter : its kind in costs on a GPU, such as "eagle3", or a draft model's name, for flags of vLLM and SGLang
    """
    engine = known_name("engine", engine, [*FLAGS])
    names = NAMES.get(engine)
    kind = drafter if drafter in KINDS else "model"
    if drafter is not None and names is not None and kind not in names:
        raise InputError(f"{engine} has no drafters of kind {kind}; choose another engine")
    if not k:
        return OFF
    if drafter is None or names is None:
        return FLAGS[engine](k)
    if engine == "vllm":
        return speculative_config(**{**DRAFTER, "method": vllm_method(drafter), "num_speculative_tokens": k})
    return f"--speculative-algorithm {names[kind]} {FLAGS[engine](k)}"
