"""EAGLE's drafter: autoregression on the features that the target's head reads (Li et al. 2024, arXiv:2401.15077).

One layer maps a token's embedding, fused with the feature before it, to the feature after it; the target's own
head makes logits of that. A feature is the target's last state after its final norm. In a round that
starts with token n pending, the rows of tokens 0 .. n are fused with true features, the first one with
zeros, and the rows of drafted tokens with what the drafter itself has put out before them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F

from realrun.decode.acceptance_predictor import Predictor
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.edd import one_layer_model
from realrun.drafters.kind import DrafterKind
from realrun.drafters.state_drafter import StateDrafterLM
from realrun.drafters.static.eagle import StaticEagle
from realrun.lm.cached import CachedLM
from realrun.lm.layer_stack import model_parts
from realrun.lm.open import static_serves
from realrun.lm.split_target import SplitTarget
from realrun.lm.static.split import StaticSplitTarget
from realrun.proposals.recorder import Recorder
from realrun.proposals.target_cache import target_cache_recorder


class Eagle(torch.nn.Module):
    """What is trained: a fusing projection [2 d -> d] and one layer of the target's kind."""

    def __init__(self, target: Any, seed: int = 0):
        super().__init__()
        self.config = copy.deepcopy(target.config)
        size = int(target.config.hidden_size)
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.fuse = torch.nn.Linear(2 * size, size).to(target.device, target.dtype)
        self.layers = one_layer_model(target, seed).model.layers

    def fused(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Input [..., d] of the layer for embeddings of tokens and the features before them, [..., d] each."""
        fused: torch.Tensor = self.fuse(torch.cat([embedded, features], dim=-1))
        return fused


class EagleLM(StateDrafterLM):
    """The drafter's pass over a target that is split above its last layer.

    features : [nodes, d], what was put out in the rows of nodes; `feature`, in the last row that is none
    order : of the nodes, numbers by slot
    """

    caches_pending_token = True  # its row is fused with a true feature
    feature: torch.Tensor

    def __init__(self, target: SplitTarget, eagle: Eagle):
        self.eagle = eagle
        super().__init__(target, target.model, target.pieces, eagle.layers)

    def reset(self) -> None:
        super().reset()
        self._forget_nodes()

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        self.features = self.target.states[:0]
        self.order = np.zeros(0, np.int64)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        start, end = self.length, self.length + len(tokens)
        embedded = self.pieces.embed(tokens)
        if start > self.target.length:  # a token that it drafted itself
            assert len(tokens) == 1
            x = self.eagle.fused(embedded, self.feature[None])
        else:
            assert end <= self.target.length + 1
            self.given = end
            x = self.eagle.fused(embedded, self._true_features(range(start - 1, end - 1)))
            if len(tokens) > 1:  # only the last output is needed
                self.stack.fill(x[:-1], start, slice(start, end - 1))
        x = self.stack.run(x[-1:], end - 1, slice(end - 1, end), None)
        self.feature = x[0]
        return self._finish(x)

    def _own_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, roots: bool
    ) -> torch.Tensor:
        """Level by level, since what a node's row is made of is what its parent's row puts out."""
        before, count = len(self.features), len(tokens)
        lineage = seen[:, self.length :].numpy()
        parent, level = parents_and_levels(lineage, before)
        embedded, at = self.pieces.embed(tokens), torch.tensor(positions, device=self.device)
        out = torch.empty(count, embedded.shape[1], dtype=embedded.dtype, device=self.device)
        for depth in range(level.max() + 1):
            rows = np.flatnonzero(level == depth)
            self.order = np.concatenate([self.order, before + rows])
            slots = torch.from_numpy(np.hstack([seen[rows, : self.length].numpy(), lineage[rows][:, self.order]]))
            known = torch.cat([self.features, out])
            above = known[torch.from_numpy(np.maximum(parent[rows], 0)).to(self.device)]
            none = torch.from_numpy(parent[rows] < 0).to(self.device)[:, None]
            if bool(none.any()):
                if roots:
                    first = self._true_features([positions[row] - 1 for row in rows.tolist()])
                else:
                    first = self.feature.expand(len(rows), -1)
                above = torch.where(none, first, above)
            end = self.length + len(self.order)
            x = self.eagle.fused(embedded[torch.from_numpy(rows)], above)
            index = torch.from_numpy(rows)
            out[index] = self.stack.run(x, end - len(rows), at[index], self.pieces.tree_mask(slots, end))
        self.features = torch.cat([self.features, out])
        return self._finish(out)

    def _true_features(self, positions: Sequence[int]) -> torch.Tensor:
        """The target's features [n, d] of tokens at these positions, ascending; zeros before the first token."""
        before = sum(position < 0 for position in positions)
        index = torch.tensor([*positions][before:], dtype=torch.long, device=self.device)
        features = self.target.pieces.normed(self.target.states[index], self.target.norm)
        return F.pad(features, (0, 0, before, 0))

    def _finish(self, features: torch.Tensor) -> torch.Tensor:
        if self.keep_hidden:
            self.hidden = features
        return self.pieces.logits(features, self.target.head)


def parents_and_levels(lineage: np.ndarray[Any, Any], before: int) -> tuple[np.ndarray[Any, Any], ...]:
    """Of n nodes behind `before` others: the number of each one's parent, -1 for none, and levels among the n.

    lineage : bool [n, before + n], each one's ancestors and itself; ancestors come first
    """
    count = len(lineage)
    above = lineage.copy()
    above[np.arange(count), before + np.arange(count)] = False
    last = lineage.shape[1] - 1 - above[:, ::-1].argmax(axis=1)
    parent = np.where(above.any(axis=1), last, -1)
    level = np.zeros(count, np.int64)
    for node in range(count):
        if parent[node] >= before:
            level[node] = level[parent[node] - before] + 1
    return parent, level


@dataclass(frozen=True, eq=False)
class EagleKind(DrafterKind):
    """Its file holds the state of `Eagle`."""

    eagle: Eagle

    name: ClassVar[str] = "eagle"
    paper_policy: ClassVar[str | None] = "eagle2"

    @classmethod
    def check_target(cls, target: Any) -> None:
        model_parts(target)

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        eagle = Eagle(target)
        eagle.load_state_dict(tensors)
        return target, cls(eagle.eval())

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        if static_serves(target):
            static = StaticSplitTarget(target, int(target.config.num_hidden_layers))
            drafting = StaticEagle(static, self.eagle.layers, self.eagle.fused)
            return static, DraftModel(drafting, eos_token_ids, predictor)
        split, lm = self._passes(target)
        return split, DraftModel(lm, eos_token_ids, predictor)

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        return target_cache_recorder(*self._passes(target), sampler)

    def _passes(self, target: Any) -> tuple[SplitTarget, EagleLM]:
        split = SplitTarget(target, int(target.config.num_hidden_layers))
        return split, EagleLM(split, self.eagle)

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (self.eagle,)
