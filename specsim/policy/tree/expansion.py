"""Selection of the nodes of largest path probability, which dynamic tree policies share."""

from __future__ import annotations

import numba as nb

from specsim.policy.tree.base import UNKNOWN


@nb.njit
def nth_best(path, first, end, n, heap):  # type: ignore[no-untyped-def]
    """Return the n-th largest known path probability of nodes first .. end - 1, n >= 1; UNKNOWN if fewer are known.

    One pass that holds the n largest in a heap, the least on top; `heap`, float64 of at
    least n, is overwritten. Children come after their parents, which are no less likely, so most
    nodes are turned away at the top.
    """
    size = 0
    for i in range(first, end):
        value = path[i]
        if value < 0.0:  # UNKNOWN
            continue
        if size < n:
            at = size
            size += 1
            while at > 0 and heap[(at - 1) // 2] > value:
                heap[at] = heap[(at - 1) // 2]
                at = (at - 1) // 2
            heap[at] = value
        elif value > heap[0]:
            at, child = 0, 1
            while child < n:
                if child + 1 < n and heap[child + 1] < heap[child]:
                    child += 1
                if heap[child] >= value:
                    break
                heap[at] = heap[child]
                at, child = child, 2 * child + 1
            heap[at] = value
    return heap[0] if size == n else UNKNOWN


@nb.njit
def mark_best(path, first, end, n, mark, marks, heap):  # type: ignore[no-untyped-def]
    """Write `mark` into marks[i] of the n known nodes of largest path among first .. end - 1; ties to the lower index.

    Where fewer are known, all of them are marked. Returns the least path that was needed: the n-th
    best, UNKNOWN where fewer than n are known. `heap`: as in `nth_best`. Parents are no less
    likely than their children and come first, so the marked nodes of a whole tree are a tree, too.
    """
    least = nth_best(path, first, end, n, heap)
    if least < 0.0:
        for i in range(first, end):
            if path[i] >= 0.0:
                marks[i] = mark
        return least
    ties = n
    for i in range(first, end):
        if path[i] > least:
            ties -= 1
    for i in range(first, end):
        if path[i] > least:
            marks[i] = mark
        elif path[i] == least and ties > 0:
            marks[i] = mark
            ties -= 1
    return least


@nb.njit
def expand_beam(tree, first, end, beam, width, widths):  # type: ignore[no-untyped-def]
    """Give `width` children to each of the `beam` likeliest nodes of the level first .. end - 1.

    Where fewer are known, unknown nodes fill the beam up: a pass takes as many nodes as it takes in a real run.
    """
    mark_best(tree.path, first, end, beam, width, widths, tree.value)
    spare = beam
    for i in range(first, end):
        if widths[i] > 0:
            spare -= 1
    for i in range(first, end):
        if spare > 0 and widths[i] == 0:
            widths[i] = width
            spare -= 1
