"""`specsim record-text`: a trace of prompt lookup or suffix decoding from texts, without a model."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specsim.cli.console import print_json, print_table, progress_bar
from specsim.cli.options import JsonOption
from specsim.errors import InputError


def record_text(
    texts: Annotated[
        Path,
        typer.Argument(
            help='JSON Lines of token ids, {"prompt_tokens": [...], "output_tokens": [...]}.', show_default=False
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Trace folder to write.", show_default=False)],
    rule: Annotated[
        Literal["specsim", "vllm", "transformers", "suffix"],
        typer.Option(
            help="Whose prompt lookup, or suffix decoding, as Arctic Inference and vLLM have it; its settings follow."
        ),
    ] = "specsim",
    min_ngram: Annotated[int | None, typer.Option(help="Shortest n-gram looked up, tokens.", min=1)] = None,
    max_ngram: Annotated[int | None, typer.Option(help="Longest n-gram looked up, tokens.", min=1)] = None,
    occurrence: Annotated[
        Literal["first", "last"] | None, typer.Option(help="Of several occurrences, which one is copied from.")
    ] = None,
    at_end: Annotated[
        Literal["stop", "copy"] | None,
        typer.Option(help="Where the text ends, whether a draft stops or copies its own tokens on."),
    ] = None,
    max_tree_depth: Annotated[
        int | None,
        typer.Option(help="Suffix decoding: longest substring counted, tokens; default: 24.", min=1, max=255),
    ] = None,
    max_spec_factor: Annotated[
        float | None, typer.Option(help="Longest draft per token of the match; default: 1.", min=0)
    ] = None,
    max_spec_offset: Annotated[float | None, typer.Option(help="Added to that, tokens; default: 0.")] = None,
    min_token_prob: Annotated[
        float | None, typer.Option(help="Least probability of a drafted token; default: 0.1.", min=0, max=1)
    ] = None,
    max_cached_requests: Annotated[
        int | None,
        typer.Option(
            help="Requests whose outputs are drafted from, this one among them; default: 10000.",
            min=0,
        ),
    ] = None,
    max_draft_tokens: Annotated[
        int | None,
        typer.Option(help="Longest draft, tokens; default: 8, of suffix decoding --max-tree-depth.", min=1, max=255),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Tokens of the vocabulary; default: up to the largest that is met.", min=2)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a trace that is there.")] = False,
    json: JsonOption = False,
) -> None:
    """Record what prompt lookup or suffix decoding would propose, from prompts and outputs alone.

    The outputs may be any model's or engine's: what is looked up depends on the text alone, so
    that any chain policy replays exactly on the trace, as `specsim replay --as vllm` would
    count it. The rule of vLLM takes n-grams of 5 tokens unless told, as vLLM does. Suffix
    decoding drafts from the outputs of earlier lines too, as if requests came one by one, and
    chooses its draft by --max-draft-tokens: record again for another limit.

    Example: specsim record-text texts.jsonl lookup/ --rule vllm --min-ngram 2 --max-ngram 3
    """
    from specsim.trace.files import check_free, write_trace
    from specsim.trace.from_text import lookup_trace, read_token_texts, suffix_trace
    from specsim.trace.ngram import RULES
    from specsim.trace.suffix import SuffixRule

    check_free(out, overwrite=overwrite)
    settings: dict[str, Any] = {
        "min_ngram": min_ngram, "max_ngram": max_ngram, "occurrence": occurrence, "at_end": at_end,
        "max_tree_depth": max_tree_depth, "max_spec_factor": max_spec_factor, "max_spec_offset": max_spec_offset,
        "min_token_prob": min_token_prob, "max_cached_requests": max_cached_requests,
    }  # fmt: skip
    changes = {name: value for name, value in settings.items() if value is not None}
    chosen = SuffixRule() if rule == "suffix" else RULES[rule]
    for name in changes.keys() - asdict(chosen).keys():
        known = ", ".join(map(_option, asdict(chosen)))
        raise InputError(f"{_option(name)} is no setting of the rule {rule}; its own are {known}")
    chosen = replace(chosen, **changes)
    found = read_token_texts(texts)
    about: dict[str, Any] = {"vocabulary": vocabulary, "source": str(texts)}
    if isinstance(chosen, SuffixRule):
        depth = max_draft_tokens or chosen.max_tree_depth
        with progress_bar() as report:
            trace = suffix_trace(found, chosen, depth, **about, progress=lambda *at: report("texts", *at))
    else:
        trace = lookup_trace(found, chosen, max_draft_tokens or 8, **about)
    write_trace(trace, out, overwrite=overwrite)
    document = {
        "trace": str(out),
        "rule": asdict(chosen),
        "sequences": trace.sequences,
        "output_tokens": int(trace.output_tokens.sum()),
        "positions_with_a_draft": float((trace.draft_limit > 0).mean()),
        "mean_match_len": float(trace.match_len.mean()),
    }
    if json:
        print_json(document)
        return
    rows = [["rule", ", ".join(f"{name} {value}" for name, value in asdict(chosen).items())]]
    rows += [[name, f"{document[name]:,}"] for name in ("sequences", "output_tokens")]
    rows += [[name, f"{document[name]:.3f}"] for name in ("positions_with_a_draft", "mean_match_len")]
    print_table(f"trace {out}", ["", "value"], rows)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
