"""`realrun engine`: inference engines, run for real."""

from __future__ import annotations

import typer

from realrun.cli.engine.check import check
from realrun.cli.engine.validate import validate
from specsim.cli.command import command

engine = typer.Typer(help="Run an engine and compare it with replays.", no_args_is_help=True)
for _command in (check, validate):
    command(engine)(_command)
