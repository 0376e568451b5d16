"""Make text safe to print: a file may contain escape codes that a terminal would execute."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

LONGEST_LINE = 900  # characters of an error
LINE_END = 300  # of these at its end, which says what to do


def printable(text: str) -> str:
    r"""Escape all characters that are not shown as they are, except line breaks and tabs.

    These are control characters, such as those that begin a terminal's escape codes, marks that change the direction
    of writing, and halves of surrogate pairs, which cannot be printed.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Put the text on a single printable line; shorten a long line in the middle."""
    line = printable(" ".join(text.splitlines()).replace("\t", " "))
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - LINE_END - 5]} ... {line[-LINE_END:]}"


class PrintableStream:
    """A text stream that escapes what is written to it, and otherwise behaves as the stream it wraps."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def printable_output() -> Iterator[None]:
    """Escape what is printed inside the block."""
    out: Any = PrintableStream(sys.stdout)
    err: Any = PrintableStream(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        yield


def unescaped(stream: Any) -> Any:
    """Return the wrapped stream, for a program that styles its output and escapes its text itself."""
    return stream.stream if isinstance(stream, PrintableStream) else stream
