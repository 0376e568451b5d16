"""The sparse tree: the optimum of all trees, by enumeration; rates from CSV and from traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.io.errors import InputError
from specsim.policy.static_tree import shape as shapes
from specsim.policy.static_tree.rates import check_rates, rates_of, read_rates
from specsim.policy.static_tree.search import (
    best_trees,
    grow,
    max_tree_nodes,
    node_accept_probs,
    tree_of,
)
from tests.support.reference import small_trace
from tests.support.tree_cases import all_trees, drawn_trace, ranked_trace

TENTHS = st.integers(0, 10).map(lambda tenths: tenths / 10)  # many ties


@st.composite
def some_rates(draw: st.DrawFn, ordered: bool | None = None) -> np.ndarray:
    depth, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    values = draw(st.sampled_from([TENTHS, st.floats(0, 1)]))
    rows = []
    for _ in range(depth):
        row = np.array(draw(st.lists(values, min_size=ranks, max_size=ranks)))
        row = row / max(1.0, row.sum())
        rows.append(-np.sort(-row) if ordered else row)
    return np.array(rows)


def by_hand(rates: np.ndarray, shape: shapes.Shape) -> float:
    """1 + the sum over nodes of the products along their paths."""
    total = 1.0
    for path in shapes.to_paths(shape):
        total += np.prod([rates[depth, rank] for depth, rank in enumerate(path)])
    return total


def test_the_enumeration_counts_the_trees() -> None:
    """Binary trees with sibling order and n nodes below the root: 1, 2, 4, 9 (Motzkin)."""
    assert [len(set(all_trees(9, 2, n))) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 9, 21]
    assert [len(all_trees(9, 9, n)) for n in (1, 2, 3, 4, 5)] == [1, 2, 5, 14, 42]  # Catalan


@pytest.mark.parametrize("ordered", [True, False])
@given(data=st.data())
def test_no_tree_of_the_size_is_better(ordered: bool, data: st.DataObject) -> None:
    rates = data.draw(some_rates(ordered))
    trees = best_trees(rates, 6)
    assert trees.nodes == min(6, max_tree_nodes(rates))
    assert trees.expected_tokens[0] == 1.0
    for nodes in range(1, trees.nodes + 1):
        best = max(by_hand(rates, shape) for shape in all_trees(*rates.shape, nodes))
        shape = trees.shape(nodes)
        assert len(shape) == nodes + 1
        assert by_hand(rates, shape) == pytest.approx(best, abs=1e-12)
        assert trees.expected_tokens[nodes] == pytest.approx(best, abs=1e-12)
        assert node_accept_probs(rates, shape).sum() == pytest.approx(best, abs=1e-12)


@given(some_rates(ordered=True), st.integers(1, 40))
def test_greedy_and_dynamic_programming_agree(rates: np.ndarray, nodes: int) -> None:
    trees = best_trees(rates, nodes)
    worth, taken = grow(rates, rates.shape[1], trees.nodes)
    assert trees.expected_tokens == pytest.approx(1 + worth, abs=1e-9)
    shape = tuple(tree_of(taken, trees.nodes).tolist())
    assert node_accept_probs(rates, shape).sum() == pytest.approx(trees.expected_tokens[-1], abs=1e-9)


@given(some_rates(), st.integers(1, 2))
def test_where_few_ranks_fork_the_others_are_leaves(rates: np.ndarray, forks: int) -> None:
    for nodes in range(1, 7):
        allowed = [
            by_hand(rates, shape)
            for shape in all_trees(*rates.shape, nodes)
            if all(max(path[:-1], default=0) < forks for path in shapes.to_paths(shape))
        ]
        worth, _ = grow(rates, forks, nodes)
        assert 1 + worth[nodes] == pytest.approx(max(allowed, default=-np.inf), abs=1e-12)


def test_each_of_256_nodes_adds_less_than_the_one_before() -> None:
    rates = 0.7 ** np.arange(1, 11) * np.ones((16, 1)) * 0.4
    curve = best_trees(rates, 256).expected_tokens
    assert len(curve) == 257 and (np.diff(curve) > 0).all() and (np.diff(curve, 2) <= 1e-12).all()


def test_few_rates_give_few_nodes() -> None:
    rates = np.array([[0.5, 0.2], [0.4, 0.1]])
    assert max_tree_nodes(rates) == 6 and best_trees(rates, 100).nodes == 6


def test_rates_of_a_trace_are_counted_by_hand() -> None:
    ranks = np.array([[0, 1, 0], [1, 0, -1], [5, 0, 0], [0, -1, -1]], dtype=np.int16)
    rates = rates_of(ranked_trace(ranks, [2, 2]), ranks=2)
    # Beyond depth 1 the third position is out of reach (rank 5); the second and last are at their output's end.
    assert rates.tolist() == [[0.5, 0.25], [0.0, 1.0], [0.0, 0.0]]


def test_rates_of_a_trace_find_those_that_made_it() -> None:
    made = np.array([[0.6, 0.2, 0.1], [0.5, 0.3, 0.05], [0.4, 0.2, 0.1], [0.3, 0.2, 0.2]])
    trace = drawn_trace(made, [20_000], seed=5)
    rates = rates_of(trace, ranks=3)
    assert rates == pytest.approx(made, abs=0.02)
    shape = best_trees(rates, 12).shape(12)
    measured = 1 + shapes.accepted_tokens(shape, trace.true_rank).mean()
    assert measured == pytest.approx(node_accept_probs(rates, shape).sum(), abs=0.03)


def test_a_trace_without_ranks_teaches_no_tree() -> None:
    with pytest.raises(InputError, match="no column true_rank"):
        rates_of(small_trace())


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    return tmp_path / "rates.csv"


@pytest.mark.parametrize(
    "text",
    [
        "depth,top1,top2\n1,0.5,0.25\n2,0.4,0.1\n",
        "0.5,0.25\n0.4,0.1\n",
        "\ufeffDepth, top1, top2\r\n1, 0.5, 0.25\r\n\r\n2, 0.4, 0.1\r\n",
    ],
)
def test_rates_are_read_with_and_without_header(csv_file: Path, text: str) -> None:
    csv_file.write_text(text, encoding="utf-8")
    assert read_rates(csv_file).tolist() == [[0.5, 0.25], [0.4, 0.1]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no rates"),
        ("depth,top1\n", "has no rates"),
        ("depth\n1\n", "has no rates"),
        ("head,top1\n1,0.5\n", "header starts with 'head'"),
        ("depth,top1\n2,0.5\n", "line 2: depth '2' where 1 is due"),
        ("depth,top1\none,0.5\n", "line 2: depth 'one' where 1 is due"),
        ("0.5,0.25\n0.4\n", "line 2: 1 rates where the first line has 2"),
        ("0.5,x\n", "line 1: 'x' is not a number"),
        ("0.5,nan\n", "depth 1 is outside"),
        ("0.4,0.2\n50,20\n", "depth 2 is outside"),
        ("0.9,-0.1\n", "depth 1 is outside"),
        ("0.9,0.2\n", "depth 1 sum to 1.1"),
    ],
)
def test_malformed_rates_are_refused(csv_file: Path, text: str, complaint: str) -> None:
    csv_file.write_text(text)
    with pytest.raises(InputError, match=complaint):
        read_rates(csv_file)


def test_bytes_are_no_csv(csv_file: Path) -> None:
    csv_file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is no CSV text"):
        read_rates(csv_file)


def test_rates_of_another_form_are_refused() -> None:
    for rates in (np.zeros(3), np.zeros((0, 3)), np.zeros((2, 0))):
        with pytest.raises(InputError, match="a row per depth"):
            check_rates(rates, "rates")
    check_rates(np.array([[0.5, 0.5 + 1e-10]]), "rates")
