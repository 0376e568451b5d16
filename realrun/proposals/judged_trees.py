"""The target's judgement of recorded trees: what typical acceptance (MEDUSA) needs to know of every node.

The output is read once. Behind it, the nodes that have children of several positions at a time share a pass, as a
round's nodes share one: each sees the output up to its position, and its ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from realrun.decode.draft import layout
from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from realrun.proposals.recorder import Columns

CHUNK_NODES = 256  # recorded nodes of the positions that share a pass


@torch.inference_mode()
def judged_columns(
    target: CachedLM, prompt: Sequence[int], output: Sequence[int], columns: Columns, sampler: Sampler
) -> Columns:
    """Compute the target's probability of every node given its parent, and its entropy in nats there, [T, M] each.

    target : holds nothing
    columns : of the trees of the T positions of the output, tree_parent and tree_token
    """
    parent, token = columns["tree_parent"], columns["tree_token"]
    prob, entropy_nats = np.zeros((2, *parent.shape), np.float32)
    after_text = target.forward([*prompt, *output[:-1]])[len(prompt) - 1 :]  # [T, V]
    step = max(CHUNK_NODES // parent.shape[1], 1)
    for begin in range(0, len(output), step):
        rows = slice(begin, min(begin + step, len(output)))
        logits, at = _after_parents(target, after_text[rows], parent[rows], token[rows], len(prompt) + begin)
        here = parent[rows] >= 0
        distributions = sampler.probs(logits).double()  # [n, V]
        nodes, parents = (torch.from_numpy(part[here]).to(logits.device) for part in (token[rows], at))
        prob[rows][here] = distributions[parents, nodes].cpu().numpy()
        entropy_nats[rows][here] = torch.special.entr(distributions).sum(-1)[parents].cpu().numpy()
    target.reset()
    return {"tree_target_prob": prob, "tree_target_entropy_nats": entropy_nats}


def _after_parents(
    target: CachedLM, roots: torch.Tensor, parent: np.ndarray, token: np.ndarray, visible: int
) -> tuple[torch.Tensor, np.ndarray]:
    """Compute the logits [n, V] after all nodes with children of P consecutive positions, after their roots [P, V].

    parent, token : [P, M]; visible : tokens before the first position

    Returns the logits, and the row of each node's parent among them [P, M].
    """
    positions, at = len(parent), np.zeros_like(parent)
    tokens: list[int] = []
    places: list[int] = []
    seen: list[torch.Tensor] = []
    for owner, (parents, drafted) in enumerate(zip(parent, token, strict=True)):
        parents = parents[parents >= 0]
        depths, ancestors = layout(parents - 1)
        inner = np.unique(parents[parents > 0])  # numbered from 1
        row = np.full(len(parents) + 1, owner)
        row[inner] = positions + len(tokens) + np.arange(len(inner))
        at[owner, : len(parents)] = row[parents]
        tokens.extend(drafted[inner - 1].tolist())
        places.extend((visible + owner + depths[inner] - 1).tolist())
        seen.append(torch.from_numpy(ancestors[np.ix_(inner, inner)]))
    if not tokens:
        return roots, at
    before = np.repeat(visible + np.arange(positions), [len(block) for block in seen])[:, None]
    text = torch.from_numpy(np.arange(target.length) < before)
    logits = target.append_rows(tokens, places, torch.cat([text, torch.block_diag(*seen)], dim=1))
    target.truncate(target.length)
    return torch.cat([roots, logits]), at
