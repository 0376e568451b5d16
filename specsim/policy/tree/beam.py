"""Trees that grow a beam at a time, as deep as their policy decides level by level (Beta-TS and Cali-TS on trees)."""

from __future__ import annotations

import numba as nb
import numpy as np

from specsim.io.errors import InputError
from specsim.policy.tree.base import MAX_DRAFTED, TreePolicy
from specsim.policy.tree.expansion import mark_best, nth_best


@nb.njit
def select(state, params, tree, count, keep):  # type: ignore[no-untyped-def]
    # Whether another level is drafted depends on no node's probability, so how many a round drafts does not either.
    # Where not all can be verified, the floor is that of EAGLE-2, for the same reason (`specsim.policy.tree.eagle2`).
    most, beam = int(params.nodes), int(params.beam)
    if count - 1 > most:
        return mark_best(tree.path, 1, count, most, True, keep, tree.value)
    # Else only the beams could differ: those of the levels that were expanded and have more nodes than a beam holds.
    keep[1:count] = True
    floor, first = np.inf, np.int64(1)
    while tree.depth[first] < tree.depth[count - 1]:
        end = first
        while tree.depth[end] == tree.depth[first]:
            end += 1
        if end - first > beam:
            least = nth_best(tree.path, first, end, beam, tree.value)
            if least < 0.0 or may_hold_likelier(tree, first, end, least):
                floor = min(floor, least)
        first = end
    return floor


@nb.njit
def may_hold_likelier(tree, first, end, least):  # type: ignore[no-untyped-def]
    """Tell whether an unknown node of a level may be in the beam, whose last node has the path `least`.

    Siblings come likeliest first, no child is likelier than its parent, and ties go to the first.
    """
    for i in range(first, end):
        if tree.path[i] < 0.0:
            above = tree.path[tree.parent[i]]
            if tree.rank[i] == 0 and (above < 0.0 or above >= least):
                return True
            if tree.rank[i] > 0 and tree.path[i - 1] > least:
                return True
    return False


class BeamTree(TreePolicy):
    """Every level gives `width` children to each of the `beam` likeliest nodes; the `nodes` likeliest are verified.

    A policy of this kind has these four as settings, and an `expand` that decides whether there is another level.
    """

    beam: int
    width: int
    nodes: int
    max_depth: int

    select = staticmethod(select)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_drafted > MAX_DRAFTED:
            raise InputError(
                f"policy {self.name}: max_depth={self.max_depth}, beam={self.beam} and width={self.width} draft "
                f"{self.max_drafted} nodes, more than {MAX_DRAFTED}; lower either"
            )

    @property
    def expanded_per_level(self) -> list[int]:
        """Nodes of each level that are expanded where all levels are drafted, the root's first."""
        expanded = [1]
        while len(expanded) < self.max_depth:
            expanded.append(min(self.beam, expanded[-1] * self.width))
        return expanded

    @property
    def max_drafted(self) -> int:
        """Nodes of the largest tree."""
        return self.width * sum(self.expanded_per_level)

    @property
    def max_nodes(self) -> int:
        return min(self.nodes, self.max_drafted)

    @property
    def max_expanded(self) -> int:
        return max(self.expanded_per_level)

    @property
    def max_width(self) -> int:
        return self.width
