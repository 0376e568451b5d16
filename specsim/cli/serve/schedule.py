"""`specsim serve schedule`: the best draft length per batch and context, and where speculation stops paying."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from specsim.cli.command import Answer
from specsim.cli.console import print_notes, print_table, progress_bar
from specsim.cli.options import LEARNING_SHARE_HELP, BatchCostSettings, SeedSettings
from specsim.io.settings import setting

if TYPE_CHECKING:
    from specsim.serving.serve import DraftSchedule


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(SeedSettings):
    """Which batch sizes, contexts and draft lengths are compared."""

    batch: tuple[int, ...] = setting((1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "Batch sizes, increasing.")
    context: tuple[int, ...] | None = setting(
        None, "Cached tokens of every sequence, as 1024,8192 (default: those of the trace)."
    )
    max_draft_tokens: int | None = setting(
        None, "Maximum draft length K (default: 8, or the depth of the trace).", low=1, high=255
    )
    policy: list[str] = setting(
        [], "Also rank this policy (chain or static tree) with its default settings; repeat for more."
    )
    tuning_share: float = setting(0.5, LEARNING_SHARE_HELP)


def schedule(source: BatchCostSettings, options: ScheduleOptions) -> Answer:
    """Find the best draft length per batch size.

    Finds the best K for each batch size and context, and the batch size beyond which speculation loses. Batches are
    full: a finished sequence makes room for the next. Every K up to --max-draft-tokens is compared, and TurboSpec,
    which chooses K in every round by the load and a moving estimate of acceptance. Intervals (95 %) are over
    sequences. The schedule is printed as `specsim serve simulate --schedule` takes it; --json also has vLLM's ranges
    [first batch, last batch, K].

    Example: specsim serve schedule TRACE --cost specdecode-bench-llama3.1-8b-eagle-h100 --context 1024
    """
    from specsim.cost.files import as_cost, with_batch
    from specsim.serving.serve import serve_schedule

    costs = as_cost(source.costs(source.cost))
    with progress_bar() as bar:
        schedule = serve_schedule(
            source.trace,
            costs,
            batches=options.batch,
            contexts=options.context,
            max_draft_tokens=options.max_draft_tokens,
            policies=options.policy,
            tuning_share=options.tuning_share,
            seed=options.seed,
            progress=partial(bar, "cells"),
        )

    def show() -> None:
        note = "; approximate: rejection sampling" if schedule.approximate else ""
        for number in range(len(schedule.contexts)):
            _print_context(schedule, number, note)
        print_notes(schedule.cost_notes)

    at_first_batch = with_batch(costs, options.batch[0])
    return Answer({**schedule.as_dict(), **source.cost_facts(source.cost, at_first_batch)}, show)


def _print_context(schedule: DraftSchedule, number: int, note: str) -> None:
    """Print the table of a context, its schedule, and where speculation stops paying."""
    context, even = schedule.contexts[number], schedule.break_even[number]
    others = [label for label in schedule.cells[0].speedup if label not in schedule.lengths]
    rows = []
    for cell in schedule.cells:
        if cell.context == context:
            best = max(schedule.lengths, key=lambda label: cell.speedup[label].estimate)
            rest = [f"{cell.speedup[label].estimate:.3f}" for label in others]
            row = [f"{cell.batch}", f"{schedule.lengths[best]}", str(cell.speedup[best]), *rest]
            rows.append([*row, f"{cell.baseline_tokens_per_s:,.0f}"])
    where = "the trace's contexts" if context is None else f"context {context:,}"
    columns = ["batch", "K", "speedup [95 %]", *(re.split(r"[ (]", label)[0] for label in others), "tok/s off"]
    print_table(f"Best K in full batches, {where}{note}", columns, rows)
    lengths = ",".join(f"{batch}:{k}" for batch, k in schedule.schedule(context).items())
    print(f"schedule {lengths}")
    if even.batch is None:
        print(f"fixed K still gains at a batch of {even.largest_batch}")
    else:
        print(f"fixed K loses beyond a batch of {even}" if even.batch else "fixed K loses at every batch")
