"""Tree rejection in torch: the result that the other backends must match."""

from __future__ import annotations

import torch

from speckernels.ops.chain_rejection.reference import SCALE, draw, in_unit_interval, weights
from speckernels.ops.tree_rejection import SiblingKind


def tree_rejection(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    kind: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, nodes, vocabulary = target_probs.shape
    uniforms = in_unit_interval(uniforms)
    target_rows = weights(target_probs)
    draft_rows = target_rows if draft_probs is None else weights(draft_probs)
    row = torch.arange(batch, device=tokens.device)
    current = torch.zeros_like(row)
    accepted = torch.zeros_like(row)
    path = torch.full_like(parents, -1)
    path[:, 0] = 0
    target, draft = target_rows[:, 0], draft_rows[:, 0]  # remaining weights of both at the current node
    met = torch.zeros_like(target, dtype=torch.bool)  # tokens of its children so far

    for node in range(1, nodes):
        token = tokens[:, node]
        inside = (token >= 0) & (token < vocabulary)
        at = torch.where(inside, token, 0)[:, None]
        verified = inside & (parents[:, node] == current)
        if kind == SiblingKind.top_k:
            wanted, offered = target.double(), target.sum(-1, keepdim=True).double().expand_as(target)
            rest = target.scatter(1, at, 0)
        else:
            wanted, offered = shares(target), shares(draft)
            rest = (wanted - offered).clamp(min=0).long()
            verified &= draft.gather(1, at)[:, 0] > 0
        if kind != SiblingKind.iid:
            verified &= ~met.gather(1, at)[:, 0]
        accept = verified & (uniforms[:, node] * offered.gather(1, at)[:, 0] < wanted.gather(1, at)[:, 0])
        reject = (verified & ~accept)[:, None]

        target = torch.where(reject, rest, target)
        met = torch.where(reject, met.scatter(1, at, True), met)
        if kind == SiblingKind.without_replacement:
            draft = torch.where(reject, draft.scatter(1, at, 0), draft)
        step = accept[:, None]
        target = torch.where(step, target_rows[:, node], target)
        draft = torch.where(step, draft_rows[:, node], draft)
        met &= ~step
        current = torch.where(accept, node, current)
        accepted += accept
        path.scatter_(1, accepted[:, None], current[:, None].int())

    last = draw(target, target_rows[row, current], uniforms[:, nodes])
    place = torch.arange(nodes, device=tokens.device)
    emitted = tokens.gather(1, path.clamp(min=0).long()).roll(-1, 1)
    emitted = torch.where(place < accepted[:, None], emitted, -1)
    emitted.scatter_(1, accepted[:, None], last[:, None])
    return path, accepted.int(), emitted


def shares(remaining: torch.Tensor) -> torch.Tensor:
    """Weights [B, V] as shares of their sum, in units of 2^-40."""
    return remaining.double() * (SCALE / remaining.sum(-1, keepdim=True).clamp(min=1).double())
