"""SPACE's layout in CUDA C++: csrc/space_layout.cu."""

from __future__ import annotations

import torch

from speckernels.ops.space_layout import empty_results
from speckernels.runtime.launch import call


def space_layout(like: torch.Tensor, candidates: int) -> tuple[torch.Tensor, ...]:
    results = empty_results(like, candidates)
    call("space_layout", "space_layout", candidates, *results)
    return tuple(results)
