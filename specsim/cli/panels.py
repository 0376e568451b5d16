"""Help in panels: plain text, in which options and commands stand under the headings that they name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from specsim.io.settings import OUTPUT

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
