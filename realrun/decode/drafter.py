"""What the decoding loop asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from realrun.decode.draft import Draft, KeepDrafting
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from specsim.policy.switch.base import SwitchPolicy
from specsim.policy.tree.base import TreePolicy


class Drafter(Protocol):
    """Proposes tokens. `prepare` ahead of the clock, `begin`, then `propose` and `commit` in turn."""

    # Whether `begin` and `commit` are to be given the target's last state [d_T] at the position
    # that produced the newest output token (None before there is one); `prepare` decides.
    wants_target_hidden: bool

    def prepare(
        self, length: int, sampler: Sampler, sequence: int, positions: int, features: Sequence[str] = ()
    ) -> None: ...

    def begin(self, context: Sequence[int], target_hidden: torch.Tensor | None = None) -> None: ...

    def propose(self, tokens: Sequence[int], context: RoundContext, keep: KeepDrafting) -> Draft: ...

    def commit(self, length: int, target_hidden: torch.Tensor | None = None) -> None: ...


@runtime_checkable
class SwitchingDrafter(Drafter, Protocol):
    """Several drafters: `choose` says ahead of `propose` with which the round drafts, and how many tokens at most."""

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
