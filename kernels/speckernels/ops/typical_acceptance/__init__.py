"""Typical acceptance: accept draft tokens that the target finds likely enough. Lossy."""

from __future__ import annotations

import math
import struct

import torch

from speckernels.ops.results import Verified, check_tensor, check_trees, empty_results
from speckernels.runtime.dispatch import register

LOGITS_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def typical_acceptance(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    logits: torch.Tensor,
    logsumexp: torch.Tensor,
    entropy_nats: torch.Tensor,
    choices: torch.Tensor,
    epsilon: float,
    delta: float,
) -> Verified:
    """Accept each node with p(token) > min(epsilon, delta exp(-entropy)) after its accepted parent.

    p and the entropy belong to the target's distribution after the parent. Of several deepest
    accepted nodes the one of lowest index ends the path. Padding, nodes whose token is outside
    the vocabulary, and nodes verified against a NaN are never accepted. The output does not follow the
    target's distribution: the rule is lossy. The paper always accepts the first token greedily;
    here that is the target's own token that ended the round before.

    Parameters
    ----------
    tokens : int64 [B, n], the token of each node; that of the root is not verified
    parents : int32 [B, n], the parent of each node, which precedes it. Node 0 is the root
        (the pending token) with parent -1; later nodes with parent -1 are padding
    logits : float16, bfloat16, float32 or float64 [B, n, V], the target's after each node, divided
        by the temperature if there is one; any strides, read at the nodes' tokens only
    logsumexp, entropy_nats : float32 [B, n], of the same logits
    choices : int64 [B, n], the target's own token after each node, emitted last
    epsilon, delta : the thresholds, at least 0

    Returns
    -------
    Verified
        The accepted path of each tree.

    Raises
    ------
    ValueError
        For other types, shapes or thresholds, or more than 1024 nodes.

    References
    ----------
    Cai et al. 2024, arXiv:2401.10774 (MEDUSA), section 3.3.2.
    """
    check_trees(tokens, parents)
    check_tensor("logits", logits, LOGITS_TYPES, (*parents.shape, None), parents.device)
    check_tensor("logsumexp", logsumexp, (torch.float32,), parents.shape, parents.device)
    check_tensor("entropy_nats", entropy_nats, (torch.float32,), parents.shape, parents.device)
    check_tensor("choices", choices, (torch.int64,), parents.shape, parents.device)
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; give a finite threshold of at least 0")
    rows = (logsumexp.contiguous(), entropy_nats.contiguous(), choices.contiguous())
    args = (tokens.contiguous(), parents.contiguous(), logits, *rows, float(epsilon), float(delta))
    return Verified(*torch.ops.speckernels.typical_acceptance(*args))


def log_threshold(value: float) -> float:
    """Logarithm of a threshold, -inf for 0; rounded to float32, the type of Triton's arguments."""
    rounded: float = struct.unpack("f", struct.pack("f", math.log(value) if value > 0 else -math.inf))[0]
    return rounded


register(
    "typical_acceptance",
    "(Tensor tokens, Tensor parents, Tensor logits, Tensor logsumexp, Tensor entropy_nats, Tensor choices, "
    "float epsilon, float delta) -> (Tensor, Tensor, Tensor)",
    lambda tokens, parents, *rest: tuple(empty_results(parents)),
)
