"""Tree metadata in CUDA C++: csrc/tree_metadata.cu."""

from __future__ import annotations

import torch

from speckernels.ops.tree_metadata import empty_results
from speckernels.runtime.launch import call


def tree_metadata(parents: torch.Tensor, context_lens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    results = empty_results(parents)
    call("tree_metadata", "tree_metadata", parents, context_lens, *parents.shape, *results)
    return tuple(results)
