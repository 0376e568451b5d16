"""Draft lengths as engines take them: what to type once K is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from specsim.errors import InputError


def generation_config(k: int, p_min: float = 0.0) -> dict[str, Any]:
    """Of a draft model in transformers: drafts of K tokens, or up to one that it gives less than p_min.

    The library's own threshold is 0.4, under which few drafts are whole.
    """
    return {
        "num_assistant_tokens": k,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": p_min,
    }


def llamacpp(options: str) -> str:
    """Options of llama-server, which without a --spec-type loads a draft model and never asks it."""
    return f"{options}, beside --spec-type and --spec-draft-model"


def speculative_config(config: dict[str, Any]) -> str:
    """Options of vLLM."""
    return f"--speculative-config '{json.dumps(config)}'"


def as_arguments(fields: dict[str, Any]) -> str:
    """Fields of a configuration as Python takes them."""
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


FLAGS: dict[str, Callable[[int], str]] = {
    "vllm": lambda k: f"{speculative_config({'num_speculative_tokens': k})}, beside method and model",
    "sglang": lambda k: (
        f"--speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
    ),
    "llamacpp": lambda k: llamacpp(f"--spec-draft-n-max {k}"),
    "tensorrt-llm": lambda k: f"speculative_config: {{max_draft_len: {k}}}, beside decoding_type and model",
    "transformers": lambda k: f"{as_arguments(generation_config(k))}, of the draft model's generation_config",
}


def draft_length_flags(engine: str, k: int) -> str:
    """What makes an engine draft K tokens in every round; InputError for an engine that is not known."""
    if engine not in FLAGS:
        raise InputError(f"how {engine!r} takes a draft length is not known; choose one of {', '.join(FLAGS)}")
    return FLAGS[engine](k) if k else "leave speculation off"
