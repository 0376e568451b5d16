"""Tree rejection in CUDA C++: csrc/rejection.cu."""

from __future__ import annotations

import torch

from speckernels.ops.results import empty_results
from speckernels.ops.tree_rejection import SiblingKind
from speckernels.runtime.launch import call

SECTIONS = 32  # of a row of probabilities, each with its own sum, as in the source


def tree_rejection(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    kind: int,
) -> tuple[torch.Tensor, ...]:
    results = empty_results(parents)
    trees, nodes, vocabulary = target_probs.shape
    rest = None if kind == SiblingKind.top_k else tokens.new_empty(trees, vocabulary)
    row_sums = tokens.new_empty(trees, nodes, 2, SECTIONS)
    call(
        "rejection", "tree_rejection",
        tokens, parents, draft_probs, target_probs, uniforms, trees, nodes, vocabulary, kind, row_sums, rest, *results,
    )  # fmt: skip
    return tuple(results)
