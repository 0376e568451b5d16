"""A round's draft, and the interface of drafters that the decoding loop calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch

from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from specsim.io.compiled import njit
from specsim.policy.chain.base import Step
from specsim.policy.switch.base import SwitchPolicy
from specsim.policy.tree.base import TreePolicy

Siblings = Literal["iid", "without_replacement", "top_k"]
KeepDrafting = Callable[[Step, int], bool]  # (the token just drafted, its depth from 1)


@dataclass
class Draft:
    """A drafter's proposal for a round; a chain is a path in a tree.

    tokens, parents : [k], the parent of node i is node parents[i], or -1 for the pending token
    steps : [k], features of each token of a chain
    probs : [k] of [V], the distribution each token was drawn from, in rejection mode
    siblings : how the children of a node were drafted, which decides how they may be judged
    policy_s : seconds spent in the policy; step_s : seconds of each draft step or pass
    drafted : number of tokens or nodes drafted; `tokens` are those to verify
    nodes : [k], each token's index in the drafted tree, whose root is 0
    level_nodes : nodes of a tree that each draft pass ingested
    fed : tokens that the first draft step ingested
    asked : decisions of the policy
    drafter : number of the drafter among several, from 1; 0 with a single drafter, or if nothing was drafted
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)
    siblings: Siblings = "iid"
    step_s: list[float] = field(default_factory=list)
    policy_s: float = 0.0
    drafted: int = 0
    nodes: list[int] = field(default_factory=list)
    level_nodes: list[int] = field(default_factory=list)
    fed: int = 0
    asked: int = 0
    drafter: int = 0

    def drop_last(self) -> None:
        """Remove the last token of a chain from verification; its draft step has been made all the same."""
        for values in (self.tokens, self.parents, self.steps, self.probs):
            del values[-1:]


class Drafter(Protocol):
    """Proposes tokens: `prepare` before timing starts, `begin`, then `propose` and `commit` in turn."""

    # Whether `begin` and `commit` need the target's last state [d_T] at the position that produced the newest output
    # token (None before the first token); `prepare` decides.
    wants_target_hidden: bool

    def prepare(
        self, length: int, sampler: Sampler, sequence: int, positions: int, features: Sequence[str] = ()
    ) -> None: ...

    def begin(self, context: Sequence[int], target_hidden: torch.Tensor | None = None) -> None: ...

    def propose(self, tokens: Sequence[int], context: RoundContext, keep: KeepDrafting) -> Draft: ...

    def commit(self, length: int, target_hidden: torch.Tensor | None = None) -> None: ...


@runtime_checkable
class SwitchingDrafter(Drafter, Protocol):
    """Several drafters: `choose`, called before `propose`, picks the drafter of the round and the draft limit."""

    def choose(
        self, tokens: Sequence[int], context: RoundContext, policy: SwitchPolicy, state: Any
    ) -> tuple[Any, RoundContext]: ...


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """Proposes trees as well: `prepare_tree` after `prepare`, then `propose_tree` and `commit_tree` in turn."""

    def prepare_tree(self, policy: TreePolicy, length: int) -> None: ...

    def propose_tree(
        self,
        tokens: Sequence[int],
        context: RoundContext,
        policy: TreePolicy,
        state: Any,
    ) -> tuple[Draft, Any]: ...

    def commit_tree(self, path: Sequence[int], target_hidden: torch.Tensor | None = None) -> None: ...


@lru_cache(maxsize=64)
def params_of(policy: TreePolicy) -> tuple[Any, ...]:
    """Cache a policy's params: those of a static tree are its whole shape."""
    return policy.params


@njit
def layout(parents):  # type: ignore[no-untyped-def]
    """Lay out a tree of nodes 0 .. n - 1 below a root: depths [n + 1] and attention mask, bool [n + 1, n + 1].

    The root comes first. parents : int [n], earlier nodes, or -1 for the root
    """
    size = len(parents) + 1
    depths, visible = np.zeros(size, np.int64), np.zeros((size, size), np.bool_)
    visible[0, 0] = True
    for node in range(1, size):
        above = parents[node - 1] + 1
        depths[node] = depths[above] + 1
        visible[node, : above + 1] = visible[above, : above + 1]
        visible[node, node] = True
    return depths, visible
