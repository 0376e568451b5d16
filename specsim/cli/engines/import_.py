"""`specsim import`: what engines and benchmarks wrote, as files that the other commands take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.cli.command import Answer
from specsim.cli.console import check_new, print_notes, print_table
from specsim.cli.options import OVERWRITE_FILE_HELP
from specsim.engines.formats.registry import UNTESTED, listed
from specsim.io.settings import Settings, argument, setting

if TYPE_CHECKING:
    from specsim.engines.formats.records import ImportedRecords


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Settings):
    """Which files are read, and what is written."""

    kind: str = argument("What the files are, of the kinds above.")
    files: list[Path] = argument("Files of this kind, in order.")
    out: Path | None = setting(
        None,
        "Where to write what the table says the files hold: a trace folder, rounds as .parquet, counters as .json; "
        "rounds also as AIPerf's records, .jsonl. Default: print the table only.",
    )
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


def import_(options: ImportOptions) -> Answer:
    from specsim.engines.import_records import import_records

    kind, out = options.kind, options.out
    if out is not None:
        check_new(out, overwrite=options.overwrite)
    imported = import_records(kind, options.files)
    if out is not None:
        imported.write(out, overwrite=options.overwrite)
    document = {"kind": kind, "holds": imported.holds, "out": None if out is None else str(out), **imported.as_dict()}

    def show() -> None:
        title = f"{', '.join(map(str, options.files))}: {imported}"
        print_table(title, ["", "value"], list(_sizes(document)))
        rows = [
            [line["quantity"], line["engine"], line["printed"], _text(line["value"]), line["formula"]]
            for line in document["printed"]
        ]
        if rows:
            print_table("acceptance", ["quantity", "by", "printed as", "value", "is"], rows, labels=3)
        print_notes(imported.notes)
        for line in _next_commands(imported, kind, out):
            print(line)

    return Answer(document, show)


def _next_commands(imported: ImportedRecords, kind: str, out: Path | None) -> list[str]:
    """What a user may run next."""
    if imported.source is None:
        return [f"next: these files hold no acceptance by position; {imported.instead}"]
    if out is None:
        return [f"next: specsim import {kind} ... --out {_SUGGESTED[imported.holds]}"]
    if out.suffix == ".jsonl":
        return [f"next: specsim import aiperf {out} --out rounds.parquet"]
    if imported.holds == "dense trace":
        return [f"next: specsim leaderboard {out} --cost COST"]
    return [
        f"next: specsim acceptance fit {out} --model per_position --out model.json, or",
        f"      specsim advise {out} --cost COST",
    ]


import_.__doc__ = f"""Import an engine's logs or exported records.

\b
{listed()}

* {UNTESTED}: compare its numbers with the engine's own.

The table shows the engine's numbers beside specsim's; missing fields are reported, or the file is rejected. Of two
scrapes the difference is counted.

Example: specsim import llamacpp-log server.log --out rounds.parquet
"""


_SUGGESTED = {"dense trace": "trace", "rounds": "rounds.parquet", "counters": "counters.json"}


def _sizes(document: dict[str, Any]) -> Iterator[list[str]]:
    for name in ("requests", "rounds", "drafted", "accepted", "output_tokens"):
        yield [name.replace("_", " "), "not reported" if document[name] is None else f"{document[name]:,}"]
    for name, value in document["averages"].items():
        yield [name, f"{value:.4g}"]
    for reason, number in document["skipped"].items():
        yield [f"skipped: {reason}", f"{number:,}"]


def _text(value: Any) -> str:
    return ", ".join(f"{number:.3f}" for number in value) if isinstance(value, list) else f"{value:.3f}"
