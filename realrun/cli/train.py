"""The `realrun train` commands, made from the settings of the trainings."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import cached_property
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from realrun.cli.options import (
    SMOKE_TEST_HELP,
    DrafterSettings,
    MachineSettings,
    TargetSettings,
    load_alone,
    typed,
)
from specsim.cli.command import (
    Answer,
    JsonOption,
    PanelCommand,
    PanelGroup,
    parameters_of,
    print_answer,
    with_signature,
)
from specsim.cli.console import print_table, progress_bar
from specsim.cli.options import SeedSettings
from specsim.io.settings import OUTPUT, from_options

if TYPE_CHECKING:
    from realrun.train.common.trainings import Training


RECIPE_HELP = (
    "Values of options that are not given: this project's (default), or those that the paper prints for larger targets "
    "and more text (paper), as docs/errata.md lists them."
)


class Recipe(StrEnum):
    """Where the values of options that are not given come from."""

    default = "default"
    paper = "paper"


class Trainings(PanelGroup):
    """A group that makes its commands on first use, because the trainings import torch."""

    @cached_property
    def trainings(self) -> TyperGroup:
        """A group of every training's command."""
        from realrun.train.registry import TRAININGS

        app = typer.Typer(rich_markup_mode=None)
        for training in TRAININGS:
            app.command(training.name, cls=PanelCommand)(command_of(training))
        return typer.main.get_group(app)

    def list_commands(self, ctx: Any) -> list[str]:
        return self.trainings.list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self.trainings.get_command(ctx, cmd_name)


train = typer.Typer(cls=Trainings, help="Train drafters and predictors.", no_args_is_help=True)


@train.callback()
def _group() -> None: ...


def command_of(training: Training) -> Callable[..., None]:
    """Make the command of a training, with a signature that Typer turns into options."""
    from specsim.io.files import working_in

    models: type[TargetSettings] = DrafterSettings if training.beside_draft else TargetSettings

    def command(ctx: typer.Context, out: Path, json: bool, **given: Any) -> None:
        smoke_test = given.get("smoke_test", False)
        if training.printed is not None and given["recipe"] == "paper":
            named = {"epochs": "tokens"}  # what decides an option beside itself
            given |= {
                name: value
                for name, value in training.printed(**given).items()
                if not typed(ctx, name) and not typed(ctx, named.get(name, name))
            }
        settings = from_options(training.settings, given, smoke_test=smoke_test)
        shared = from_options(training.shared, given, smoke_test=smoke_test)
        shared.check(given["target"])
        machine = from_options(MachineSettings, given)
        with working_in(out), progress_bar() as report:
            if training.beside_draft:
                pair = from_options(DrafterSettings, given).load(machine)
            else:
                pair = load_alone(given["target"], machine)
            trained = shared.start(training.run, pair.core, settings, out, report)

        def show() -> None:
            print_table(*trained.summary())
            print(f"{training.trains}: {trained.path}")

        print_answer(Answer(trained.as_dict(), show), json)

    out_help = f"Folder for the {training.trains}; an interrupted run resumes from it."
    out_option = typer.Option("--out", "-o", help=out_help, rich_help_panel=OUTPUT)
    options: dict[str, tuple[Any, Any]] = {
        "ctx": (typer.Context, Parameter.empty),
        "out": (Annotated[Path, out_option], ...),
    }
    for kind in (models, training.settings, training.shared, SeedSettings, MachineSettings):
        options |= {name: option for name, option in parameters_of(kind).items() if name not in options}
    for name, default in training.defaults.items():
        options[name] = options[name][0], default
    if training.smoke_test:
        options["smoke_test"] = Annotated[bool, typer.Option("--smoke-test", help=SMOKE_TEST_HELP)], False
    if training.printed is not None:
        options["recipe"] = Annotated[Recipe, typer.Option("--recipe", help=RECIPE_HELP)], Recipe.default
    options["json"] = JsonOption, False
    command.__doc__ = training.help
    return with_signature(command, options)
