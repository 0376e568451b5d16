"""`specsim tree`: the best static draft trees, by acceptance alone or by the hardware's costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from specsim.cli.command import Answer, command
from specsim.cli.console import print_table
from specsim.cli.options import CostSettings, TraceSettings
from specsim.io.arrays import Floats
from specsim.io.settings import Settings, argument, setting
from specsim.policy.static_tree.shape import Shape, parents, ranks

if TYPE_CHECKING:
    from rich.tree import Tree

    from specsim.policy.static_tree.search import BestTrees
    from specsim.trace.trace import Trace

tree = typer.Typer(
    help="Find the best static draft tree.\n\n"
    "A static tree is the same in every round and known before decoding starts. search finds the tree of a given size "
    "with most accepted tokens. best also weighs what larger and deeper trees cost on given hardware. Replay and run "
    "them as the policies sparse_tree and optimal_tree.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
CURVE = 256  # nodes that the curve reaches at least


@dataclass(frozen=True, kw_only=True)
class SearchOptions(Settings):
    """Which tree is searched in which accuracies."""

    source: Path = argument(
        "Accuracies as CSV, a line per depth (depth,top1,top2,...), or a trace (folder or .zip).",
        metavar="ACC.csv|TRACE",
    )
    nodes: int = setting(63, "Nodes of the tree, without the root.", low=1, high=1023)


@command(tree)
def search(options: SearchOptions) -> Answer:
    """Find the tree with most accepted tokens.

    This is MEDUSA's search (section 3.3.3). An accuracy is the probability that the target's token at a depth is the
    drafter's candidate of a rank (top1 is rank 0), given that the tokens before it are right. Assuming independence,
    a node's probability is the product along its path, and a round emits 1 + the sum over the tree: the expected
    tokens. The result is the best of all trees of its size; the curve gives the best of every size. From a trace the
    accuracies are counted, and "measured" is how many tokens of the tree are accepted there, as a mean over all
    positions: accuracies are seldom independent.

    Choices are printed as MEDUSA writes them: a node is the ranks on its path from the root.

    Example: specsim tree search accuracies.csv --nodes 63
    """
    from specsim.io.errors import InputError
    from specsim.policy.static_tree import shape as tree_shapes
    from specsim.policy.static_tree.search import best_trees, max_tree_nodes, node_accept_probs

    nodes = options.nodes
    trace, rates = _read_source(options.source)
    if nodes > max_tree_nodes(rates):
        raise InputError(
            f"{options.source} has {rates.shape[0]} depths and {rates.shape[1]} ranks, room for "
            f"{max_tree_nodes(rates)} nodes, not {nodes}; ask for fewer or give more"
        )
    trees = best_trees(rates, max(nodes, CURVE))
    shape, curve = trees.shape(nodes), trees.expected_tokens
    document = {
        "source": str(options.source),
        "nodes": nodes,
        "depth": int(tree_shapes.depths(shape).max()),
        "expected_tokens": float(curve[nodes]),
        **({} if trace is None else {"measured_tokens": _measured(shape, trace)}),
        "choices": tree_shapes.to_paths(shape),
        "children": shape,
        "curve": curve.tolist(),
        "accuracies": rates.tolist(),
    }

    def show() -> None:
        _print_tree(shape, node_accept_probs(rates, shape))
        _print_curve(f"tokens per round, best tree of each size: {options.source}", trees, nodes, trace)

    return Answer(document, show)


def _print_curve(title: str, trees: BestTrees, nodes: int, trace: Trace | None) -> None:
    curve, rows = trees.expected_tokens, []
    for size in sorted({*_powers(trees.nodes), nodes}):
        row = [f"{size}{' *' if size == nodes else ''}", f"{curve[size]:.3f}", f"{curve[size] - curve[size - 1]:.4f}"]
        rows.append(row if trace is None else [*row, f"{_measured(trees.shape(size), trace):.3f}"])
    columns = ["nodes (* asked for)", "expected tokens", "of it the last node"]
    print_table(title, columns if trace is None else [*columns, "measured"], rows)


@dataclass(frozen=True, kw_only=True)
class BestOptions(TraceSettings):
    """How large a tree may be."""

    max_nodes: int = setting(64, "Maximum nodes, without the root.", low=1, high=1023)
    max_depth: int = setting(16, "Maximum depth in tokens.", low=1, high=255)


@command(tree)
def best(options: BestOptions, costs: CostSettings) -> Answer:
    """Find the fastest static tree.

    Finds the static tree with most tokens per second on this hardware (Sequoia's idea): for every size and depth the
    tree with most expected tokens, priced with a draft pass per level, verification of all nodes, policy and overhead.
    The prediction assumes independent accuracies, and learns and predicts on the same sequences. To replay the tree
    exactly, on held-out sequences: `specsim replay TRACE --policy optimal_tree`. "measured" is how many tokens of the
    tree are accepted in the trace, as a mean over all positions.

    Example: specsim tree best TRACE --cost profile.json --max-nodes 64
    """
    from specsim.policy.static_tree.optimal import optimal_trees, tree_round_cost
    from specsim.policy.static_tree.rates import rates_of
    from specsim.policy.static_tree.search import node_accept_probs
    from specsim.policy.static_tree.shape import depths, to_paths
    from specsim.replaying.priced import PricedTrace
    from specsim.trace.files import read_plain_trace

    trace = read_plain_trace(options.read(options.trace))
    rates, round_costs = rates_of(trace), tree_round_cost(PricedTrace(trace, costs.read()).table(), trace)
    trees = optimal_trees(rates, round_costs, max_nodes=options.max_nodes, max_depth=options.max_depth)
    fastest = max(trees, key=lambda tree: tree.tokens_per_s)
    baseline = 1 / round_costs.autoregressive_s
    sizes = [
        TreeOfSize(
            tree.nodes,
            int(depths(tree.shape).max()),
            tree.tokens,
            _measured(tree.shape, trace),
            tree.seconds,
            tree.tokens_per_s,
            tree.tokens_per_s / baseline,
        )
        for tree in trees
    ]
    best = sizes[trees.index(fastest)]._asdict()
    document = {
        "trace": str(options.trace),
        "autoregressive_tokens_per_s": baseline,
        "best": {**best, "choices": to_paths(fastest.shape), "children": fastest.shape},
        "sizes": [size._asdict() for size in sizes],
    }

    def show() -> None:
        _print_tree(fastest.shape, node_accept_probs(rates, fastest.shape))
        shown = {*_powers(options.max_nodes), fastest.nodes}
        rows = [["no tree", "", "1", "1", f"{1e3 / baseline:.3f}", f"{baseline:.1f}", "1"]]
        rows += [size.cells(best=size.nodes == fastest.nodes) for size in sizes if size.nodes in shown]
        columns = [
            "nodes (* best)",
            "depth",
            "expected tokens",
            "measured",
            "round, ms",
            "predicted tokens/s",
            "speedup",
        ]
        print_table(f"fastest tree of each size: {options.trace}", columns, rows)

    return Answer(document, show)


class TreeOfSize(NamedTuple):
    """The fastest tree of a size."""

    nodes: int
    depth: int
    expected_tokens: float
    measured_tokens: float
    round_s: float
    tokens_per_s: float
    speedup: float

    def cells(self, *, best: bool) -> list[str]:
        """The row of the table."""
        return [
            f"{self.nodes}{' *' if best else ''}",
            str(self.depth),
            f"{self.expected_tokens:.3f}",
            f"{self.measured_tokens:.3f}",
            f"{1e3 * self.round_s:.3f}",
            f"{self.tokens_per_s:.1f}",
            f"{self.speedup:.3f}",
        ]


def _read_source(source: Path) -> tuple[Trace | None, Floats]:
    """Read a trace and its accuracies [K, R], or the accuracies of a CSV file."""
    from specsim.io.errors import InputError
    from specsim.io.examples import is_example
    from specsim.policy.static_tree.rates import rates_of, read_rates
    from specsim.trace.files import read_plain_trace

    if is_example(source) or source.is_dir() or source.suffix == ".zip":
        trace = read_plain_trace(source)
        return trace, rates_of(trace)
    if not source.is_file():
        raise InputError(f"{source} does not exist; give accuracies as CSV, or a trace folder")
    return None, read_rates(source)


def _measured(shape: tuple[int, ...], trace: Trace) -> float:
    """Mean tokens per round of a static tree, over all positions of a trace."""
    from specsim.policy.static_tree.shape import accepted_tokens

    assert trace.true_rank is not None
    return 1 + float(accepted_tokens(shape, trace.true_rank).mean())


def _print_tree(shape: tuple[int, ...], probs: Floats) -> None:
    """Print the tree, a line per node, and its choices in a line to copy."""
    from specsim.policy.static_tree.shape import to_paths
    from specsim.report.terminal import terminal

    terminal().print(drawing(shape, [f"{prob:.4f}" for prob in probs]))
    print(f"choices = {[list(path) for path in to_paths(shape)]}")


def _powers(largest: int) -> list[int]:
    """1, 2, 4, ... up to this."""
    return [2**k for k in range(largest.bit_length()) if 2**k <= largest]


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
