"""Chain rejection in torch: what the other backends must equal."""

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

    # Subtract nothing where all were accepted, or where the draft cannot have drawn the token.
    row = torch.arange(batch, device=draft_tokens.device)
    subtract = torch.nn.functional.pad(drawable, (0, 1))[row, accepted]
    wanted = weights(target_probs[row, accepted])
    drafted = weights(torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))[row, accepted]) * subtract[:, None]
    last = draw((wanted - drafted).clamp(min=0), wanted, uniforms[:, drafts])

    place = torch.arange(drafts + 1, device=draft_tokens.device)
    emitted = torch.nn.functional.pad(draft_tokens, (0, 1))
    emitted = torch.where(place == accepted[:, None], last[:, None], emitted)
    return accepted.int(), torch.where(place <= accepted[:, None], emitted, -1)


def weights(probs: torch.Tensor) -> torch.Tensor:
    """Probabilities in whole units of 2^-40: sums of integers do not depend on their order."""
    return (torch.where(probs > 0, probs, 0).clamp(max=1).double() * SCALE).long()


def in_unit_interval(uniforms: torch.Tensor) -> torch.Tensor:
    """Uniforms in [0, 1), whatever was given."""
    return torch.where(uniforms > 0, uniforms, 0).clamp(max=BELOW_ONE)


def draw(remaining: torch.Tensor, fallback: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """A token [B] for weights [B, V], from the fallback where they are all 0, -1 where both are.

    It is the smallest i with cumulative weight above floor(u * total).
    """
    used = torch.where(remaining.sum(-1, keepdim=True) > 0, remaining, fallback)
    cumulative = used.cumsum(-1)
    total = cumulative[:, -1]
    drawn_at = (uniforms * total.double()).long()
    token = (cumulative <= drawn_at[:, None]).sum(-1)
    return torch.where(total > 0, token, -1)
