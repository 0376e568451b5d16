"""Beta-TS on trees: draft another level with a probability drawn from a Beta posterior of acceptance."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.base import Variant, setting
from specsim.policy.chain.beta_ts import BetaTS, initial_state, keep_probability, update
from specsim.policy.estimates.counts import COUNTING, THETA
from specsim.policy.tree.base import MAX_DRAFTED
from specsim.policy.tree.beam import BeamTree
from specsim.policy.tree.expansion import expand_beam


@nb.njit
def expand(state, params, tree, first, end, u, widths):  # type: ignore[no-untyped-def]
    if first > 0 and u >= keep_probability(state, params, 0.0, tree.depth[first]):
        return state
    expand_beam(tree, first, end, int(params.beam), int(params.width), widths)
    return state


@dataclass(frozen=True)
class BetaTSTree(BeamTree):
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
    counting: str = setting(
        "exact", choices=COUNTING, doc="levels counted as verified: min(a+1, d), or with printed min(a+2, d)"
    )
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
    update = staticmethod(update)

    @property
    def carries_state(self) -> bool:
        return self.carry
