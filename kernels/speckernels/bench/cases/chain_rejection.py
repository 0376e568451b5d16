"""Rejection sampling along a chain of draft tokens, with the residual at the first rejection."""

from __future__ import annotations

from typing import Any

import torch

from speckernels.bench.cases.base import Arguments, Case, Operation, Work


def _case(batch: int, drafted: int, vocabulary: int) -> Case:
    shape = {"batch": batch, "drafted": drafted, "vocab": vocabulary}
    return Case("chain_rejection", shape, torch.float32, compiled=drafted == 4)


def _inputs(case: Case, generator: torch.Generator) -> Arguments:
    batch, drafted, vocabulary = (case.shape[name] for name in ("batch", "drafted", "vocab"))
    target_logits = 3 * torch.randn(batch, drafted + 1, vocabulary, generator=generator, device=generator.device)
    # The draft is the target with an error, so that some tokens are accepted and some not.
    draft_logits = target_logits[:, :drafted] + 0.7 * torch.randn(
        batch, drafted, vocabulary, generator=generator, device=generator.device
    )
    draft_probs, target_probs = draft_logits.softmax(-1), target_logits.softmax(-1)
    tokens = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=generator).view(batch, drafted)
    uniforms = torch.rand(batch, drafted + 1, generator=generator, device=generator.device, dtype=torch.float64)
    return tokens, draft_probs, target_probs, uniforms


def _work(case: Case, args: Arguments, expected: Any) -> Work:
    """Reads the row of the last token, 4 V bytes of the target and, after a rejection, 4 V of the draft.

    Beside it 24 bytes a verified draft token (id, two probabilities, uniform), and the results.
    A residual takes 2 divisions, a subtraction and a sum per token, a plain row a sum.
    """
    batch, drafted, vocabulary = (case.shape[name] for name in ("batch", "drafted", "vocab"))
    accepted = expected[0].cpu()
    rejected = int((accepted < drafted).sum())
    verified = int(accepted.sum()) + rejected
    rows = batch + rejected
    written = batch * (8 * (drafted + 1) + 4)
    return Work(4 * vocabulary * rows + 24 * verified + 8 * batch + written, vocabulary * (batch + 3 * rejected))


OPERATION = Operation(
    name="chain_rejection",
    cases=tuple(
        _case(batch, drafted, vocabulary) for vocabulary in (131_072, 32_000) for drafted in (4, 8) for batch in (1, 8)
    ),
    small=(_case(1, 4, 200), _case(3, 5, 300)),
    inputs=_inputs,
    work=_work,
)
