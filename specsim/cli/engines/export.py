"""`specsim export`: what was found, as an engine takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from specsim.cli.console import OverwriteFileOption, check_new, print_json, print_notes
from specsim.cli.options import ContextOption, JsonOption
from specsim.errors import InputError


def export(
    engine: Annotated[
        str,
        typer.Argument(
            help="vllm, sglang, llamacpp, llamacpp-2025 (its options of before), tensorrt-llm or transformers.",
            show_default=False,
        ),
    ],
    k: Annotated[int | None, typer.Option(help="Draft tokens of every round; 0 for none.", min=0, max=255)] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Instead a K from each batch on, such as 1:5,4:3,16:0.", metavar="BATCH:K,...")
    ] = None,
    largest_batch: Annotated[
        int, typer.Option(help="Where a schedule ends, for vLLM, and a table of steps.", min=1, max=4096)
    ] = 512,
    p_min: Annotated[
        float | None,
        typer.Option(
            help="With --k, end drafts where the draft model is less sure: llamacpp, transformers.", min=0, max=1
        ),
    ] = None,
    min_ngram: Annotated[
        int | None, typer.Option(help="With --k, prompt lookup by n-grams of at least so many tokens: vllm.", min=1)
    ] = None,
    max_ngram: Annotated[
        int | None, typer.Option(help="And of at most so many: vllm, transformers. Default: the engine's.", min=1)
    ] = None,
    acceptance: Annotated[
        Path | None,
        typer.Option(
            help="With --k, settings that make the engine accept as often as this source does, which `specsim import` "
            "wrote, without a trained drafter: vllm, sglang, llamacpp, tensorrt-llm.",
        ),
    ] = None,
    cost: Annotated[
        Path | None,
        typer.Option(
            help="With --k, what steps cost, as the table by which a DSpark drafter's verification is scheduled: a "
            "cost file that knows batches, such as a batch profile; sglang, tensorrt-llm.",
        ),
    ] = None,
    context: ContextOption = 1000,
    form: Annotated[
        Literal["additive", "tokens"],
        typer.Option(help="Of that table: by sequences and verified tokens, or by verified tokens alone (sglang)."),
    ] = "additive",
    confidence: Annotated[
        Path | None,
        typer.Option(
            help="With --k, a trace, as temperatures under which a DSpark drafter's confidence is the probability of "
            "acceptance: sglang, tensorrt-llm.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the file that the engine wants.")] = None,
    overwrite: OverwriteFileOption = False,
    json: JsonOption = False,
) -> None:
    """Print what an engine is to be started with: flags, and a file where it wants one.

    Example: specsim export vllm --schedule 1:5,4:3,16:0
    """
    from specsim.engines.export import export_flags
    from specsim.files import write_text

    if out is not None:
        check_new(out, overwrite=overwrite)
    setting = export_flags(
        engine,
        k,
        schedule=schedule,
        largest_batch=largest_batch,
        p_min=p_min,
        min_ngram=min_ngram,
        max_ngram=max_ngram,
        acceptance=acceptance,
        cost=cost,
        context=context,
        form=form,
        confidence=confidence,
        path=None if out is None else str(out),
    )
    if out is not None:
        if setting.file is None:
            raise InputError(f"{engine} wants no file here: {setting.flags}; leave --out out")
        write_text(out, setting.file + "\n")
    if json:
        print_json({"engine": engine, "flags": setting.flags, "file": setting.file, "notes": setting.notes})
        return
    print(setting.flags)
    if setting.file is not None and out is None:
        print(f"{setting.path}: {setting.file}")
    print_notes(setting.notes)
