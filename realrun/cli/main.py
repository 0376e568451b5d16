"""The `realrun` command: record, profile, validate and train with real models."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
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

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
LARGE_BYTES = 2**21
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


def _return_freed_memory() -> None:
    """Have glibc map blocks from 2 MiB on: its own limit grows, and freed tensors then stay in its heap."""
    with suppress(AttributeError, OSError):  # other systems
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)


def main() -> None:
    """Entry point of the console command."""
    _return_freed_memory()
    run(app)
