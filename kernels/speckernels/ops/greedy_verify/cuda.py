"""Greedy verification in CUDA C++: csrc/tree_verify.cu."""

from __future__ import annotations

import torch

from speckernels.ops.results import empty_results
from speckernels.runtime.launch import call


def greedy_verify(tokens: torch.Tensor, parents: torch.Tensor, choices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    results = empty_results(parents)
    call("tree_verify", "greedy_verify", tokens, parents, choices, *parents.shape, *results)
    return tuple(results)
