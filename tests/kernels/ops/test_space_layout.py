"""SPACE's layout, against the paper's equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import speckernels
from speckernels.ops.space_layout import SpaceLayout, space_layout
from speckernels.ops.tree_metadata import tree_metadata
from tests.support.kernel_trees import Refusals, assert_same, thread_orders
from tests.support.mutants import Mutant

MUTANTS = [
    Mutant("csrc/space_layout.cu", "node > candidates", "node > candidates + 1", "the first mask is a candidate"),
    Mutant("csrc/space_layout.cu", "place % candidates == 0", "place % (candidates + 1) == 0", "groups a mask longer"),
    Mutant("csrc/space_layout.cu", "? its_group : node - 1", "? 0 : node - 1", "all groups below the pending token"),
    Mutant("ops/space_layout/triton.py", "tl.where(mask, place // per_group, -1)", "place // per_group",
           "candidates in a group"),
    Mutant("ops/space_layout/triton.py", "candidates * (candidates + 2)", "candidates * (candidates + 1)",
           "the last group is missing"),
]  # fmt: skip


def check(device: str) -> None:
    for candidates in (0, 1, 2, 3, 5, 10, 11, 31):
        with speckernels.use_backend("reference"):
            expected = space_layout(candidates, "cpu")
        for order in thread_orders("space_layout", device):
            got = SpaceLayout(*(t.cpu() for t in space_layout(candidates, device)))
            assert_same(got, expected, f"{candidates} candidates, threads in order {order}")


def paper_tokens(context: int, k: int) -> tuple[list[int | None], list[int]]:
    """Eq. 5, 1-based: the group of each mask token, None for others; and each token's node, -1 for the context.

    The paper's l real tokens are the context and the pending token.
    """
    group: list[int | None] = [None] * (context + 1)
    node = [-1] * context + [0]
    for g in range(k + 1):
        if g:
            group.append(None)
            node.append(g)
        group += [g] * k
        node += range(1 + k + g * k, 1 + k + (g + 1) * k)
    return group, node


def paper_mask(group: list[int | None], k: int, *, literal: bool) -> torch.Tensor:
    """Eq. 6 [i, j]. Literally, i - j < k joins mask tokens; the text says those of the same group."""
    length = len(group)
    mask = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(i + 1):
            masks = group[i] is not None and group[j] is not None
            mask[i, j] = group[j] is None or (masks and (i - j < k if literal else group[i] == group[j]))
    return mask


def layout_mask(k: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which nodes each node sees, and positions, by tree_metadata."""
    parents = space_layout(k, "cpu").parents[None]
    data = tree_metadata(parents, torch.tensor([context], dtype=torch.int32))
    bits = data.mask_bits[0, :, :, None] >> torch.arange(32, dtype=torch.int32) & 1
    return bits.flatten(1)[:, : parents.shape[1]].bool(), data.positions[0]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("context", [0, 1, 6])
def test_mask_and_positions_are_the_papers(k: int, context: int) -> None:
    group, node = paper_tokens(context, k)
    assert len(group) == context + 1 + k * (k + 2)
    mask = paper_mask(group, k, literal=False)
    positions = mask.sum(1) - 1  # Eq. 7
    in_tree = torch.tensor(node[context:])
    sees, our_positions = layout_mask(k, context)
    assert mask[context:, :context].all()  # all of the context, which attention adds to the tree's mask
    assert torch.equal(sees[in_tree][:, in_tree], mask[context:, context:])
    assert torch.equal(our_positions[in_tree], positions[context:])
    layout = space_layout(k, "cpu")
    assert [None if g < 0 else g for g in layout.group[in_tree].tolist()] == group[context:]
    assert torch.equal(layout.is_mask, layout.group >= 0)


@pytest.mark.parametrize(("k", "links_too_many"), [(1, 0), (2, 0), (3, 3), (4, 12), (5, 30)])
def test_equation_6_taken_literally_joins_groups(k: int, links_too_many: int) -> None:
    """Why the layout follows the text: i - j < k also reaches masks of the group before."""
    group, _ = paper_tokens(3, k)
    literal, meant = paper_mask(group, k, literal=True), paper_mask(group, k, literal=False)
    assert int((literal & ~meant).sum()) == links_too_many
    assert not (meant & ~literal).any()


def test_figure_3() -> None:
    """The paper's example: k = 2, "LLMs are" the input, "auto" and "model" the candidates."""
    rows = ["1", "11", "111", "1111", "11001", "110011", "1100111", "11001001", "110010011", "1100100111"]
    group, node = paper_tokens(1, 2)
    figure = torch.tensor([[int(bit) for bit in row.ljust(10, "0")] for row in rows], dtype=torch.bool)
    assert torch.equal(paper_mask(group, 2, literal=True), figure)
    in_tree = torch.tensor(node[1:])
    assert torch.equal(layout_mask(2, 1)[0][in_tree][:, in_tree], figure[1:, 1:])


@pytest.mark.parametrize("accepted", range(4))
def test_an_accepted_path_lies_in_a_row(accepted: int) -> None:
    """So that no cache entry moves: path[j] = j."""
    parents = space_layout(3, "cpu").parents.tolist()
    assert parents[: accepted + 1] == list(range(-1, accepted))


def samples() -> list[tuple[Any, ...]]:
    like = torch.empty(0, dtype=torch.int32)
    return [(like, 3)]


def refusals() -> Refusals:
    return {"device": "cpu"}, [(f"candidates is {k}; give 0 to 31", {"candidates": k}) for k in (-1, 32)]
