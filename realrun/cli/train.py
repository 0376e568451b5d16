"""The `realrun train` commands, made from the settings of the trainings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from realrun.cli.options import (
    DeviceOption,
    DrafterOption,
    DraftModelOption,
    DtypeOption,
    JsonOption,
    SeedOption,
    SmokeTestOption,
    TargetOption,
    ThreadsOption,
    TokenizerDifferenceOption,
    load,
    load_alone,
)
from specsim.cli.console import print_json, print_table, progress_bar

if TYPE_CHECKING:
    from realrun.training.common.settings import Option
    from realrun.training.common.trainings import Training


class Trainings(TyperGroup):
    """Makes its commands when one is asked for, as the trainings import torch."""

    @cached_property
    def made(self) -> dict[str, Any]:
        from realrun.training.registry import TRAININGS

        app = typer.Typer(rich_markup_mode=None)
        for training in TRAININGS:
            app.command(training.name)(command_of(training))
        group = typer.main.get_group(app)
        return {training.name: group.commands[training.name] for training in TRAININGS}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.made)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self.made.get(cmd_name)


train = typer.Typer(cls=Trainings, help="Train drafters, and what they need beside their models.", no_args_is_help=True)


@train.callback()
def _group() -> None: ...


def command_of(training: Training) -> Callable[..., None]:
    """The command of a training, with the signature that Typer makes options of."""
    from realrun.training.common.settings import from_options, options_of
    from specsim.files import working_in

    def command(out: Path, json: bool, **given: Any) -> None:
        smoke_test = given.get("smoke_test", False)
        settings = from_options(training.settings, given, smoke_test=smoke_test)
        shared = from_options(training.shared, given, smoke_test=smoke_test)
        shared.check(given["target"])
        where = (given["device"], given["dtype"], given["threads"])
        with working_in(out), progress_bar() as report:
            if training.beside_draft:
                pair = load(
                    given["target"],
                    given["draft_model"],
                    *where,
                    "none",
                    given["drafter"],
                    allow_tokenizer_difference=given["allow_tokenizer_difference"],
                )
            else:
                pair = load_alone(given["target"], *where)
            document = shared.start(training.run, pair.core, settings, out, report)
        if json:
            print_json(document)
            return
        print_table(*training.summarise(document))
        print(f"{training.trains}: {document[training.trains]}")

    out_help = f"Folder for the {training.trains}; a run that was killed goes on from what is there."
    options: dict[str, tuple[Any, Any]] = {
        "out": (Annotated[Path, typer.Option(help=out_help)], inspect.Parameter.empty),
        "target": (TargetOption, "lab"),
    }
    if training.beside_draft:
        options |= {"draft_model": (DraftModelOption, "lab"), "drafter": (DrafterOption, "model")}
        options["allow_tokenizer_difference"] = TokenizerDifferenceOption, False
    for option in (*options_of(training.settings), *options_of(training.shared)):
        options[option.name] = _option(option), training.defaults.get(option.name, _default(option))
    options |= {"seed": (SeedOption, 0), "device": (DeviceOption, "cpu")}
    options.setdefault("dtype", (DtypeOption, "float32"))
    options["threads"] = ThreadsOption, 1
    if training.smoke_test:
        options["smoke_test"] = SmokeTestOption, False
    options["json"] = JsonOption, False
    command.__doc__ = training.help
    command.__annotations__ = {name: annotation for name, (annotation, _) in options.items()}
    kind = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, kind, default=default, annotation=a) for n, (a, default) in options.items()]
    )
    return command


def _option(option: Option) -> Any:
    """A setting's annotation for Typer."""
    name = "--" + option.name.replace("_", "-")
    if option.kind is bool:
        return Annotated[bool, typer.Option(name, help=option.doc)]
    kind: Any = str if option.kind is tuple else option.kind
    if option.choices:
        enum: Any = StrEnum  # of which type checkers know literal members only
        kind = enum("Word", {choice: choice for choice in option.choices})
    if option.optional:
        kind = kind | None
    return Annotated[kind, typer.Option(name, help=option.doc, min=option.low, max=option.high)]


def _default(option: Option) -> Any:
    return ",".join(f"{number:g}" for number in option.default) if option.kind is tuple else option.default
