"""Draft lengths as the flags of engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from specsim.io.errors import InputError

OFF = "turn speculation off"
DRAFTER = {"method": "eagle", "model": "<drafter>"}  # to be replaced


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


FLAGS: dict[str, Callable[[int], str]] = {
    "vllm": lambda k: speculative_config(**DRAFTER, num_speculative_tokens=k),
    "sglang": lambda k: (
        f"--speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
    ),
    "llamacpp": lambda k: llamacpp(f"--spec-draft-n-max {k}"),
    "tensorrt-llm": lambda k: tensorrt_llm(f"max_draft_len: {k}"),
    "transformers": lambda k: f"{as_arguments(generation_config(k))} in the draft model's generation_config",
}


def draft_length_flags(engine: str, k: int) -> str:
    """The flags that make an engine draft K tokens in every round; InputError for an unknown engine."""
    if engine not in FLAGS:
        raise InputError(f"unknown engine {engine!r}; choose one of {', '.join(FLAGS)}")
    return FLAGS[engine](k) if k else OFF
