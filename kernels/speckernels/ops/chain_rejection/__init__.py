"""Chain rejection: accept drafted tokens in order so that the output follows the target's distribution."""

from __future__ import annotations

from typing import NamedTuple

import torch

from speckernels.ops.results import check_tensor, describe
from speckernels.runtime.dispatch import register

MAX_VOCABULARY = 2**22  # weights are at most 2^40, and their sum must fit 63 bits


class ChainVerified(NamedTuple):
    """The accepted part of each of B chains of k drafted tokens.

    Attributes
    ----------
    accepted : int32 [B], accepted draft tokens, 0 to k
    emitted : int64 [B, k + 1], the accepted tokens and then one drawn token, that is
        accepted + 1 tokens, then -1
    """

    accepted: torch.Tensor
    emitted: torch.Tensor


def chain_rejection(
    draft_tokens: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, uniforms: torch.Tensor
) -> ChainVerified:
    """Speculative sampling: emitted tokens follow the target's distribution, whatever the draft's.

    A token x is accepted if u * q(x) < p(x), where p is the target's and q the draft's
    distribution at its position. The last token is drawn from max(p - q, 0) if a token was
    rejected, from p if all were accepted. Probabilities are taken as whole multiples of
    2^-40, rounded down, and u * q in float64, so every backend gives the same tokens; this
    moves the distribution by about V * 2^-40 at most. Rows are not normalised here: the
    distribution departs from the target's by as much as the rows' sums depart from 1.

    NaN and negative probabilities count as 0, those above 1 as 1. A token that the draft cannot
    have drawn (of probability 0, below 0, or >= V) ends the chain as if it were not there: the
    last token is drawn from p. So it is where nothing is left of max(p - q, 0). If p is 0
    everywhere as well, the last token is -1.

    Parameters
    ----------
    draft_tokens : int64 [B, k], k >= 0
    draft_probs : float32 [B, k, V], the distribution each was drawn from; V up to 2^22
    target_probs : float32 [B, k + 1, V], the target's distribution at each place and after the last
    uniforms : float64 [B, k + 1] in [0, 1); [:, i] decides on token i, [:, k] draws the last token.
        Outside values count as the nearest inside, NaN as 0

    Returns
    -------
    ChainVerified
        The accepted tokens of each chain and the token drawn after them.

    Raises
    ------
    ValueError
        For other types or shapes.

    References
    ----------
    Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1; Chen et al. 2023, arXiv:2302.01318.
    Both write p for the target and q for the draft, as here.
    """
    if draft_tokens.dtype != torch.int64 or draft_tokens.dim() != 2:
        raise ValueError(f"draft_tokens is {describe(draft_tokens)}; give int64 [B, k]")
    batch, drafts = draft_tokens.shape
    check_tensor("target_probs", target_probs, (torch.float32,), (batch, drafts + 1, None), draft_tokens.device)
    vocabulary = check_vocabulary(target_probs)
    check_tensor("draft_probs", draft_probs, (torch.float32,), (batch, drafts, vocabulary), draft_tokens.device)
    check_tensor("uniforms", uniforms, (torch.float64,), (batch, drafts + 1), draft_tokens.device)
    args = (t.contiguous() for t in (draft_tokens, draft_probs, target_probs, uniforms))
    return ChainVerified(*torch.ops.speckernels.chain_rejection(*args))


def check_vocabulary(target_probs: torch.Tensor) -> int:
    """Size of the vocabulary; ValueError if sums could overflow."""
    vocabulary = target_probs.shape[-1]
    if not 1 <= vocabulary <= MAX_VOCABULARY:
        raise ValueError(f"target_probs is {describe(target_probs)}; give a vocabulary of 1 to {MAX_VOCABULARY} tokens")
    return vocabulary


def empty_results(draft_tokens: torch.Tensor) -> ChainVerified:
    """Uninitialised results of the right shapes and types."""
    batch, drafts = draft_tokens.shape
    return ChainVerified(
        draft_tokens.new_empty(batch, dtype=torch.int32),
        draft_tokens.new_empty(batch, drafts + 1),
    )


register(
    "chain_rejection",
    "(Tensor draft_tokens, Tensor draft_probs, Tensor target_probs, Tensor uniforms) -> (Tensor, Tensor)",
    lambda draft_tokens, draft_probs, target_probs, uniforms: tuple(empty_results(draft_tokens)),
)
