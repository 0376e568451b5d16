"""`specsim tree`: the best static draft trees, by acceptance alone or by the hardware's costs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.arrays import Floats
from specsim.cli.console import print_json, print_table
from specsim.cli.options import BatchOption, CostOption, DraftCostOption, JsonOption, TraceArgument, read_costs
from specsim.files import write_text
from specsim.static_tree.shape import Shape, parents, ranks

if TYPE_CHECKING:
    from rich.tree import Tree

    from specsim.trace.trace import Trace

tree = typer.Typer(
    help="Static draft trees: the same tree in every round, known before decoding starts.\n\n"
    "search finds the tree of a given number of nodes that gets most tokens accepted. best weighs that against "
    "what larger and deeper trees cost on given hardware. What they find can be replayed, and run, as the "
    "policies sparse_tree and optimal_tree.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
CURVE = 256  # nodes that the curve reaches at least

FigureOption = Annotated[
    Path | None, typer.Option(help="Draw the curve and the tree, as .png or .svg.", show_default=False)
]


@tree.command()
def search(
    source: Annotated[
        Path,
        typer.Argument(
            help="Accuracies as CSV, a line per depth (depth,top1,top2,...), or a trace (folder or .zip).",
            metavar="ACC.csv|TRACE",
            show_default=False,
        ),
    ],
    nodes: Annotated[int, typer.Option(help="Nodes of the tree, the root not counted.", min=1, max=1023)] = 63,
    curve_out: Annotated[
        Path | None, typer.Option(help="Write the curve as CSV: nodes,expected_tokens.", show_default=False)
    ] = None,
    figure: FigureOption = None,
    json: JsonOption = False,
) -> None:
    """Find the sparse tree of most accepted tokens (MEDUSA, section 3.3.3).

    An accuracy is the probability that the target's token at a depth is the drafter's candidate of a
    rank (top1 is rank 0), given that the tokens before it are right. Taken as independent, the
    probability of a node is the product along its path, and a round emits 1 + their sum over the tree:
    the expected tokens. The tree found is the best of all trees of its size; the curve gives the
    best of each size. From a trace the accuracies are counted, and "measured" is what the tree
    really gets accepted there, in the mean over all positions: accuracies are seldom independent.

    Choices are printed as MEDUSA writes them: a node is the ranks on its path from the root.

    Example: specsim tree search accuracies.csv --nodes 63 --figure tree.svg
    """

    from specsim.errors import InputError
    from specsim.static_tree import shape as tree_shapes
    from specsim.static_tree.search import best_trees, max_tree_nodes, node_accept_probs

    if figure is not None:
        from specsim.report.tree_figures import check_figure, write_search_figure

        check_figure(figure)
    trace, rates = _read_source(source)
    if nodes > max_tree_nodes(rates):
        raise InputError(
            f"{source} has {rates.shape[0]} depths and {rates.shape[1]} ranks, room for {max_tree_nodes(rates)} nodes, "
            f"not {nodes}; ask for fewer or give more"
        )
    found = best_trees(rates, max(nodes, CURVE))
    shape, curve = found.shape(nodes), found.expected_tokens
    document: dict[str, Any] = {
        "source": str(source),
        "nodes": nodes,
        "depth": int(tree_shapes.depths(shape).max()),
        "expected_tokens": float(curve[nodes]),
    }
    if trace is not None:
        document["measured_tokens"] = _measured(shape, trace)
    if curve_out is not None:
        _write_curve(curve_out, curve)
    if figure is not None:
        write_search_figure(figure, found, nodes)
    if json:
        document |= {
            "choices": tree_shapes.to_paths(shape),
            "children": shape,
            "curve": curve.tolist(),
            "accuracies": rates.tolist(),
        }
        print_json(document)
        return
    _print_tree(shape, node_accept_probs(rates, shape))
    marked = sorted({*_powers(found.nodes), nodes})
    measured = {size: _measured(found.shape(size), trace) for size in marked} if trace is not None else {}
    rows = []
    for size in marked:
        row = [f"{size}{' *' if size == nodes else ''}", f"{curve[size]:.3f}", f"{curve[size] - curve[size - 1]:.4f}"]
        rows.append([*row, f"{measured[size]:.3f}"] if measured else row)
    columns = ["nodes (* asked for)", "expected tokens", "of it the last node"]
    print_table(f"tokens per round, best tree of each size: {source}", columns + ["measured"] * bool(measured), rows)
    for path in filter(None, (curve_out, figure)):
        print(f"written: {path}")


@tree.command()
def best(
    trace: TraceArgument,
    cost: CostOption,
    draft_cost: DraftCostOption = None,
    batch: BatchOption = None,
    max_nodes: Annotated[int, typer.Option(help="Most nodes, the root not counted.", min=1, max=1023)] = 64,
    max_depth: Annotated[int, typer.Option(help="Deepest nodes, in tokens.", min=1, max=255)] = 16,
    json: JsonOption = False,
) -> None:
    """Find the static tree of most tokens per second on this hardware (Sequoia's idea).

    For every size and depth the tree of most expected tokens, its rounds priced: a draft pass per
    level, costlier the more nodes it is over, verification of all nodes, policy and overhead. The
    prediction takes accuracies as independent and learns and predicts on the same sequences;
    `specsim replay TRACE --policy optimal_tree` replays the tree exactly, on others than it
    learned from. "measured" is what the tree gets accepted in the trace, in the mean over all
    positions.

    Example: specsim tree best TRACE --cost profile.json --max-nodes 64
    """
    from specsim.replaying.priced import PricedTrace
    from specsim.static_tree.optimal import optimal_trees, tree_round_cost
    from specsim.static_tree.rates import rates_of
    from specsim.static_tree.search import node_accept_probs
    from specsim.static_tree.shape import depths, to_paths
    from specsim.trace.files import read_plain_trace

    data, model = read_plain_trace(trace), read_costs(cost, draft_cost, batch)
    rates = rates_of(data)
    costs = tree_round_cost(PricedTrace(data, model).table(), data)
    trees = optimal_trees(rates, costs, max_nodes=max_nodes, max_depth=max_depth)
    fastest = max(trees, key=lambda one: one.tokens_per_s)
    autoregressive = 1 / costs.autoregressive_s
    lines = [
        {
            "nodes": one.nodes,
            "depth": int(depths(one.shape).max()),
            "expected_tokens": one.tokens,
            "measured_tokens": _measured(one.shape, data),
            "round_s": one.seconds,
            "tokens_per_s": one.tokens_per_s,
            "speedup": one.tokens_per_s / autoregressive,
        }
        for one in trees
    ]
    if json:
        print_json(
            {
                "trace": str(trace),
                "autoregressive_tokens_per_s": autoregressive,
                "best": {
                    **lines[trees.index(fastest)],
                    "choices": to_paths(fastest.shape),
                    "children": fastest.shape,
                },
                "sizes": lines,
            }
        )
        return
    _print_tree(fastest.shape, node_accept_probs(rates, fastest.shape))
    wanted = {*_powers(max_nodes), fastest.nodes}
    rows = [["no tree", "", "1", "1", f"{1e3 * costs.autoregressive_s:.3f}", f"{autoregressive:.1f}", "1"]]
    for line in lines:
        if line["nodes"] in wanted:
            rows.append(
                [
                    f"{line['nodes']}{' *' if line['nodes'] == fastest.nodes else ''}",
                    str(line["depth"]),
                    f"{line['expected_tokens']:.3f}",
                    f"{line['measured_tokens']:.3f}",
                    f"{1e3 * line['round_s']:.3f}",
                    f"{line['tokens_per_s']:.1f}",
                    f"{line['speedup']:.3f}",
                ]
            )
    columns = ["nodes (* best)", "depth", "expected tokens", "measured", "round, ms", "predicted tokens/s", "speedup"]
    print_table(f"fastest tree of each size: {trace}", columns, rows)


def _read_source(source: Path) -> tuple[Trace | None, Floats]:
    """Accuracies [K, R] of a CSV file, or of a trace and that."""
    from specsim.errors import InputError
    from specsim.examples import is_example
    from specsim.static_tree.rates import rates_of, read_rates
    from specsim.trace.files import read_plain_trace

    if is_example(source) or source.is_dir() or source.suffix == ".zip":
        trace = read_plain_trace(source)
        return trace, rates_of(trace)
    if not source.is_file():
        raise InputError(f"{source} does not exist; give accuracies as CSV, or a trace folder")
    return None, read_rates(source)


def _measured(shape: tuple[int, ...], trace: Trace) -> float:
    """Tokens per round that a static tree emits, in the mean over all positions of a trace."""
    from specsim.static_tree.shape import accepted_tokens

    assert trace.true_rank is not None
    return 1 + float(accepted_tokens(shape, trace.true_rank).mean())


def _print_tree(shape: tuple[int, ...], probs: Floats) -> None:
    """The tree, a line per node, and its choices in one line to copy."""
    from specsim.report.terminal import terminal
    from specsim.static_tree.shape import to_paths

    terminal().print(drawing(shape, [f"{prob:.4f}" for prob in probs]))
    print(f"choices = {[list(path) for path in to_paths(shape)]}")


def _powers(largest: int) -> list[int]:
    """1, 2, 4, ... up to this."""
    return [2**k for k in range(largest.bit_length()) if 2**k <= largest]


def _write_curve(path: Path, curve: Floats) -> None:

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["nodes", "expected_tokens"])
    writer.writerows([nodes, repr(float(tokens))] for nodes, tokens in enumerate(curve))
    write_text(path, text.getvalue())


def drawing(shape: Shape, notes: Sequence[str] | None = None) -> Tree:
    """The tree to print with rich, a line per node: its rank and, where given, notes[node] (root first)."""
    from rich.text import Text  # slow to load
    from rich.tree import Tree

    def line(name: str, node: int) -> Text:
        return Text(f"{name}  {notes[node]}" if notes else name)

    root = Tree(line("root", 0))
    branches = [root]
    for node, (parent, rank) in enumerate(zip(parents(shape).tolist(), ranks(shape).tolist(), strict=True)):
        if node:
            branches.append(branches[parent].add(line(str(rank), node)))
    return root
