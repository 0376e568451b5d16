"""A page for every command, with all its options: made when the site is built, so that its search finds them."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import typer

import realrun.cli.main
import specsim.cli.main
from specsim.cli.command import parameter_panels

FOLDER = "reference/commands"
Commands = Iterator[tuple[str, Any, Any]]  # name as typed, command, context
APPS = {"specsim": specsim.cli.main.app, "realrun": realrun.cli.main.app}


def command_pages() -> dict[str, str]:
    """Write the page of every command, by its place in the site."""
    return {f"{FOLDER}/{_file(name)}": command_page(name, command, ctx) for name, command, ctx in _all()}


def command_list() -> str:
    """Link every command's page with its summary, for the page that lists them."""
    rows = [f"| [`{name}`](commands/{_file(name)}) | {command.get_short_help_str(80)} |" for name, command, _ in _all()]
    return "\n".join(["| command | what it does |", "|---|---|", *rows])


def _file(name: str) -> str:
    return f"{name.replace(' ', '-')}.md"


def _all() -> Commands:
    for name, app in APPS.items():
        yield from _commands(name, typer.main.get_command(app), None)


def _commands(name: str, command: Any, parent: Any) -> Commands:
    """Every command below this one, with its name and context; those of `realrun train` need torch."""
    ctx = command.context_class(command, parent=parent, info_name=name.rpartition(" ")[2])
    if not hasattr(command, "list_commands"):
        yield name, command, ctx
        return
    try:
        children = command.list_commands(ctx)
    except ModuleNotFoundError:
        return
    for child in children:
        yield from _commands(f"{name} {child}", command.get_command(ctx, child), ctx)


def command_page(name: str, command: Any, ctx: Any) -> str:
    """Write a command's page: what it does, its arguments and options by panel, as its help has them."""
    paragraphs = [" ".join(text.split()) for text in (command.help or "").split("\n\n")]
    description = [re.sub(r"^Example: (.*)$", r"```sh\n\1\n```", text) for text in paragraphs]
    parts = [
        f"## {panel}\n\n" + "\n".join(f"`{name}`\n:   {_plain(text)}\n" for name, text in lines)
        for panel, lines in parameter_panels(command, ctx).items()
    ]
    return "\n\n".join([f"# {name}", *description, *parts]) + "\n"


def _plain(text: str) -> str:
    """Escape what is HTML, and what Markdown would read as a link or as emphasis."""
    return re.sub(r"([\[*_])", r"\\\1", html.escape(text, quote=False))
