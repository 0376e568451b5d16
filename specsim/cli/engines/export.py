"""`specsim export`: a draft length, or one per batch, as an engine takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specsim.cli.console import print_json
from specsim.cli.options import JsonOption
from specsim.cli.serve.arms import parse_schedule
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
    largest_batch: Annotated[int, typer.Option(help="Where a schedule ends, for vLLM.", min=1)] = 512,
    acceptance: Annotated[
        Path | None,
        typer.Option(
            help="With --k, settings that make the engine accept as often as this source does, which `specsim import` "
            "wrote, without a trained drafter: vllm, sglang, llamacpp.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print what an engine is to be started with: flags, and a file where it wants one.

    Example: specsim export vllm --schedule 1:5,4:3,16:0
    """
    from specsim.acceptance.sources import read_source
    from specsim.engines import export as settings
    from specsim.serving.draft_length import ScheduledK

    if (k is None) == (schedule is None):
        raise InputError("give either --k or --schedule")
    if acceptance is not None:
        if not k:
            raise InputError("--acceptance is of drafts of one length; give --k of 1 or more")
        setting = settings.scripted(engine, settings.acceptance_by_depth(read_source(acceptance), k))
    elif schedule is not None:
        setting = settings.schedule(engine, ScheduledK(parse_schedule(schedule)), largest_batch)
    else:
        assert k is not None
        setting = settings.draft_length(engine, k)
    if json:
        print_json({"engine": engine, "flags": setting.flags, "file": setting.file})
        return
    print(setting.flags)
    if setting.file is not None:
        print(f"{settings.FILE}: {setting.file}")
