"""How inference engines run and count speculative rounds: the conventions in which they differ from each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specsim.io.names import known_name
from specsim.serving.presets import SERVERS

LastDraft = Literal["K", "min(K, remaining - 1)", "min(K, remaining)"]


@dataclass(frozen=True)
class Conventions:
    """How an engine runs and counts rounds.

    engine, version : its name, and the release they hold for
    first_token : who emits a sequence's first output token: the pass over the prompt, or the first round
    last_draft : longest draft of a request's last rounds: K; as many tokens as the output has room for (remaining); or
        one less, because the target adds a token
    lookup_last_draft : the same of prompt lookup, where it differs; None where it does not
    counts_past_end : whether what is accepted of a draft beyond the limit on output tokens, or behind an end of text,
        is counted, though it is never output. If not, an engine that makes whole drafts makes none for a last token
    counts_empty : whether rounds that drafted nothing count as rounds of speculation
    pads_lookup : whether a round of prompt lookup verifies K + 1 tokens whatever was found, so that it costs as much
        without a match
    drafts_ahead : whether a round's draft is made at the end of the step before, so that a schedule of K by batch goes
        by the sequences of that step, see `specsim.serving.presets`
    drafts_past_end : whether a draft goes on behind an end-of-text token that the drafter proposes
    accepts_end : when a drafted end of text that is right counts as accepted: always, as a draft's last token alone, or
        never, because it counts as the token that the target adds
    source : how they were determined

    >>> from specsim.engines.conventions import find_conventions
    >>> find_conventions("vllm").last_draft
    'K'
    """

    engine: str
    version: str
    first_token: Literal["prefill", "round"]
    last_draft: LastDraft
    counts_past_end: bool
    counts_empty: bool
    drafts_ahead: bool
    drafts_past_end: bool
    accepts_end: Literal["always", "last", "never"]
    source: str
    lookup_last_draft: LastDraft | None = None
    pads_lookup: bool = False


CONVENTIONS = {
    conventions.engine: conventions
    for conventions in (
        Conventions(
            engine="specsim",
            version="0.1",
            first_token="round",
            last_draft="min(K, remaining - 1)",
            counts_past_end=False,
            counts_empty=True,
            drafts_ahead=False,
            drafts_past_end=False,
            accepts_end="always",
            source="this package",
        ),
        Conventions(
            engine="vllm",
            version="0.32.0",
            first_token="prefill",
            last_draft="K",
            counts_past_end=True,
            counts_empty=False,
            drafts_ahead=SERVERS["vllm"].drafts_ahead,
            drafts_past_end=True,
            accepts_end="always",
            source="runs on a CPU: per-request metrics of 36 prompts, texts and rounds equal to a replay, under a "
            "schedule of K by batch to a simulated server",
        ),
        Conventions(
            engine="llamacpp",
            version="2026.10 (0c1e57098)",
            first_token="prefill",
            last_draft="min(K, remaining - 1)",
            counts_past_end=False,
            counts_empty=False,
            drafts_ahead=SERVERS["llamacpp"].drafts_ahead,
            drafts_past_end=True,
            accepts_end="last",
            source="runs on a CPU: LLAMA_TRACE of 36 prompts, texts and rounds equal to a replay",
        ),
        Conventions(
            engine="transformers",
            version="5.23",
            first_token="round",
            last_draft="min(K, remaining - 1)",
            counts_past_end=False,
            counts_empty=True,
            drafts_ahead=False,
            drafts_past_end=False,
            accepts_end="never",
            lookup_last_draft="K",
            source="read in _assisted_decoding; with a draft model and by lookup, rounds of 36 prompts equal to a "
            "replay",
        ),
        Conventions(
            engine="openvino",
            version="2026.4.1",
            first_token="prefill",
            last_draft="min(K, remaining - 1)",
            counts_past_end=False,
            counts_empty=True,
            drafts_ahead=False,
            drafts_past_end=False,
            accepts_end="never",
            pads_lookup=True,
            source="run on a CPU: tokens of every pass of the target, and draft passes of every request; for a last "
            "token the draft model makes a pass all the same, and its token is not verified",
        ),
        Conventions(
            engine="onnxruntime-genai",
            version="0.18.0",
            first_token="round",
            last_draft="min(K, remaining)",
            counts_past_end=True,
            counts_empty=False,
            drafts_ahead=False,
            drafts_past_end=True,
            accepts_end="always",
            source="run on a CPU: get_speculative_stats after every token",
        ),
        Conventions(
            engine="mlx",
            version="0.32.2",
            first_token="round",
            last_draft="min(K, remaining)",
            counts_past_end=False,
            counts_empty=True,
            drafts_ahead=False,
            drafts_past_end=True,
            accepts_end="always",
            source="read: speculative_generate_step in mlx_lm/generate.py; run on a CPU",
        ),
    )
}


def find_conventions(engine: str) -> Conventions:
    """The conventions of an engine; InputError for an unknown engine."""
    return CONVENTIONS[known_name("engine", engine, [*CONVENTIONS])]
