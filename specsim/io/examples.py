"""Traces and costs that ship with the package, named example:lab-eagle and the like wherever a path of one is taken."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Literal

from specsim.io.errors import InputError

PREFIX = "example:"
FOLDER = Path(__file__).parents[1] / "data" / "example"
Kind = Literal["trace", "cost"]
SUFFIXES: dict[Kind, str] = {"trace": ".zip", "cost": ".json"}


def example_files(kind: Kind) -> dict[str, Path]:
    """The shipped files of a kind by name, prefix included."""
    return {f"{PREFIX}{path.stem}": path for path in sorted(FOLDER.glob(f"*{SUFFIXES[kind]}"))}


def is_example(path: str | PathLike[str]) -> bool:
    """Whether this names an example, if there is one of that name, and not a file."""
    return str(path).startswith(PREFIX)


def located(path: str | PathLike[str], kind: Kind) -> Path:
    """The file that an example's name stands for, and any other path as it is; InputError for an unknown name."""
    if not is_example(path):
        return Path(path)
    known = example_files(kind)
    if str(path) not in known:
        raise InputError(f"there is no {kind} {path}; there are {', '.join(known)}")
    return known[str(path)]
