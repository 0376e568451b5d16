"""The sparse tree that gets most tokens accepted with a given number of nodes (MEDUSA, section 3.3.3).

Rates [K, R]: rates[k - 1, i] is the probability that the target's token at depth k is the drafter's
candidate of rank i, given that the tokens before it are right. Taken as independent, a node's
probability of being accepted is the product along its path, and a round with a tree emits in the mean

    expected tokens = 1 + sum over nodes of their probabilities

(errata E10: MEDUSA's sum leaves out the token that every round emits).

Where no rate exceeds those of smaller ranks of its depth, taking the likeliest node left,
again and again, is optimal for every number of nodes: a node is never likelier than its parent,
a rate being at most 1, nor than its sibling of the rank before; so the n likeliest nodes of all,
ties going to ancestors and elder siblings, form a tree, and no n nodes have a larger sum. Rates of
few data may break that order, and ranks cannot be exchanged, as the drafter fixes them: then a
dynamic programme finds the best tree that has a node only together with its elder siblings.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specsim.io.arrays import Floats, Ints
from specsim.io.compiled import njit
from specsim.policy.static_tree import shape as tree_shapes
from specsim.policy.static_tree.rates import check_rates
from specsim.policy.static_tree.shape import Shape


@dataclass(frozen=True)
class BestTrees:
    """Best trees of 0 to N nodes, root not counted, for rates [K, R]."""

    rates: Floats
    nodes: int

    @cached_property
    def expected_tokens(self) -> Floats:
        """Mean tokens of a round with the best tree of n nodes [N + 1]; 1 without any."""
        if self._ordered:
            return 1 + np.concatenate([[0.0], np.cumsum([prob for prob, _ in self._likeliest])])
        return 1 + self._grown[0]

    def shape(self, nodes: int) -> Shape:
        """Return the best tree of this many nodes, from 1 to N."""
        if self._ordered:
            return tree_shapes.from_paths(path for _, path in self._likeliest[:nodes])
        return tuple(tree_of(self._grown[1], nodes).tolist())

    @property
    def _ordered(self) -> bool:
        return bool((np.diff(self.rates, axis=1) <= 0).all())

    @cached_property
    def _likeliest(self) -> list[tuple[float, tree_shapes.Path]]:
        """List the N likeliest nodes and their probabilities, likeliest first, ties to the shallower."""
        depth, ranks = self.rates.shape
        prob_of: dict[tree_shapes.Path, float] = {(): 1.0}
        found: list[tuple[float, tree_shapes.Path]] = []
        first: tree_shapes.Path = (0,)
        heap = [(-float(self.rates[0, 0]), 1, first)]
        while heap and len(found) < self.nodes:
            prob, level, path = heapq.heappop(heap)
            prob_of[path] = -prob
            found.append((-prob, path))
            if path[-1] + 1 < ranks:
                younger = (*path[:-1], path[-1] + 1)
                heapq.heappush(heap, (-prob_of[path[:-1]] * float(self.rates[level - 1, younger[-1]]), level, younger))
            if level < depth:
                heapq.heappush(heap, (prob * float(self.rates[level, 0]), level + 1, (*path, 0)))
        return found

    @cached_property
    def _grown(self) -> tuple[Floats, Ints]:
        return grow(self.rates, self.rates.shape[1], self.nodes)


def best_trees(rates: Floats, nodes: int) -> BestTrees:
    """Find the best trees of up to `nodes` nodes, or as many as the rates have."""
    check_rates(rates, "rates")
    return BestTrees(np.ascontiguousarray(rates, dtype=np.float64), min(nodes, max_tree_nodes(rates)))


def max_tree_nodes(rates: Floats) -> int:
    """Nodes of the full tree over all depths and ranks; root not counted."""
    depth, ranks = rates.shape
    return sum(ranks**k for k in range(1, depth + 1))


def node_accept_probs(rates: Floats, shape: Shape) -> Floats:
    """Probability of every node to be accepted [n + 1]; the root's is 1."""
    probs = np.ones(len(shape))
    parents, depths, ranks = tree_shapes.parents(shape), tree_shapes.depths(shape), tree_shapes.ranks(shape)
    for node in range(1, len(shape)):
        probs[node] = probs[parents[node]] * rates[depths[node] - 1, ranks[node]]
    return probs


@njit
def grow(rates, forks, nodes):  # type: ignore[no-untyped-def]
    """Compute the largest sum of probabilities of m nodes below the root by dynamic programming over size, rank, depth.

    rates : float64 [K, R]; forks : only children of so many ranks, the likeliest of a depth, have children themselves
    Returns float64 [nodes + 1], the sum of probabilities (-inf: there is no such tree), and int64
    [K, R, nodes + 1]: of m nodes that the children of ranks k and above of a node at depth j have
    with all below them, those that child k takes. Among equals it takes fewest: shallow trees.
    """
    depth, ranks = rates.shape
    taken = np.zeros((depth, ranks, nodes + 1), dtype=np.int64)
    below = np.full(nodes + 1, -np.inf)  # value of m nodes below a node, given that it is right
    below[0] = 0.0
    for j in range(depth - 1, -1, -1):
        rest = np.full(nodes + 1, -np.inf)  # the same of children of ranks k and above
        rest[0] = 0.0
        for k in range(ranks - 1, -1, -1):
            likelier = (rates[j] > rates[j, k]).sum() + (rates[j, :k] == rates[j, k]).sum()
            both = np.full(nodes + 1, -np.inf)
            both[0] = 0.0
            for m in range(1, nodes + 1):
                for s in range(1, (m if likelier < forks else 1) + 1):
                    if below[s - 1] == -np.inf or rest[m - s] == -np.inf:
                        continue
                    value = rates[j, k] * (1.0 + below[s - 1]) + rest[m - s]
                    if value > both[m]:
                        both[m] = value
                        taken[j, k, m] = s
            rest = both
        below = rest
    return below, taken


@njit
def tree_of(taken, nodes):  # type: ignore[no-untyped-def]
    """Child counts int64 [nodes + 1] of the best tree of so many nodes, from `grow`."""
    children = np.zeros(nodes + 1, dtype=np.int64)
    left = np.zeros(nodes + 1, dtype=np.int64)  # nodes below each
    depth = np.zeros(nodes + 1, dtype=np.int64)
    left[0] = nodes
    end = 1
    for node in range(nodes + 1):
        rest = left[node]
        while rest > 0:
            size = taken[depth[node], children[node], rest]
            children[node] += 1
            left[end] = size - 1
            depth[end] = depth[node] + 1
            rest -= size
            end += 1
    return children
