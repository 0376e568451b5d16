"""The `speckernels` command: benchmark the kernels, draw the results, build and inspect them."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Kernels of speculative decoding: torch reference, Triton and CUDA behind one signature.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

BAD_INPUT = 2
USAGE_ERROR: Any = typer.BadParameter.__base__
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def _show_version(requested: bool) -> None:
    if requested:
        print(f"specsim {version_of('specsim')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None: ...


@app.command()
def bench(
    op: Annotated[
        list[str], typer.Option("--op", help="Operation; repeat for several (default: all).", metavar="NAME")
    ] = [],  # noqa: B006 (typer reads the default, nobody changes it)
    backend: Annotated[
        list[str],
        typer.Option("--backend", help="Backend; repeat for several (default: all; fewer on a CPU).", metavar="NAME"),
    ] = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="cuda or cpu (default: the GPU, if there is one).")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Run fewer cases and repeats.")] = False,
    headline: Annotated[
        bool, typer.Option("--headline", help="Run only the main cases of tree attention and draft statistics.")
    ] = False,
    case: Annotated[
        list[str],
        typer.Option("--case", help='Run only cases with these sizes, such as "nodes=64 batch=1".', metavar="TEXT"),
    ] = [],  # noqa: B006
    minutes: Annotated[float, typer.Option(help="Start no case that would end later.", min=0.01)] = 10.0,
    out: Annotated[Path | None, typer.Option(help="File to write; keep the rows that it has.", dir_okay=False)] = None,
    json: JsonOption = False,
) -> None:
    """Benchmark every backend, after a check against the reference.

    The ratio to the floor is the time over the smallest possible: bytes over measured copy bandwidth,
    operations over measured matrix rate, or launch latency, whichever is largest. Without a
    GPU shapes are small, and Triton (interpreted) and CUDA (emulated) are checked but not timed.

    Example: speckernels bench --op tree_attention --minutes 5 --out bench.json
    """
    from speckernels.bench import run_bench
    from speckernels.bench.summary import DETAILS, HEADER, ceilings_line, detail_table, failures, ratio_table

    with _progress_bar() as progress:
        document = run_bench(out, minutes, op, backend, device or None, quick, progress, headline=headline, case=case)
    if json:
        print(json_module.dumps(document.as_dict(), indent=1))
        return
    print(ceilings_line(document))
    table = ratio_table(document)
    used = [i for i in range(len(HEADER)) if i < 3 or any(row[i] for row in table)]
    rows = [[row[i] for i in used] for row in table]
    _print_table("median ratio to the floor over the cases", [HEADER[i] for i in used], rows)
    if headline or case:
        _print_table("every case", DETAILS, detail_table(document))
    for line in failures(document):
        print(f"no time: {line}")
    if document.unfinished:
        advice = f"; run again with --out {out}" if out else "; give more --minutes"
        print(f"{len(document.unfinished)} cases unfinished{advice}")


@app.command()
def plot(
    file: Annotated[Path, typer.Argument(help="File of `speckernels bench --out`.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the PNG files.", file_okay=False)] = Path("."),
    json: JsonOption = False,
) -> None:
    """Draw ratios to the floor, a roofline, and the time of tree attention against tree size and context.

    Example: speckernels plot bench.json --out figures
    """
    from speckernels.bench import read_document
    from speckernels.bench.figures import draw

    files = draw(read_document(file), out)
    if json:
        print(json_module.dumps({"files": [str(path) for path in files]}))
        return
    for path in files:
        print(path)


@app.command()
def profile(
    op: Annotated[str, typer.Option("--op", help="Operation.", metavar="NAME")],
    case: Annotated[
        list[str],
        typer.Option("--case", help='Use the first case with these sizes, such as "nodes=64 batch=1".', metavar="TEXT"),
    ] = [],  # noqa: B006
    backend: Annotated[str, typer.Option(help="triton or cuda.")] = "cuda",
    run: Annotated[bool, typer.Option("--run", help="Run the case, as the printed command does.")] = False,
) -> None:
    """Print the command that profiles the kernels of one case with NVIDIA's ncu.

    Example: speckernels profile --op tree_attention --case "nodes=64 batch=1 context=8192"
    """
    from speckernels.bench.profile import ncu_command, run_case

    print(run_case(op, case, backend) if run else ncu_command(op, case, backend))


@app.command()
def info(json: JsonOption = False) -> None:
    """Show which backends work on this machine, and why the others do not."""
    from speckernels.bench import machine
    from speckernels.runtime import dispatch

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
    print("operations: " + ", ".join(sorted(dispatch.OPERATIONS)))
    print("versions: " + ", ".join(f"{name} {value}" for name, value in machine.versions().items()))


@app.command()
def build(
    arch: Annotated[
        list[str], typer.Option("--arch", help="Architecture such as 90a; repeat for more.", metavar="SM")
    ] = [],  # noqa: B006
    json: JsonOption = False,
) -> None:
    """Compile all CUDA sources and show registers, spills and seconds of each. Needs nvcc, but no GPU.

    Example: speckernels build --arch 90a
    """
    from speckernels.bench.resources import build_source
    from speckernels.bench.rows import BenchError
    from speckernels.runtime import build as builder

    try:
        built = [build_source(source, arch or builder.ARCHITECTURES) for source in builder.sources()]
    except RuntimeError as error:
        lines = str(error).splitlines()
        print("\n".join(lines[1:]), end="\n" if lines[1:] else "", file=sys.stderr)
        raise BenchError(lines[0]) from None
    if json:
        print(json_module.dumps({"sources": [source.as_dict() for source in built]}, indent=1))
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
    from speckernels.bench.rows import printable

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    console = Console()
    if not console.is_terminal:  # no line breaks in a pipe or a log
        console = Console(width=200)
    console.print(table)


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Callback (case, done, total) that draws a progress bar on stderr, or prints lines without a terminal."""
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bars:
        task = bars.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)
            if not console.is_terminal:
                print(f"[{done}/{total}] {what}", file=sys.stderr, flush=True)

        yield report


def main() -> None:
    """Run the command; bad input gives one line on stderr and exit code 2."""
    from speckernels.bench.rows import BenchError

    try:
        code = app(standalone_mode=False)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
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


if __name__ == "__main__":
    main()
