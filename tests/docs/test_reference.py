"""The reference shows every public name; names in the menu and links are the build's to check."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from typing import Any

import pytest
import typer

from docs.commands import command_pages
from docs.pages import HOME, written
from specsim.policy.registry import NAMED
from tests.contract.test_options_named import APPS, commands, options


@pytest.mark.parametrize("package", ["specsim", "realrun", "speckernels"])
def test_every_public_name_stands_in_the_reference(package: str) -> None:
    shown = (HOME / "reference" / f"{package}.md").read_text()
    names = import_module(package).__all__
    assert [name for name in names if f"::: {package}.{name}\n" not in shown and f"`{name}`" not in shown] == []


@pytest.mark.parametrize("package", ["specsim", "realrun"])
def test_the_architecture_shows_every_folder_below_those_that_it_imports(package: str) -> None:
    contracts = tomllib.loads((HOME.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract.get("containers") == [package]]
    level = {name: number for number, layer in enumerate(reversed(layers)) for name in layer.split(" | ")}
    folders = {name for name in level if (HOME.parent / package / name).is_dir()}
    rows = re.findall(rf"^\| `{package}/(\w+)/` \|", (HOME / "architecture.md").read_text(), re.MULTILINE)
    assert set(rows) == folders
    assert [level[name] for name in rows] == sorted(level[name] for name in rows)


@pytest.mark.parametrize("app", APPS)
def test_every_command_stands_in_the_reference(app: str) -> None:
    commands: Any = typer.main.get_command(APPS[app])
    text = (HOME / "reference" / "commands.md").read_text()
    assert [name for name in commands.commands if not re.search(rf"`{name}`|^  {name} ", text, re.MULTILINE)] == []


def test_every_command_has_a_page_with_all_its_options() -> None:
    made = command_pages()
    for name, command in commands().items():
        if not name.startswith("speckernels") and not hasattr(command, "list_commands"):
            page = made[f"reference/commands/{name.replace(' ', '-')}.md"]
            assert [option for option in options(name) if option.startswith("-") and option not in page] == []


def test_every_policy_stands_on_the_page_that_helps_to_choose() -> None:
    text = (HOME / "which.md").read_text()
    assert [name for name in NAMED if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", [path.relative_to(HOME.parent).as_posix() for path in written()])
def test_files_that_a_page_names_exist(name: str) -> None:
    text = (HOME.parent / name).read_text()
    named = re.findall(r"`((?:specsim|realrun|kernels|studies|tests|claims|docs)/[\w./]+)`", text)
    assert [path for path in sorted(set(named)) if not (HOME.parent / path).exists()] == []


def test_every_page_stands_in_the_menu() -> None:
    menu = (HOME.parent / "mkdocs.yml").read_text()
    assert [path.name for path in HOME.rglob("*.md") if path.relative_to(HOME).as_posix() not in menu] == []
