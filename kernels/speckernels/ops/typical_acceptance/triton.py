"""Typical acceptance in Triton: one program per tree."""

from __future__ import annotations

import numpy as np
import torch

from speckernels.ops.results import empty_results
from speckernels.ops.typical_acceptance import log_threshold
from speckernels.runtime.triton_runtime import INTERPRETED, Variant, launch, tl, triton


@triton.jit
def _kernel(
    tokens, parents, logits, logsumexp, entropy_nats, choices, nodes, vocabulary,
    tree_stride, node_stride, token_stride, log_epsilon, log_delta, path, accepted, emitted,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    first = tree * nodes
    node = tl.arange(0, BLOCK)
    inside = node < nodes
    parent = tl.load(parents + first + node, mask=inside, other=-1)
    token = tl.load(tokens + first + node, mask=inside, other=-1)
    verified = (parent >= 0) & (parent < node) & (token >= 0) & (token < vocabulary)
    row = tl.where(verified, parent, 0).to(tl.int64)
    at = tree * tree_stride + row * node_stride + tl.where(verified, token, 0) * token_stride
    logit = tl.load(logits + at, mask=verified, other=0.0).to(tl.float64)
    log_prob = logit - tl.load(logsumexp + first + row, mask=verified, other=0.0).to(tl.float64)
    unsure = log_delta - tl.load(entropy_nats + first + row, mask=verified, other=0.0).to(tl.float64)
    # Above the smaller of both; written so that NaN anywhere rejects.
    enough = (log_prob > log_epsilon) | (log_prob > unsure)
    link = tl.where(verified & (unsure == unsure) & enough, parent, -1)

    # Depth of each node whose ancestors are all accepted; `link` is a node's parent if it is accepted once that is.
    ancestor = tl.where(inside, node, -1)
    depth = tl.zeros([BLOCK], tl.int32)
    while tl.max(ancestor) > 0:
        below = ancestor > 0
        depth += below.to(tl.int32)
        ancestor = tl.where(below, tl.gather(link, tl.maximum(ancestor, 0), 0), ancestor)
    # The deepest, and the lowest index among those.
    best = tl.max(tl.where(ancestor == 0, depth * BLOCK + (BLOCK - 1 - node), -1))
    length = best // BLOCK
    last = BLOCK - 1 - best % BLOCK

    tl.store(accepted + tree, length)
    tl.store(path + first + node, tl.full([BLOCK], -1, tl.int32), mask=inside & (node > length))
    tl.store(emitted + first + node, tl.full([BLOCK], -1, tl.int64), mask=inside & (node > length))
    tl.store(emitted + first + length, tl.load(choices + first + last))
    step = length
    current = last
    while step > 0:
        tl.store(path + first + step, current)
        tl.store(emitted + first + step - 1, tl.load(tokens + first + current))
        current = tl.load(parents + first + current)
        step -= 1
    tl.store(path + first, 0)


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
    if INTERPRETED and logits.dtype == torch.bfloat16:
        logits = logits.float()  # the interpreter misreads bfloat16
    trees, nodes, vocabulary = logits.shape
    with np.errstate(invalid="ignore"):  # the interpreter would warn of inf - inf, which is a NaN and rejects
        launch(
            _kernel, (trees,),
            tokens, parents, logits, logsumexp, entropy_nats, choices, nodes, vocabulary, *logits.stride(),
            log_threshold(epsilon), log_threshold(delta), *results, BLOCK=max(32, triton.next_power_of_2(nodes)),
        )  # fmt: skip
    return tuple(results)


def compiled_variants() -> list[Variant]:
    signature = {"tokens": "*i64", "parents": "*i32", "logsumexp": "*fp32", "entropy_nats": "*fp32", "choices": "*i64"}
    signature |= dict.fromkeys(("nodes", "vocabulary", "tree_stride", "node_stride", "token_stride"), "i32")
    signature |= dict.fromkeys(("log_epsilon", "log_delta"), "fp32")
    signature |= {"path": "*i32", "accepted": "*i32", "emitted": "*i64"}
    return [
        Variant(_kernel, signature | {"logits": f"*{logits}"}, {"BLOCK": 64})
        for logits in ("fp16", "bf16", "fp32", "fp64")
    ]
