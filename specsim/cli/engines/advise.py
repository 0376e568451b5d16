"""`specsim advise`: the draft length that an engine's counts speak for."""

from __future__ import annotations

from typing import Annotated

import typer

from specsim.cli.console import print_json, print_notes, print_table
from specsim.cli.options import (
    BatchOption,
    ContextOption,
    CostOption,
    CountsArgument,
    DraftCostOption,
    JsonOption,
    RoundsPolicyOption,
    SeedOption,
    read_costs,
)


def advise(
    source: CountsArgument,
    cost: CostOption,
    draft_cost: DraftCostOption = None,
    batch: BatchOption = None,
    context: ContextOption = 1000,
    policy: RoundsPolicyOption = None,
    engine: Annotated[
        str | None, typer.Option(help="Whose flags to print: vllm, sglang, llamacpp, tensorrt-llm or transformers.")
    ] = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Recommend a draft length K, or none, from the drafts that an engine counted as accepted.

    Of every K up to the longest draft counted: tokens per round, the speedup over decoding
    without speculation with a 95 % interval, and how likely it is the best, or within 1 % of
    it. Where the counts cannot tell, it is said, and how many rounds would.

    Example: specsim advise counters.json --cost vllm-llama3.1-8b-eagle-h100 --engine vllm
    """
    from specsim.acceptance.sources import read_source
    from specsim.engines.advise import NEAR_PERCENT
    from specsim.engines.advise import advise as find_advice
    from specsim.engines.flags import draft_length_flags

    if engine is not None:
        draft_length_flags(engine, 1)
    found = find_advice(
        read_source(source, policy=policy), read_costs(cost, draft_cost, batch), context=context, seed=seed
    )
    flags = None if engine is None else draft_length_flags(engine, found.k)
    if json:
        print_json({**found.as_dict(), "flags": flags})
        return
    chosen = found.lengths[found.k]
    said = f"K = {found.k}" if found.k else "no speculation"
    if found.k:
        said += f", {chosen.speedup} times as fast as without speculation"
    if not found.sure:
        said += f"; not sure ({100 * chosen.near:.0f} %) to be within {NEAR_PERCENT:g} % of the best"
        if found.times_rounds:
            said += f", which about {found.times_rounds * found.rounds:,} rounds would tell ({found.rounds:,} counted)"
    if found.longest:
        said += "; longer drafts were not counted and may be better still"
    rows = [
        [
            str(one.k),
            f"{one.tokens_per_round:.2f}",
            str(one.speedup),
            f"{100 * one.best:.0f} %",
            f"{100 * one.near:.0f} %",
        ]
        for one in found.lengths
    ]
    columns = ["K", "tokens per round", "speedup [95 % interval]", "is the best", f"within {NEAR_PERCENT:g} % of it"]
    print_table(said, columns, rows)
    if flags:
        print(f"{engine}: {flags}")
    print_notes(found.notes)
