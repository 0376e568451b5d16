"""Static trees: the same tree in every round, whatever the drafter says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numba as nb
import numpy as np
import numpy.typing as npt

from specsim.io.errors import InputError
from specsim.policy.memoryless import initial_state, update
from specsim.policy.tree.base import MAX_DRAFTED, TreePolicy


@nb.njit
def expand(state, params, tree, first, end, u, widths):  # type: ignore[no-untyped-def]
    children = params.children
    for i in range(first, end):
        widths[i] = int(children[i])
    return state


@nb.njit
def select(state, params, tree, count, keep):  # type: ignore[no-untyped-def]
    keep[:count] = True
    return np.inf


class Shape(NamedTuple):
    """Return a static tree as compiled functions read it: children of every node in level order, the root first."""

    children: npt.NDArray[np.float64]


@dataclass(frozen=True)
class StaticTree(TreePolicy):
    """Base of static trees; subclasses give the `shape`."""

    features = ("true_rank",)
    static = True
    initial_state = staticmethod(initial_state)
    expand = staticmethod(expand)
    select = staticmethod(select)
    update = staticmethod(update)

    @property
    def shape(self) -> tuple[int, ...]:
        """Children of every node in level order, the root first."""
        raise NotImplementedError

    @property
    def params(self) -> Shape:
        return Shape(np.array(self.shape, dtype=np.float64))

    @property
    def max_draft_tokens(self) -> int:
        return len(self.level_sizes) - 1

    @property
    def max_verified_nodes(self) -> int:
        return len(self.shape) - 1

    @property
    def max_width(self) -> int:
        return max(self.shape)

    @property
    def max_expanded(self) -> int:
        return max(expanded_per_level(self.shape))

    @property
    def level_sizes(self) -> list[int]:
        """Nodes of each level, the root's first."""
        return level_sizes(self.shape)


def check_shape(policy: str, shape: tuple[int, ...]) -> None:
    """Raise InputError unless these are the child counts of a tree of 2 to MAX_DRAFTED + 1 nodes."""
    if not (2 <= len(shape) == 1 + sum(shape) and min(shape) >= 0):
        raise InputError(
            f"policy {policy}: child counts {list(shape)[:12]} are not a tree's; give a count per node, in level "
            "order, that sum to the nodes less the root"
        )
    if len(shape) > MAX_DRAFTED + 1:
        raise InputError(f"policy {policy}: a tree of {len(shape)} nodes; give at most {MAX_DRAFTED + 1}")
    open_nodes = 1
    for position, count in enumerate(shape):
        if position >= open_nodes:
            raise InputError(f"policy {policy}: child counts {list(shape)[:12]} end before their node {position}")
        open_nodes += count


def level_sizes(shape: tuple[int, ...]) -> list[int]:
    """Nodes of each level of a tree given by child counts in level order, the root's first."""
    sizes, first, end = [1], 0, 1
    while True:
        size = sum(shape[first:end])
        if not size:
            return sizes
        sizes.append(size)
        first, end = end, end + size


def expanded_per_level(shape: tuple[int, ...]) -> list[int]:
    """Nodes of each level that have children, the root's first."""
    found, first = [], 0
    for size in level_sizes(shape):
        found.append(sum(count > 0 for count in shape[first : first + size]))
        first += size
    return found
