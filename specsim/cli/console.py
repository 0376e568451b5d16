"""Errors, tables, progress and JSON of both command lines."""

from __future__ import annotations

import atexit
import errno
import gc
import json
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim import __version__
from specsim.io.errors import InputError, Interrupted
from specsim.io.printable import one_line, printable, printable_output, unescaped
from specsim.io.progress import Progress, ProgressLines, ProgressReports

if TYPE_CHECKING:
    from rich.progress import TaskID

BAD_INPUT = 2
INTERRUPTED = 130  # as shells have it
AGAIN_S = 0.1  # until a dropped KeyboardInterrupt is raised again
BAR_WIDTH, BESIDE_BAR = 40, 50  # most characters of a bar, and of the text beside it
# Click's class, or typer's own copy of it: that depends on typer's version.
USAGE_ERROR: Any = typer.BadParameter.__base__
INSTALL = "real runs need more than `pip install .`: pip install -c constraints.txt '.[real]'"
MAX_SEED = 2**32 - 1  # the least of what numpy, optuna and torch take


@printable_output()
def run(app: typer.Typer) -> None:
    """Run a command line; its output is escaped, and bad input becomes a line on standard error and exit code 2."""
    atexit.register(gc.disable)  # or Python looks for garbage once more, among all that was imported
    try:
        with _no_lost_interrupt():
            code = app(standalone_mode=False)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("specsim", "realrun", "speckernels"):
            raise  # a bug, not a lack of the install
        print(f"error: {error.name} is not installed; {INSTALL}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except (MemoryError, RuntimeError) as error:
        line = _what_system_lacks(error)
        if line is None:
            raise
        print(f"error: {one_line(line)}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except OSError as error:
        print(f"error: {one_line(_what_failed(error))}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help page
            error.show()
        else:
            message = one_line(" ".join(error.format_message().split()).rstrip("."))
            command = error.ctx.command_path if error.ctx else sys.argv[0]
            print(f"error: {message}; see `{command} --help`", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except Interrupted as stop:
        print(f"interrupted: {stop}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer's, too, for Ctrl-C in a command that keeps nothing
        print("interrupted: nothing is kept, the same command starts anew", file=sys.stderr)
    raise SystemExit(code or 0)


@contextmanager
def _no_lost_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt again where Python dropped it.

    Python prints and drops an exception in a finalizer or weak reference's callback. Drawing a figure
    has many of them, and the command would continue.
    """
    hook = sys.unraisablehook

    def interrupt_again(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            try:  # not in here, where it would be dropped, too
                threading.Timer(AGAIN_S, os.kill, [os.getpid(), signal.SIGINT]).start()
            except KeyboardInterrupt:  # the thread started so slowly that its signal came first
                interrupt_again(unraisable)
        else:
            hook(unraisable)

    sys.unraisablehook = interrupt_again
    try:
        yield
    finally:
        sys.unraisablehook = hook


def _what_system_lacks(error: Exception) -> str | None:
    """Describe a fault of the machine that Python does not report as an OSError; None for any other error."""
    text = str(error)[:200]
    if isinstance(error, MemoryError) or "can't start new thread" in text:  # NumPy says how much it wanted
        return f"memory is used up ({text or 'out of memory'}); give smaller input, or the machine more memory"
    if text.startswith("Symlink loop"):
        return f"{text}; choose another path"
    return None


def _what_failed(error: OSError) -> str:
    """Describe a file error and its remedy in a line."""
    place = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"{place}the disk is full; free some space, then run the command again"
    if error.errno == errno.EDQUOT:
        return f"{place}your disk quota is used up; free some space, then run the command again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{place}no permission ({error.strerror}); choose another place, or have its permissions changed"
    if "No usable temporary directory" in str(error):
        return "no folder for temporary files can be written; set TMPDIR to one that can"
    return f"{place}{' '.join(str(error.strerror or error).split())}; check path and permissions"


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"specsim {__version__}")
        raise typer.Exit


class ProgressForm(StrEnum):
    AUTO = "auto"
    JSON = "json"


_progress_form = ContextVar("progress_form", default=ProgressForm.AUTO)
_remarks_shown = ContextVar("remarks_shown", default=True)


def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    progress: Annotated[
        ProgressForm,
        typer.Option(
            help="Progress on stderr: bar or lines (auto), or JSON.",
            show_default=False,
        ),
    ] = ProgressForm.AUTO,
) -> None:
    _progress_form.set(progress)


def check_new(path: Path, *, overwrite: bool) -> None:
    """Raise InputError, before any work, where a file exists and is not to be replaced."""
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists; choose another name or overwrite it (--overwrite)")


def claim_file(path: Path, *, overwrite: bool) -> None:
    """Raise InputError or OSError, before any work, where a file exists or is not writable."""
    from specsim.io.files import check_writable

    check_new(path, overwrite=overwrite)
    check_writable(path)


def print_json(document: Any) -> None:
    """Print a JSON object on standard output."""
    print(json.dumps(document, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, labels: int = 1) -> None:
    """A table on standard output, as wide as that is; see `specsim.report.terminal.print_table`."""
    from specsim.report import terminal  # rich is slow to load, and --json does not need it

    terminal.print_table(title, columns, rows, labels=labels)


def print_facts(title: str, facts: Mapping[str, Any], *, number: str = ".4g") -> None:
    """Print names and values as a table; `number` is how floats are formatted."""
    print_table(title, ["", "value"], [[name, fact_text(value, number)] for name, value in facts.items()])


def fact_text(value: Any, number: str = ".4g") -> str:
    """A value of a JSON document as people read it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {fact_text(part, number)}" for name, part in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(fact_text(part, number) for part in value) or "none"
    if value is None:
        return "none"
    return f"{value:{number}}" if isinstance(value, float) else str(value)


def print_skipped(title: str, skipped: Iterable[tuple[str, str]]) -> None:
    """Print which policies were left out, and why."""
    if rows := [*skipped]:
        print_table(title, ["policy", "reason"], rows)


def print_notes(notes: Iterable[str], label: str = "note") -> None:
    """Print what qualifies the result above, a line each."""
    for note in notes:
        print(f"{label}: {note}")


@contextmanager
def remarks_shown(shown: bool) -> Iterator[None]:
    """Set whether commands inside print what `realrun` logs."""
    token = _remarks_shown.set(shown)
    try:
        yield
    finally:
        _remarks_shown.reset(token)


class _Remarks(logging.Handler):
    """Pass the text of each logged record to a function."""

    def __init__(self, say: Callable[[str], None]):
        super().__init__()
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(printable(record.getMessage()))


@contextmanager
def _remarks(say: Callable[[str], None]) -> Iterator[None]:
    """Print what `realrun` logs while it works, such as first results; nothing if the command prints JSON."""
    if not _remarks_shown.get():
        yield
        return
    logger, handler = logging.getLogger("realrun"), _Remarks(say)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show bars on standard error, a line every half a minute where it is not a terminal, or JSON objects if asked."""

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    as_json = _progress_form.get() is ProgressForm.JSON
    if as_json:
        logging.getLogger("specsim").setLevel(logging.ERROR)  # or remarks would stand among the objects
        yield ProgressReports(say)
        return
    if not sys.stderr.isatty():
        with ProgressLines(say) as lines, _remarks(say):
            yield lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(file=unescaped(sys.stderr))
    bar = BarColumn(max(4, min(BAR_WIDTH, console.width - BESIDE_BAR)))
    columns = TextColumn("{task.description}", markup=False), bar, TaskProgressColumn(), TimeRemainingColumn()
    with Bars(*columns, console=console, transient=True) as bars, _remarks(partial(console.print, markup=False)):
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(printable(what), total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


def parse_share(text: str, option: str, example: str) -> float:
    """The share that a text such as "1%" or "0.01" gives; InputError names the option and gives the example."""
    number, percent, rest = text.partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = math.nan
    if rest or not 0 < share < 1:
        raise InputError(f"{option} {text!r} is not a share between 0 and 100%; write for example {example}")
    return share


def parse_settings(pairs: Sequence[str], option: str = "--set ") -> dict[str, str]:
    """["gamma=0.2", ...] as a dict; InputError for text without "=". option : that each comes after"""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or not value:
            raise InputError(f"{option}{pair!r} is not NAME=VALUE; write for example {option}gamma=0.2")
        settings[key.strip()] = value.strip()
    return settings
