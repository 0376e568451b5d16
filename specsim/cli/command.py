"""Commands made of functions: parameters that are `Settings` become options, an `Answer` is printed.

Help is plain text, in which options and commands stand under the headings that they name.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING
from enum import StrEnum
from functools import wraps
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from specsim.cli.console import print_json, remarks_shown
from specsim.io.settings import OUTPUT, Option, Settings, from_options, numbers_text, options_of

ARGUMENTS, OPTIONS, COMMANDS = "Arguments", "Options", "Commands"


class PanelCommand(TyperCommand):
    """A command whose help has a panel for every group of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(formatter, parameter_panels(self, ctx))


class PanelGroup(TyperGroup):
    """A group of commands whose help has a panel for every heading that the commands name."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)
        for parameter in parameters:
            if parameter.name == "show_completion":
                parameter.hidden = True  # the first screen of help has 40 lines
        return parameters

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        _write(formatter, parameter_panels(self, ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands: list[tuple[str, Any]] = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        lines = [
            (command.rich_help_panel or COMMANDS, (name, command.get_short_help_str(formatter.width)))
            for name, command in commands
            if not command.hidden
        ]
        _write(formatter, _by_panel(lines))


def parameter_panels(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Names and helps of a command's arguments and options, by panel in the order in which help shows them."""
    records = [(parameter, parameter.get_help_record(ctx)) for parameter in command.get_params(ctx)]
    shown = [(_panel(parameter), record) for parameter, record in records if record is not None]
    places = {ARGUMENTS: 0, OUTPUT: 2, OPTIONS: 3}  # others between them, in the order of their options
    return _by_panel(sorted(shown, key=lambda item: places.get(item[0], 1)))


def _panel(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return ARGUMENTS
    return str(parameter.rich_help_panel or OPTIONS)


def _by_panel(lines: Iterable[tuple[str, tuple[str, str]]]) -> dict[str, list[tuple[str, str]]]:
    panels: dict[str, list[tuple[str, str]]] = {}
    for panel, line in lines:
        panels.setdefault(panel, []).append(line)
    return panels


def _write(formatter: Any, panels: dict[str, list[tuple[str, str]]]) -> None:
    for panel, lines in panels.items():
        with formatter.section(panel):
            formatter.write_dl(lines)


JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)
]


class Answer(NamedTuple):
    """The result of a command.

    document : what --json prints
    show : prints it for people
    passed : whether the check that the command makes succeeded; exit code 1 otherwise
    warning : a line for standard error
    code : exit code of a check that has more than two outcomes; 0 leaves it to `passed`
    """

    document: Any
    show: Callable[[], None]
    passed: bool = True
    warning: str = ""
    code: int = 0


def command(
    app: typer.Typer, name: str | None = None, *, panel: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to an app as a command, by default with the function's name, in a panel of the app's help.

    Every field of a parameter whose type is a `Settings` class becomes an option. A function that returns an `Answer`
    gets the option --json.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        app.command(name, cls=PanelCommand, rich_help_panel=panel)(as_command(function))
        return function

    return add


def as_command(function: Callable[..., Any]) -> Callable[..., None]:
    """Wrap a function as Typer expects it."""
    hints = typing.get_type_hints(function, include_extras=True)
    kinds = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Settings)}
    answers = kinds.pop("return", None) is None and hints.get("return") is Answer
    options: dict[str, tuple[Any, Any]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        options |= parameters_of(kinds[name]) if name in kinds else {name: (hints[name], parameter.default)}
    if answers:
        options["json"] = JsonOption, False

    @wraps(function)
    def run(**values: Any) -> None:
        as_json = answers and values.pop("json")
        arguments = {name: from_options(kind, values) for name, kind in kinds.items()}
        with remarks_shown(not as_json):
            answer = function(**{name: value for name, value in values.items() if name in hints}, **arguments)
        print_answer(answer, as_json)

    return with_signature(run, options)


def print_answer(answer: Answer | None, as_json: bool) -> None:
    """Print the result of a command, as JSON or for people; exit with its code if its check failed."""
    if answer is None:
        return
    if as_json:
        print_json(answer.document)
    else:
        answer.show()
    if answer.warning:
        print(answer.warning, file=sys.stderr)
    if answer.code or not answer.passed:
        raise typer.Exit(answer.code or 1)


def with_signature(run: Callable[..., None], options: Mapping[str, tuple[Any, Any]]) -> Callable[..., None]:
    """Give a function of keywords the signature that Typer reads: annotation and default by parameter."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(n, keyword, default=default, annotation=a) for n, (a, default) in options.items()]
    run.__annotations__ = {name: annotation for name, (annotation, _) in options.items()}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def parameters_of(kind: type[Settings]) -> dict[str, tuple[Any, Any]]:
    """Annotations and defaults for Typer, by the names of settings."""
    return {option.name: (_annotation(option), _default(option)) for option in options_of(kind)}


def _annotation(option: Option) -> Any:
    kind: Any = str if option.kind is tuple else list[option.item] if option.kind is list else option.kind  # type: ignore[name-defined]
    if option.choices:
        enum: Any = StrEnum  # type checkers know literal members only
        kind = enum("Word", {choice: choice for choice in option.choices})
    if option.optional:
        kind = kind | None
    if option.positional:
        return Annotated[kind, typer.Argument(help=option.doc, metavar=option.metavar)]
    how: dict[str, Any] = {"help": option.doc, "min": option.low, "max": option.high, "metavar": option.metavar}
    return Annotated[kind, typer.Option(*option.names, rich_help_panel=option.panel, **how)]


def _default(option: Option) -> Any:
    if option.default is MISSING:
        return inspect.Parameter.empty
    return numbers_text(option.default) if option.kind is tuple and option.default is not None else option.default
