"""`specsim serve`: batches, and a server under load."""

from __future__ import annotations

import typer

from specsim.cli.serve.schedule import schedule
from specsim.cli.serve.simulate import simulate

serve = typer.Typer(
    help="Speculation on a server, where several sequences share every pass: what it gains in batches and under load, "
    "and the draft length for each batch.\n\nNeeds costs that know batches: linear ones, such as "
    "specdecode-bench-llama3.1-8b-eagle-h100 (`specsim cost list` has those that ship), rooflines, silicon costs, or a "
    "profile of `realrun batch-profile`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _command in (simulate, schedule):
    serve.command()(_command)
