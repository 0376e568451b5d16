"""Arguments and options that the `specsim` commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specsim.cli.console import MAX_SEED

if TYPE_CHECKING:
    from specsim.cost.model import CostModel

TUNED = ["fixed_k", "max_confidence", "adaedl"]  # policies of commands that tune some, unless others are named

TraceArgument = Annotated[
    Path,
    typer.Argument(
        help="Trace folder, made by `realrun record`, or a name of `specsim example --list`.", show_default=False
    ),
]
PolicyOption = Annotated[
    str,
    typer.Option(help="Policy: a name that `specsim policies` lists, or a FILE.py of your own.", show_default=False),
]
PolicyFileOption = Annotated[
    list[str],
    typer.Option(
        help="Policies of your own beside those, FILE.py or FILE.py:NAME; repeat for more.", metavar="FILE.py"
    ),
]
SetOption = Annotated[
    list[str], typer.Option("--set", help="A setting, NAME=VALUE; repeat for more.", metavar="NAME=VALUE")
]
CostOption = Annotated[
    Path,
    typer.Option(
        help='Cost file: a profile, {"s_d": seconds, "s_t": seconds}, a name of `specsim cost list` or '
        "`specsim example --list`, or with --draft-cost the target's cost grid.",
        show_default=False,
    ),
]
DraftCostOption = Annotated[
    Path | None,
    typer.Option(
        help="The drafter's cost grid; FILE:MODEL names one of a campaign's profile.json.", show_default=False
    ),
]
BatchCostOption = Annotated[
    Path,
    typer.Option(
        help="Costs that know batches: a linear, roofline or silicon cost file, a batch profile, or a name of "
        "`specsim cost list`.",
        metavar="COST",
    ),
]
BatchOption = Annotated[int | None, typer.Option(help="Batch size, of cost grids and linear costs; default 1.", min=1)]
CountsArgument = Annotated[
    Path,
    typer.Argument(
        help='What was accepted: {"drafted": [...], "accepted": [...]} by depth as .json, a rounds.parquet, or a '
        "trace.",
        show_default=False,
    ),
]
RoundsPolicyOption = Annotated[
    str | None, typer.Option(help="Of rounds, only those of this policy, as the file spells it.")
]
ContextOption = Annotated[int, typer.Option(help="Tokens in the cache at which costs are taken.", min=1)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
LearningShareOption = Annotated[
    float, typer.Option(help="Share of the sequences that a policy which learns from data learns from.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of all randomness.", min=0, max=MAX_SEED)]


def read_costs(cost: Path, draft_cost: Path | None, batch: int | None) -> CostModel:
    """The cost model that --cost, --draft-cost and --batch name."""
    from specsim.cost.files import read_cost
    from specsim.cost.grid import read_grid_pair

    if draft_cost is not None:
        return read_grid_pair(cost, draft_cost, batch=batch or 1)
    return read_cost(cost, batch=batch)
