"""What both command lines share: errors, tables, progress, JSON."""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from specsim.errors import InputError, Interrupted
from specsim.progress import Progress

BAD_INPUT = 2
INTERRUPTED = 130  # as shells have it
LINE_EVERY_S = 30.0  # of progress, where it goes to a file or a pipe
Number = TypeVar("Number", int, float)
# Click's class, or typer's own copy of it: that depends on typer's version.
USAGE_ERROR: Any = typer.BadParameter.__base__
MAX_SEED = 2**32 - 1  # the least of what numpy, optuna and torch take


def run(app: typer.Typer) -> None:
    """Run a command line; bad input becomes one line on standard error and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except OSError as error:
        print(f"error: {_what_failed(error)}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help page
            error.show()
        else:
            message = " ".join(error.format_message().split()).rstrip(".")
            command = error.ctx.command_path if error.ctx else sys.argv[0]
            print(f"error: {message}; see `{command} --help`", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except Interrupted as stop:
        print(f"interrupted: {stop}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer's, too, for Ctrl-C in a command that keeps nothing
        print("interrupted", file=sys.stderr)
    raise SystemExit(code or 0)


def _what_failed(error: OSError) -> str:
    """What is wrong with a file, and what to do, in one line."""
    place = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"{place}the disk is full; free some space, then run the command again"
    if error.errno == errno.EDQUOT:
        return f"{place}your disk quota is used up; free some space, then run the command again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{place}no permission ({error.strerror}); choose another place, or have its permissions changed"
    return f"{place}{' '.join(str(error.strerror or error).split())}; check path and permissions"


def print_json(document: Any) -> None:
    """One JSON object on standard output."""
    print(json.dumps(document, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on standard output; every column but the first is right-aligned."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:  # a pipe or a log has no width to fold at
        console = Console(width=200)
    console.print(table)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Bars on standard error; where that is no terminal, a line every half a minute."""
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield progress_lines()
        return
    with Bars(console=console, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


def progress_lines(interval_s: float = LINE_EVERY_S) -> Progress:
    """Progress as lines on standard error, the first after `interval_s` seconds and no more than one in as many."""
    last = time.monotonic()

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= interval_s:
            last = time.monotonic()
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    return report


def parse_numbers(text: str, option: str, kind: type[Number], example: str) -> list[Number]:
    """The numbers of a comma-separated list, "3,7,16"; InputError names the option and gives the example."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{option} {text!r} is no list of {what}; write for example {example}") from None


def parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    """["gamma=0.2", ...] as a dict; InputError for text without "="."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or not value:
            raise InputError(f"--set {pair!r} is not NAME=VALUE; write for example --set gamma=0.2")
        settings[key.strip()] = value.strip()
    return settings
