"""`specsim record-text`: a trace of prompt lookup from texts, without a model."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specsim.cli.console import print_json, print_table
from specsim.cli.options import JsonOption


def record_text(
    texts: Annotated[
        Path,
        typer.Argument(
            help='JSON Lines of token ids, {"prompt_tokens": [...], "output_tokens": [...]}.', show_default=False
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Trace folder to write.", show_default=False)],
    rule: Annotated[
        Literal["specsim", "vllm", "transformers"], typer.Option(help="Whose rule; those below change it.")
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
    max_draft_tokens: Annotated[int, typer.Option(help="Longest draft, tokens.", min=1, max=255)] = 8,
    vocabulary: Annotated[
        int | None, typer.Option(help="Tokens of the vocabulary; default: up to the largest that is met.", min=2)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a trace that is there.")] = False,
    json: JsonOption = False,
) -> None:
    """Record what prompt lookup would propose, from prompts and outputs alone.

    The outputs may be any model's or engine's: what is looked up depends on the text alone, so
    that any chain policy replays exactly on the trace, as `specsim replay --as vllm` would
    count it. The rule of vLLM takes n-grams of 5 tokens unless told, as vLLM does.

    Example: specsim record-text texts.jsonl lookup/ --rule vllm --min-ngram 2 --max-ngram 3
    """
    from specsim.trace.files import check_free, write_trace
    from specsim.trace.from_text import lookup_trace, read_token_texts
    from specsim.trace.ngram import RULES

    check_free(out, overwrite=overwrite)
    changes: dict[str, Any] = {
        "min_ngram": min_ngram, "max_ngram": max_ngram, "occurrence": occurrence, "at_end": at_end,
    }  # fmt: skip
    chosen = replace(RULES[rule], **{name: value for name, value in changes.items() if value is not None})
    trace = lookup_trace(read_token_texts(texts), chosen, max_draft_tokens, vocabulary=vocabulary, source=str(texts))
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
