"""Typical acceptance in torch: the result that the other backends must match."""

from __future__ import annotations

import torch

from speckernels.ops.typical_acceptance import log_threshold


def typical_acceptance(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    logits: torch.Tensor,
    logsumexp: torch.Tensor,
    entropy_nats: torch.Tensor,
    choices: torch.Tensor,
    epsilon: float,
    delta: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    vocabulary = logits.shape[2]
    above = parents.clamp(0, parents.shape[1] - 1).long()
    tree = torch.arange(len(parents), device=parents.device)[:, None]
    logit = logits[tree, above, tokens.clamp(0, vocabulary - 1)].double()
    # In logarithms: differences of doubles only, so that every backend decides alike.
    log_prob = logit - logsumexp.gather(1, above).double()
    unsure = log_threshold(delta) - entropy_nats.gather(1, above).double()
    enough = unsure.clamp(max=log_threshold(epsilon))
    good = (tokens >= 0) & (tokens < vocabulary) & (log_prob > enough)  # false where either is NaN
    return longest_path(good, tokens, parents, choices)


def longest_path(
    good: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, choices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the deepest path of good nodes below the root, as the three tensors of Verified.

    good : bool [B, n], whether a node is accepted once its parent is
    """
    nodes = parents.shape[1]
    index = torch.arange(nodes, device=parents.device)
    good = good & (parents >= 0) & (parents < index)  # neither padding nor a tree out of order
    above = parents.clamp(0, nodes - 1).long()
    depth = torch.full_like(above, -1)  # -1: not accepted
    depth[:, 0] = 0
    for node in range(1, nodes):
        depth_above = depth.gather(1, above[:, node, None])[:, 0]
        depth[:, node] = torch.where(good[:, node] & (depth_above >= 0), depth_above + 1, -1)

    accepted = depth.amax(1, keepdim=True)
    last = torch.where(depth == accepted, index, nodes).amin(1, keepdim=True)
    path = torch.full_like(above, -1)
    current = last
    for _ in range(nodes):  # up to the root, and there until the loop ends
        path.scatter_(1, depth.gather(1, current), current)
        current = torch.where(current > 0, above.gather(1, current), 0)

    following = path.roll(-1, 1).clamp(min=0)
    emitted = torch.where(index < accepted, tokens.gather(1, following), -1)
    emitted = torch.where(index == accepted, choices.gather(1, last), emitted)
    return path.int(), accepted[:, 0].int(), emitted
