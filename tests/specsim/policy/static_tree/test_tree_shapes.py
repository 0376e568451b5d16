"""Shapes of draft trees: what is in them, and from paths and back."""

from __future__ import annotations

import io
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from specsim.cli.tree import drawing
from specsim.io.errors import InputError
from specsim.policy.static_tree import shape as shapes
from specsim.policy.tree.static import check_shape, level_sizes

MEDUSA_FIGURE_2 = (2, 3, 3, 0, 0, 0, 0, 0, 0)


@st.composite
def trees(draw: st.DrawFn, nodes: int = 14, width: int = 4) -> shapes.Shape:
    """Any tree of at most so many nodes: each new node is the next child of an earlier node."""
    paths: list[shapes.Path] = [()]
    counts = {(): 0}
    for _ in range(draw(st.integers(1, nodes))):
        parent = draw(st.sampled_from([path for path in paths if counts[path] < width]))
        paths.append((*parent, counts[parent]))
        counts[parent] += 1
        counts[paths[-1]] = 0
    return shapes.from_paths(paths)


@given(trees())
def test_paths_and_child_counts_are_two_forms_of_one_tree(shape: shapes.Shape) -> None:
    paths = shapes.to_paths(shape)
    assert shapes.from_paths(reversed(paths)) == shape
    assert len(set(paths)) == len(paths) == len(shape) - 1 == sum(shape)
    check_shape("test", shape)


@given(trees())
def test_parents_ranks_and_depths_are_those_of_the_paths(shape: shapes.Shape) -> None:
    paths = [(), *shapes.to_paths(shape)]
    assert [paths[p] for p in shapes.parents(shape)[1:]] == [path[:-1] for path in paths[1:]]
    assert shapes.ranks(shape)[1:].tolist() == [path[-1] for path in paths[1:]]
    assert shapes.depths(shape).tolist() == [len(path) for path in paths]
    assert shapes.parents(shape)[0] == -1 and shapes.ranks(shape)[0] == 0
    assert np.bincount(shapes.depths(shape)).tolist() == level_sizes(shape)


@given(trees(), st.integers(1, 6))
def test_a_cut_tree_keeps_the_nodes_down_to_that_depth(shape: shapes.Shape, depth: int) -> None:
    kept = [path for path in shapes.to_paths(shape) if len(path) <= depth]
    assert shapes.to_paths(shapes.cut(shape, depth)) == kept


def test_a_tree_cut_at_the_root_has_no_node() -> None:
    assert shapes.cut(MEDUSA_FIGURE_2, 0) == (0,)


@pytest.mark.parametrize(
    ("paths", "complaint"),
    [
        ([], "no node given"),
        ([()], "no node given"),
        ([(0,), (1, 0)], r"path \(1, 0\) lacks its parent \(1,\)"),
        ([(0,), (2,)], r"path \(2,\) lacks its sibling \(1,\)"),
        ([(0,), (0, 1)], r"path \(0, 1\) lacks its sibling \(0, 0\)"),
        ([(0,), (-1,)], r"path \(-1,\) has a negative rank"),
    ],
)
def test_paths_with_gaps_are_refused(paths: Iterable[tuple[int, ...]], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        shapes.from_paths(paths)


def test_a_cartesian_tree_has_the_nodes_that_medusa_counts() -> None:
    """Section 3.1.2: sum over k of prod_{i <= k} s_i nodes; figure 2 has 2 x 3 = 6 candidates."""
    assert shapes.cartesian((2, 3)) == MEDUSA_FIGURE_2
    assert sum(count == 0 for count in shapes.cartesian((2, 3))) == 6
    for sizes in [(1,), (4, 3, 2, 1), (5, 1, 4), (10, 10, 2)]:
        shape = shapes.cartesian(sizes)
        assert level_sizes(shape)[1:] == np.cumprod(sizes).tolist()
        check_shape("test", shape)
    assert shapes.cartesian((2, 3, 0, 4)) == MEDUSA_FIGURE_2


def test_a_full_vanilla_tree_is_the_cartesian_one() -> None:
    full = shapes.vct(3, 5, 3**5)
    assert full == shapes.cartesian((3,) * 5) and len(full) - 1 == 363  # errata B11


def test_a_capped_vanilla_tree_keeps_the_least_rank_sums_of_each_level() -> None:
    shape = shapes.vct(3, 5, 10)
    assert level_sizes(shape) == [1, 3, 9, 10, 10, 10]
    paths = shapes.to_paths(shape)
    for depth in (3, 4, 5):
        above = [path for path in paths if len(path) == depth - 1]
        kept = {path for path in paths if len(path) == depth}
        left = {(*path, rank) for path in above for rank in range(3)} - kept
        assert max(map(sum, kept)) <= min(map(sum, left))
    assert shapes.vct(3, 4, 1) == (1, 1, 1, 1, 0)


@given(trees(), st.lists(st.lists(st.integers(-1, 4), min_size=5, max_size=5), min_size=1, max_size=8))
def test_a_tree_accepts_down_to_its_first_missing_node(shape: shapes.Shape, true_rank: list[list[int]]) -> None:
    paths = set(shapes.to_paths(shape))
    wanted = []
    for row in true_rank:
        length = 0
        while length < len(row) and tuple(row[: length + 1]) in paths:
            length += 1
        wanted.append(length)
    assert shapes.accepted_tokens(shape, np.array(true_rank, dtype=np.int16)).tolist() == wanted


def test_a_drawing_has_a_line_per_node_and_no_markup() -> None:
    text = io.StringIO()
    Console(file=text, width=80).print(drawing((2, 1, 0, 0), ["1.0", "0.5", "[b]", "0.2"]))
    lines = [line.strip("│├└─ ") for line in text.getvalue().splitlines()]
    assert lines == ["root  1.0", "0  0.5", "0  0.2", "1  [b]"]
