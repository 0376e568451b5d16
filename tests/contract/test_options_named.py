"""Options that helps and errors name exist: a help's are its command's own, or stand after a command that has them.

Helps have options and commands in panels, short options are unambiguous, and shells complete.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import typer

import realrun.cli.main
import specsim.cli.main
from specsim.io.settings import SHORT_FLAGS
from tests.support import ROOT
from tests.support.commands import call

APPS = {"specsim": specsim.cli.main.app, "realrun": realrun.cli.main.app}
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


def test_the_first_screen_has_every_command_in_a_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = call("specsim", "--help").out.splitlines()
    panels = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert panels == ["Tune a server:", "Compare drafting policies:", "Traces, costs and claims:", "Options:"]
    assert 24 <= len(lines) <= 41 and max(map(len, lines)) <= 80


def test_options_stand_under_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    panel, headings, panels = "", [], {}
    for line in call("realrun", "validate", "--help").out.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            panel = line.removesuffix(":")
            headings.append(panel)
        panels |= {word.strip(","): panel for word in line.split()[:2] if line.startswith("  -")}
    where = {option: panels[option] for option in ("--target", "--prompts", "--temperature", "--clock", "--out")}
    assert where == {
        "--target": "Models",
        "--prompts": "Prompts",
        "--temperature": "Sampling",
        "--clock": "Machine and timing",
        "--out": "Output",
    }
    assert headings[-2:] == ["Output", "Options"]


@pytest.mark.parametrize("name", [name for name in commands() if name.startswith(("specsim", "realrun"))])
def test_a_letter_means_the_same_in_every_command(name: str) -> None:
    letters = {value: key for key, value in SHORT_FLAGS.items()}
    for parameter in commands()[name].params:
        for option in parameter.opts:
            assert len(option) != 2 or not option.startswith("-") or letters[option] in parameter.opts


def test_a_shell_completes_commands() -> None:
    environment = {"_SPECSIM_COMPLETE": "complete_bash", "COMP_WORDS": "specsim adv", "COMP_CWORD": "1"}
    code = "import sys; sys.argv[0] = 'specsim'; from specsim.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert done.stdout.split() == ["advise"]
