"""`specsim join`: join traces of a target with the same outputs but different drafters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specsim.cli.command import Answer
from specsim.cli.console import print_table
from specsim.io.errors import InputError
from specsim.io.settings import Settings, argument, setting

COST_FILE = "cost.json"


@dataclass(frozen=True, kw_only=True)
class JoinOptions(Settings):
    """Which traces are joined."""

    traces: list[Path] = argument("Two or three trace folders, in the order of the drafters.")
    out: Path = setting(..., "Trace folder to write.")
    cost: list[str] = setting(
        [],
        f"Cost file of a drafter; repeat: one per trace, in order. They are joined into OUT/{COST_FILE}.",
        metavar="FILE",
    )
    overwrite: bool = setting(False, "Replace an existing trace.", flag="--overwrite")


def join(options: JoinOptions) -> Answer:
    """Join traces of several drafters.

    On a joined trace, policies choose the drafter of every round. Greedy and Gumbel-coupled outputs are the target's,
    whichever drafter was recorded with them, so that rounds of several drafters replay exactly on one output. Traces
    that differ in target, decoding, prompts, outputs or end-of-text tokens are rejected with the first difference.
    Chains only: recorded trees are left out. Put lookups first: switch_match drafts with the first drafter that is
    sure enough before it drafts, else with the last.

    Example: realrun record lookup/ --drafter prompt-lookup && realrun record eagle/ --drafter eagle
    && realrun profile lookup.json --for lookup/ --drafter prompt-lookup
    && realrun profile eagle.json --for eagle/ --drafter eagle
    && specsim join lookup/ eagle/ --cost lookup.json --cost eagle.json --out both/
    && specsim tune both/ --policy switch_match --cost both/cost.json
    """
    from specsim.cost.files import cost_path, read_cost, read_cost_document
    from specsim.cost.joined import joined_document
    from specsim.io.files import write_json
    from specsim.trace.files import check_free, read_trace, write_trace
    from specsim.trace.joined import join_traces

    traces, cost, out, overwrite = options.traces, options.cost, options.out, options.overwrite
    check_free(out, overwrite=overwrite)
    if len({*traces}) < len(traces):
        raise InputError("a trace is named twice; give each drafter's trace once")
    if cost and len(cost) != len(traces):
        raise InputError(f"{len(cost)} cost files for {len(traces)} traces; give a --cost for each, in their order")
    recorded = {str(path): read_trace(path) for path in traces}
    joined = join_traces(recorded)
    for path in cost:
        read_cost(path)  # rejects a bad cost file before writing
    write_trace(joined, out, overwrite=overwrite)
    if cost:
        write_json(joined_document([read_cost_document(cost_path(path)) for path in cost]), out / COST_FILE)
    trees = [name for name, trace in recorded.items() if trace.tree is not None]
    drafters: list[dict[str, Any]] = [
        {"trace": name, "drafter": part.meta["drafter"], "mean_match_len": float(part.match_len.mean())}
        for name, part in zip(recorded, joined.parts, strict=True)
    ]
    document = {
        "trace": str(out),
        "cost": str(out / COST_FILE) if cost else None,
        "depth": joined.depth,
        "sequences": joined.sequences,
        "output_tokens": int(joined.output_tokens.sum()),
        "drafters": drafters,
        "mean_longest_match": float(joined.columns.match_len.max(axis=0).mean()),
        "without_trees": trees,
    }
    return Answer(document, partial(_print_joined, document))


def _print_joined(document: dict[str, Any]) -> None:
    drafters = enumerate(document["drafters"], start=1)
    rows = [[str(n), str(part["drafter"]), f"{part['mean_match_len']:.3f}"] for n, part in drafters]
    rows.append(["", "the longest of them", f"{document['mean_longest_match']:.3f}"])
    size = f"{document['sequences']} sequences, {document['output_tokens']:,} output tokens, depth {document['depth']}"
    print_table(f"trace {document['trace']}: {size}", ["", "drafter", "mean longest accepted prefix"], rows)
    if document["without_trees"]:
        traces = ", ".join(document["without_trees"])
        print(f"recorded trees are left out, since switching policies draft chains: {traces}")
