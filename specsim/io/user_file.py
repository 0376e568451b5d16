"""A user's own Python file as a module, and what other installed packages add to a registry.

The file runs, as any program that its user starts; nothing but a path named by the user is loaded.
"""

from __future__ import annotations

import re
import sys
import traceback
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from specsim.io.errors import InputError
from specsim.io.files import digest


def is_file_name(name: str) -> bool:
    """Check whether a name is FILE.py or FILE.py:NAME, not that of something built in."""
    return name.endswith(".py") or ".py:" in name


def split_file_name(name: str) -> tuple[str, str]:
    """Split FILE.py:NAME into path and name; the name of FILE.py is empty."""
    return (name, "") if name.endswith(".py") else tuple(name.rsplit(":", 1))  # type: ignore[return-value]


def run_file(path: Path, source: bytes) -> ModuleType:
    """Run a file as a module, registered under its own name because dataclasses look their module up by name."""
    name = digest(f"{path}\0", source, length=12)
    module = ModuleType(f"specsim_user_file_{name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException as error:
        del sys.modules[module.__name__]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise InputError(f"{_place(path, error)}; correct the file") from None
    return module


def own_classes(module: ModuleType, bases: tuple[type[Any], ...]) -> list[type[Any]]:
    """List a module's own classes of these bases, but for any named _Like_this."""

    def own(name: str, value: Any) -> bool:
        mine = isinstance(value, type) and issubclass(value, bases) and value.__module__ == module.__name__
        return mine and not name.startswith("_")

    return list(dict.fromkeys(value for name, value in vars(module).items() if own(name, value)))


def _place(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:  # of this file, or of a file that it imports
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    place = f"{path}, line {lines[-1]}" if lines else str(path)
    return f"{place}: {type(error).__name__}: {error_line(error)}"


def error_line(error: BaseException) -> str:
    """Strip colours, line breaks and numba's preamble from an error message."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Failed in nopython mode")]
    return " ".join(lines[:3])[:300].rstrip(".;")


def plugin(group: str, name: str) -> Any:
    """Load the object that an installed package adds to a group of entry points by this name; None if none does."""
    for entry in entry_points(group=group, name=name):
        try:
            return entry.load()
        except Exception as error:
            raise InputError(
                f"{entry.value} of {group} does not load: {error_line(error)}; update its package"
            ) from None
    return None


def plugin_names(group: str) -> tuple[str, ...]:
    """List what installed packages add to a group of entry points."""
    return tuple(entry.name for entry in entry_points(group=group))
