"""Dense recording of drafters whose drafted tokens do not depend on each other (MEDUSA, SPACE, DFlash).

MEDUSA's head i reads a single state of the target, whatever the tokens between are, and so do SPACE's masks. A single
pass over the text therefore gives the proposals at all positions, and a position's tree has the same siblings below
every node of a depth. DSpark's logits depend also on the token before, which adds a bias (`Positionwise.bias`).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from realrun.lm.cached import CachedLM
from realrun.proposals.chain import AlongText, along_text, proposals_of, text_columns, tree_columns
from realrun.proposals.recorder import Columns, RecordRequest
from realrun.proposals.trees import CHUNK_NODES, Trees, best_trees, joined_trees
from specsim.io.arrays import Array


class Positionwise(Protocol):
    """Proposals at T output positions of a drafter that does not depend on earlier drafts.

    chained : whether `bias` is added to the logits, so that a token depends on the one before
    """

    chained: bool = False

    def states(self, step: int) -> torch.Tensor:
        """Compute the states [T, d] behind the tokens at depth step + 1."""

    def logits(self, step: int, states: torch.Tensor) -> torch.Tensor:
        """Compute logits [n, V] from n of these states."""

    def bias(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Compute the bias [n, V] of the logits of the tokens after `previous`, int64 [n], with these states."""
        raise AssertionError("chained is False")


@torch.inference_mode()
def positionwise_columns(target: PreTrainedModel, proposed: Positionwise, request: RecordRequest) -> Columns:
    """Record what such a drafter proposes at every position; a `Recorder` once target and proposals are given.

    Columns at (t, i) have the noise of output position t + i - 1. The ranks of the true token do not repeat along
    diagonals, as those of an independent model do. In rejection mode drafts are drawn together with the output
    (`realrun.proposals.chain`), and there are no trees.
    """
    output, sampler, depth = request.output, request.sampler, request.depth
    proposals = proposals_of(request, int(target.config.vocab_size), CachedLM(target))
    along = AlongText(np.zeros((len(output), depth), np.int64), np.zeros((len(output), depth)))
    chained = getattr(proposed, "chained", False)  # your own proposals may leave it out
    text = torch.tensor([request.prompt[-1], *output], device=target.device)
    drafted = text[: len(output)]
    for step in range(depth):
        hidden = proposed.states(step)
        logits = plain = proposed.logits(step, hidden)
        if step < len(output):
            if chained:
                count = len(output) - step
                logits = plain[:count] + proposed.bias(hidden[:count], text[step : step + count])
            ahead = along_text(logits[: len(output) - step], output[step:], sampler, request.sequence, step)
            along.rank[: len(ahead.rank), step], along.prob[: len(ahead.prob), step] = ahead
        logits = plain + proposed.bias(hidden, drafted) if chained else plain
        drafted = proposals.take(logits, hidden, 0, step)
    columns = proposals.columns() | text_columns(along, request)
    assert request.tree is None or not chained, "siblings depend on the token before them"
    if request.tree is None:
        return columns
    return columns | tree_columns(level_trees(proposals.siblings, proposals.sibling_probs, request.tree.nodes))


def level_trees(tokens: Array, probs: Array, nodes: int) -> Trees:
    """Find trees of `nodes` nodes at T positions; the children of every node of depth i are tokens, probs [T, i]."""
    parts = []
    step = max(CHUNK_NODES // nodes, 1)
    for begin in range(0, len(tokens), step):
        chunk = tokens[begin : begin + step], probs[begin : begin + step]

        def expand(rows: Array, depth: Array, parent: Array, token: Array, chunk: Any = chunk) -> tuple[Array, Array]:
            return chunk[0][rows, depth], chunk[1][rows, depth]

        parts.append(best_trees(*chunk, nodes, expand))
    return joined_trees(parts)
