"""The static tree that decodes fastest on given hardware (the idea of Sequoia, Chen et al. 2024, arXiv:2402.12374).

A larger or deeper tree emits more tokens per round and takes longer. For every number of nodes n
and depth d a dynamic programme finds the tree that emits most (`tree_search.grow`, with rates that
depend on the depth), and its round is priced: draft passes, verification of n + 1 tokens,
and the rest. The best has most tokens per second.

Sequoia prices by n and d alone; then this is the optimum over all trees. Here a draft pass over
more nodes may take longer as well. So the search also tries, for every n and d, the trees of which
only the w likeliest ranks of siblings have children, for every w: with w = 1 every pass is over a single
node, with w = R all trees are allowed. Each is priced exactly as the replay does; between them
there may be a tree that is faster still.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specsim.cost.table import CostTable, autoregressive_seconds, context_share
from specsim.io.arrays import Floats
from specsim.io.compiled import njit
from specsim.io.errors import InputError
from specsim.policy.static_tree.rates import check_rates
from specsim.policy.static_tree.search import grow, max_tree_nodes, tree_of
from specsim.policy.static_tree.shape import Shape
from specsim.trace.trace import Trace


class TreeRoundCost(NamedTuple):
    """Seconds of the parts of a round with a tree, at an average context.

    draft_s : [D + 1], draft passes over a node each, down to each depth
    catch_up_s : what the first pass takes more where the last accepted node was never expanded
    wider_s : [W + 1], additional time of a pass over e nodes beyond a pass over a single node (entry 0 is unused)
    verify_s : [n_max + 1], a target pass over n tokens (entry 0 is unused)
    policy_step_s : a decision about a level
    """

    draft_s: Floats
    catch_up_s: float
    wider_s: Floats
    verify_s: Floats
    policy_step_s: float
    round_overhead_s: float
    autoregressive_s: float


@dataclass(frozen=True)
class PricedTree:
    """A static tree with the mean tokens (the target's included) and seconds of its rounds."""

    shape: Shape
    tokens: float
    seconds: float

    @property
    def nodes(self) -> int:
        return len(self.shape) - 1

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def tree_round_cost(table: CostTable, trace: Trace) -> TreeRoundCost:
    """Average the costs of a table over the contexts of a trace's positions."""
    if table.tree is None:
        raise InputError("the costs do not price trees; profile again with `realrun profile --tree-nodes`")
    share = context_share(trace, table)
    return TreeRoundCost(
        draft_s=table.draft_s @ share,
        catch_up_s=float(table.catch_up_s @ share),
        wider_s=np.nan_to_num(table.tree.wider_s) @ share,
        verify_s=np.nan_to_num(table.tree.verify_s) @ share,
        policy_step_s=table.tree.policy_step_s,
        round_overhead_s=table.tree.round_overhead_s,
        autoregressive_s=float(autoregressive_seconds(trace, table).sum() / len(trace.token)),
    )


def price(shape: Shape, rates: Floats, cost: TreeRoundCost) -> PricedTree:
    """Compute the mean tokens and seconds of a round with this tree; infinite seconds beyond the costs' range."""
    tokens, seconds = _price(np.array(shape, dtype=np.int64), rates, cost)
    return PricedTree(shape, float(tokens), float(seconds))


def optimal_tree(rates: Floats, cost: TreeRoundCost, *, max_nodes: int, max_depth: int) -> PricedTree:
    """Find the tree of the most tokens per second with 1 to max_nodes nodes, at most max_depth deep."""
    return max(optimal_trees(rates, cost, max_nodes=max_nodes, max_depth=max_depth), key=lambda t: t.tokens_per_s)


def optimal_trees(rates: Floats, cost: TreeRoundCost, *, max_nodes: int, max_depth: int) -> list[PricedTree]:
    """Find the fastest tree of 1, 2, ... nodes that rates and costs cover; raise InputError if they cover none."""
    check_rates(rates, "rates")
    depth = min(len(rates), max_depth, len(cost.draft_s) - 1)
    reached = np.ascontiguousarray(rates[:depth], dtype=np.float64)
    nodes = min(max_nodes, len(cost.verify_s) - 2, max_tree_nodes(reached))
    ranks = rates.shape[1]
    least_forks = 1 if cost.wider_s.any() else ranks
    found = _search(reached, nodes, least_forks, cost)
    trees = []
    for size in range(1, nodes + 1):
        deep, forks = (int(choice) for choice in found[size])
        if deep:
            taken = grow(reached[:deep], forks, size)[1]
            trees.append(price(tuple(tree_of(taken, size).tolist()), reached, cost))
    if not trees:
        raise InputError(
            f"costs of trees of up to {len(cost.verify_s) - 1} tokens price no tree of the {max_nodes} nodes and "
            f"{max_depth} levels allowed; profile with a larger `realrun profile --tree-nodes` or allow more"
        )
    return trees


@njit
def _search(  # type: ignore[no-untyped-def]
    rates, nodes, least_forks, cost
):
    """Find the depth and forking ranks [nodes + 1, 2] of the fastest tree of each size; 0 if no tree fits."""
    most = np.zeros(nodes + 1)
    found = np.zeros((nodes + 1, 2), dtype=np.int64)
    for depth in range(1, len(rates) + 1):
        for forks in range(least_forks, rates.shape[1] + 1):
            value, taken = grow(rates[:depth], forks, nodes)
            for size in range(1, nodes + 1):
                if value[size] == -np.inf:
                    continue
                tokens, seconds = _price(tree_of(taken, size), rates, cost)
                if tokens / seconds > most[size]:
                    most[size] = tokens / seconds
                    found[size, 0], found[size, 1] = depth, forks
    return found


@njit
def _price(  # type: ignore[no-untyped-def]
    children, rates, cost
):
    """Compute the mean tokens and seconds of a round with a tree; children int64 [n + 1] in level order."""
    nodes = len(children) - 1
    prob = np.ones(nodes + 1)
    seconds = cost.verify_s[nodes + 1] + cost.round_overhead_s
    tokens = unexpanded = 0.0
    first, end, depth = 0, 1, 0
    while True:
        child, expanded = end, 0
        for node in range(first, end):
            tokens += prob[node]
            if children[node] > 0:
                expanded += 1
            elif node > 0:
                unexpanded += prob[node]
            for rank in range(children[node]):
                prob[child] = prob[node] * rates[depth, rank]
                child += 1
        if expanded == 0:
            break
        if expanded >= len(cost.wider_s):
            return tokens, np.inf
        seconds += cost.wider_s[expanded] + cost.policy_step_s
        first, end = end, child
        depth += 1
    return tokens, seconds + cost.draft_s[depth] + unexpanded * cost.catch_up_s
