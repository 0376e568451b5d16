"""Typical acceptance in torch: the result that the other backends must match."""

from __future__ import annotations

import torch

from speckernels.ops.greedy_verify.reference import longest_path
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
