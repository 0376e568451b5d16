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
    from specsim.engines.advise import NEAR_PERCENT
    from specsim.engines.advise import advise as find_advice
    from specsim.engines.flags import draft_length_flags

    if engine is not None:
        draft_length_flags(engine, 1)  # names a bad one before any work
    found = find_advice(source, read_costs(cost, draft_cost, batch), context=context, policy=policy, seed=seed)
    flags = None if engine is None else found.flags(engine)
    if json:
        print_json({**found.as_dict(), "flags": flags})
        return
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
    print_table(repr(found), columns, rows)
    if flags:
        print(f"{engine}: {flags}")
    print_notes(found.notes)
