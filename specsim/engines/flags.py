"""Draft lengths as engines take them: what to type once K is known."""

from __future__ import annotations

import json
from collections.abc import Callable

from specsim.errors import InputError

FLAGS: dict[str, Callable[[int], str]] = {
    "vllm": lambda k: f"--speculative-config '{json.dumps({'num_speculative_tokens': k})}', beside method and model",
    "sglang": lambda k: (
        f"--speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
    ),
    "llamacpp": lambda k: f"--spec-draft-n-max {k}",
    "tensorrt-llm": lambda k: f"speculative_config: {{max_draft_len: {k}}}, beside decoding_type and model",
    "transformers": lambda k: f"num_assistant_tokens={k}, num_assistant_tokens_schedule='constant'",
}


def draft_length_flags(engine: str, k: int) -> str:
    """What makes an engine draft K tokens in every round; InputError for an engine that is not known."""
    if engine not in FLAGS:
        raise InputError(f"how {engine!r} takes a draft length is not known; choose one of {', '.join(FLAGS)}")
    return FLAGS[engine](k) if k else "leave speculation off"
