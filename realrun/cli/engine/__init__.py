"""`realrun engine`: inference engines, really run."""

from __future__ import annotations

import typer

from realrun.cli.engine.check import check
from realrun.cli.engine.validate import validate

engine = typer.Typer(
    help="Run inference engines beside their replays: rounds, counters, seconds.", no_args_is_help=True
)
for _command in (check, validate):
    engine.command()(_command)
