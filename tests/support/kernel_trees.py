"""What tests of several operations share: trees, backends to test, orders of emulated threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import speckernels
from speckernels.runtime import launch
from speckernels.runtime.triton_runtime import INTERPRETED

# Arguments that an operation takes, and changes of them with the message that each earns.
Refusals = tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]
BACKENDS = [
    pytest.param("triton", "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="Triton compiles here")),
    ("cuda", "cpu"),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
]
ON_GPU = pytest.mark.parametrize("backend", [pytest.param(name, marks=pytest.mark.gpu) for name in ("triton", "cuda")])
SHAPES = ("random", "chain", "star", "binary", "padded", "all padding", "hangs on padding")


def thread_orders(source: str, device: str) -> Iterator[int]:
    """Set several orders of emulated threads, in turn, where threads are emulated.

    Results must be the same in each: else there is a race.
    """
    if device != "cpu" or speckernels.backend_for(device) != "cuda":
        yield 0
        return
    for seed in (0, 1, 7):
        launch.set_host_order(source, seed)
        yield seed
    launch.set_host_order(source, 0)


def parents_of(shape: str, nodes: int, generator: torch.Generator) -> list[int]:
    """Parents of a tree of this kind."""
    if shape == "chain":
        return [node - 1 for node in range(nodes)]
    if shape == "star":
        return [min(node, 1) - 1 for node in range(nodes)]
    if shape == "binary":
        return [(node + 1) // 2 - 1 for node in range(nodes)]
    if shape == "all padding":
        return [-1] * nodes
    parents = [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, nodes)]
    if shape == "padded":
        # Padding in the middle as well as at the end; the rest hangs on nodes of the tree.
        for node in range(1, nodes):
            if node % 4 == 0 or node > 2 * nodes // 3:
                parents[node] = -1
            else:
                while parents[node] > 0 and parents[parents[node]] < 0:
                    parents[node] -= 1
    if shape == "hangs on padding" and nodes > 1:
        parents[1] = -1
    return parents


def forest(shapes: tuple[str, ...], nodes: int, seed: int) -> torch.Tensor:
    """Parents int32 [len(shapes), nodes]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([parents_of(shape, nodes, generator) for shape in shapes], dtype=torch.int32)


def path_to_root(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to this node, or to the padding that it hangs on."""
    path = [node]
    while path[0] > 0 and parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def mask_bits_of(parents: torch.Tensor) -> torch.Tensor:
    """Mask bits of trees [B, n], on their device: each node sees itself and its ancestors."""
    sees = torch.zeros(*parents.shape, parents.shape[1], dtype=torch.bool)
    for tree, links in enumerate(parents.tolist()):
        for node in range(len(links)):
            sees[tree, node, path_to_root(links, node)] = True
    return speckernels.pack_bits(sees).to(parents.device)


def assert_same(got: object, wanted: object, what: str) -> None:
    """Named tuples of tensors are equal to the last bit."""
    for name, a, b in zip(got._fields, got, wanted, strict=True):  # type: ignore[attr-defined, call-overload]
        assert a.dtype == b.dtype and a.shape == b.shape, (
            f"{what}: {name} is {a.dtype} {a.shape}, not {b.dtype} {b.shape}"
        )
        wrong = (a != b).nonzero()
        assert not len(wrong), f"{what}: {name} differs at {wrong[0].tolist()}: {a[*wrong[0]]}, not {b[*wrong[0]]}"
