"""Options that helps and errors name exist: a help's are its command's own, or stand after a command that has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import typer

import realrun.cli.main
import speckernels.cli
import specsim.cli.main
from tests.support import ROOT

APPS = {"specsim": specsim.cli.main.app, "realrun": realrun.cli.main.app, "speckernels": speckernels.cli.app}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
ENGINES = {  # options of engines and pip, which are named too
    "--metrics",
    "--no-deps",
    "--per-request-spec-decode-metrics",
    "--save-detailed",
    "--save-result",
    "--speculative-eagle-topk",
    "--use-tree-spec",
}
LINE = re.compile(rf"(?:`|Example: |&& )((?:{'|'.join(APPS)}) [^`&\n]*)")  # a command, as it is typed

RAISING = ("InputError", "claim", "read_own", "refuse_other")  # what errors' texts are given to


@cache
def commands() -> dict[str, Any]:
    """Every command and group of commands, by what is typed to call it."""
    found: dict[str, Any] = {}

    def add(name: str, command: Any) -> None:
        found[name] = command
        for child in command.list_commands(None) if hasattr(command, "list_commands") else ():
            add(f"{name} {child}", command.get_command(None, child))

    for name, app in APPS.items():
        add(name, typer.main.get_command(app))
    return found


def options(name: str) -> set[str]:
    """What a command takes."""
    return {flag for parameter in commands()[name].params for flag in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }


def command_of(line: str) -> str:
    """The command that a line calls, its longest beginning that is a command."""
    words = line.split()
    return next(" ".join(words[:n]) for n in range(3, 0, -1) if " ".join(words[:n]) in commands())


def strange(text: str, own: set[str]) -> list[str]:
    """Options that a text names and that neither these are nor the commands have that it names them with."""
    found = [
        f"{line}: {option}"
        for line in LINE.findall(text)
        for option in OPTION.findall(line)
        if option not in options(command_of(line))
    ]
    return found + [option for option in OPTION.findall(LINE.sub("", text)) if option not in own | ENGINES]


@pytest.mark.parametrize("name", commands())
def test_a_help_recommends_what_there_is(name: str) -> None:
    command = commands()[name]
    texts = [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]
    assert [found for text in texts for found in strange(text, options(name))] == []


def errors(source: str) -> Iterator[str]:
    """Texts of all errors that a file raises, without what is put in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in RAISING:
            texts = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and type(part.value) is str]
            texts.sort(key=lambda text: (text.lineno, text.col_offset))
            yield "".join(str(text.value) for text in texts)


def test_an_error_recommends_what_there_is() -> None:
    own = set.union(*map(options, commands()))  # of any command: which one raises an error is not known here
    paths = [path for folder in ("specsim", "realrun", "kernels/speckernels") for path in (ROOT / folder).rglob("*.py")]
    texts = {path: [*errors(path.read_text())] for path in paths}
    assert [(path, text) for path in paths for text in texts[path] if strange(text, own)] == []


def test_a_strange_option_is_found() -> None:
    assert strange("profile again with `realrun profile --tree-nodes` or --fast", {"--slow"}) == ["--fast"]
    assert strange("see `realrun record --contexts`", set()) == ["realrun record --contexts: --contexts"]
