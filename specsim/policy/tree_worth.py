"""What the nodes of a draft tree are worth: which to expand and which to verify, in seconds.

Shared by `HardwarePCT` and by `specsim.tree_stopping`, which learns the gains.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np

NEVER = 1e6  # a gain in seconds that nothing reaches
KNOTS = 13  # of the gain of expanding a node, at even distances of the log of its path probability
LOWEST = -6.0  # log path probability at the first knot


@nb.njit
def gain_s(path, own, edges, gains):  # type: ignore[no-untyped-def]
    """Seconds that the children of a node are expected to be worth beyond their verification.

    Of its path probability and own chance; gains [len(edges) + 1, KNOTS], per unit of path probability.
    """
    row = np.searchsorted(edges, own, side="right") * KNOTS
    at = min(max((math.log(path) - LOWEST) * ((KNOTS - 1) / -LOWEST), 0.0), KNOTS - 1.0)
    low = min(int(at), KNOTS - 2)
    left = gains[row + low]
    return path * (left + (at - low) * (gains[row + low + 1] - left))


@nb.njit
def worthless(gains):  # type: ignore[no-untyped-def]
    """The path probability up to which no node's children are worth anything."""
    rows = len(gains) // KNOTS
    for knot in range(KNOTS):
        for row in range(rows):
            if gains[row * KNOTS + knot] > 0.0:
                return math.exp(LOWEST - LOWEST * (knot - 1) / (KNOTS - 1)) if knot > 0 else 0.0
    return 1.0


@nb.njit
def best_expanded(gains, wider_s):  # type: ignore[no-untyped-def]
    """How many of the nodes of these gains, the largest first, a draft pass best expands; and what that gains.

    Net of the pass being wider than over one node.
    """
    best, best_s, total = 0, 0.0, 0.0
    for e in range(1, min(len(gains), len(wider_s) - 1) + 1):
        total += gains[e - 1]
        if total - wider_s[e] > best_s:
            best, best_s = e, total - wider_s[e]
    return best, best_s


@nb.njit
def best_kept(values, value_s, verify_s):  # type: ignore[no-untyped-def]
    """How many nodes of these path probabilities, the largest first, are best verified; and what that is worth.

    In seconds, those of the pass taken off. verify_s[n]: a pass over n nodes beside the pending token
    """
    best, best_s, total = 0, -verify_s[0], 0.0
    for n in range(1, min(len(values), len(verify_s) - 1) + 1):
        total += value_s * values[n - 1]
        if total - verify_s[n] > best_s:
            best, best_s = n, total - verify_s[n]
    return best, best_s


@nb.njit
def harmless(values, kept, value_s, verify_s):  # type: ignore[no-untyped-def]
    """A path probability such that any number of further nodes below it would leave `kept` best, after `best_kept`."""
    high = values[kept - 1] if kept > 0 else 1.0
    if kept == len(verify_s) - 1:
        return high
    low = 0.0
    for _ in range(30):
        middle, fits, total = 0.5 * (low + high), True, 0.0
        for n in range(kept + 1, len(verify_s)):
            total += value_s * max(middle, values[n - 1] if n <= len(values) else 0.0)
            if total > verify_s[n] - verify_s[kept]:
                fits = False
                break
        if fits:
            low = middle
        else:
            high = middle
    return low


@nb.njit(cache=True)
def worth_of_children(rows, first_child, values, depths, width, least, value_s, margin_s):  # type: ignore[no-untyped-def]
    """What a node's children would be worth, of every recorded node that might be expanded.

    Returns log path probability, own chance, and sum over the children of (value x path
    probability - margin_s)+ per path probability of the node, [n] each.
    """
    n = 0
    for filling in (False, True):  # counted first
        at, own, worth = np.empty(n), np.empty(n), np.empty(n)
        n = 0
        level, parent = np.zeros(values.shape[1], np.int64), np.zeros(values.shape[1], np.int64)
        for r in range(len(rows)):
            for node in range(values.shape[1]):
                begin, end = np.int64(first_child[rows[r], node]), np.int64(first_child[rows[r], node + 1])
                for child in range(begin, end):
                    level[child], parent[child] = level[node] + 1, node
                path = values[r, node]
                if node == 0 or path < least or level[node] >= depths:
                    continue
                if filling:
                    total = 0.0
                    for child in range(begin, min(end, begin + width)):
                        total += max(value_s * values[r, child] - margin_s, 0.0)
                    at[n], own[n], worth[n] = math.log(path), path / values[r, parent[node]], total / path
                n += 1
    return at, own, worth


@nb.njit(cache=True)
def levels(  # type: ignore[no-untyped-def]
    rows,
    first_child,
    values,
    width,
    least,
    value_s,
    verify_s,
    wider_s,
    edges,
    gains,
    foretold_s,
    wide_s,
    worth_s,
):
    """Every round's tree grown as far as recorded, level by level.

    Fills, per round and depth d = 0 .. D: foretold_s [R, D] what the children of the nodes of depth d
    are expected to be worth, net of a wider pass; wide_s [R, D] that pass's seconds beyond one over
    a single node; worth_s [R, D + 1] what verifying the best of the nodes up to depth d is worth.
    """
    nodes = values.shape[1]
    depths = foretold_s.shape[1]
    parent = np.zeros(nodes, np.int64)
    here, likely = np.zeros(nodes), np.zeros(nodes)
    for r in range(len(rows)):
        row = rows[r]
        count, first, end = 0, 0, 1  # likely nodes so far; nodes of this level
        for d in range(depths + 1):
            begun = 0
            for node in range(first, end):
                drafted = node - np.int64(first_child[row, parent[node]]) < width
                if node > 0 and drafted and values[r, parent[node]] >= least:
                    likely[count] = values[r, node]
                    count += 1
                if node == 0 or d == depths or not drafted or values[r, node] < least:
                    continue
                here[begun] = gain_s(values[r, node], values[r, node] / values[r, parent[node]], edges, gains)
                begun += 1
            worth_s[r, d] = best_kept(np.sort(likely[:count])[::-1], value_s, verify_s)[1]
            if d == depths:
                break
            expanded, total = best_expanded(np.sort(here[:begun])[::-1], wider_s)
            foretold_s[r, d] = total
            wide_s[r, d] = wider_s[expanded] if expanded > 0 else 0.0
            last = end
            for node in range(first, last):
                for child in range(np.int64(first_child[row, node]), np.int64(first_child[row, node + 1])):
                    parent[child] = node
                    end = child + 1
            first = last
