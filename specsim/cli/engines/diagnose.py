"""`specsim diagnose`: why speculation is slower, or no faster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specsim.cli.command import Answer
from specsim.cli.console import print_table
from specsim.cli.options import BatchSettings, CountsSettings
from specsim.io.settings import setting

if TYPE_CHECKING:
    from specsim.engines.diagnose import Diagnosis


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions(CountsSettings, BatchSettings):
    """Measurements with speculation and without."""

    baseline_tokens_per_second: float = setting(..., "Measured tok/s without speculation, at the same load.")
    tokens_per_second: float = setting(..., "Measured tok/s with speculation.")
    cost: Path | None = setting(
        None, "Costs, to split a round's time further; `specsim cost list` names those that ship."
    )


def diagnose(options: DiagnoseOptions) -> Answer:
    """Explain why speculation does not pay.

    Shows how many tokens drafts add, what a round costs, and the draft length K that would pay.

    Example: specsim diagnose counters.json --baseline-tokens-per-second 52 --tokens-per-second 41
    """
    from specsim.cost.files import read_cost
    from specsim.engines.diagnose import diagnose as find_diagnosis

    diagnosis = find_diagnosis(
        options.source,
        baseline_tokens_per_s=options.baseline_tokens_per_second,
        tokens_per_s=options.tokens_per_second,
        cost=None if options.cost is None else read_cost(options.cost, batch=options.batch),
        context=options.context,
        policy=options.policy,
        seed=options.seed,
    )
    return Answer(diagnosis.as_dict(), partial(_print_diagnosis, diagnosis))


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    rows = [
        ["speedup", f"{diagnosis.speedup:.3f}"],
        ["tokens per step [95 % interval]", str(diagnosis.tokens_per_round)],
        ["tokens per step to break even", f"{diagnosis.round_tokens:.3f}"],
        [f"speedup if all {diagnosis.draft_tokens} drafts were accepted", f"{diagnosis.all_accepted:.3f}"],
        *([f"of a step: {part.name}", f"{part.tokens:.3f} decode steps"] for part in diagnosis.parts),
    ]
    print_table(repr(diagnosis), ["quantity", "value"], rows)
    for assumed, advice in diagnosis.advice:
        best = advice.lengths[advice.k]
        choice = f"K = {advice.k}, {str(best.speedup).replace(' ', 'x ', 1)}" if advice.k else "turn speculation off"
        print(f"{assumed}: {choice}{'' if advice.sure else ' (uncertain: collect more rounds)'}")
