"""The `realrun` command: real models. Record, profile, validate; train the lab."""

from __future__ import annotations

import typer

from realrun.cli.campaign import campaign
from realrun.cli.compare import compare
from realrun.cli.convert import convert
from realrun.cli.engine import engine
from realrun.cli.lab import lab
from realrun.cli.leaderboard import leaderboard
from realrun.cli.profile import batch_profile, probe, profile
from realrun.cli.record import record
from realrun.cli.shapes import cost_grid, scripted, shapes
from realrun.cli.train import train as train_group
from realrun.cli.typical import typical
from realrun.cli.validate import validate
from specsim.cli.command import command
from specsim.cli.console import options_of_all, run

app = typer.Typer(
    help="Record, profile and validate speculative decoding with real models.\n\n"
    "Default models: the bundled lab, a small pair trained on Python's standard library.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.callback()(options_of_all)
app.add_typer(engine, name="engine")
app.add_typer(lab, name="lab")
app.add_typer(train_group, name="train")


for _command in (
    record,
    profile,
    probe,
    batch_profile,
    validate,
    compare,
    convert,
    campaign,
    cost_grid,
    leaderboard,
    scripted,
    shapes,
    typical,
):
    command(app)(_command)


def main() -> None:
    """Entry point of the console command."""
    run(app)
