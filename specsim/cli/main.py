"""The `specsim` command: replay and tune on a recorded trace. Needs no torch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import typer

from specsim.cli.acceptance import acceptance
from specsim.cli.claims import claims
from specsim.cli.command import PanelGroup, command
from specsim.cli.console import options_of_all, run
from specsim.cli.cost import cost
from specsim.cli.engines import advise, explain, export, import_
from specsim.cli.files import example, info, join, policies, record_text, report
from specsim.cli.leaderboard import leaderboard
from specsim.cli.replay import replay
from specsim.cli.serve import serve
from specsim.cli.servers import bench, doctor
from specsim.cli.sweep import sweep
from specsim.cli.tree import tree
from specsim.cli.tune import tune

OBJECTS = 100_000  # between two garbage collections, which otherwise take a tenth of a replay

app = typer.Typer(
    cls=PanelGroup,
    help="Find the best speculative-decoding settings without re-running the model. "
    "Start: specsim advise vllm.log -g h100 -t llama-3.1-8b -d eagle3",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.callback()(options_of_all)

SERVERS, POLICIES, DATA = "Tune a server", "Compare drafting policies", "Traces, costs and claims"
COMMANDS: dict[str, tuple[Callable[..., Any], ...]] = {
    SERVERS: (advise, bench, doctor, explain, import_, export),
    POLICIES: (leaderboard, tune, replay, sweep, policies),
    DATA: (example, info, join, record_text, report),
}
GROUPS = {
    "serve": (serve, SERVERS),
    "tree": (tree, POLICIES),
    "cost": (cost, DATA),
    "claims": (claims, DATA),
    "acceptance": (acceptance, DATA),
}
for _panel, _commands in COMMANDS.items():
    for _command in _commands:
        command(app, _command.__name__.replace("_", "-").rstrip("-"), panel=_panel)(_command)
for _name, (_group, _panel) in GROUPS.items():
    app.add_typer(_group, name=_name, rich_help_panel=_panel)


def main() -> None:
    """Entry point of the console command."""
    gc.set_threshold(OBJECTS)
    run(app)
