"""Beta-TS on trees: draft another level with a probability drawn from a Beta posterior of acceptance."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb
import numpy as np

from specsim.errors import InputError
from specsim.policy.base import Variant, setting
from specsim.policy.chain.beta_ts import BetaTS, initial_state, keep_probability
from specsim.policy.estimates.counts import COUNTING, THETA, count_round
from specsim.policy.tree.base import MAX_DRAFTED, TreePolicy
from specsim.policy.tree.expansion import expand_beam, mark_best, nth_best


@nb.njit
def expand(state, params, tree, first, end, u, widths):  # type: ignore[no-untyped-def]
    if first > 0 and u >= keep_probability(state, params, 0.0, tree.depth[first]):
        return state
    expand_beam(tree, first, end, int(params.beam), int(params.width), widths)
    return state


@nb.njit
def select(state, params, tree, count, keep):  # type: ignore[no-untyped-def]
    # Chi asks nothing of the nodes, so how many of them a round drafts never depends on their probabilities. Where
    # not all can be verified, the floor is that of EAGLE-2, for the same reason (`specsim.policy.tree.eagle2`).
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
    """Whether an unknown node of a level may be in the beam, whose last node has the path `least`.

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


@nb.njit
def update(state, params, depth, accepted):  # type: ignore[no-untyped-def]
    return count_round(state, depth, accepted, params.counting)


@dataclass(frozen=True)
class BetaTSTree(TreePolicy):
    """Draft another level if chi = 1: chi ~ Bernoulli(theta), theta ~ Beta(alpha0 + r, beta0 + n - r).

    A level is to a tree what a token is to a chain, so r and n count levels: a round whose verified tree is d
    deep and of which the target accepts a path of a tokens is counted as a chain of d tokens is
    (`specsim.policy.estimates.counts`), and theta is integrated out as `specsim.policy.chain.beta_ts` says.
    The root is always expanded; with a beam and a width of 1 the rounds are those of Beta-TS. Every level gives
    `width` children to each of the `beam` nodes of largest path probability, ties to the first drafted;
    verified are the `nodes` likeliest of all that were drafted, which may be all of them.

    The paper says of its tree attention only that several candidates are drafted and that the ones which agree
    with the target's top-1 token are retained: shape and number of the candidates are this
    project's, growing as EAGLE-2's do, and so is what a level counts. Departures of Beta-TS hold here as well.
    """

    alpha0: float = setting(1.0, 1e-6, 1e9, tune=(0.1, 2000.0), log=True, doc="prior successes, levels")
    beta0: float = setting(1.0, 1e-6, 1e9, tune=(0.1, 2000.0), log=True, doc="prior failures, levels")
    counting: str = setting("exact", choices=COUNTING, doc="levels verified a round: min(a+1, d), printed min(a+2, d)")
    theta: str = setting("per_token", choices=THETA, doc="how often theta is drawn; for every level, per_token")
    carry: bool = setting(False, 0, 1, doc="keep the posterior from sequence to sequence")
    beam: int = setting(2, 1, 31, tune=(1, 8), doc="nodes of a level that are expanded")
    width: int = setting(3, 1, 31, tune=(1, 8), bounds="width", doc="children of an expanded node")
    nodes: int = setting(64, 1, MAX_DRAFTED, tune=(4, 64), bounds="nodes", doc="most drafted nodes verified")
    max_depth: int = setting(10, 1, 64, tune=(1, 16), bounds="depth", doc="most levels of the tree")

    name = "beta_ts_tree"
    source = "Liu et al. 2024 (EESD), section 5.7 with Algorithm 2; trees grown as in EAGLE-2"
    variants = (
        Variant("tuned"),
        Variant("weak prior", BetaTS.PRIORS["weak"], tuned=False),
        Variant("strong prior", BetaTS.PRIORS["strong"], tuned=False),
    )
    initial_state = staticmethod(initial_state)
    expand = staticmethod(expand)
    select = staticmethod(select)
    update = staticmethod(update)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_drafted > MAX_DRAFTED:
            raise InputError(
                f"policy {self.name}: max_depth={self.max_depth}, beam={self.beam} and width={self.width} draft "
                f"{self.max_drafted} nodes, more than {MAX_DRAFTED}; make one of them smaller"
            )

    @property
    def carries_state(self) -> bool:
        return self.carry

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
