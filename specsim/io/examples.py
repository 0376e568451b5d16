"""Traces and costs that ship with the package, which every path accepts by names such as example:lab-eagle."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Literal

from specsim.io.errors import InputError

PREFIX = "example:"
FOLDER = Path(__file__).parents[1] / "data" / "example"
TASKS = Path(__file__).parents[1] / "data" / "tasks.jsonl"  # prompts, 40 of each of six kinds
Kind = Literal["trace", "cost"]
SUFFIXES: dict[Kind, str] = {"trace": ".zip", "cost": ".json"}


def example_files(kind: Kind) -> dict[str, Path]:
    """List the shipped files of a kind by name, prefix included."""
    return {f"{PREFIX}{path.stem}": path for path in sorted(FOLDER.glob(f"*{SUFFIXES[kind]}"))}


def is_example(path: str | PathLike[str]) -> bool:
    """Tell whether a path has the form of an example's name, whether or not that example exists."""
    return str(path).startswith(PREFIX)


def located(path: str | PathLike[str], kind: Kind) -> Path:
    """Return the file of an example's name, or any other path unchanged; raise InputError for an unknown name."""
    if not is_example(path):
        return Path(path)
    known = example_files(kind)
    if str(path) not in known:
        raise InputError(f"unknown {kind} {path}; choose from {', '.join(known)}")
    return known[str(path)]
