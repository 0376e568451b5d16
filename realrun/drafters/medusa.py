"""MEDUSA's drafter (Cai et al. 2024): K heads on the target's last state, each for a token further ahead.

    p_t^(k) = softmax(W_2^(k) (SiLU(W_1^(k) h_t) + h_t)),   k = 1 .. K

h_t is the state, after the final norm, that produced the pending token y_{t+1}; head k predicts
y_{t+k+1} from it, whatever the tokens between are. All heads run at once, at a round's first
draft step; the further ones cost next to nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from realrun.decode.acceptance_predictor import Predictor, Scorer, pending_token_states
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.kind import DrafterKind
from realrun.drafters.static.rows import RoundRows
from realrun.lm.cached import CachedLM, Describe
from realrun.lm.head import float32_product, gives_float32
from realrun.lm.open import make_lm
from realrun.lm.static.graphs import Results
from realrun.lm.static.llama import StaticLlama
from realrun.lm.variants.tuned_weights import ADAPTER, tuned_target
from realrun.proposals.positionwise import positionwise_columns
from realrun.proposals.recorder import Columns, Recorder
from realrun.proposals.trees import TreeSize
from specsim.errors import InputError


class MedusaHeads(torch.nn.Module):
    """K heads of one residual block each. residual [K, d, d], W_1; vocabulary [K, V, d], W_2.

    W_1 starts at zero and W_2 as the target's head, so that every head starts as the target's own
    prediction (the paper has the two the wrong way round; errata E1). No biases, as in the formula.
    """

    def __init__(self, target: Any, heads: int):
        super().__init__()
        if not 1 <= heads <= 16:
            raise InputError(f"{heads} MEDUSA heads; choose 1 to 16")
        head = target.get_output_embeddings().weight.detach()
        self.float32_logits = gives_float32(target)
        self.config = copy.deepcopy(target.config)
        self.residual = torch.nn.Parameter(head.new_zeros(heads, head.shape[1], head.shape[1]))
        self.vocabulary = torch.nn.Parameter(head.expand(heads, *head.shape).clone())

    def __len__(self) -> int:
        return len(self.residual)

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """SiLU(W_1 h) + h [K, n, d] of target states [n, d]."""
        return F.silu(torch.matmul(hidden, self.residual.transpose(1, 2))) + hidden

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [K, n, V] of target states [n, d]."""
        return self.all_logits(self.states(hidden))

    def all_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [K, n, V] of all heads' states [K, n, d]."""
        return self._product(states, self.vocabulary.transpose(1, 2))

    def state(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """`states` of one head, from 0: [n, d]."""
        return F.silu(hidden @ self.residual[head].T) + hidden

    def logits(self, head: int, states: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] of one head's states [n, d]."""
        return self._product(states, self.vocabulary[head].T)

    def _product(self, states: torch.Tensor, vocabulary: torch.Tensor) -> torch.Tensor:
        return (float32_product if self.float32_logits else torch.matmul)(states, vocabulary)


class MedusaLM(CachedLM):
    """The heads behind the interface of a model: the i-th pass of a round gives what head i says.

    source : [d], the target's state that produced the pending token; None before there is one
    """

    def __init__(self, target: CachedLM, heads: MedusaHeads):
        self.target, self.heads = target, heads
        self.source: torch.Tensor | None = None
        self.describes = target.describes
        super().__init__(target.model)
        if isinstance(target, StaticLlama):
            vocabulary, size = heads.vocabulary.shape[1:]
            self._said = RoundRows(self, target.recorded.graphs, len(heads), vocabulary, size)
            self._from = heads.residual.new_zeros(1, size)

    def take(self, source: torch.Tensor | None) -> None:
        """The target's state that produced the pending token."""
        self.source = source
        if self.describes:  # at the address that the heads were recorded with
            if source is None:
                self._from.zero_()
            else:
                self._from.copy_(source[None])

    def warm_description(self, sizes: Iterable[int], describe: Describe) -> None:
        for step in range(len(self.heads)):
            self._said.describe(step, 0, describe, None if step else self._say_all)

    def warm(self, sizes: Iterable[int], length: int = 0, tree_nodes: int = 0) -> None:
        super().warm(sizes, length, tree_nodes)
        if tree_nodes and self.describes:
            self._said.recorded.run("all heads", self._say_all)

    def forget_description(self, describe: Describe) -> None:
        self._said.recorded.forget(describe)

    def _describe(self, tokens: Sequence[int], describe: Describe, follows: bool) -> torch.Tensor:
        self._check_step()
        said = self._said.describe(self.step, self.target.length, describe, None if self.step else self._say_all)
        self.hidden = self._said.states[self.step : self.step + 1]
        self.step += 1
        return said

    def _say_all(self) -> Results:
        states = self.heads.states(self._from)  # [K, 1, d]
        self._said.states.copy_(states[:, 0])
        self._said.logits.copy_(self.heads.all_logits(states)[:, 0])
        return self._said.states, self._said.logits

    def _check_step(self) -> None:
        if self.step == len(self.heads):
            raise InputError(f"{self.step} MEDUSA heads draft at most {self.step} tokens; lower the policy's limit")

    def reset(self) -> None:
        self.length = self.nodes = self.step = 0
        self.hidden = None

    def prefill(self, tokens: Sequence[int]) -> None:
        """There is nothing to keep of them."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        self.length, self.nodes, self.step = self.target.length, 0, 0

    def keep_nodes(self, path: Sequence[int]) -> None:
        self.truncate(0)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        return self._logits(1)

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        return self._logits(len(tokens))

    def _logits(self, rows: int) -> torch.Tensor:
        """[rows, V] of the next head, the same in every row."""
        self._check_step()
        if self.step == 0 and self.describes:
            self._said.recorded.run("all heads", self._say_all)
            self._states, self._rows = self._said.states[:, None], self._said.logits
        elif self.step == 0:
            source = self.source
            if source is None:
                source = self.heads.residual.new_zeros(self.heads.residual.shape[1])
            self._states = self.heads.states(source[None])
            self._rows = self.heads.all_logits(self._states)[:, 0]
        if self.keep_hidden:
            self.hidden = self._states[self.step]
        self.step += 1
        return self._rows[self.step - 1].expand(rows, -1)

    def _check_trees(self) -> None:
        """Any model can have heads."""


class MedusaDrafter(DraftModel):
    """Drafts what the heads say; they need the target's state of every round."""

    def __init__(self, target: CachedLM, heads: MedusaHeads, eos_token_ids: Sequence[int], predictor: Predictor | None):
        super().__init__(MedusaLM(target, heads), eos_token_ids, predictor)
        self.wants_target_hidden = True
        self.max_depth = len(heads)

    def enable_scores(self, scoring: bool) -> None:
        self.scoring = self.lm.keep_hidden = scoring

    def take_hidden(self, target_hidden: torch.Tensor | None) -> None:
        super().take_hidden(target_hidden)
        self.lm.take(target_hidden)  # type: ignore[attr-defined]


class HeadProposals:
    """What the heads propose by states [T, d] of the target; a `realrun.proposals.positionwise.Positionwise`."""

    def __init__(self, heads: MedusaHeads, hidden: torch.Tensor):
        self.heads, self.hidden = heads, hidden

    def states(self, step: int) -> torch.Tensor:
        return self.heads.state(step, self.hidden)

    def logits(self, step: int, states: torch.Tensor) -> torch.Tensor:
        return self.heads.logits(step, states)


@torch.inference_mode()
def head_columns(
    target: Any,
    heads: MedusaHeads,
    prompt: Sequence[int],
    output: Sequence[int],
    depth: int,
    sampler: Sampler,
    sequence: int,
    scorer: Scorer | None = None,
    tree: TreeSize | None = None,
) -> Columns:
    """What the heads propose at every position, a `Recorder` once target and heads are given.

    Those at (t, i) are of head i at the state that produced the pending token of round t.
    """
    if depth > len(heads):
        raise InputError(f"{len(heads)} MEDUSA heads draft at most {len(heads)} tokens, not {depth}; lower the depth")
    proposed = HeadProposals(heads, pending_token_states(target, prompt, output))
    return positionwise_columns(target, proposed, prompt, output, depth, sampler, sequence, scorer, tree)


@dataclass(frozen=True, eq=False)
class MedusaKind(DrafterKind):
    """Heads on a target, which MEDUSA-2 has tuned.

    Its file holds the state of `MedusaHeads`, fact "heads" (K), and MEDUSA-2's low-rank updates of its target as
    `realrun.lm.variants.tuned_weights` reads them.
    """

    heads: MedusaHeads

    name: ClassVar[str] = "medusa"
    paper_policy: ClassVar[str | None] = "sparse_tree"

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        tuned = tuned_target(target, tensors, facts)
        if facts["heads"] != len(tensors["residual"]):  # said before so many heads are made
            raise ValueError(f"{facts['heads']} heads, tensors of {len(tensors['residual'])}")
        heads = MedusaHeads(tuned, facts["heads"])
        heads.load_state_dict({name: value for name, value in tensors.items() if not name.startswith(ADAPTER)})
        return tuned, cls(heads.eval())

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        lm = make_lm(target)
        return lm, MedusaDrafter(lm, self.heads, eos_token_ids, predictor)

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        return partial(head_columns, target, self.heads)

    @property
    def max_depth(self) -> int:
        return len(self.heads)

    @property
    def facts(self) -> dict[str, Any]:
        return {"heads": len(self.heads)}

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (self.heads,)
