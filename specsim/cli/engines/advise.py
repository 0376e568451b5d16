"""`specsim advise`: a draft length from an engine's counts of accepted drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specsim.cli.command import Answer
from specsim.cli.console import print_notes, print_table
from specsim.cli.options import CostSettings, CountsSettings, RequestSettings
from specsim.io.settings import setting

if TYPE_CHECKING:
    from specsim.engines.advise import Advice


@dataclass(frozen=True, kw_only=True)
class AdviseCosts(CostSettings):
    """Costs, and the engine whose flags are printed."""

    engine: str | None = setting(
        None,
        "Engine whose flags to print: vllm, sglang, llamacpp, tensorrt-llm or transformers. Its overhead is part of "
        "costs on a GPU.",
    )
    engine_alone = True


def advise(options: CountsSettings, costs: AdviseCosts, requests: RequestSettings) -> Answer:
    """Recommend a draft length K from counters.

    For every K up to the longest draft counted: tokens per round, the speedup over decoding without speculation with
    a 95 % interval, and how likely it is the best, or within 1 % of the best. Where the counts do not decide, the
    output says how many rounds would settle it. The last lines are the answer and the flag. With --isl and --osl, the
    speedup is that of the time per output token on a server with --batch such requests, whose prompts are read in the
    same steps.

    Example: specsim advise counters.json --cost vllm-llama3.1-8b-eagle-h100 --engine vllm

    Example: specsim advise vllm.log --gpu h100 --target llama-3.1-8b --drafter eagle3 --engine vllm
    """
    from specsim.cost.files import as_cost
    from specsim.cost.roofline.cost import RooflineCost
    from specsim.engines.advise import advise as find_advice
    from specsim.engines.flags import draft_length_flags

    engine, cost = costs.engine, as_cost(costs.read())
    kind = cost.drafter.kind if isinstance(cost, RooflineCost) else None
    if engine is not None:
        draft_length_flags(engine, 1, kind)  # rejects what has no flags before any work
    advice = find_advice(
        options.source,
        cost,
        context=options.context,
        policy=options.policy,
        seed=options.seed,
        isl=requests.isl,
        osl=requests.osl,
    )
    flags = None if engine is None else advice.flags(engine, kind)

    def show() -> None:
        _print_lengths(advice)
        print_notes(advice.notes)
        print(advice)
        if flags is not None:
            print(f"{engine}: {flags}")

    return Answer({**advice.as_dict(), "flags": flags}, show)


def _print_lengths(advice: Advice) -> None:
    from specsim.engines.advise import NEAR_PERCENT

    rows = [
        [
            str(length.k),
            f"{length.tokens_per_round:.2f}",
            str(length.speedup),
            f"{100 * length.best:.0f} %",
            f"{100 * length.near:.0f} %",
        ]
        for length in advice.lengths
    ]
    columns = ["K", "tokens per round", "speedup [95 %]", "best", f"within {NEAR_PERCENT:g} %"]
    title = f"speedup by draft length; how likely a K is the best, or within {NEAR_PERCENT:g} % of the best"
    print_table(title, columns, rows)
