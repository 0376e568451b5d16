"""The engines' HTTP interfaces: how a server is recognised, and where its responses count drafts.

llama.cpp: read from a server of 2026.10, which ignores `speculative.n_max` in a request, so that a request cannot turn
speculation off. vLLM: read from a server of 0.32, which tells neither K nor the drafter. SGLang: by its sources of
0.5.23 and published responses, not tested on a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Page = Mapping[str, Any]
Counts = tuple[int | None, int | None, int | None]  # rounds, drafted and accepted tokens; None for what is unknown


class Adapter(NamedTuple):
    """The interface of an engine.

    name : the engine, as `specsim.engines.flags.FLAGS` calls it
    page : path of a page that only this engine has, with the key `key`
    responses : format of its responses in `specsim.engines.formats.registry.FORMATS`
    request : fields of a request beside OpenAI's
    settings : reads off that page version, draft_tokens and method where it tells them, and other settings
    counts : reads the counts of a response, of which the last chunk is given
    """

    name: str
    page: str
    key: str
    responses: str
    request: dict[str, Any]
    settings: Callable[[Page], dict[str, Any]]
    counts: Callable[[Mapping[str, Any]], Counts]


def _llamacpp_settings(page: Page) -> dict[str, Any]:
    context = page.get("default_generation_settings", {}).get("n_ctx")
    return {"version": str(page["build_info"]), "total_slots": page.get("total_slots"), "n_ctx": context}


def _llamacpp_counts(response: Mapping[str, Any]) -> Counts:
    timings = response.get("timings") or {}
    return None, timings.get("draft_n"), timings.get("draft_n_accepted")


SGLANG_SETTINGS = ("speculative_eagle_topk", "speculative_num_draft_tokens", "tp_size", "dtype", "quantization")


def _sglang_settings(page: Page) -> dict[str, Any]:
    return {
        "version": str(page.get("version", "")),
        "draft_tokens": page.get("speculative_num_steps"),
        "method": page["speculative_algorithm"] or "",
        **{name: page[name] for name in SGLANG_SETTINGS if name in page},
    }


def _sglang_counts(response: Mapping[str, Any]) -> Counts:
    choice = (response.get("choices") or [{}])[0]
    meta = choice.get("meta_info") or (response.get("sglext") or {}).get("spec_tokens_details") or {}
    return meta.get("spec_verify_ct"), meta.get("spec_num_proposed_drafts"), meta.get("spec_num_correct_drafts")


def _vllm_settings(page: Page) -> dict[str, Any]:
    return {"version": str(page["version"])}


def _vllm_counts(response: Mapping[str, Any]) -> Counts:
    metrics = (response.get("metrics") or {}).get("speculative_decoding") or {}
    return metrics.get("num_spec_steps"), metrics.get("num_draft_tokens"), metrics.get("num_accepted_draft_tokens")


LLAMACPP = Adapter(
    "llamacpp",
    "/props",
    "build_info",
    "llamacpp-responses",
    {"cache_prompt": False},
    _llamacpp_settings,
    _llamacpp_counts,
)
SGLANG = Adapter(
    "sglang",
    "/server_info",
    "speculative_algorithm",
    "sglang-responses",
    {"return_spec_tokens_details": True},
    _sglang_settings,
    _sglang_counts,
)
VLLM = Adapter("vllm", "/version", "version", "vllm-requests", {}, _vllm_settings, _vllm_counts)
ADAPTERS = LLAMACPP, SGLANG, VLLM
