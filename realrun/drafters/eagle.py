"""EAGLE's drafter: autoregression on the features that the target's head reads (Li et al. 2024, arXiv:2401.15077).

One layer maps a token's embedding, fused with the feature before it, to the feature after it; the target's own head
makes logits of that. A feature is the target's last state after its final norm. In a round that starts with token n
pending, the rows of tokens 0 .. n are fused with features of the target (zeros for token 0), and the rows of drafted
tokens with the drafter's own output before them.

The authors' layer, which vLLM runs (model_executor/models/llama_eagle.py), differs in three things, and `Eagle` can be
made so: its projection may have no bias, its layer has no first norm, and the first token no row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from realrun.drafters.edd import one_layer_model
from realrun.drafters.kind import DRAFT_TOKENS, DrafterFacts, InsideTargetKind, draft_tokens, draft_vocabulary
from realrun.drafters.state_drafter import STATE_ROWS, StateDrafterLM, StatePass, StateRows, StaticStateDrafter
from realrun.lm.cached import CachedLM
from realrun.lm.head import partial_head
from realrun.lm.split_target import SplitTarget
from realrun.lm.static.llama import StaticLlama
from realrun.lm.static.sizes import Rows
from realrun.lm.static.split import StaticSplitTarget
from realrun.lm.variants import with_layers
from specsim.io.arrays import Bools, Ints

BIAS, FIRST_NORM = "fuse.bias", "layers.0.input_layernorm.weight"  # layers for vLLM have no first norm


class Eagle(torch.nn.Module):
    """The trained modules: a fusing projection [2 d -> d] and a layer of the target's kind.

    vocabulary : int64 [n], the tokens that it drafts; None for all. A draft step then reads n rows of the target's head
    for_vllm : whether it is the layer that vLLM runs
    bias : whether the projection has a bias; by default only if not for_vllm
    """

    def __init__(
        self,
        target: Any,
        seed: int = 0,
        vocabulary: torch.Tensor | None = None,
        *,
        for_vllm: bool = False,
        bias: bool | None = None,
    ):
        super().__init__()
        self.config = copy.deepcopy(target.config)
        size = int(target.config.hidden_size)
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.fuse = torch.nn.Linear(2 * size, size, bias=not for_vllm if bias is None else bias).to(
                target.device, target.dtype
            )
        self.layers = one_layer_model(target, seed).model.layers
        if for_vllm:
            self.layers[0].input_layernorm = torch.nn.Identity()
        self.vocabulary, self.for_vllm = vocabulary, for_vllm

    def head(self, head: Any) -> Any:
        """Choose what it makes logits by: the target's head, or a part of it."""
        return partial_head(head, self.vocabulary)

    def fused(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Make the layer's input [..., d] of embeddings of tokens and the features before them, [..., d] each."""
        fused: torch.Tensor = self.fuse(torch.cat([embedded, features], dim=-1))
        return fused


class EagleLM(StateDrafterLM):
    """The drafter's pass over a target that is split above its last layer.

    features : [nodes, d], output in the rows of nodes; `feature` [d], output in the last row that is no node
    order : numbers of the nodes by slot
    """

    caches_pending_token = True  # its row is fused with a feature of the target
    eagle: Any  # or what EAGLE-3 has in its place
    feature: torch.Tensor

    def __init__(self, target: SplitTarget, eagle: Eagle):
        self.eagle, self.head = eagle, eagle.head(target.head)
        super().__init__(target, target.model, target.parts, eagle.layers)

    def reset(self) -> None:
        super().reset()
        self._forget_nodes()

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        self.features = self.target.states.new_empty(0, int(self.model.config.hidden_size))
        self.order = np.zeros(0, np.int64)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        start, end = self.length, self.length + len(tokens)
        if start > self.target.length:  # a token that it drafted itself
            assert len(tokens) == 1
            x = self.eagle.fused(self._embedded(tokens, [None]), self.feature[None])
        else:
            assert end <= self.target.length + 1
            self.state_rows, start = end, max(start, self.shift)
            if start == end:
                return self._no_logits()
            above = range(start - 1, end - 1)
            x = self.eagle.fused(self._embedded(tokens[start - end :], above), self._target_features(above))
            if len(x) > 1:  # only the last output is needed
                self.stack.fill(x[:-1], start - self.shift, slice(start, end - 1))
        x = self.stack.run(x[-1:], end - 1 - self.shift, slice(end - 1, end), None)
        self.feature = self.handed_on(x)[0]
        return self.finish(x)

    def _draft_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, roots: bool
    ) -> torch.Tensor:
        """Compute the rows level by level because a node's row is made of the output of its parent's row."""
        before, count = len(self.features), len(tokens)
        lineage = seen[:, self.length :].numpy()
        parent, level = parents_and_levels(lineage, before)
        states = [at - 1 if roots and node < 0 else None for at, node in zip(positions, parent.tolist(), strict=True)]
        embedded, at = self._embedded(tokens, states), torch.tensor(positions, device=self.device)
        out = torch.empty(count, embedded.shape[1], dtype=embedded.dtype, device=self.device)
        for depth in range(level.max() + 1):
            rows = np.flatnonzero(level == depth)
            self.order = np.concatenate([self.order, before + rows])
            cached = seen[rows, self.shift : self.length].numpy()
            slots = torch.from_numpy(np.hstack([cached, lineage[rows][:, self.order]]))
            known = torch.cat([self.features, self.handed_on(out)])
            above = known[torch.from_numpy(np.maximum(parent[rows], 0)).to(self.device)]
            none = torch.from_numpy(parent[rows] < 0).to(self.device)[:, None]
            if bool(none.any()):
                if roots:
                    first = self._target_features([positions[row] - 1 for row in rows.tolist()])
                else:
                    first = self.feature.expand(len(rows), -1)
                above = torch.where(none, first, above)
            end = self.length - self.shift + len(self.order)
            x = self.eagle.fused(embedded[torch.from_numpy(rows)], above)
            index = torch.from_numpy(rows)
            out[index] = self.stack.run(x, end - len(rows), at[index], self.parts.tree_mask(slots, end))
        self.features = torch.cat([self.features, self.handed_on(out)])
        return self.finish(out)

    def handed_on(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the states [n, d] that the next rows read from the layer's output [n, d]."""
        return x

    def _target_features(self, positions: Sequence[int]) -> torch.Tensor:
        """Look up the target's features [n, d] at these positions, ascending; zeros before the first token."""
        before = sum(position < 0 for position in positions)
        index = torch.tensor([*positions][before:], dtype=torch.long, device=self.device)
        return F.pad(self._features_of(self.target.states[index]), (0, 0, before, 0))

    def _embedded(self, tokens: Sequence[int], states: Sequence[int | None]) -> torch.Tensor:
        """Look up embeddings [n, d].

        states : for each row, the position of the target's state that it reads; None if it reads the drafter's own
        """
        return self.parts.embed(tokens)

    def _features_of(self, states: torch.Tensor) -> torch.Tensor:
        """Make features [n, d] of the target's states."""
        return self.target.parts.normed(states, self.target.norm)

    def finish(self, x: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """Compute logits of features [n, d] by the target's head; the norm is in the target's features only."""
        if self.keep_hidden:
            self.hidden = x
        return self.parts.logits(x, self.head)


class RowsOfStates(StateRows):
    """Mixed into both passes: the first token has no row, as no state is before it.

    While the first token is pending, it has a row with a hidden state of zeros, which is dropped when the round ends.
    """

    target: Any

    @property
    def shift(self) -> int:
        return int(self.target.length > 0)


class VllmEagleLM(RowsOfStates, EagleLM):
    """The pass of a drafter whose first token has no row."""


def parents_and_levels(lineage: np.ndarray[Any, Any], before: int) -> tuple[np.ndarray[Any, Any], ...]:
    """Find the parents of n nodes behind `before` others, -1 for none, and their levels among the n.

    lineage : bool [n, before + n], each node's ancestors and itself; ancestors come first
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


class StaticEagle(StaticStateDrafter):
    """`EagleLM` over static caches; features [capacity, d] are the layer's output, by slot.

    State rows and the row of the pending token are fused with the target's features. A row behind it is fused with the
    layer's output in the row before it in the text, whose slot is its source.

    norm_after : norm between the layer and the head
    """

    caches_pending_token = True
    norm_after: torch.Tensor | None = None

    def __init__(self, target: StaticSplitTarget, eagle: Eagle):
        super().__init__(target, with_layers(target.model, eagle.layers))
        self.head = eagle.head(self.head)
        self._keep_features(eagle.fused)

    def _keep_features(self, fuse: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.fuse = fuse
        self.features = self.keys.new_empty(self.capacity, self.embedding.shape[1])

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        before = self.capacity
        super().reserve(length)
        if self.capacity > before:
            self.features = F.pad(self.features, (0, 0, 0, self.capacity - before))

    def _state_input(self, rows: Rows) -> torch.Tensor:
        above = rows.slots - 1
        features = self._ops.norm(self.target.states[above.clamp(min=0)], self.norm_out, self.eps)
        return self.fuse(self._embedded(rows), torch.where((above >= 0)[:, None], features, 0))

    def _open(self, tokens: Sequence[int]) -> tuple[Sequence[int], int, StatePass]:
        start, end = self.length, self.length + len(tokens)
        if start > self.target.length:  # a token that it drafted itself
            assert len(tokens) == 1
            return tokens, start - self.shift, StatePass(0, of_state=False)
        assert end <= self.target.length + 1
        self.state_rows, start = end, max(start, self.shift)
        if start == end:
            return (), 0, StatePass(0, of_state=False)
        filled = self._prepare_state_rows(tokens[start - end : -1], start - self.shift)
        return tokens[-1:], end - 1 - self.shift, StatePass(filled, of_state=True)

    def _variants(self, n: int) -> Sequence[Hashable]:
        of_states = (StatePass(rows, of_state=True) for rows in (0, *STATE_ROWS))
        return (StatePass(0, of_state=False), *(of_states if n == 1 else ()))

    def _sources(self, visible: Bools) -> Ints:
        """Find the slots of the nodes' parents, less the first slot of the pass."""
        n, nodes = visible.shape
        assert not visible[:, nodes - n :][~np.eye(n, dtype=np.bool_)].any(), "nodes of a level come in the same pass"
        above = visible[:, : nodes - n]
        last = above.shape[1] - 1 - above[:, ::-1].argmax(axis=1) if above.shape[1] else np.zeros(n, np.int64)
        return np.where(above.any(axis=1), last, -1) - (nodes - n)

    def _input(self, rows: Rows, variant: Hashable) -> torch.Tensor:
        assert isinstance(variant, StatePass)
        if variant.rows:
            self._fill_state_rows(variant)
        if variant.of_state:
            return self._state_input(rows)
        return self.fuse(self._embedded(rows), self.features[rows.sources])

    def _embedded(self, rows: Rows) -> torch.Tensor:
        return super()._input(rows, None)

    def _through(self, rows: Rows, variant: Hashable) -> tuple[torch.Tensor, torch.Tensor]:
        features, hidden = self.stack.run(self._input(rows, variant), rows, self.norm_after)
        self.features[rows.slots] = features
        return self._of_states(hidden, rows), hidden


class StaticRowsOfStates(RowsOfStates, StaticEagle):
    """`StaticEagle` without a row of the first token."""

    def _open(self, tokens: Sequence[int]) -> tuple[Sequence[int], int, StatePass]:
        fed, slot, variant = super()._open(tokens)
        return fed, slot, variant._replace(first=self.target.length == 0)

    def _variants(self, n: int) -> Sequence[Hashable]:
        firsts = (StatePass(0, of_state, first=True) for of_state in (False, True))
        return (*super()._variants(n), *(firsts if n == 1 else ()))

    def _input(self, rows: Rows, variant: Hashable) -> torch.Tensor:
        assert isinstance(variant, StatePass)
        if variant.first and variant.of_state:
            embedded = self._embedded(rows)
            return self.fuse(embedded, torch.zeros_like(embedded))
        return super()._input(rows, variant)

    def _nodes_step(
        self, tokens: Sequence[int], first: int, offsets: npt.ArrayLike, visible: Bools, sources: npt.ArrayLike,
        variant: Hashable,
    ) -> torch.Tensor:  # fmt: skip
        return super()._nodes_step(tokens, first - self.shift, offsets, visible, sources, variant)

    def _places(self, rows: Rows, variant: Hashable) -> torch.Tensor:
        assert isinstance(variant, StatePass)
        return rows.positions if variant.first else rows.positions + 1


class StaticVllmEagle(StaticRowsOfStates):
    """`VllmEagleLM` over static caches."""

    def _state_input(self, rows: Rows) -> torch.Tensor:
        features = self._ops.norm(self.target.states[rows.slots], self.norm_out, self.eps)
        return self.fuse(self._embedded(rows), features)


@dataclass(frozen=True, eq=False)
class EagleKind(InsideTargetKind):
    """Its file holds the state of `Eagle`, and its vocabulary, int32 [n], if it does not draft all tokens."""

    eagle: Any  # Eagle, or what EAGLE-3 has in its place

    name: ClassVar[str] = "eagle"
    paper_policy: ClassVar[str | None] = "eagle2"

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        for_vllm = FIRST_NORM not in tensors
        bias = not for_vllm or BIAS in tensors  # the authors' layers may have none
        eagle = Eagle(target, vocabulary=draft_tokens(tensors), for_vllm=for_vllm, bias=bias)
        eagle.load_state_dict({name: tensor for name, tensor in tensors.items() if name != DRAFT_TOKENS})
        return target, cls(eagle.eval())

    @property
    def facts(self) -> DrafterFacts:
        return draft_vocabulary(self.eagle.vocabulary)

    @property
    def passes(self) -> tuple[Any, Any]:
        """Name the eager and the static pass of the drafter."""
        return (VllmEagleLM, StaticVllmEagle) if self.eagle.for_vllm else (EagleLM, StaticEagle)

    def splits(self, target: Any) -> Sequence[int]:
        """List the numbers of layers after which the drafter reads the target's states."""
        return (int(target.config.num_hidden_layers),)

    def make_passes(self, target: Any) -> tuple[SplitTarget, CachedLM]:
        split = SplitTarget(target, *self.splits(target))
        return split, self.passes[0](split, self.eagle)

    def make_static_passes(self, target: Any) -> tuple[StaticLlama, StaticLlama]:
        static = StaticSplitTarget(target, *self.splits(target))
        return static, self.passes[1](static, self.eagle)

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (self.eagle,)
