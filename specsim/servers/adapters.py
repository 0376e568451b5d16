"""The engines' HTTP interfaces: how a server is recognised, and where its responses count drafts.

llama.cpp: read from a server of 2026.10, which ignores `speculative.n_max` in a request, so that a request cannot turn
speculation off. vLLM: read from a server of 0.32, which tells neither K nor the drafter. SGLang: by its sources of
0.5.23 and published responses, not tested on a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypedDict

from msgspec import Meta

from specsim.servers.document import Count, DraftLength, Text

Page = Mapping[str, Any]
Setting = bool | int | float | Text | None


class _Slot(TypedDict, total=False):
    n_ctx: Count | None


class LlamacppPage(TypedDict, total=False):
    """What is read of /props."""

    build_info: Text | Count
    total_slots: Count | None
    default_generation_settings: _Slot


class SglangPage(TypedDict, total=False):
    """What is read of /server_info."""

    version: Text
    speculative_algorithm: Text | None
    speculative_num_steps: DraftLength | None
    speculative_eagle_topk: Setting
    speculative_num_draft_tokens: Setting
    tp_size: Setting
    dtype: Setting
    quantization: Setting


class VllmPage(TypedDict, total=False):
    """What is read of /version."""

    version: Text


class _Model(TypedDict):
    id: Annotated[str, Meta(min_length=1, max_length=2**12)]


class Models(TypedDict):
    """What is read of /v1/models."""

    data: Annotated[list[_Model], Meta(min_length=1)]


class _Cached(TypedDict, total=False):
    cached_tokens: Count | None


class Usage(TypedDict, total=False):
    """Tokens of a request."""

    completion_tokens: Count
    prompt_tokens: Count | None
    prompt_tokens_details: _Cached | None


class _LlamacppTimings(TypedDict, total=False):
    draft_n: Count | None
    draft_n_accepted: Count | None


class _SglangCounts(TypedDict, total=False):
    spec_verify_ct: Count | None
    spec_num_proposed_drafts: Count | None
    spec_num_correct_drafts: Count | None


class _SglangDetails(TypedDict, total=False):
    spec_tokens_details: _SglangCounts | None


class _VllmCounts(TypedDict, total=False):
    num_spec_steps: Count | None
    num_draft_tokens: Count | None
    num_accepted_draft_tokens: Count | None


class _VllmMetrics(TypedDict, total=False):
    speculative_decoding: _VllmCounts | None


class Choice(TypedDict, total=False):
    """A piece of text."""

    text: str | None
    delta: dict[str, Any] | None
    finish_reason: Text | None
    meta_info: _SglangCounts | None


class Chunk(TypedDict, total=False):
    """What is read of a streamed chunk, of any engine."""

    choices: list[Choice] | None
    usage: Usage | None
    timings: _LlamacppTimings | None
    sglext: _SglangDetails | None
    metrics: _VllmMetrics | None


Counts = tuple[int | None, int | None, int | None]  # rounds, drafted and accepted tokens; None for what is unknown


class Adapter(NamedTuple):
    """The interface of an engine.

    name : the engine, as `specsim.engines.flags.FLAGS` calls it
    page : path of a page that only this engine has, with the key `key` and of this shape
    responses : format of its responses in `specsim.engines.formats.registry.FORMATS`
    request : fields of a request beside OpenAI's
    settings : reads off that page version, draft_tokens and method where it tells them, and other settings
    counts : reads the counts of a response, of which the last chunk is given
    """

    name: str
    page: str
    key: str
    shape: Any
    responses: str
    request: dict[str, bool]
    settings: Callable[[Page], dict[str, Setting]]
    counts: Callable[[Chunk], Counts]


def _llamacpp_settings(page: Page) -> dict[str, Setting]:
    context = page.get("default_generation_settings", {}).get("n_ctx")
    return {"version": str(page["build_info"]), "total_slots": page.get("total_slots"), "n_ctx": context}


def _llamacpp_counts(response: Chunk) -> Counts:
    timings = response.get("timings") or {}
    return None, timings.get("draft_n"), timings.get("draft_n_accepted")


SGLANG_SETTINGS = ("speculative_eagle_topk", "speculative_num_draft_tokens", "tp_size", "dtype", "quantization")


def _sglang_settings(page: Page) -> dict[str, Setting]:
    return {
        "version": str(page.get("version", "")),
        "draft_tokens": page.get("speculative_num_steps"),
        "method": page["speculative_algorithm"] or "",
        **{name: page[name] for name in SGLANG_SETTINGS if name in page},
    }


def _sglang_counts(response: Chunk) -> Counts:
    choice = (response.get("choices") or [{}])[0]
    meta = choice.get("meta_info") or (response.get("sglext") or {}).get("spec_tokens_details") or {}
    return meta.get("spec_verify_ct"), meta.get("spec_num_proposed_drafts"), meta.get("spec_num_correct_drafts")


def _vllm_settings(page: Page) -> dict[str, Setting]:
    return {"version": str(page["version"])}


def _vllm_counts(response: Chunk) -> Counts:
    metrics = (response.get("metrics") or {}).get("speculative_decoding") or {}
    return metrics.get("num_spec_steps"), metrics.get("num_draft_tokens"), metrics.get("num_accepted_draft_tokens")


LLAMACPP = Adapter(
    "llamacpp",
    "/props",
    "build_info",
    LlamacppPage,
    "llamacpp-responses",
    {"cache_prompt": False},
    _llamacpp_settings,
    _llamacpp_counts,
)
SGLANG = Adapter(
    "sglang",
    "/server_info",
    "speculative_algorithm",
    SglangPage,
    "sglang-responses",
    {"return_spec_tokens_details": True},
    _sglang_settings,
    _sglang_counts,
)
VLLM = Adapter("vllm", "/version", "version", VllmPage, "vllm-requests", {}, _vllm_settings, _vllm_counts)
ADAPTERS = LLAMACPP, SGLANG, VLLM
