"""The longest path of a tree whose tokens are typical for the target."""

from __future__ import annotations

from typing import Any

import torch

from speckernels.bench.cases.base import Arguments, Case, Operation, Work, random_tree

EPSILON, DELTA = 0.09, 0.3  # MEDUSA's defaults: delta = sqrt(epsilon)


def _case(batch: int, nodes: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    shape = {"batch": batch, "nodes": nodes, "vocab": vocabulary}
    return Case("typical_acceptance", shape, dtype, compiled=nodes <= 16)


def _inputs(case: Case, generator: torch.Generator) -> Arguments:
    batch, nodes, vocabulary = (case.shape[name] for name in ("batch", "nodes", "vocab"))
    # A steep distribution over a few tokens, so that some are accepted.
    logits = torch.randn(batch, nodes, vocabulary, generator=generator, device=generator.device)
    logits[..., :8] += 12
    logits = logits.to(case.dtype)
    log_probs = logits.float().log_softmax(-1)
    logsumexp = logits.float().logsumexp(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    tokens = torch.randint(0, 8, (batch, nodes), generator=generator, device=generator.device)
    parents = random_tree(nodes, batch, generator)
    return tokens, parents, logits, logsumexp, entropy, logits.argmax(-1), EPSILON, DELTA


def _work(case: Case, args: Arguments, expected: Any) -> Work:
    """Per node: token 8, parent 4, one logit, its row's two sums 8, choice 8; written 12, and a count per tree."""
    batch, nodes = case.shape["batch"], case.shape["nodes"]
    return Work(bytes=batch * (nodes * (40 + case.dtype.itemsize) + 4), flops=4 * batch * nodes)


OPERATION = Operation(
    name="typical_acceptance",
    cases=tuple(_case(batch, nodes, 131_072) for nodes in (64, 8, 128) for batch in (1, 8)),
    small=(_case(1, 8, 100, torch.float32), _case(2, 40, 100, torch.float32)),
    inputs=_inputs,
    work=_work,
)
