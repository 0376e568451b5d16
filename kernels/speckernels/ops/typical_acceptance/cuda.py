"""Typical acceptance in CUDA C++: csrc/typical_acceptance.cu."""

from __future__ import annotations

import torch

from speckernels.ops.results import empty_results
from speckernels.ops.typical_acceptance import LOGITS_TYPES, log_threshold
from speckernels.runtime.launch import call


def typical_acceptance(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    logits: torch.Tensor,
    logsumexp: torch.Tensor,
    entropy_nats: torch.Tensor,
    choices: torch.Tensor,
    epsilon: float,
    delta: float,
) -> tuple[torch.Tensor, ...]:
    results = empty_results(parents)
    call(
        "typical_acceptance",
        "typical_acceptance",
        *(tokens, parents, logits, LOGITS_TYPES.index(logits.dtype), logsumexp, entropy_nats, choices),
        *(*logits.shape, *logits.stride(), log_threshold(epsilon), log_threshold(delta)),
        *results,
    )
    return tuple(results)
