"""vLLM's server: K and the drafter are not told, counters by position are; responses count where the server is asked.

Read from a server of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME, PAGE, KEY, RESPONSES = "vllm", "/version", "version", "vllm-requests"
REQUEST: dict[str, Any] = {}


def settings(page: Mapping[str, Any]) -> dict[str, Any]:
    return {"version": str(page[KEY])}


def counts(response: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    metrics = (response.get("metrics") or {}).get("speculative_decoding") or {}
    return metrics.get("num_spec_steps"), metrics.get("num_draft_tokens"), metrics.get("num_accepted_draft_tokens")
