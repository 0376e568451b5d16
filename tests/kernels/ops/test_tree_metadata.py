"""Mask bits, positions and links of trees, against the reference and a walk in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speckernels
from speckernels.ops.tree_metadata import TreeMetadata, tree_metadata
from tests.support.kernel_trees import SHAPES, Refusals, assert_same, forest, path_to_root, thread_orders
from tests.support.mutants import Mutant

MUTANTS = [
    Mutant("csrc/tree_metadata.cu", "ancestor == 0 || above < 0", "above < 1", "the root is nobody's ancestor"),
    Mutant("csrc/tree_metadata.cu", "1u << (ancestor % 32)", "1u << (ancestor % 31)", "mask bit in the wrong place"),
    Mutant("csrc/tree_metadata.cu", "  __syncthreads();\n", "", "parents are read before they are shared"),
    Mutant("csrc/tree_metadata.cu", "if (parent >= 0 && parent_of", "if (parent_of", "padding nodes are siblings"),
    Mutant("ops/tree_metadata/triton.py", "while tl.max(ancestor) >= 0", "while tl.max(ancestor) > 0",
           "the root is left out of the longest paths"),
    Mutant("ops/tree_metadata/triton.py", "used & is_later", "used & (child < 0)",
           "last child, not first"),
    Mutant("ops/tree_metadata/triton.py", "[:, None] * words", "[:, None] * 1", "rows of masks overlap"),
]  # fmt: skip


def check(device: str) -> None:
    for nodes in (1, 5, 32, 33, 63, 123):
        parents = forest(SHAPES if nodes < 60 else ("random", "padded"), nodes, seed=nodes)
        context = torch.arange(len(parents), dtype=torch.int32) * 1000
        context[-1] = 2**31 - 1  # positions are 64 bits wide
        with speckernels.use_backend("reference"):
            expected = tree_metadata(parents, context)
        for order in thread_orders("tree_metadata", device):
            got = TreeMetadata(*(t.cpu() for t in tree_metadata(parents.to(device), context.to(device))))
            assert_same(got, expected, f"{nodes} nodes, threads in order {order}")


@pytest.mark.parametrize("backend", ["reference", "cuda"])
def test_largest_tree(backend: str) -> None:
    parents = forest(("chain", "random"), 1024, seed=3)
    with speckernels.use_backend(backend):
        data = tree_metadata(parents, torch.tensor([5, 0], dtype=torch.int32))
    assert data.positions[0].tolist() == list(range(5, 5 + 1024))
    assert (data.mask_bits[0, -1] == -1).all()
    assert_is_of(data, 1, parents[1].tolist(), 0)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(1, 70), st.integers(0, 2**20), st.integers(0, 1000))
def test_reference_is_a_walk_to_the_root(shape: str, nodes: int, context: int, seed: int) -> None:
    parents = forest((shape,), nodes, seed)
    data = tree_metadata(parents, torch.tensor([context], dtype=torch.int32))
    assert_is_of(data, 0, parents[0].tolist(), context)


def assert_is_of(data: TreeMetadata, tree: int, parents: list[int], context: int) -> None:
    """What metadata means, node by node."""
    nodes = len(parents)
    for node in range(nodes):
        words = data.mask_bits[tree, node].tolist()
        sees = [i for i in range(32 * len(words)) if words[i // 32] >> (i % 32) & 1]
        path = path_to_root(parents, node)
        assert sees == path
        assert data.positions[tree, node] == context + len(path) - 1
        is_padding = node > 0 and parents[node] < 0
        children = [i for i in range(1, nodes) if parents[i] == node and not is_padding]
        siblings = [i for i in range(node + 1, nodes) if parents[i] == parents[node] >= 0]
        assert data.first_child[tree, node] == (children or [-1])[0]
        assert data.next_sibling[tree, node] == (siblings or [-1])[0]


@pytest.mark.parametrize("backend", speckernels.BACKENDS)
def test_no_trees_give_nothing(backend: str) -> None:
    with speckernels.use_backend(backend):
        data = tree_metadata(torch.empty(0, 7, dtype=torch.int32), torch.empty(0, dtype=torch.int32))
    assert data.mask_bits.shape == (0, 7, 1)


def test_links_that_are_no_tree_do_not_hang() -> None:
    parents = torch.tensor([[-1, 2, 1, 3]], dtype=torch.int32)
    with speckernels.use_backend("cuda"):
        tree_metadata(parents, torch.zeros(1, dtype=torch.int32))


def samples() -> list[tuple[Any, ...]]:
    parents = forest(SHAPES, 33, seed=0)
    context = torch.zeros(len(parents), dtype=torch.int32)
    return [(parents, context)]


def refusals() -> Refusals:
    def parents(nodes: int, dtype: torch.dtype = torch.int32, batch: int = 2) -> dict[str, Any]:
        return {"parents": torch.zeros(batch, nodes, dtype=dtype)}

    return {"context_lens": torch.zeros(2, dtype=torch.int32)}, [
        (r"parents is torch.int64 \[2, 3\]; give int32 \[B, n\] with 1 to 1024 nodes", parents(3, torch.int64)),
        (r"\[2, 1025\]; give", parents(1025)),
        (r"context_lens is torch.int32 \[2\]; give int32 \[3\]", parents(3, batch=3)),
    ]
