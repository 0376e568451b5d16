"""`specsim example`: traces and costs that ship, listed, or as files to look into."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli.console import print_json, print_table
from specsim.cli.options import JsonOption
from specsim.examples import SUFFIXES, Kind, example_files

if TYPE_CHECKING:
    from specsim.trace.trace import Trace

TRACE, COST = "example:lab-model", "example:lab-deep-model"  # what is written


def example(
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not be there yet.")] = Path("example"),
    list_: Annotated[bool, typer.Option("--list", help="List the examples instead: size, content, source.")] = False,
    json: JsonOption = False,
) -> None:
    """Examples of traces and costs, which need no model: write a trace and a profile, or list all that ship.

    Their names are taken wherever a trace or costs are, with nothing to write. What is written is the lab's pair, the
    target with 40 layers, at temperature 0.8, with the profile of one thread of a CPU.

    Example: specsim leaderboard example:lab-eagle --cost example:llama-3.1-8b-eagle-h100
    """
    if list_:
        _list(json)
        return
    from specsim.errors import InputError
    from specsim.files import replacing_folder
    from specsim.trace.files import read_trace, write_trace

    if out.exists():
        raise InputError(f"{out} exists; choose another name")
    with replacing_folder(out) as work:
        write_trace(read_trace(TRACE), work / "trace")
        (work / "profile.json").write_bytes(example_files("cost")[COST].read_bytes())
    trace, profile = out / "trace", out / "profile.json"
    if json:
        print_json({"trace": str(trace), "profile": str(profile)})
    else:
        print(f"try: specsim leaderboard {trace} --cost {profile}")


def _list(json: bool) -> None:
    """Every example: its name, what it is of, kilobytes, what it holds, and where that is from."""
    rows: list[dict[str, Any]] = []
    for kind in SUFFIXES:
        for name, path in example_files(kind).items():
            holds, source = _described(kind, path)
            rows.append({"name": name, "kind": kind, "bytes": path.stat().st_size, "holds": holds, "source": source})
    if json:
        print_json({"examples": rows})
        return
    shown = [[one["name"], one["kind"], f"{one['bytes'] / 1e3:.1f}", one["holds"], one["source"]] for one in rows]
    print_table("examples that ship", ["name", "kind", "kB", "holds", "source"], shown)


def _described(kind: Kind, path: Path) -> tuple[str, str]:
    """What a file holds, and its source, as it says itself."""
    if kind == "trace":
        from specsim.trace.files import read_trace

        trace = read_trace(path)
        return _trace_text(trace), _made_text("realrun record", trace.meta["provenance"])
    from specsim.cost.files import read_cost_document

    cost = read_cost_document(path)
    if "provenance" in cost:
        contexts = f"contexts of {cost['contexts'][0]} to {cost['contexts'][-1]} tokens"
        return f"{cost['target']} with {cost['drafter']}, {contexts}", _made_text("realrun profile", cost["provenance"])
    return f"{cost['target']} with {cost['drafter']} on {cost['hardware']}", f"{cost['source']}, {cost['date']}"


def _trace_text(trace: Trace) -> str:
    from specsim.report.page import decoding_text

    meta = trace.meta
    trees = "" if trace.tree is None else f", trees of {trace.tree.nodes} nodes"
    return (
        f"{meta['target']} with {meta['drafter']}, {decoding_text(meta['decoding'])}; {trace.sequences} sequences, "
        f"{len(trace.token):,} tokens, drafts of {trace.depth}{trees}"
    )


def _made_text(command: str, made: dict[str, Any]) -> str:
    return f"{command} on {made['device']}, {made['threads']} thread, {made['date'][:10]}"
