"""The `realrun` command: record, profile, validate and train with real models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from realrun.cli.board import board
from realrun.cli.compare import compare
from realrun.cli.convert import convert
from realrun.cli.engine import engine
from realrun.cli.gpu import gpu
from realrun.cli.profile import batch_profile, probe, profile
from realrun.cli.record import record
from realrun.cli.shapes import cost_grid, scripted, shapes
from realrun.cli.train import train as train_group
from realrun.cli.typical import typical
from realrun.cli.validate import validate
from specsim.cli.command import PanelGroup, command
from specsim.cli.console import options_of_all, run

app = typer.Typer(
    cls=PanelGroup,
    help="Record, profile and validate speculative decoding with real models.\n\n"
    "Default models: the bundled lab, a small pair trained on Python's standard library.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.callback()(options_of_all)

MEASURE, VALIDATE, TRAIN = "Record and measure", "Validate and compare", "Train and convert"
COMMANDS: dict[str, tuple[Callable[..., Any], ...]] = {
    MEASURE: (record, profile, probe, batch_profile, cost_grid, shapes, gpu),
    VALIDATE: (validate, board, compare, scripted, typical),
    TRAIN: (convert,),
}
GROUPS = {"engine": (engine, VALIDATE), "train": (train_group, TRAIN)}
for _panel, _commands in COMMANDS.items():
    for _command in _commands:
        command(app, panel=_panel)(_command)
for _name, (_group, _panel) in GROUPS.items():
    app.add_typer(_group, name=_name, rich_help_panel=_panel)


def main() -> None:
    """Entry point of the console command."""
    run(app)
