"""`specsim record-text`: a trace of prompt lookup or suffix decoding from texts, without a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specsim.cli.command import Answer
from specsim.cli.console import print_table, progress_bar
from specsim.io.errors import InputError
from specsim.io.settings import Settings, argument, setting

if TYPE_CHECKING:
    from specsim.lookup.ngram import NgramRule
    from specsim.lookup.suffix import SuffixRule


@dataclass(frozen=True, kw_only=True)
class RuleSettings(Settings):
    """Settings of prompt lookup, then those of suffix decoding; None: the rule's own."""

    min_ngram: int | None = setting(None, "Shortest n-gram to look up, in tokens.", low=1)
    max_ngram: int | None = setting(None, "Longest n-gram to look up, in tokens.", low=1)
    occurrence: Literal["first", "last"] | None = setting(None, "Which of several occurrences to copy from.")
    at_end: Literal["stop", "copy"] | None = setting(
        None, "At the end of the text, stop the draft or continue copying from the draft itself."
    )
    max_tree_depth: int | None = setting(
        None, "Suffix decoding: longest substring to count, in tokens (default: 24).", low=1, high=255
    )
    max_spec_factor: float | None = setting(
        None, "Suffix decoding: maximum draft tokens per matched token (default: 1).", low=0
    )
    max_spec_offset: float | None = setting(None, "Suffix decoding: draft tokens added to that (default: 0).")
    min_token_prob: float | None = setting(
        None, "Suffix decoding: minimum probability of a drafted token (default: 0.1).", low=0, high=1
    )
    max_cached_requests: int | None = setting(
        None, "Suffix decoding: requests to draft from, the current one included (default: 10000).", low=0
    )

    def rule(self, name: str) -> NgramRule | SuffixRule:
        """Make the rule of this name with the settings given; InputError for settings that it lacks."""
        from specsim.lookup.ngram import RULES
        from specsim.lookup.suffix import SuffixRule

        rule = SuffixRule() if name == "suffix" else RULES[name]
        changes = {key: value for key, value in vars(self).items() if value is not None}
        for unknown in changes.keys() - asdict(rule).keys():
            known = ", ".join(map(_flag, asdict(rule)))
            raise InputError(f"rule {name} has no setting {_flag(unknown)}; use {known}")
        return replace(rule, **changes)


@dataclass(frozen=True, kw_only=True)
class TextOptions(Settings):
    """Which texts are read, and what is written."""

    texts: Path = argument('JSON Lines of token ids, {"prompt_tokens": [...], "output_tokens": [...]}.')
    out: Path = argument("Trace folder to write.")
    rule: Literal["specsim", "vllm", "transformers", "suffix"] = setting(
        "specsim", "Whose prompt lookup; or suffix decoding, as in Arctic Inference and vLLM."
    )
    max_draft_tokens: int | None = setting(
        None, "Maximum draft length (default: 8; for suffix decoding --max-tree-depth).", low=1, high=255
    )
    vocabulary: int | None = setting(None, "Vocabulary size (default: up to the largest token id found).", low=2)
    overwrite: bool = setting(False, "Replace an existing trace.", flag="--overwrite")


def record_text(options: TextOptions, settings: RuleSettings) -> Answer:
    """Record prompt lookup or suffix decoding.

    Needs prompts and outputs only, of any model or engine: what is looked up depends on the text alone, so any chain
    policy replays exactly on the trace, as `specsim replay --as vllm` would count it. vLLM's rule takes n-grams of 5
    tokens by default, as vLLM does. Suffix decoding also drafts from the outputs of earlier lines, as if requests came
    one by one, and chooses its draft by --max-draft-tokens: record again for another limit.

    Example: specsim record-text texts.jsonl lookup/ --rule vllm --min-ngram 2 --max-ngram 3
    """
    from specsim.lookup.from_text import lookup_trace, read_token_texts, suffix_trace
    from specsim.lookup.suffix import SuffixRule
    from specsim.trace.files import check_free, write_trace

    check_free(options.out, overwrite=options.overwrite)
    rule, texts = settings.rule(options.rule), read_token_texts(options.texts)
    about: dict[str, Any] = {"vocabulary": options.vocabulary, "source": str(options.texts)}
    if isinstance(rule, SuffixRule):
        depth = options.max_draft_tokens or rule.max_tree_depth
        with progress_bar() as report:
            trace = suffix_trace(texts, rule, depth, **about, progress=partial(report, "texts"))
    else:
        trace = lookup_trace(texts, rule, options.max_draft_tokens or 8, **about)
    write_trace(trace, options.out, overwrite=options.overwrite)
    document: dict[str, Any] = {
        "trace": str(options.out),
        "rule": asdict(rule),
        "sequences": trace.sequences,
        "output_tokens": int(trace.output_tokens.sum()),
        "positions_with_a_draft": float((trace.draft_limit > 0).mean()),
        "mean_match_len": float(trace.match_len.mean()),
    }
    rows = [["rule", ", ".join(f"{name} {value}" for name, value in document["rule"].items())]]
    rows += [[name, f"{document[name]:,}"] for name in ("sequences", "output_tokens")]
    rows += [[name, f"{document[name]:.3f}"] for name in ("positions_with_a_draft", "mean_match_len")]
    return Answer(document, partial(print_table, f"trace {options.out}", ["", "value"], rows))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
