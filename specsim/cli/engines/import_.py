"""`specsim import`: what engines and benchmarks wrote, as files that the other commands take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.cli.console import OverwriteFileOption, check_new, print_json, print_notes, print_table
from specsim.cli.options import JsonOption
from specsim.engines.formats.registry import UNTESTED, listed


def import_(
    kind: Annotated[str, typer.Argument(help="What the files are, of the kinds above.", show_default=False)],
    files: Annotated[list[Path], typer.Argument(help="Files of this kind, in their order.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write: a trace folder, rounds as .parquet, counters as .json, as the table says the files "
            "hold; of rounds also AIPerf's records, as .jsonl. Default: the table alone."
        ),
    ] = None,
    overwrite: OverwriteFileOption = False,
    json: JsonOption = False,
) -> None:
    from specsim.engines.import_records import import_records

    if out is not None:
        check_new(out, overwrite=overwrite)
    imported = import_records(kind, files)
    if out is not None:
        imported.write(out, overwrite=overwrite)
    found = {"kind": kind, "holds": imported.holds, "out": None if out is None else str(out), **imported.as_dict()}
    if json:
        print_json(found)
        return
    print_table(f"{', '.join(map(str, files))}: {imported}", ["", "value"], list(_sizes(found)))
    rows = [
        [one["quantity"], one["engine"], one["printed"], _text(one["value"]), one["formula"]]
        for one in found["printed"]
    ]
    if rows:
        print_table("acceptance", ["quantity", "by", "printed as", "value", "is"], rows, labels=3)
    print_notes(imported.notes)
    if imported.source is None:
        print(f"next: of these no acceptance by position follows; {imported.instead}")
    elif out is None:
        print(f"next: specsim import {kind} ... --out {_SUGGESTED[imported.holds]}")
    elif out.suffix == ".jsonl":
        print(f"next: specsim import aiperf {out} --out rounds.parquet")
    elif imported.holds == "dense trace":
        print(f"next: specsim leaderboard {out} --cost COST")
    else:
        print(f"next: specsim acceptance fit {out} --model per_position --out model.json, or")
        print(f"      specsim advise {out} --cost COST")


import_.__doc__ = f"""Read what an engine logged or exported about speculation, and write it for the other commands.

\b
{listed()}

* {UNTESTED}: compare its numbers with the engine's own.

The table shows the engine's numbers beside specsim's; what a source cannot tell is said. Of two scrapes the
difference is counted.

Example: specsim import llamacpp-log server.log --out rounds.parquet
"""


_SUGGESTED = {"dense trace": "trace", "rounds": "rounds.parquet", "counters": "counters.json"}


def _sizes(found: dict[str, Any]) -> Iterator[list[str]]:
    for name in ("requests", "rounds", "drafted", "accepted", "output_tokens"):
        yield [name.replace("_", " "), "not told" if found[name] is None else f"{found[name]:,}"]
    for name, value in found["averages"].items():
        yield [name, f"{value:.4g}"]
    for reason, number in found["skipped"].items():
        yield [f"skipped: {reason}", f"{number:,}"]


def _text(value: Any) -> str:
    return ", ".join(f"{one:.3f}" for one in value) if isinstance(value, list) else f"{value:.3f}"
