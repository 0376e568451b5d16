"""The pair that a command of `realrun engine` runs, and the trace whose rounds it compares with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from realrun.cli.options import load, load_prompts, refuse_beside

if TYPE_CHECKING:
    from realrun.engines.engine import Engine
    from realrun.pairs.pair import Pair
    from specsim.progress import Progress
    from specsim.trace.trace import Trace

TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="A trace of this pair, made by `realrun record --mode greedy`, in place of a new one; its prompts are "
        "decoded.",
        show_default=False,
    ),
]


def pair_and_trace(
    ctx: typer.Context,
    engine: Engine,
    target: str,
    draft_model: str,
    *,
    trace: Path | None,
    prompts: Path | None,
    num_prompts: int | None,
    depth: int,
    max_new_tokens: int,
    progress: Progress,
) -> tuple[Pair, Trace]:
    """The models loaded, and the trace given, or a new one of the prompts."""
    from realrun.engines.check import check_recording, recorded_tokens, recording
    from realrun.pairs.prompts import prompts_source
    from realrun.recording.record import longest_prompt
    from specsim.trace.files import read_trace

    if trace is not None:
        refuse_beside(ctx, "trace", ("prompts", "num_prompts"))
    else:
        prompts_source(target, prompts)
    pair = load(target, draft_model, "cpu", "float32", 1)
    if trace is not None:
        recorded = read_trace(trace)
        check_recording(recorded, pair, engine, depth, max_new_tokens, str(trace))
        return pair, recorded
    longest = longest_prompt(pair, recorded_tokens(engine, depth, max_new_tokens), depth)
    chosen = load_prompts(pair, prompts, num_prompts, longest)
    return pair, recording(pair, chosen, engine, depth, max_new_tokens, progress)
