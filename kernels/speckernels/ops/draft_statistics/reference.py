"""Draft statistics in torch: the result that the other backends must match."""

from __future__ import annotations

import math

import torch

from speckernels.ops.draft_statistics import result_type


def draft_statistics(
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    temperature: float,
    token_ids: torch.Tensor | None,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype, vocabulary = result_type(logits), logits.shape[1]
    # A tensor on the device: torch would multiply by the reciprocal of a number there.
    x = usable(logits.to(dtype) / torch.full((), temperature, dtype=dtype, device=logits.device))
    scores = x if noise is None else usable(x + noise)

    # Sums in float64, relative to the maximum.
    maximum = x.amax(-1, keepdim=True).double()
    empty = maximum == -math.inf
    shift = torch.where(empty, 0.0, maximum)
    distance = x.double() - shift
    weight = distance.exp()
    total = weight.sum(-1, keepdim=True)
    positive = torch.where(empty, 1.0, total)
    probs = weight / positive
    entropy = positive.log() - (torch.where(weight > 0, distance, 0.0) * probs).sum(-1, keepdim=True)

    token = first_of_largest(scores) if token_ids is None else token_ids[:, None]
    token = torch.where(empty, -1, token)
    inside = (token >= 0) & (token < vocabulary)
    prob = torch.where(inside, probs.gather(1, torch.where(inside, token, 0)), 0.0)
    values = torch.cat([token.double(), prob, probs.amax(-1, keepdim=True), entropy, total.log() + shift], 1)

    if top_k == 0:  # the sort would take most of the time
        return values.to(dtype), x.new_empty(len(x), 0, dtype=torch.int64), x.new_empty(len(x), 0)
    # The stable sort keeps the lower index first.
    count = min(top_k, vocabulary)
    order = x.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    finite = x.gather(1, order) > -math.inf
    pad = (0, top_k - count)
    top_ids = torch.nn.functional.pad(torch.where(finite, order, -1), pad, value=-1)
    top_probs = torch.nn.functional.pad(torch.where(finite, probs.gather(1, order), 0.0), pad)
    return values.to(dtype), top_ids, top_probs.to(dtype)


def usable(x: torch.Tensor) -> torch.Tensor:
    """Replace NaN by -inf, +inf by the largest finite number, -0 by 0."""
    return torch.where(x > -math.inf, x, -math.inf).clamp(max=torch.finfo(x.dtype).max) + 0.0


def first_of_largest(scores: torch.Tensor) -> torch.Tensor:
    """Lowest index of each row's maximum [n, 1], or -1 if all are -inf."""
    index = torch.arange(scores.shape[1], device=scores.device)
    largest = scores.amax(-1, keepdim=True)
    first = torch.where(scores == largest, index, scores.shape[1]).amin(-1, keepdim=True)
    return torch.where(largest > -math.inf, first, -1)
