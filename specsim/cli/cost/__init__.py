"""`specsim cost`: costs in files, under names that ship, and on hardware that is not at hand."""

from __future__ import annotations

import typer

from specsim.cli.command import command
from specsim.cli.cost.calibrate import calibrate
from specsim.cli.cost.compare import compare
from specsim.cli.cost.show import list_costs, show

cost = typer.Typer(help="Show, calibrate and compare costs.", no_args_is_help=True)
command(cost, "list")(list_costs)
for _command in (show, compare, calibrate):
    command(cost)(_command)
