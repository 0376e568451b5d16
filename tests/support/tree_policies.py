"""Tree policies that find faults: by a coin, of any width, and keeping nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numba as nb
import numpy as np

from specsim.io.rng import split
from specsim.policy.base import setting
from specsim.policy.memoryless import initial_state, update
from specsim.policy.tree.base import MAX_DRAFTED, TreePolicy
from specsim.policy.tree.static import select as keep_all


@nb.njit
def counting_state(params):
    return (0.0,)


@nb.njit
def by_coin(state, params, tree, first, end, u, widths):
    if first == 0 and u < 0.2:
        return (state[0] + 1.0,)  # now and then nothing is drafted
    for i in range(first, end):
        widths[i] = int(split(u, i + 1) * 3.5) if first > 0 or i > 0 else 3
    return (state[0] + 1.0,)


@nb.njit
def likely(state, params, tree, count, keep):
    least = params.least * (1.0 + int(state[0]) % 3)
    for i in range(1, count):
        keep[i] = tree.path[i] >= least
    return least


@nb.njit
def count_rounds(state, params, depth, accepted):
    return (state[0] + depth + 10.0 * accepted,)


@dataclass(frozen=True)
class CoinTree(TreePolicy):
    """Expands what a coin says and keeps by a threshold that moves with all that happened before."""

    least: float = setting(0.05, 0.0, 1.0)

    name = "coin_tree"
    source = "these tests"
    max_depth: ClassVar[int] = 4
    max_nodes: ClassVar[int] = 100
    max_width: ClassVar[int] = 3  # type: ignore[misc, assignment]
    initial_state = staticmethod(counting_state)
    expand = staticmethod(by_coin)
    select = staticmethod(likely)
    update = staticmethod(count_rounds)

    @property
    def carries_state(self) -> bool:
        return True


@nb.njit
def wide(state, params, tree, first, end, u, widths):
    widths[first:end] = int(params.width)
    return state


@nb.njit
def keep_none(state, params, tree, count, keep):
    return np.inf


@dataclass(frozen=True)
class Wide(TreePolicy):
    """Every node gets `width` children; with a width of 0, none."""

    width: int = setting(2, 0, 2000)
    max_depth: int = setting(3, 1, 64, bounds="depth")

    name = "wide"
    source = "these tests"
    max_nodes: ClassVar[int] = MAX_DRAFTED
    initial_state = staticmethod(initial_state)
    expand = staticmethod(wide)
    select = staticmethod(keep_all)
    update = staticmethod(update)

    @property
    def max_width(self) -> int:
        return self.width


@dataclass(frozen=True)
class KeepNone(Wide):
    """Drafts, and verifies none of it."""

    name = "keep_none"
    select = staticmethod(keep_none)
