"""Chain rejection in torch: the result that the other backends must match."""

from __future__ import annotations

import torch

SCALE = 2.0**40
BELOW_ONE = 1 - 2.0**-53


def chain_rejection(
    draft_tokens: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, drafts = draft_tokens.shape
    uniforms = in_unit_interval(uniforms)
    inside = (draft_tokens >= 0) & (draft_tokens < target_probs.shape[-1])
    at = torch.where(inside, draft_tokens, 0)[..., None]
    target = weights(target_probs[:, :drafts].gather(-1, at)[..., 0])
    draft = torch.where(inside, weights(draft_probs.gather(-1, at)[..., 0]), 0)
    drawable = draft > 0
    passes = drawable & (uniforms[:, :drafts] * draft.double() < target.double())
    accepted = passes.long().cumprod(-1).sum(-1)

    # Subtract nothing if all were accepted, or if the draft cannot have drawn the token.
    row = torch.arange(batch, device=draft_tokens.device)
    subtract = torch.nn.functional.pad(drawable, (0, 1))[row, accepted]
    target = weights(target_probs[row, accepted])
    drafted = weights(torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))[row, accepted]) * subtract[:, None]
    last = draw((target - drafted).clamp(min=0), target, uniforms[:, drafts])

    place = torch.arange(drafts + 1, device=draft_tokens.device)
    emitted = torch.nn.functional.pad(draft_tokens, (0, 1))
    emitted = torch.where(place == accepted[:, None], last[:, None], emitted)
    return accepted.int(), torch.where(place <= accepted[:, None], emitted, -1)


def weights(probs: torch.Tensor) -> torch.Tensor:
    """Probabilities as multiples of 2^-40: sums of integers do not depend on their order."""
    return (torch.where(probs > 0, probs, 0).clamp(max=1).double() * SCALE).long()


def in_unit_interval(uniforms: torch.Tensor) -> torch.Tensor:
    """Clamp uniforms to [0, 1); NaN gives 0."""
    return torch.where(uniforms > 0, uniforms, 0).clamp(max=BELOW_ONE)


def draw(remaining: torch.Tensor, fallback: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw a token [B] by weights [B, V]; by the fallback if they are all 0, -1 if both are.

    The token is the smallest i with cumulative weight above floor(u * total).
    """
    used = torch.where(remaining.sum(-1, keepdim=True) > 0, remaining, fallback)
    cumulative = used.cumsum(-1)
    total = cumulative[:, -1]
    drawn_at = (uniforms * total.double()).long()
    token = (cumulative <= drawn_at[:, None]).sum(-1)
    return torch.where(total > 0, token, -1)
