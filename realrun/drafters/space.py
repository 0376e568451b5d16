"""SPACE's drafter (Yi et al. 2024, section 3): the target itself predicts the next k candidates at mask tokens.

A pass holds the pending token, the candidates c_1 .. c_m that it verifies, and behind each of these m + 1 tokens a
group of k mask tokens. Mask j of a group predicts the token j places after the token that its real token predicts
(errata C3). If a candidates are accepted, group a proposes the next candidates, so drafting takes no extra pass.
Candidates of a round are conditioned on all tokens but the pending token, and not on each other (C12).

The mask token is an additional row of the embedding and has no row in the head: it can be fed, never chosen (C11).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Self

import numpy as np
import torch

from realrun.decode.acceptance_predictor import Predictor
from realrun.decode.draft import layout
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.kind import DrafterFacts, DrafterKind
from realrun.drafters.parallel_rows import ParallelRowsLM
from realrun.lm.cached import CachedLM, refuse_recurrent_layers
from realrun.lm.choice import make_lm
from realrun.lm.layer_stack import capped, check_head
from realrun.lm.variants import tuned_target, without_head
from realrun.proposals.chain import CHUNK
from realrun.proposals.positionwise import Positionwise, positionwise_columns
from realrun.proposals.recorder import Columns, Recorder, RecordRequest
from specsim.io.arrays import Ints
from specsim.io.errors import InputError
from specsim.policy.tree.base import TreePolicy

MAX_MASKS = 16
CHAINS_ONLY = "SPACE drafts chains only; choose a policy that does not draft trees"


def with_mask(target: Any, mask: torch.Tensor) -> Any:
    """Copy a Hugging Face causal model and append the mask token's row [d] to its embedding.

    The head keeps its rows and the configuration its vocabulary. A head that was tied to the embedding becomes a
    separate head of the same values.
    """
    tuned = copy.deepcopy(target)
    embedding, head = tuned.get_input_embeddings(), tuned.get_output_embeddings()
    weight = embedding.weight.detach()
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(weight.clone(), requires_grad=embedding.weight.requires_grad)
    tuned.config.tie_word_embeddings = False
    rows = torch.cat([weight, mask.detach().to(weight)[None]])
    # The module stays because some scale what they look up (Gemma).
    embedding.weight = torch.nn.Parameter(rows, requires_grad=embedding.weight.requires_grad)
    embedding.num_embeddings = len(rows)
    return tuned


def mask_token(target: Any) -> int:
    """Give the mask token's number in a target from `with_mask`."""
    return int(target.get_input_embeddings().num_embeddings) - 1


@lru_cache(maxsize=256)
def pass_layout(tokens: int, masks: int) -> tuple[Ints, torch.Tensor]:
    """Lay out a pass of n = tokens (masks + 1) rows, real tokens first, then their groups: depths [n], mask [n, n].

    The parent of a group's first mask is its real token, that of every other mask the mask before it. Rows see their
    ancestors and themselves. This is the mask of Eqs. 6 and 7 as the text means it (errata C2, C6, C7), in another
    order of rows, so that accepted tokens need not be moved.
    """
    parents = [*range(-1, tokens - 1)]
    for group in range(tokens):
        first = len(parents)
        parents += [group, *range(first, first + masks - 1)]
    depths, visible = layout(np.array(parents[1:]) - 1)  # `layout` adds the pending token itself
    return depths, torch.from_numpy(visible)


class MaskedTarget(CachedLM):
    """The target's pass with a group of `masks` mask tokens behind every token that it is fed.

    most : number of masks that the target was trained with
    masks : mask tokens of a group: `most` until `warm` is told the draft length; 0 for the autoregressive baseline
    mask_logits : [groups, masks, V], of the groups of the last pass, which began behind `first` cached
        tokens; `mask_hidden` [groups, masks, d] where hidden states are kept
    group : the group that drafts next, behind the last token that was kept; None if there is none
    """

    def __init__(self, model: Any, most: int):
        self.inner, self.most, self.masks = make_lm(model), most, most
        self.mask_id = mask_token(model)
        super().__init__(model)

    def reset(self) -> None:
        self.inner.reset()
        self._forget()

    def warm(self, sizes: Iterable[int], length: int = 0, tree_nodes: int = 0) -> None:
        """Prepare passes; the largest of `sizes` (pending and verified tokens) sets the length of drafts and groups."""
        sizes = {*sizes}
        self.masks = min(max(sizes) - 1, self.most)
        passes = {size * (self.masks + 1) for size in sizes} | ({self.masks} if self.masks else set())
        self.inner.warm(passes, length + max(passes))
        self._forget()

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append tokens to the cache; logits [n, V] after each of them. Their masks' logits are kept."""
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
        """Append tokens without masks; `ask` feeds those behind the last token."""
        self.inner.keep_hidden = self.keep_hidden
        self.inner.prefill(tokens)
        self._forget()

    def ask(self) -> None:
        """Feed a group of masks behind the cached tokens, if any, for the next candidates."""
        assert self.masks, "this run has no masks"
        chain = torch.ones(self.masks, self.masks, dtype=torch.bool).tril()
        logits = self._run([self.mask_id] * self.masks, np.arange(self.masks), chain)
        self.inner.keep_nodes([])
        self._take(logits, self._kept_hidden(), self.length - 1)

    def proposals(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Look up the next candidates' logits [masks, V], and the states [masks, d] behind them if kept."""
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
        """Compute logits of these rows behind the cached tokens.

        Masks beyond the model's last position get that position: their candidates would exceed the room for the
        output, and nothing else sees them.
        """
        self.inner.keep_hidden = self.keep_hidden
        last = self.max_positions - 1 - self.length
        return self.inner.forward_nodes(tokens, np.minimum(depths, last).tolist(), visible)

    def _kept_hidden(self) -> torch.Tensor | None:
        """Give the states of the last pass, None unless they are kept: the buffer may hold those of an earlier pass."""
        return self.inner.hidden if self.keep_hidden else None

    def _take(self, logits: torch.Tensor, hidden: torch.Tensor | None, start: int) -> None:
        """Keep the masks' logits [groups * masks, V], and likewise hidden, of a pass behind `start` tokens."""
        self.mask_logits = logits.unflatten(0, (-1, self.masks))
        self.mask_hidden = None if hidden is None else hidden.unflatten(0, (-1, self.masks))
        self.first, self.length, self.group = start, self.inner.length, len(self.mask_logits) - 1

    def _forget(self) -> None:
        self.length, self.nodes, self.hidden = self.inner.length, 0, self.inner.hidden
        self.mask_logits = self.mask_hidden = self.group = None
        self.first = self.length


class SpaceLM(ParallelRowsLM):
    """The masks as a model; mask i gives row i."""

    predictors = "masks of SPACE"
    target: MaskedTarget

    def __init__(self, target: MaskedTarget):
        config: Any = target.model.config
        super().__init__(target, target.inner, target.most, int(config.vocab_size), int(config.hidden_size))

    def load(self) -> None:
        """Copy the mask tokens' logits into the static buffers that the CUDA graphs read."""
        if self.describes and self.target.group is not None:
            logits, hidden = self.target.proposals()
            self.logits[: len(logits)].copy_(logits)
            if hidden is not None:
                self.states[: len(hidden)].copy_(hidden)

    @property
    def rows(self) -> int:
        return len(self._round()[0])

    def _round(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.target.proposals()


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


class MaskProposals(Positionwise):
    """The masks' proposals from their states [T, D, d]."""

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor):
        self.head, self.hidden = head, hidden

    def states(self, step: int) -> torch.Tensor:
        return self.hidden[:, step]

    def logits(self, step: int, states: torch.Tensor) -> torch.Tensor:
        return self.head(states)


@torch.inference_mode()
def mask_columns(target: Any, masks: int, request: RecordRequest) -> Columns:
    """Record what the masks propose at every position; a `Recorder` once target and masks are given. No trees."""
    assert request.tree is None, "SPACE drafts chains"
    if request.depth > masks:
        raise InputError(f"{masks} masks of SPACE draft at most {masks} tokens, not {request.depth}; lower the depth")
    head = target.get_output_embeddings()
    states = mask_states(target, request.prompt, request.output, request.depth)
    proposed = MaskProposals(lambda hidden: capped(target.config, head(hidden)), states)
    return positionwise_columns(target, proposed, request)


def mask_states(target: Any, prompt: Sequence[int], output: Sequence[int], depth: int) -> torch.Tensor:
    """Compute states [T, D, d] of D masks behind prompt + output[:t - 1]; at t = 0 behind prompt[:-1].

    The candidates of a round at output position t come from masks behind the text without the pending token. A
    single pass feeds the text, and behind it every position has its group of masks, which sees that prefix and itself.
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
    (`realrun.lm.variants`); fact "masks" (k).
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
        if hasattr(without_head(target), "embed_tokens_per_layer"):
            raise InputError(
                f"{type(target).__name__} looks tokens up in an embedding for every layer, which has no row for mask "
                "tokens; choose another drafter, such as MEDUSA-1"
            )
        refuse_recurrent_layers(target, "which read the mask tokens of a pass as text")
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
    def facts(self) -> DrafterFacts:
        return {"masks": self.masks}
