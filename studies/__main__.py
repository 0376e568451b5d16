"""The studies, from what their real runs recorded or run anew: `python -m studies [NAME...] [--real]`."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from specsim.cli.console import run
from specsim.io.errors import InputError

HOME = Path(__file__).parent
STUDIES = tuple(sorted(path.parent.name for path in HOME.glob("*/run.py")))
RECORDED = "recorded"  # in a study's folder: what its real run left and its report is made of
WRITTEN = ("report.md", "table.csv", "figures")


def patterns(name: str) -> tuple[str, ...]:
    """Files that a study's report is made of and only a real run gives; none of a study that runs nothing."""
    return tuple(import_module(f"studies.{name}.run").RECORDED)


def recorded_files(name: str, folder: Path) -> list[Path]:
    """Those files of all of its results; relative paths."""
    paths = {path.relative_to(folder) for pattern in patterns(name) for path in folder.glob(pattern) if path.is_file()}
    return sorted(paths)


def copy(paths: Iterable[Path], source: Path, target: Path) -> None:
    """Copy files and folders of one folder into another, in place of what has their name there."""
    for path in paths:
        if (target / path).is_dir():
            shutil.rmtree(target / path)
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        if (source / path).is_dir():
            shutil.copytree(source / path, target / path)
        else:
            shutil.copy(source / path, target / path)


def compact(folder: Path) -> None:
    """Leave the spaces out of a folder's JSON: programs read it, and every checkout holds it."""
    for path in folder.rglob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()), separators=(",", ":")) + "\n")


def redo(name: str, out: Path, *, real: bool) -> None:
    """Write a study's report and figures anew, into its results and its folder."""
    home, results = HOME / name, out / name
    records = bool(patterns(name))
    if records and not real:
        if not (home / RECORDED).is_dir():
            raise InputError(f"{home} has no {RECORDED} run; run it with --real")
        copy([path.relative_to(home / RECORDED) for path in (home / RECORDED).iterdir()], home / RECORDED, results)
    config = tomllib.loads((home / "config.toml").read_text())
    import_module(f"studies.{name}.run").main(results, config)
    if records and real:
        shutil.rmtree(home / RECORDED, ignore_errors=True)
        copy(recorded_files(name, results), results, home / RECORDED)
        compact(home / RECORDED)
    copy([Path(written) for written in WRITTEN if (results / written).exists()], results, home)


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Which: {', '.join(STUDIES)}; all unless given.")] = None,
    real: Annotated[
        bool,
        typer.Option("--real", help="Record, profile and decode anew on this machine, for hours; resumes in --out."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results/studies"),
) -> None:
    """Write the studies' reports: from what their real runs recorded, or from real runs on this machine."""
    for name in names or STUDIES:
        if name not in STUDIES:
            raise InputError(f"there is no study {name}; choose of {', '.join(STUDIES)}")
    for name in names or STUDIES:
        print(f"{name}:", flush=True)
        redo(name, out, real=real)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    run(app)
