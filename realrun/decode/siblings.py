"""Draws the children of a node at random, in rejection mode.

How they are drawn decides how they may be judged (`realrun.decode.tree_verify.reject_tree`). With a single child
each, "iid" draws the same tokens as a chain (`Sampler.draft`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from realrun.decode.draft import Siblings
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import draw, draw_each

UNUSED = 0.5  # the uniform in the place of a child that is not drawn


class Drawn(NamedTuple):
    """Children of n nodes.

    tokens : int64 [n, w], in the order drawn, -1 beyond a node's own width
    probs : [n, w], their probability in the draft's distribution; 0 beyond
    rows : [n, V], the distribution that each node's children were drawn from, for `Draft.probs`
    """

    tokens: torch.Tensor
    probs: torch.Tensor
    rows: torch.Tensor


def draw_siblings(
    logits: torch.Tensor, kind: Siblings, widths: Sequence[int], context: RoundContext, first_node: int
) -> Drawn:
    """Draft widths[i] children from row i of the drafter's logits [n, V], in this round.

    kind : "iid" draws each from the draft's distribution q, so that tokens may repeat;
        "without_replacement" draws each from what its earlier siblings left of q; where nothing is left, it gives
        a token that verification skips. "top_k" draws nothing: see `Sampler.candidates`
    first_node : number in the drafted tree of the first child of the first row; the others
        follow in level order. A child's uniform is keyed by its number, so every run repeats it.

    The columns are as many as the largest width, or V if that is less.
    """
    sampler, sequence, position, *_ = context
    columns = min(max(widths), logits.shape[1])
    beyond = torch.arange(columns) >= torch.tensor(widths)[:, None]
    beyond = beyond.to(logits.device)
    rows = sampler.probs(logits)
    first = [first_node + before for before in accumulate(widths, initial=0)]
    uniforms = [
        [sampler.uniform("draft", sequence, position, node + r) if r < width else UNUSED for r in range(columns)]
        for node, width in zip(first, widths, strict=False)
    ]
    tokens = draw_each(rows, uniforms) if kind == "iid" else _draw_without_replacement(rows, uniforms)
    probs = rows.gather(-1, tokens)
    return Drawn(tokens.masked_fill(beyond, -1), probs.masked_fill(beyond, 0.0), rows)


def _draw_without_replacement(rows: torch.Tensor, uniforms: Sequence[Sequence[float]]) -> torch.Tensor:
    """Draw tokens int64 [n, w], each from what those before it left of its row [n, V]."""
    tokens = []
    for column in zip(*uniforms, strict=True):
        tokens.append(draw(rows, column))
        rows = rows.scatter(-1, tokens[-1][:, None], 0.0)
    return torch.stack(tokens, dim=1)
