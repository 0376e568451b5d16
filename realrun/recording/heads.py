"""What drafters propose at every position of an output at once whose tokens do not depend on one another: MEDUSA's.

Head i reads one state of the target, whatever the tokens between are. So one teacher-forced
pass of the target gives all that the heads say at all positions, and a position's tree has the
same siblings below every node of a depth. SPACE's masks are alike (`realrun.recording.masks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from realrun.decode.sampling import Sampler
from realrun.drafters.acceptance_predictor import Scorer, pending_token_states
from realrun.drafters.medusa import MedusaHeads
from realrun.lm.cached import CachedLM
from realrun.recording.chain import MAX_RANK, NO_RANK, STATISTICS, Columns, columns_of, true_ranks
from realrun.recording.rejection import rejection_columns
from realrun.recording.trees import CHUNK_NODES, Trees, TreeSize, best_trees
from specsim.arrays import Array
from specsim.errors import InputError


class Said(Protocol):
    """What a drafter says at T output positions, whatever was drafted before."""

    def states(self, step: int) -> torch.Tensor:
        """The states [T, d] behind the tokens at depth step + 1."""

    def logits(self, step: int, states: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] from n of these states."""


class HeadsSaid:
    """What MEDUSA's heads say of states [T, d] of the target."""

    def __init__(self, heads: MedusaHeads, hidden: torch.Tensor):
        self.heads, self.hidden = heads, hidden

    def states(self, step: int) -> torch.Tensor:
        return self.heads.state(step, self.hidden)

    def logits(self, step: int, states: torch.Tensor) -> torch.Tensor:
        return self.heads.logits(step, states)


@torch.inference_mode()
def heads_columns(
    target: PreTrainedModel,
    heads: MedusaHeads,
    prompt: Sequence[int],
    output: Sequence[int],
    depth: int,
    sampler: Sampler,
    sequence: int,
    scorer: Scorer | None = None,
    tree: TreeSize | None = None,
) -> Columns:
    """What the heads propose after prompt + output[:t], for every t at once: `said_columns`.

    Those at (t, i) are of head i at the state that produced the pending token of round t.
    """
    if depth > len(heads):
        raise InputError(f"{len(heads)} MEDUSA heads draft at most {len(heads)} tokens, not {depth}; lower the depth")
    said = HeadsSaid(heads, pending_token_states(target, prompt, output))
    return said_columns(target, said, prompt, output, depth, sampler, sequence, scorer, tree)


@torch.inference_mode()
def said_columns(
    target: PreTrainedModel,
    said: Said,
    prompt: Sequence[int],
    output: Sequence[int],
    depth: int,
    sampler: Sampler,
    sequence: int,
    scorer: Scorer | None = None,
    tree: TreeSize | None = None,
) -> Columns:
    """Columns as in `realrun.recording.chain.dense_columns`, [T] or [T, depth], of what is said at every position.

    Those at (t, i) have the noise of output position t + i - 1. The ranks of the true token do not
    repeat along diagonals, as an independent model's do. In rejection mode the target judges the
    drafts as well (`realrun.recording.rejection`), and there are no trees.
    """
    total, vocabulary = len(output), int(target.config.vocab_size)
    statistics = torch.empty(total, depth, STATISTICS, dtype=torch.float64)
    scores = torch.zeros(total, depth, dtype=torch.float64)
    rank = np.empty((total, depth), dtype=np.int16)
    width = 0 if tree is None else min(tree.width, vocabulary)
    siblings = np.empty((total, depth, width), dtype=np.int64)
    probs = np.empty((total, depth, width), dtype=np.float32)
    for step in range(depth):
        hidden = said.states(step)
        logits = said.logits(step, hidden)
        rank[:, step] = ranks_at(logits, output, sampler, sequence, step)
        if sampler.mode == "rejection":
            continue
        statistics[:, step] = sampler.statistics(logits, sequence, step).cpu()
        if scorer is not None:
            scores[:, step] = scorer(hidden, step + 1).cpu()
        if tree is not None:
            tokens, their_probs = sampler.candidates(logits, sequence, range(step, step + total), width)
            siblings[:, step], probs[:, step] = tokens.cpu().numpy(), their_probs.cpu().numpy()
    if sampler.mode == "rejection":
        drafter = BesideTarget(target, said, len(prompt) - 1)
        judged = rejection_columns(drafter, CachedLM(target), prompt, output, depth, sampler, sequence, scorer)
        return judged | {"true_rank": rank}
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
    """What is said, in the place of a draft model that drafts a branch from every position, for `rejection_columns`.

    before : tokens that are fed before the first at which something is said
    """

    def __init__(self, target: PreTrainedModel, said: Said, before: int):
        super().__init__(target)
        self.said, self.before = said, before

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        # Nobody reads the rows before.
        return self._say(0, F.pad(self.said.states(0), (0, 0, self.before, 0)))

    def run_model(self, **inputs: Any) -> torch.Tensor:
        """What is said at this step of the branches, whatever their tokens are."""
        step = (inputs["attention_mask"].shape[-1] - self.length) // inputs["input_ids"].shape[-1]
        return self._say(step, self.said.states(step)[inputs["position_ids"][0] - step - self.before])

    def _say(self, step: int, states: torch.Tensor) -> torch.Tensor:
        self.hidden = states
        return self.said.logits(step, states)
