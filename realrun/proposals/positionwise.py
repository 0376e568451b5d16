"""What drafters propose at every position of an output at once whose tokens do not depend on one another.

MEDUSA's head i reads one state of the target, whatever the tokens between are; SPACE's masks are alike. So one
pass over the text gives all that is proposed at all positions, and a position's tree has the same siblings
below every node of a depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from realrun.decode.acceptance_predictor import Scorer
from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from realrun.proposals.chain import MAX_RANK, NO_RANK, STATISTICS, columns_of, described, true_ranks
from realrun.proposals.recorder import Columns
from realrun.proposals.rejection import rejection_columns
from realrun.proposals.trees import CHUNK_NODES, Trees, TreeSize, best_trees
from specsim.arrays import Array


class Positionwise(Protocol):
    """What a drafter proposes at T output positions, whatever was drafted before."""

    def states(self, step: int) -> torch.Tensor:
        """The states [T, d] behind the tokens at depth step + 1."""

    def logits(self, step: int, states: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] from n of these states."""


@torch.inference_mode()
def positionwise_columns(
    target: PreTrainedModel,
    proposed: Positionwise,
    prompt: Sequence[int],
    output: Sequence[int],
    depth: int,
    sampler: Sampler,
    sequence: int,
    scorer: Scorer | None = None,
    tree: TreeSize | None = None,
) -> Columns:
    """What such a drafter proposes at every position, a `Recorder` once target and proposals are given.

    Columns at (t, i) have the noise of output position t + i - 1. The ranks of the true token do not repeat along
    diagonals, as an independent model's do. In rejection mode the target verifies the drafts as well
    (`realrun.proposals.rejection`), and there are no trees.
    """
    total, vocabulary = len(output), int(target.config.vocab_size)
    statistics = torch.empty(total, depth, STATISTICS, dtype=torch.float64)
    scores = torch.zeros(total, depth, dtype=torch.float64)
    rank = np.empty((total, depth), dtype=np.int16)
    width = 0 if tree is None else min(tree.width, vocabulary)
    siblings = np.empty((total, depth, width), dtype=np.int64)
    probs = np.empty((total, depth, width), dtype=np.float32)
    for step in range(depth):
        hidden = proposed.states(step)
        logits = proposed.logits(step, hidden)
        rank[:, step] = ranks_at(logits, output, sampler, sequence, step)
        if sampler.mode == "rejection":
            continue
        statistics[:, step] = described(sampler, logits, sequence, step).cpu()
        if scorer is not None:
            scores[:, step] = scorer(hidden, step + 1).cpu()
        if tree is not None:
            tokens, their_probs = sampler.candidates(logits, sequence, range(step, step + total), width)
            siblings[:, step], probs[:, step] = tokens.cpu().numpy(), their_probs.cpu().numpy()
    if sampler.mode == "rejection":
        drafter = BesideTarget(target, proposed, len(prompt) - 1)
        verified = rejection_columns(drafter, CachedLM(target), prompt, output, depth, sampler, sequence, scorer)
        return verified | {"true_rank": rank}
    columns = columns_of(statistics.numpy(), np.zeros(total, np.int64), np.asarray(output), depth)
    columns["true_rank"] = rank
    if scorer is not None:
        columns["score"] = scores.numpy().astype(np.float32)
    if tree is not None:
        trees = level_trees(siblings, probs, tree.nodes)
        columns |= {f"tree_{name}": column for name, column in trees._asdict().items()}
    return columns


def ranks_at(logits: torch.Tensor, output: Sequence[int], sampler: Sampler, sequence: int, step: int) -> Array:
    """Rank int16 [T] of output[t + step] by row t of logits [T, V]; NO_RANK beyond the output."""
    ranks = np.full(len(output), NO_RANK, dtype=np.int16)
    inside = max(len(output) - step, 0)
    if inside:
        found = true_ranks(logits[:inside], output[step:], sampler, sequence, step)
        ranks[:inside] = np.minimum(found, MAX_RANK)
    return ranks


def level_trees(tokens: Array, probs: Array, nodes: int) -> Trees:
    """The trees of `nodes` nodes of T positions; below every node of depth i are the tokens, probs [T, i] of [W]."""
    parts = []
    step = max(CHUNK_NODES // nodes, 1)
    for begin in range(0, len(tokens), step):
        mine = tokens[begin : begin + step], probs[begin : begin + step]

        def expand(rows: Array, depth: Array, parent: Array, token: Array, mine: Any = mine) -> tuple[Array, Array]:
            return mine[0][rows, depth], mine[1][rows, depth]

        parts.append(best_trees(*mine, nodes, expand))
    return Trees(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class BesideTarget(CachedLM):
    """What is proposed, in place of a draft model that drafts a branch from every position, for `rejection_columns`.

    before : tokens that are fed before the first after which something is proposed
    """

    def __init__(self, target: PreTrainedModel, proposed: Positionwise, before: int):
        super().__init__(target)
        self.proposed, self.before = proposed, before

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        # The rows before are never read.
        return self._propose(0, F.pad(self.proposed.states(0), (0, 0, self.before, 0)))

    def run_model(self, **inputs: Any) -> torch.Tensor:
        """What is proposed at this step of the branches, whatever their tokens are."""
        step = (inputs["attention_mask"].shape[-1] - self.length) // inputs["input_ids"].shape[-1]
        return self._propose(step, self.proposed.states(step)[inputs["position_ids"][0] - step - self.before])

    def drop_rows(self, count: int) -> None:
        """There is no cache."""

    def _propose(self, step: int, states: torch.Tensor) -> torch.Tensor:
        self.hidden = states
        return self.proposed.logits(step, states)
