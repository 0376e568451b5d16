"""The lab's text: the source of Python's standard library, split by file.

The split hashes each file's path below the library folder, so that it is the same under every Python version.
"""

from __future__ import annotations

import ast
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specsim.io.files import digest

Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 16  # every sixteenth file
MAX_FILE_BYTES = 300_000  # a few giant generated tables would drown the rest
MIN_FILE_BYTES = 200


@dataclass(frozen=True)
class SourceFile:
    """A library file: its path below the library folder and its text."""

    name: str
    text: str

    @property
    def is_test(self) -> bool:
        return "test" in Path(self.name).parts or "tests" in Path(self.name).parts


def held_out(name: str) -> bool:
    """Decide whether the file with this path (posix, below the library) is held out."""
    return int(digest(name, length=2), 16) % HELD_OUT_SHARE == 0


def library_files(split: Split) -> list[SourceFile]:
    """List the usable files of a split, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "__pycache__" in name:
            continue
        if held_out(name) != (split == "held_out"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # the library's tests hold files that are invalid on purpose
        if MIN_FILE_BYTES <= len(text) <= MAX_FILE_BYTES:
            files.append(SourceFile(name, text))
    return files


def docstring_spans(text: str) -> list[tuple[int, int]]:
    """Find the character ranges of a module's docstrings of at least 400 characters."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    line_start = [0]
    for line in text.split("\n"):  # as the parser counts lines; a form feed ends none
        line_start.append(min(line_start[-1] + len(line) + 1, len(text)))
    spans = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
            continue
        if isinstance(first.value.value, str) and len(first.value.value) >= 400:
            end_line = first.end_lineno or first.lineno
            if end_line < len(line_start):
                spans.append((line_start[first.lineno - 1], line_start[end_line]))
    return sorted(spans)
