"""`specsim join`: traces of one target with the same outputs, each of another drafter, as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.cli.console import print_json, print_table
from specsim.cli.options import JsonOption
from specsim.errors import InputError

COST_FILE = "cost.json"


def join(
    traces: Annotated[
        list[Path],
        typer.Argument(help="Two or three trace folders, in the order in which drafters count.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="Trace folder to write.", show_default=False)],
    cost: Annotated[
        list[str],
        typer.Option(
            help=f"Cost file of each drafter, in the order of the traces; repeat for each. They are written to "
            f"OUT/{COST_FILE}.",
            metavar="FILE",
        ),
    ] = [],  # noqa: B006 (typer reads the default, it is never changed)
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a trace that is there.")] = False,
    json: JsonOption = False,
) -> None:
    """Join traces of one target, so that policies can choose the drafter of every round.

    Greedy and Gumbel-coupled outputs are the target's, whichever drafter was recorded with them,
    so that rounds of several drafters replay exactly on one output. Traces that differ in target,
    decoding, prompts, outputs or end-of-text tokens are refused with the first place. Chains only:
    records of trees are left behind. Put lookups first: switch_match drafts with the first drafter
    that is sure enough before it drafts, else with the last.

    Example: realrun record lookup/ --drafter prompt-lookup && realrun record eagle/ --drafter eagle
    && realrun profile lookup.json --for lookup/ --drafter prompt-lookup
    && realrun profile eagle.json --for eagle/ --drafter eagle
    && specsim join lookup/ eagle/ --cost lookup.json --cost eagle.json --out both/
    && specsim tune both/ --policy switch_match --cost both/cost.json
    """
    from specsim.cost.files import cost_path, read_cost, read_cost_document
    from specsim.cost.joined import joined_document
    from specsim.files import write_json
    from specsim.trace.files import check_free, read_trace, write_trace
    from specsim.trace.joined import join_traces

    check_free(out, overwrite=overwrite)
    if len({*traces}) < len(traces):
        raise InputError("a trace is named twice; give each drafter's trace once")
    if cost and len(cost) != len(traces):
        raise InputError(f"{len(cost)} cost files for {len(traces)} traces; give a --cost for each, in their order")
    recorded = {str(path): read_trace(path) for path in traces}
    joined = join_traces(recorded)
    for path in cost:
        read_cost(path)  # says what is wrong with it
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
    if json:
        print_json(document)
        return
    rows = [[str(n), str(one["drafter"]), f"{one['mean_match_len']:.3f}"] for n, one in enumerate(drafters, start=1)]
    rows.append(["", "the longest of them", f"{document['mean_longest_match']:.3f}"])
    size = f"{joined.sequences} sequences, {document['output_tokens']:,} output tokens, depth {joined.depth}"
    print_table(f"trace {out}: {size}", ["", "drafter", "mean match length"], rows)
    if trees:
        print(f"records of trees are left behind, switching policies draft chains: {', '.join(trees)}")
