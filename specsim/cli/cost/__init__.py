"""`specsim cost`: what things cost, in files, under names that ship, and on hardware that is not at hand."""

from __future__ import annotations

import typer

from specsim.cli.cost.compare import compare
from specsim.cli.cost.fit import fit
from specsim.cli.cost.show import list_costs, show

cost = typer.Typer(
    help="Costs of draft steps and target passes: those that ship under a name, what a file says, what recorded steps "
    "say, and what a model and a drafter would gain on several GPUs.",
    no_args_is_help=True,
)
cost.command("list")(list_costs)
for _command in (show, compare, fit):
    cost.command()(_command)
