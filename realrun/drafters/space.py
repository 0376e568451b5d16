"""SPACE's drafter (Yi et al. 2024, section 3): the target itself, which mask tokens ask for the next k candidates.

A pass holds the pending token, the candidates c_1 .. c_m that it verifies, and behind each of these m + 1
tokens a group of k mask tokens. Mask j of a group predicts the token j places after the one that its
real token predicts (errata C3). If a candidates are accepted, group a proposes the next ones, so drafting
costs no pass of its own. Candidates of a round are conditioned on all tokens but the pending one, and
not on each other (C12).

The mask token is one row more of the embedding and has no place in the head: it can be fed, never chosen (C11).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Self

import numpy as np
import torch

from realrun.decode.acceptance_predictor import Predictor, Scorer
from realrun.decode.draft import layout
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.kind import DrafterKind
from realrun.drafters.static.rows import RoundRows
from realrun.lm.cached import CachedLM, Describe
from realrun.lm.layer_stack import capped, check_head
from realrun.lm.open import make_lm
from realrun.lm.static.llama import StaticLlama
from realrun.lm.variants.tuned_weights import tuned_target
from realrun.proposals.chain import CHUNK
from realrun.proposals.positionwise import positionwise_columns
from realrun.proposals.recorder import Columns, Recorder
from realrun.proposals.trees import TreeSize
from specsim.arrays import Ints
from specsim.errors import InputError
from specsim.policy.tree.base import TreePolicy

MAX_MASKS = 16
CHAINS_ONLY = "SPACE drafts chains only; choose a policy that does not draft trees"


def with_mask(target: Any, mask: torch.Tensor) -> Any:
    """A copy of a Hugging Face causal model whose embedding has this row [d] more, the mask token's, as its last.

    The head keeps its rows and the configuration its vocabulary. A head that was tied to the
    embedding is one of its own from now on, of the same values.
    """
    tuned = copy.deepcopy(target)
    embedding, head = tuned.get_input_embeddings(), tuned.get_output_embeddings()
    weight = embedding.weight.detach()
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(weight.clone(), requires_grad=embedding.weight.requires_grad)
    tuned.config.tie_word_embeddings = False
    rows = torch.cat([weight, mask.detach().to(weight)[None]])
    # The module stays, as some scale what they look up (Gemma).
    embedding.weight = torch.nn.Parameter(rows, requires_grad=embedding.weight.requires_grad)
    embedding.num_embeddings = len(rows)
    return tuned


def mask_token(target: Any) -> int:
    """The mask token's number in a target that has one."""
    return int(target.get_input_embeddings().num_embeddings) - 1


@lru_cache(maxsize=256)
def pass_layout(tokens: int, masks: int) -> tuple[Ints, torch.Tensor]:
    """Depths [n] and attention mask, bool [n, n], of n = tokens (masks + 1) rows: real tokens first, then their groups.

    The parent of every mask is the one before it in its group, that of the first its real token; rows
    see their ancestors and themselves. That is the mask of Eqs. 6 and 7 as the text means it (errata C2, C6,
    C7), in another order of rows, in which accepted tokens lie in a row from the start.
    """
    parents = [*range(-1, tokens - 1)]
    for group in range(tokens):
        first = len(parents)
        parents += [group, *range(first, first + masks - 1)]
    depths, visible = layout(np.array(parents[1:]) - 1)  # `layout` adds the pending token itself
    return depths, torch.from_numpy(visible)


class MaskedTarget(CachedLM):
    """The target's pass with a group of `masks` mask tokens behind every token that it is fed.

    most : the masks that the target was trained with
    masks : as many until `warm` says how long drafts are; 0, as for the autoregressive baseline, feeds none
    mask_logits : [groups, masks, V], of the groups of the last pass, which began behind `first` cached
        tokens; `mask_hidden` [groups, masks, d] where hidden states are kept
    group : which of them drafts next, that behind the last token that was kept; None where there is none
    """

    def __init__(self, model: Any, most: int):
        self.inner, self.most, self.masks = make_lm(model), most, most
        self.mask_id = mask_token(model)
        super().__init__(model)

    def reset(self) -> None:
        self.inner.reset()
        self._forget()

    def warm(self, sizes: Iterable[int], length: int = 0, tree_nodes: int = 0) -> None:
        """sizes : of the pending token with what is verified; the largest says how long drafts, and so groups, are."""
        sizes = {*sizes}
        self.masks = min(max(sizes) - 1, self.most)
        passes = {size * (self.masks + 1) for size in sizes} | ({self.masks} if self.masks else set())
        self.inner.warm(passes, length + max(passes))
        self._forget()

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append tokens to the cache; logits [n, V] after each of them. What their masks say is kept."""
        if not self.masks:
            self.inner.keep_hidden = self.keep_hidden
            logits = self.inner.forward(tokens)
            self._forget()
            return logits
        start, n = self.length, len(tokens)
        logits = self._run([*tokens, *[self.mask_id] * (n * self.masks)], *pass_layout(n, self.masks))
        self.inner.keep_nodes(range(n))
        hidden = self._kept_hidden()
        self._take(logits[n:], None if hidden is None else hidden[n:], start)
        self.hidden = None if hidden is None else hidden[:n]
        return logits[:n]

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append tokens without masks; the drafter asks for those behind the last one."""
        self.inner.keep_hidden = self.keep_hidden
        self.inner.prefill(tokens)
        self._forget()

    def ask(self) -> None:
        """Let a group of masks behind the last cached token, or behind none, say the next candidates."""
        assert self.masks, "this run has no masks"
        chain = torch.ones(self.masks, self.masks, dtype=torch.bool).tril()
        logits = self._run([self.mask_id] * self.masks, np.arange(self.masks), chain)
        self.inner.keep_nodes([])
        self._take(logits, self._kept_hidden(), self.length - 1)

    def proposals(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [masks, V] of the next candidates, and the states [masks, d] behind them where those are kept."""
        assert self.mask_logits is not None and self.group is not None, "no masks were fed"
        return self.mask_logits[self.group], None if self.mask_hidden is None else self.mask_hidden[self.group]

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; the group behind the last of them drafts next."""
        self.inner.truncate(length)
        self.length = self.inner.length
        group = self.length - self.first - 1
        self.group = group if self.mask_logits is not None and 0 <= group < len(self.mask_logits) else None

    def forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        raise InputError(CHAINS_ONLY)

    def _run(self, tokens: Sequence[int], depths: Ints, visible: torch.Tensor) -> torch.Tensor:
        """Logits of these rows behind the cached tokens.

        Masks beyond the model's last position stand at it: what they say would exceed the room for the output, and
        nothing else sees them.
        """
        self.inner.keep_hidden = self.keep_hidden
        last = self.max_positions - 1 - self.length
        return self.inner.forward_nodes(tokens, np.minimum(depths, last).tolist(), visible)

    def _kept_hidden(self) -> torch.Tensor | None:
        """The states of the last pass; what lies there where none are kept is of an earlier one."""
        return self.inner.hidden if self.keep_hidden else None

    def _take(self, logits: torch.Tensor, hidden: torch.Tensor | None, start: int) -> None:
        """Keep what the masks of a pass behind `start` tokens gave: logits [groups * masks, V], hidden likewise."""
        self.mask_logits = logits.unflatten(0, (-1, self.masks))
        self.mask_hidden = None if hidden is None else hidden.unflatten(0, (-1, self.masks))
        self.first, self.length, self.group = start, self.inner.length, len(self.mask_logits) - 1

    def _forget(self) -> None:
        """After a pass without masks."""
        self.length, self.nodes, self.hidden = self.inner.length, 0, self.inner.hidden
        self.mask_logits = self.mask_hidden = self.group = None
        self.first = self.length


class SpaceLM(CachedLM):
    """The masks' logits behind the interface of a model: the i-th pass of a round gives those of mask i."""

    def __init__(self, target: MaskedTarget):
        self.target = target
        self.describes = target.inner.describes
        super().__init__(target.model)
        if isinstance(target.inner, StaticLlama):
            sizes = int(self.model.config.vocab_size), int(self.model.config.hidden_size)
            self._said = RoundRows(self, target.inner.recorded.graphs, target.most, *sizes)

    def load(self) -> None:
        """Bring what the masks said to the address that its description was recorded with."""
        if self.describes and self.target.group is not None:
            logits, hidden = self.target.proposals()
            self._said.logits[: len(logits)].copy_(logits)
            if hidden is not None:
                self._said.states[: len(hidden)].copy_(hidden)

    def warm_description(self, sizes: Iterable[int], describe: Describe) -> None:
        for step in range(self.target.most):
            self._said.describe(step, 0, describe)

    def forget_description(self, describe: Describe) -> None:
        self._said.recorded.forget(describe)

    def _describe(self, tokens: Sequence[int], describe: Describe, follows: bool) -> torch.Tensor:
        step = self._next_step(len(self.target.proposals()[0]))
        self.hidden = self._said.states[step : step + 1]
        return self._said.describe(step, self.target.length, describe)

    def _next_step(self, masks: int) -> int:
        if self.step == masks:
            raise InputError(f"{self.step} masks of SPACE draft at most {self.step} tokens; lower the policy's limit")
        self.step += 1
        return self.step - 1

    def reset(self) -> None:
        self.length = self.nodes = self.step = 0
        self.hidden = None

    def prefill(self, tokens: Sequence[int]) -> None:
        """The target has fed them."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        self.length, self.nodes, self.step = self.target.length, 0, 0

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        logits, hidden = self.target.proposals()
        step = self._next_step(len(logits))
        if self.keep_hidden:
            self.hidden = None if hidden is None else hidden[step : step + 1]
        return logits[step : step + 1]


class SpaceDrafter(DraftModel):
    """Drafts from the masks' logits of the target's last pass."""

    def __init__(
        self, target: MaskedTarget, masks: int, eos_token_ids: Sequence[int], predictor: Predictor | None = None
    ):
        super().__init__(SpaceLM(target), eos_token_ids, predictor)
        self.target, self.max_depth = target, masks

    def begin(self, context: Sequence[int], target_hidden: torch.Tensor | None = None) -> None:
        super().begin(context, target_hidden)
        if self.target.masks:  # none where the output has a single token
            self.target.ask()  # so that the first round has candidates as any other
            self.lm.load()  # type: ignore[attr-defined]

    def commit(self, length: int, target_hidden: torch.Tensor | None = None) -> None:
        super().commit(length, target_hidden)
        self.lm.load()  # type: ignore[attr-defined]

    def prepare_tree(self, policy: TreePolicy, length: int) -> None:
        raise InputError(CHAINS_ONLY)


class MaskProposals:
    """What the masks propose by their states [T, D, d]; a `realrun.proposals.positionwise.Positionwise`."""

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor):
        self.head, self.hidden = head, hidden

    def states(self, step: int) -> torch.Tensor:
        return self.hidden[:, step]

    def logits(self, step: int, states: torch.Tensor) -> torch.Tensor:
        return self.head(states)


@torch.inference_mode()
def mask_columns(
    target: Any,
    masks: int,
    prompt: Sequence[int],
    output: Sequence[int],
    depth: int,
    sampler: Sampler,
    sequence: int,
    scorer: Scorer | None = None,
    tree: TreeSize | None = None,
) -> Columns:
    """What the masks propose at every position, a `Recorder` once target and masks are given; no trees."""
    assert tree is None, "SPACE drafts chains"
    if depth > masks:
        raise InputError(f"{masks} masks of SPACE draft at most {masks} tokens, not {depth}; lower the depth")
    head, states = target.get_output_embeddings(), mask_states(target, prompt, output, depth)
    proposed = MaskProposals(lambda hidden: capped(target.config, head(hidden)), states)
    return positionwise_columns(target, proposed, prompt, output, depth, sampler, sequence, scorer)


def mask_states(target: Any, prompt: Sequence[int], output: Sequence[int], depth: int) -> torch.Tensor:
    """States [T, D, d] of D masks behind prompt + output[:t - 1], for t = 0 .. T - 1; at t = 0 behind prompt[:-1].

    A round at output position t drafts what the masks behind the text without the pending token proposed. So one
    pass feeds the text, and behind it every position has a group of masks of its own, which sees that prefix and
    itself.
    """
    lm, total, before = CachedLM(target), len(output), len(prompt) - 1
    lm.keep_hidden = True
    lm.prefill([*prompt, *output][: before + total - 1])
    own = torch.ones(depth, depth, dtype=torch.bool).tril()
    states = []
    for rows in torch.arange(total).split(max(CHUNK // depth, 1)):
        ends = (before + rows).repeat_interleave(depth)  # tokens before each group
        prefix = torch.arange(lm.length) < ends[:, None]
        seen = torch.cat([prefix, torch.block_diag(*[own] * len(rows)).bool()], dim=1)
        positions = ends + torch.arange(depth).repeat(len(rows))
        lm.append_rows([mask_token(target)] * len(positions), positions.tolist(), seen)
        assert lm.hidden is not None
        states.append(lm.hidden.unflatten(0, (len(rows), depth)))
        lm.truncate(lm.length)
    return torch.cat(states)


@dataclass(frozen=True, eq=False)
class SpaceKind(DrafterKind):
    """How many masks a target that has a mask token was trained with.

    Its file holds `mask` [d], the mask token's embedding, and what was tuned of the target
    (`realrun.lm.variants.tuned_weights`); fact "masks" (k).
    """

    masks: int

    name: ClassVar[str] = "space"
    paper_policy: ClassVar[str | None] = "space_k"
    trees: ClassVar[bool] = False
    mask_groups: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.masks <= MAX_MASKS:
            raise InputError(f"{self.masks} masks of SPACE; choose 1 to {MAX_MASKS}")

    @classmethod
    def check_target(cls, target: Any) -> None:
        check_head(target)

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        masked = with_mask(tuned_target(target, tensors, facts), tensors["mask"])
        return masked, cls(facts["masks"])

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        masked = MaskedTarget(target, self.masks)
        return masked, SpaceDrafter(masked, self.masks, eos_token_ids, predictor)

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        return partial(mask_columns, target, self.masks)

    @property
    def max_depth(self) -> int:
        return self.masks

    @property
    def facts(self) -> dict[str, Any]:
        return {"masks": self.masks}
