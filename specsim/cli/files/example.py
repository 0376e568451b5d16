"""`specsim example`: traces and costs that ship, listed, or as files to look into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.cli.command import Answer
from specsim.cli.console import print_table
from specsim.io.examples import SUFFIXES, Kind, example_files
from specsim.io.settings import Settings, argument, setting

if TYPE_CHECKING:
    from specsim.trace.trace import Trace

TRACE, COST = "example:lab-model", "example:lab-deep-model"  # the examples that are written


@dataclass(frozen=True, kw_only=True)
class ExampleOptions(Settings):
    """Where the example is written."""

    out: Path = argument("Folder to write; it must not exist yet.", default=Path("example"))
    list_: bool = setting(False, "List the examples instead: size, content, source.", flag="--list")


def example(options: ExampleOptions) -> Answer:
    """Write example files, or list all examples.

    Writes a trace and a profile, which need no model. All commands that take a trace or costs accept the examples'
    names, too. The trace is of the lab's pair with a 40-layer target at temperature 0.8; the profile is of one CPU
    thread.

    Example: specsim leaderboard example:lab-eagle --cost example:llama-3.1-8b-eagle-h100
    """
    from specsim.io.errors import InputError
    from specsim.io.files import replacing_folder
    from specsim.trace.files import read_trace, write_trace

    if options.list_:
        return _list()
    if options.out.exists():
        raise InputError(f"{options.out} exists; choose another name")
    with replacing_folder(options.out) as work:
        write_trace(read_trace(TRACE), work / "trace")
        (work / "profile.json").write_bytes(example_files("cost")[COST].read_bytes())
    trace, profile = options.out / "trace", options.out / "profile.json"
    show = partial(print, f"try: specsim leaderboard {trace} --cost {profile}")
    return Answer({"trace": str(trace), "profile": str(profile)}, show)


def _list() -> Answer:
    """All examples: name, kind, size, content and source."""
    rows: list[dict[str, Any]] = []
    for kind in SUFFIXES:
        for name, path in example_files(kind).items():
            holds, source = _described(kind, path)
            rows.append({"name": name, "kind": kind, "bytes": path.stat().st_size, "holds": holds, "source": source})
    cells = [[row["name"], row["kind"], f"{row['bytes'] / 1e3:.1f}", row["holds"], row["source"]] for row in rows]
    show = partial(print_table, "examples that ship", ["name", "kind", "kB", "holds", "source"], cells)
    return Answer({"examples": rows}, show)


def _described(kind: Kind, path: Path) -> tuple[str, str]:
    """Describe a file's content and source, as recorded in the file."""
    if kind == "trace":
        from specsim.trace.files import read_trace

        trace = read_trace(path)
        return _trace_text(trace), _provenance_text("realrun record", trace.meta["provenance"])
    from specsim.cost.files import read_cost_document

    cost = read_cost_document(path)
    if "provenance" in cost:
        contexts = f"contexts of {cost['contexts'][0]} to {cost['contexts'][-1]} tokens"
        return f"{cost['target']} with {cost['drafter']}, {contexts}", _provenance_text(
            "realrun profile", cost["provenance"]
        )
    return f"{cost['target']} with {cost['drafter']} on {cost['hardware']}", f"{cost['source']}, {cost['date']}"


def _trace_text(trace: Trace) -> str:
    from specsim.report.page import decoding_text

    meta = trace.meta
    trees = "" if trace.tree is None else f", trees of {trace.tree.nodes} nodes"
    return (
        f"{meta['target']} with {meta['drafter']}, {decoding_text(meta['decoding'])}; {trace.sequences} sequences, "
        f"{len(trace.token):,} tokens, drafts of {trace.depth}{trees}"
    )


def _provenance_text(command: str, provenance: dict[str, Any]) -> str:
    return f"{command} on {provenance['device']}, {provenance['threads']} thread, {provenance['date'][:10]}"
