"""SGLang's server: settings in /server_info; counts in `meta_info` or, through OpenAI's interface, in `sglext`.

By its sources of 0.5.23 and published responses; not tested on a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME, PAGE, KEY, RESPONSES = "sglang", "/server_info", "speculative_algorithm", "sglang-responses"
REQUEST: dict[str, Any] = {"return_spec_tokens_details": True}
OTHERS = ("speculative_eagle_topk", "speculative_num_draft_tokens", "tp_size", "dtype", "quantization")


def settings(page: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "version": str(page.get("version", "")),
        "draft_tokens": page.get("speculative_num_steps"),
        "method": page[KEY] or "",
        **{name: page[name] for name in OTHERS if name in page},
    }


def counts(response: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    choice = (response.get("choices") or [{}])[0]
    meta = choice.get("meta_info") or (response.get("sglext") or {}).get("spec_tokens_details") or {}
    return meta.get("spec_verify_ct"), meta.get("spec_num_proposed_drafts"), meta.get("spec_num_correct_drafts")
