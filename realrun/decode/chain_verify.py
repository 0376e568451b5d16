"""Verification by rejection sampling: the output follows the target's distribution, whatever the drafter's.

Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1; Chen et al. 2023 (arXiv:2302.01318),
Algorithm 2. Both write p for the target and q for the draft, as here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

import speckernels
from realrun.decode.draft import Draft
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler, draw, plain_calls


def rejection_verifier(logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
    """Emit the accepted tokens and a token of the target's own; a sample of p if nothing was drafted.

    logits : [k + 1, V], the target's after the pending token and each drafted token
    """
    sampler, sequence, position, *_ = context
    drafted = len(draft.tokens)
    uniforms = [sampler.uniform("judge", sequence, position, depth) for depth in range(1, drafted + 1)]
    uniforms.append(sampler.uniform("last", sequence, position, 0))
    verify = verify_chain if plain_calls(logits) else verify_by_kernel
    return verify(draft.tokens, draft.probs, sampler.probs(logits), uniforms)


def verify_chain(
    tokens: Sequence[int],
    draft_probs: Sequence[torch.Tensor],
    target_probs: torch.Tensor,
    uniforms: Sequence[float],
) -> list[int]:
    """Emit the accepted tokens of a chain of k and another token: speckernels.chain_rejection in plain calls.

    Token i is accepted if its uniform u < p/q (strictly: p = 0 is never accepted). The first rejected token is
    replaced by a draw from the normalised (p - q)+. If all are accepted, the last token is drawn from p.

    draft_probs : [k] of [V], what each token was drawn from; target_probs : [k + 1, V]
    uniforms : [k + 1], the last of them for the draw
    """
    for place, token in enumerate(tokens):
        target, drafter = target_probs[place], draft_probs[place]
        if not uniforms[place] * drafter[token].item() < target[token].item():
            residual = (target - drafter).clamp(min=0)
            # Distributions that differ by rounding alone may leave nothing.
            weights = residual if residual.any() else target
            return [*tokens[:place], int(draw(weights[None], uniforms[-1:]))]
    return [*tokens, int(draw(target_probs[-1:], uniforms[-1:]))]


def verify_by_kernel(
    tokens: Sequence[int],
    draft_probs: Sequence[torch.Tensor],
    target_probs: torch.Tensor,
    uniforms: Sequence[float],
) -> list[int]:
    """Do the same as `verify_chain` by speckernels.chain_rejection, in float32."""
    device = target_probs.device
    stacked = torch.stack([*draft_probs]) if draft_probs else target_probs[:0]
    verified = speckernels.chain_rejection(
        torch.tensor([[*tokens]], dtype=torch.int64, device=device),
        stacked[None].float(),
        target_probs[None].float(),
        torch.tensor([[*uniforms]], dtype=torch.float64, device=device),
    )
    # A single copy from the device; emitted tokens are followed by -1.
    return [token for token in verified.emitted[0].tolist() if token >= 0]


class Verifier(Protocol):
    """Judges a chain by the target's logits."""

    def __call__(self, logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
        """Emit the accepted tokens and a token of the target's own.

        logits : [k + 1, V], after the pending token and each drafted token
        """


def match_verifier(logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
    """Accept the leading tokens that equal the target's own choices; lossless in greedy and Gumbel mode."""
    chosen: list[int] = context.sampler.tokens(logits, context.sequence, context.position).tolist()
    drafted = draft.tokens
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == chosen[accepted]:
        accepted += 1
    return chosen[: accepted + 1]


def verifier_for(sampler: Sampler) -> Verifier:
    """Choose the lossless verifier of this sampler."""
    return rejection_verifier if sampler.mode == "rejection" else match_verifier
