"""`specsim serve`: batches, and a server under load."""

from __future__ import annotations

import typer

from specsim.cli.command import command
from specsim.cli.serve.frontier import frontier
from specsim.cli.serve.schedule import schedule
from specsim.cli.serve.simulate import simulate

serve = typer.Typer(
    help="Simulate speculation on a server.\n\n"
    "Several sequences share every pass: what speculation gains in batches and under load, and the best draft length "
    "for each batch size. Needs a batch-aware cost model: linear, such as specdecode-bench-llama3.1-8b-eagle-h100 "
    "(`specsim cost list` names those that ship), roofline, or a profile of `realrun batch-profile`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _command in (simulate, schedule, frontier):
    command(serve)(_command)
