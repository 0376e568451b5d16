"""Text made safe to print, wherever it comes from: a file may hold what a terminal would obey."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

LONGEST_LINE = 900  # characters of an error
LINE_END = 300  # of these at its end, which says what to do


def printable(text: str) -> str:
    r"""The text with all characters escaped, but line breaks and tabs, that are not shown as they are.

    These are control characters, such as those that begin a terminal's escape codes, marks that change the direction
    of writing, and halves of surrogate pairs, which cannot be printed.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """The text on one line that can be printed; a long one keeps its beginning and its end."""
    line = printable(" ".join(text.splitlines()).replace("\t", " "))
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - LINE_END - 5]} ... {line[-LINE_END:]}"


class PrintableStream:
    """A stream of text that escapes what is written to it; all else is the stream's own."""

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
    """The stream itself, for a program that styles its output; it must escape what it is given to print."""
    return stream.stream if isinstance(stream, PrintableStream) else stream
