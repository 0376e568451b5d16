"""Chain rejection in CUDA C++: csrc/rejection.cu."""

from __future__ import annotations

import torch

from speckernels.ops.chain_rejection import empty_results
from speckernels.runtime.launch import call, counters

TOKENS_PER_BLOCK = 4096  # at least, where a row is split
BLOCKS = 256  # about as many fill a GPU


def chain_rejection(
    draft_tokens: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    results = empty_results(draft_tokens)
    batch, drafts = draft_tokens.shape
    vocabulary = target_probs.shape[-1]
    splits = max(1, min(-(-vocabulary // TOKENS_PER_BLOCK), BLOCKS // max(1, batch)))
    partial = draft_tokens.new_empty(batch, splits) if splits > 1 else None
    arrived = counters(draft_tokens, batch) if splits > 1 else None
    sizes = (batch, drafts, vocabulary, splits)
    call(
        "rejection", "chain_rejection",
        draft_tokens, draft_probs, target_probs, uniforms, *sizes, partial, arrived, *results,
    )  # fmt: skip
    return tuple(results)
