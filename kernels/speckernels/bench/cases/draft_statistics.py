"""Token, probability, confidence, entropy and top-k of each row of logits, in one pass."""

from __future__ import annotations

from typing import Any

import torch

from speckernels.bench.cases.base import Arguments, Case, Mismatch, Operation, Work, equal, relative_error

TEMPERATURE = 0.7
VOCABULARIES = (131_072, 32_000, 151_936)
# Exponentials and sums in float32, in another order than the reference's.
PROBABILITY_ERROR = 1e-5
ENTROPY_ERROR = 1e-4
FLOPS_PER_LOGIT = 6  # divide, compare, subtract, exponential, and two sums


def _case(rows: int, vocabulary: int, dtype: torch.dtype, noise: int = 0, top_k: int = 0) -> Case:
    shape = {"rows": rows, "vocab": vocabulary, "noise": noise, "top_k": top_k}
    return Case(
        "draft_statistics", shape, dtype, compiled=vocabulary not in VOCABULARIES[1:] and not noise and not top_k
    )


def _inputs(case: Case, generator: torch.Generator) -> Arguments:
    rows, vocabulary = case.shape["rows"], case.shape["vocab"]
    logits = (torch.randn(rows, vocabulary, generator=generator, device=generator.device) * 3).to(case.dtype)
    uniforms = torch.rand(rows, vocabulary, generator=generator, device=generator.device).clamp(min=1e-7, max=1 - 1e-7)
    noise = -(-uniforms.log()).log() if case.shape["noise"] else None
    return logits, noise, TEMPERATURE, None, case.shape["top_k"]


def _public(
    logits: torch.Tensor, noise: torch.Tensor | None, temperature: float, token_ids: torch.Tensor | None, top_k: int
) -> Any:
    from speckernels.ops.draft_statistics import draft_statistics

    return draft_statistics(logits, noise=noise, temperature=temperature, token_ids=token_ids, top_k=top_k)


def _work(case: Case, args: Arguments, expected: Any) -> Work:
    """Reads n V logits, and n V noise of 4 bytes; writes 5 values of 4 bytes and k pairs of 12 bytes per row."""
    rows, vocabulary, top_k = case.shape["rows"], case.shape["vocab"], case.shape["top_k"]
    read = rows * vocabulary * (case.dtype.itemsize + 4 * case.shape["noise"])
    return Work(read + rows * (20 + 12 * top_k), FLOPS_PER_LOGIT * rows * vocabulary)


def _check(expected: Any, actual: Any, case: Case) -> None:
    values, top_ids, top_probs = expected
    got, got_ids, got_probs = actual
    equal((values[:, 0], top_ids), (got[:, 0], got_ids), case)
    for column, name in ((1, "prob"), (2, "confidence"), (4, "logsumexp")):
        relative_error(values[:, column], got[:, column], PROBABILITY_ERROR, name)
    relative_error(values[:, 3], got[:, 3], ENTROPY_ERROR, "entropy")
    if not got.isfinite().all():
        raise Mismatch("values are not finite")
    if case.shape["top_k"]:
        relative_error(top_probs, got_probs, PROBABILITY_ERROR, "top_probs")


_OPTIONS = ((0, 0), (1, 0), (0, 8), (1, 8))


def _is_headline(case: Case) -> bool:
    """One row to 256 over the largest vocabulary, and 64 with the candidates of a tree."""
    rows, top_k = case.shape["rows"], case.shape["top_k"]
    plain = case.shape["vocab"] == VOCABULARIES[0] and not case.shape["noise"]
    return plain and (rows in (1, 64, 256) if top_k == 0 else rows == 64)


OPERATION = Operation(
    name="draft_statistics",
    cases=tuple(
        _case(rows, vocabulary, dtype, noise, top_k)
        for vocabulary in VOCABULARIES
        for noise, top_k in _OPTIONS
        for dtype in (torch.float32, torch.bfloat16)
        for rows in (1, 8, 64, 256)
    ),
    small=(_case(2, 300, torch.float32), _case(1, 300, torch.float32, 1, 4)),
    inputs=_inputs,
    work=_work,
    check=_check,
    headline=_is_headline,
    public=_public,
)
