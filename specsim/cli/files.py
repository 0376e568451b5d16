"""`specsim example`, `info`, `policies` and `report`: what ships, what a trace holds, and results as a page."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.cli.command import Answer
from specsim.cli.console import claim_file, print_facts, print_table
from specsim.cli.options import OVERWRITE_FILE_HELP, POLICY_FILE_HELP, TraceSettings
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
        return _list_examples()
    if options.out.exists():
        raise InputError(f"{options.out} exists; choose another name")
    with replacing_folder(options.out) as work:
        write_trace(read_trace(TRACE), work / "trace")
        (work / "profile.json").write_bytes(example_files("cost")[COST].read_bytes())
    trace, profile = options.out / "trace", options.out / "profile.json"
    show = partial(print, f"try: specsim leaderboard {trace} --cost {profile}")
    return Answer({"trace": str(trace), "profile": str(profile)}, show)


def _list_examples() -> Answer:
    """All examples: name, kind, size, content and source."""
    rows: list[dict[str, Any]] = []
    for kind in SUFFIXES:
        for name, path in example_files(kind).items():
            holds, source = _example_facts(kind, path)
            rows.append({"name": name, "kind": kind, "bytes": path.stat().st_size, "holds": holds, "source": source})
    cells = [[row["name"], row["kind"], f"{row['bytes'] / 1e3:.1f}", row["holds"], row["source"]] for row in rows]
    show = partial(print_table, "examples that ship", ["name", "kind", "kB", "holds", "source"], cells)
    return Answer({"examples": rows}, show)


def _example_facts(kind: Kind, path: Path) -> tuple[str, str]:
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


@dataclass(frozen=True, kw_only=True)
class PoliciesOptions(Settings):
    """Which policies are listed beside the built-in ones."""

    policy_file: list[str] = setting([], POLICY_FILE_HELP, metavar="FILE.py")


def policies(options: PoliciesOptions) -> Answer:
    """List policies and their settings.

    Commands that take a policy accept these names, and your own FILE.py.
    """
    from specsim.policy.registry import NAMED, find_policies

    kinds = find_policies([*NAMED, *options.policy_file])
    document = {
        name: {
            "source": kind.source,
            "settings": {field.name: _setting_facts(field) for field in dataclasses.fields(kind)},
        }
        for name, kind in kinds.items()
    }

    def show() -> None:
        for name, kind in kinds.items():
            rows = [setting_texts(field) for field in dataclasses.fields(kind)]
            print_table(f"{name}: {kind.source}", ["setting", "default", "legal", "search", "meaning"], rows)

    return Answer(document, show)


def _setting_facts(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """A setting's default, ranges and help; what it bounds is for those who cut it to a trace."""
    return {"default": field.default, **{key: value for key, value in field.metadata.items() if key != "bounds"}}


def setting_texts(field: dataclasses.Field[Any]) -> list[str]:
    """A setting's line in `policies`: name, default, legal values, search range, meaning."""
    meta, default = field.metadata, field.default
    low, high = f"{meta['low']:g}", f"{meta['high']:g}"
    shown, legal = str(default), f"{low} to {high}"
    searched = (
        f"{meta['tune'][0]:g} to {meta['tune'][1]:g}{', log' if meta['log'] else ''}" if meta["tune"] else "fixed"
    )
    if isinstance(default, (bool, str)):
        choices = meta["choices"] or ("true", "false")
        shown, legal, searched = str(default).lower(), ", ".join(choices), "all" if meta["tune"] else "fixed"
    elif isinstance(default, tuple):
        shown = ",".join(f"{number:g}" for number in default) if len(default) <= 4 else f"{len(default)} numbers"
        legal, searched = f"numbers, {low} to {high}", "learned" if not meta["tune"] else searched
    return [field.name, shown, legal, searched, meta["doc"]]


def info(options: TraceSettings) -> Answer:
    """Show what a trace holds.

    Shows the pair, decoding, sizes, agreement and repetition.
    """
    import numpy as np

    from specsim.trace.files import read_trace

    trace = read_trace(options.trace)
    document = {
        **{key: value for key, value in trace.meta.items() if key not in ("checksums", "provenance")},
        "sequences": trace.sequences,
        "output_tokens": int(trace.output_tokens.sum()),
        "domains": {str(domain): int((trace.domain == domain).sum()) for domain in np.unique(trace.domain)},
        "mean_match_len": float(trace.match_len.mean()),
    }
    return Answer(document, partial(print_facts, f"trace {options.trace}", document))


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Settings):
    """Which results are shown, and where."""

    files: list[Path] = argument("Results as JSON, or output folders of runs.", metavar="FILE...")
    out: Path = setting(Path("report.html"), "The page to write.")
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


def report(options: ReportOptions) -> Answer:
    """Show results as one HTML page.

    Takes validations, leaderboards, tunings, claims, batches and hardware comparisons. Each begins with its verdict.
    The page is one file that needs no network: click a column to sort a table, hover a figure to see values.

    Example: specsim tune TRACE --policy adaedl --cost COST --json > tuned.json; specsim report tuned.json validation/
    """
    from specsim.io.files import write_text
    from specsim.report.files import render_files

    files, out = options.files, options.out
    claim_file(out, overwrite=options.overwrite)
    write_text(out, render_files(files))
    show = partial(print, f"{out}: {len(files)} {'result' if len(files) == 1 else 'results'}")
    return Answer({"report": str(out), "results": [str(path) for path in files]}, show)
