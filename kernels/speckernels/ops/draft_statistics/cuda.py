"""Draft statistics in CUDA C++: csrc/draft_statistics.cu."""

from __future__ import annotations

import torch

from speckernels.ops.draft_statistics import MAX_TOP_K, empty_results, result_type, split, with_unit_stride
from speckernels.runtime.launch import block_slots, call, counters

_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}


def draft_statistics(
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    temperature: float,
    token_ids: torch.Tensor | None,
    top_k: int,
) -> tuple[torch.Tensor, ...]:
    results = empty_results(logits, top_k)
    rows, vocabulary = logits.shape
    if rows == 0:
        return tuple(results)
    logits = with_unit_stride(logits)
    noise = None if noise is None else with_unit_stride(noise)
    token_ids = None if token_ids is None else token_ids.contiguous()
    variant = (_TYPES[logits.dtype], int(noise is not None), int(top_k > 0))
    slots = block_slots(logits.device, "draft_statistics", "draft_statistics_occupancy", *variant)
    splits, chunk = split(rows, vocabulary, slots)
    numbers = rows * splits * (8 + (2 * MAX_TOP_K if top_k else 0))
    call(
        "draft_statistics", "draft_statistics",
        logits, _TYPES[logits.dtype], logits.stride(0), noise, 0 if noise is None else noise.stride(0),
        float(temperature), token_ids, top_k, rows, vocabulary, splits, chunk,
        logits.new_empty(numbers, dtype=result_type(logits)), counters(logits, rows), *results,
    )  # fmt: skip
    return tuple(results)
