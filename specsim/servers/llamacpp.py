"""llama.cpp's server: counters by position with --metrics; `timings` of a response have drafted and accepted tokens.

Read from a server of 2026.10, which ignores `speculative.n_max` in a request: speculation is not switched off by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME, PAGE, KEY, RESPONSES = "llamacpp", "/props", "build_info", "llamacpp-responses"
REQUEST: dict[str, Any] = {"cache_prompt": False}


def settings(page: Mapping[str, Any]) -> dict[str, Any]:
    context = page.get("default_generation_settings", {}).get("n_ctx")
    return {"version": str(page[KEY]), "total_slots": page.get("total_slots"), "n_ctx": context}


def counts(response: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    timings = response.get("timings") or {}
    return None, timings.get("draft_n"), timings.get("draft_n_accepted")
