"""Draft lengths as the flags of engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from specsim.io.errors import InputError

OFF = "turn speculation off"
DRAFTER = {"method": "eagle", "model": "<drafter>"}  # to be replaced
# Names of drafters, as costs have them, in vLLM and SGLang; other names are of draft models.
VLLM_METHODS = {"eagle": "eagle", "eagle3": "eagle3", "mtp": "mtp", "medusa": "medusa", "prompt-lookup": "ngram"}
SGLANG_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "prompt-lookup": "NGRAM"}


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


def draft_length_flags(engine: str, k: int, drafter: str | None = None) -> str:
    """The flags that make an engine draft K tokens in every round; InputError for an unknown engine.

    drafter : as costs on a GPU name it, such as "eagle3"; vLLM's and SGLang's flags then name its kind
    """
    if engine not in FLAGS:
        raise InputError(f"unknown engine {engine!r}; choose one of {', '.join(FLAGS)}")
    if not k:
        return OFF
    if drafter is not None and engine == "vllm":
        config = {**DRAFTER, "method": VLLM_METHODS.get(drafter, "draft_model"), "num_speculative_tokens": k}
        return speculative_config(**config)
    algorithm = ""
    if drafter is not None and engine == "sglang":
        algorithm = f"--speculative-algorithm {SGLANG_ALGORITHMS.get(drafter, 'STANDALONE')} "
    return algorithm + FLAGS[engine](k)
