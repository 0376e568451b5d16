"""`specsim diagnose`: why speculation is slower, or no faster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specsim.cli.console import print_json, print_table
from specsim.cli.options import (
    BatchOption,
    ContextOption,
    CountsArgument,
    JsonOption,
    RoundsPolicyOption,
    SeedOption,
)


def diagnose(
    source: CountsArgument,
    baseline_tokens_per_second: Annotated[
        float, typer.Option(help="Measured without speculation, at the same load.", show_default=False)
    ],
    tokens_per_second: Annotated[float, typer.Option(help="Measured with speculation.", show_default=False)],
    cost: Annotated[
        Path | None, typer.Option(help="Costs, which split a round's time further; `specsim cost list` has some.")
    ] = None,
    batch: BatchOption = None,
    context: ContextOption = 1000,
    policy: RoundsPolicyOption = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Say why speculation is slower, or no faster: what drafts bring, what a round costs, and the K that would pay.

    Example: specsim diagnose counters.json --baseline-tokens-per-second 52 --tokens-per-second 41
    """
    from specsim.cost.files import read_cost
    from specsim.engines.diagnose import diagnose as find_diagnosis

    found = find_diagnosis(
        source,
        baseline_tokens_per_s=baseline_tokens_per_second,
        tokens_per_s=tokens_per_second,
        cost=None if cost is None else read_cost(cost, batch=batch),
        context=context,
        policy=policy,
        seed=seed,
    )
    if json:
        print_json(found.as_dict())
        return
    rows = [
        ["speedup", f"{found.speedup:.3f}"],
        ["tokens that a round emits [95 % interval]", str(found.tokens_per_round)],
        ["tokens that it would have to emit to pay", f"{found.round_tokens:.3f}"],
        [f"speedup, were all {found.draft_tokens} drafts accepted", f"{found.all_accepted:.3f}"],
        *([f"of a round: {part.name}", f"{part.tokens:.3f} tokens' time"] for part in found.parts),
    ]
    print_table(repr(found), ["quantity", "value"], rows)
    for assumed, advice in found.advice:
        best = advice.lengths[advice.k]
        said = f"K = {advice.k}, {best.speedup}" if advice.k else "no speculation"
        print(f"fastest {assumed}: {said}{'' if advice.sure else ' (not sure: count more rounds)'}")
