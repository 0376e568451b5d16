"""The `speckernels` command: show which backends work, and build the kernels."""

from __future__ import annotations

import inspect
import json as json_module
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import speckernels
from speckernels.bench import machine
from speckernels.runtime import build as builder
from speckernels.runtime import dispatch

app = typer.Typer(
    help="Kernels of speculative decoding: torch reference, Triton and CUDA behind one signature.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

VERSION = "0.1.0"  # of the distribution, which this package does not import
BAD_INPUT = 2
USAGE_ERROR: Any = typer.BadParameter.__base__
_ENTRY = re.compile(r"Compiling entry function '([^']+)' for 'sm_(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel. name : as in the binary; shared_bytes : static shared memory."""

    name: str
    architecture: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Built:
    """One source. seconds : of its compilation; None if it lay in the cache."""

    source: str
    seconds: float | None
    kernels: tuple[Kernel, ...]


def parse_report(report: str) -> tuple[Kernel, ...]:
    """Parse the kernels of a report of `ptxas -v`."""
    kernels = []
    name = architecture = ""
    stack = spills = 0
    for line in report.splitlines():
        if match := _ENTRY.search(line):
            name, architecture = match.groups()
            stack = spills = 0
        elif match := _SPILLS.search(line):
            stack, stores, loads = map(int, match.groups())
            spills = stores + loads
        elif name and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            bytes_ = int(shared.group(1)) if shared else 0
            kernels.append(Kernel(name, architecture, int(match.group(1)), stack, spills, bytes_))
            name = ""
    return tuple(kernels)


def build_source(source: str, architectures: Sequence[str]) -> Built:
    """Compile a source if it is not in the cache, and read the compiler's report.

    Raises RuntimeError without nvcc, or with the compiler's message.
    """
    start, clock = time.time(), time.perf_counter()
    library = builder.build_device(source, architectures)
    seconds = time.perf_counter() - clock if library.stat().st_mtime >= start - 1e-2 else None
    return Built(source, seconds, parse_report(library.with_suffix(".txt").read_text()))


def _show_version(requested: bool) -> None:
    if requested:
        print(f"specsim {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None: ...


@app.command()
def info(json: JsonOption = False) -> None:
    """Show operations, and which backends work here."""
    device = machine.default_device()
    document = {
        "device": machine.device_name(device),
        "device_type": device.type,
        "default_backend": dispatch.backend_for(device),
        "backends": machine.availability(),
        "operations": sorted(dispatch.OPERATIONS),
        "versions": machine.versions(),
    }
    if json:
        print(json_module.dumps(document, indent=1))
        return
    print(f"{document['device']} ({device.type}); operations use {document['default_backend']} by default")
    _print_table("backends", ["backend", "here"], machine.availability().items())
    described = [(name, inspect.getdoc(getattr(speckernels, name)) or "") for name in sorted(dispatch.OPERATIONS)]
    _print_table("operations", ["operation", "does"], [(name, text.partition("\n")[0]) for name, text in described])
    print("versions: " + ", ".join(f"{name} {value}" for name, value in machine.versions().items()))


@app.command()
def build(
    arch: Annotated[
        list[str], typer.Option("--arch", help="Architecture such as 90a; repeat for more.", metavar="SM")
    ] = [],  # noqa: B006 (typer reads the default, nobody changes it)
    json: JsonOption = False,
) -> None:
    """Compile all CUDA sources.

    Shows registers, spills and seconds of each. Needs nvcc, but no GPU.

    Example: speckernels build --arch 90a
    """
    try:
        built = [build_source(source, arch or builder.ARCHITECTURES) for source in builder.sources()]
    except RuntimeError as error:
        first, *others = str(error).splitlines()
        print(*others, f"error: {first}", sep="\n", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    if json:
        print(json_module.dumps({"sources": [asdict(source) for source in built]}, indent=1))
        return
    rows = []
    for source in built:
        seconds = "cached" if source.seconds is None else f"{source.seconds:.1f}"
        for architecture in dict.fromkeys(kernel.architecture for kernel in source.kernels):
            kernels = [kernel for kernel in source.kernels if kernel.architecture == architecture]
            registers = max(kernel.registers for kernel in kernels)
            spills = max(kernel.spill_bytes for kernel in kernels)
            shared = max(kernel.shared_bytes for kernel in kernels)
            cells = [architecture, len(kernels), registers, spills, shared, seconds]
            rows.append([source.source, *map(str, cells)])
            seconds = ""
    columns = ["source", "sm", "kernels", "most registers", "most spilled bytes", "most shared bytes", "seconds"]
    _print_table("CUDA sources", columns, rows)


def _print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console()
    if not console.is_terminal:  # no line breaks in a pipe or a log
        console = Console(width=200)
    console.print(table)


def main() -> None:
    """Run the command; bad input gives one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror or error}; check path and permissions", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            message = " ".join(error.format_message().split()).rstrip(".")
            command = error.ctx.command_path if error.ctx else sys.argv[0]
            print(f"error: {message}; see `{command} --help`", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except typer.Abort:
        raise SystemExit(1) from None
    raise SystemExit(code or 0)
