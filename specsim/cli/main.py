"""The `specsim` command: replay and tune on a recorded trace. Needs no torch."""

from __future__ import annotations

import gc

import typer

from specsim.cli.acceptance import acceptance
from specsim.cli.claims import claims
from specsim.cli.command import command
from specsim.cli.console import options_of_all, run
from specsim.cli.cost import cost
from specsim.cli.engines.advise import advise
from specsim.cli.engines.diagnose import diagnose
from specsim.cli.engines.explain import explain
from specsim.cli.engines.export import export
from specsim.cli.engines.import_ import import_
from specsim.cli.engines.join import join
from specsim.cli.engines.record_text import record_text
from specsim.cli.files.example import example
from specsim.cli.files.info import data, info, policies
from specsim.cli.files.report import report
from specsim.cli.leaderboard import leaderboard
from specsim.cli.replay import replay
from specsim.cli.serve import serve
from specsim.cli.servers.bench import bench
from specsim.cli.servers.doctor import doctor
from specsim.cli.sweep import sweep
from specsim.cli.tree import tree
from specsim.cli.tune import tune

OBJECTS = 100_000  # between two garbage collections, which otherwise take a tenth of a replay

app = typer.Typer(
    help="Tune and benchmark speculative decoding offline: record once, replay any policy, predict the speedup.\n\n"
    "Traces come from `realrun record`, costs from `realrun profile`; `specsim example --list` lists examples of both.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.callback()(options_of_all)
app.add_typer(data, name="data")
app.add_typer(acceptance, name="acceptance")
app.add_typer(claims, name="claims")
app.add_typer(cost, name="cost")
app.add_typer(serve, name="serve")
app.add_typer(tree, name="tree")


COMMANDS = (
    replay,
    tune,
    leaderboard,
    sweep,
    policies,
    info,
    example,
    report,
    advise,
    diagnose,
    bench,
    doctor,
    explain,
    export,
    record_text,
    join,
)
for _command in COMMANDS:
    command(app)(_command)
command(app, "import")(import_)


def main() -> None:
    """Entry point of the console command."""
    gc.set_threshold(OBJECTS)
    run(app)
