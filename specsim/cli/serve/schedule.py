"""`specsim serve schedule`: the best draft length per batch and context, and where speculation stops paying."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from specsim.cli.console import parse_numbers, print_json, print_notes, print_table, progress_bar
from specsim.cli.options import BatchCostOption, JsonOption, LearningShareOption, SeedOption, TraceArgument

if TYPE_CHECKING:
    from specsim.api.serve import DraftSchedule


def schedule(
    trace: TraceArgument,
    cost: BatchCostOption,
    batch: Annotated[str, typer.Option(help="Batches, increasing.")] = "1,2,4,8,16,32,64,128,256,512",
    context: Annotated[
        str, typer.Option(help="Cached tokens of every sequence, as 1024,8192; default those of the trace.")
    ] = "",
    max_draft_tokens: Annotated[
        int | None, typer.Option(help="Largest K; default 8, or the depth of the trace.", min=1, max=255)
    ] = None,
    policy: Annotated[
        list[str],
        typer.Option(
            help="A policy of chains or of a static tree to rank beside, at its defaults; repeat for more.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 (typer reads the default, it is never changed)
    tuning_share: LearningShareOption = 0.5,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Find the best draft length K for each batch and context, and the batch beyond which speculation loses.

    Batches are full: whoever is done makes room for the next. Every K up to
    --max-draft-tokens is weighed, beside the goodput rule, which chooses K anew in every
    round by the load and a moving estimate of acceptance. Intervals (95 %) are over
    sequences. The schedule is printed as `specsim serve simulate --schedule` takes it;
    --json has it as vLLM's ranges [first batch, last batch, K], too.

    Example: specsim serve schedule TRACE --cost specdecode-bench-llama3.1-8b-eagle-h100 --context 1024
    """
    from specsim.api.serve import serve_schedule

    sizes = parse_numbers(batch, "--batch", int, "1,2,4,8")
    contexts = parse_numbers(context, "--context", int, "1024,8192") if context else None
    with progress_bar() as bar:
        found = serve_schedule(
            trace,
            cost,
            batches=sizes,
            contexts=contexts,
            max_draft_tokens=max_draft_tokens,
            policies=policy,
            tuning_share=tuning_share,
            seed=seed,
            progress=lambda done, total: bar("cells", done, total),
        )
    if json:
        print_json(found.as_dict())
        return
    approximate = "; approximate: rejection sampling" if found.approximate else ""
    for number in range(len(found.contexts)):
        _print_context(found, number, approximate)
    print_notes(found.cost_notes)


def _print_context(found: DraftSchedule, number: int, note: str) -> None:
    """The table of one context, and what follows from it."""
    context, even = found.contexts[number], found.break_even[number]
    others = [label for label in found.cells[0].speedup if label not in found.lengths]
    rows = []
    for cell in found.cells:
        if cell.context == context:
            best = max(found.lengths, key=lambda label: cell.speedup[label].estimate)
            rest = [f"{cell.speedup[label].estimate:.3f}" for label in others]
            row = [f"{cell.batch}", f"{found.lengths[best]}", str(cell.speedup[best]), *rest]
            rows.append([*row, f"{cell.baseline_tokens_per_s:,.0f}"])
    where = "the trace's contexts" if context is None else f"context {context:,}"
    columns = ["batch", "best K", "speedup [95 %]", *(re.split(r"[ (]", label)[0] for label in others), "tok/s off"]
    print_table(f"Speedup in full batches, {where}{note}", columns, rows)
    lengths = ",".join(f"{batch}:{k}" for batch, k in found.schedule(context).items())
    print(f"schedule {lengths}")
    if even.batch is None:
        print(f"fixed K still gains at a batch of {even.largest_batch}")
    else:
        print(f"fixed K loses beyond a batch of {even}" if even.batch else "fixed K loses at every batch")
