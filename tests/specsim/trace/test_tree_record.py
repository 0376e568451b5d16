"""Recorded trees: what is derived from them against plain code, the round trip through files, damaged files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.trace.files import pack_trace, read_trace, write_trace
from specsim.trace.trace import Trace
from specsim.trace.tree_record import TreeRecord, record_from_nodes
from tests.specsim.trace.test_trace import META, TREES, meta_with, table_with
from tests.support import checks
from tests.support.checks import edit_meta
from tests.support.reference import small_trace

ARRAYS = ("prob", "token", "first_child", "horizon")
WIDTH, NODES = 6, 20


@dataclass
class Node:
    """A node of a plain tree."""

    token: int = -1
    prob: np.float32 = np.float32(1)
    rank: int = -1
    children: list[Node] = field(default_factory=list)


def random_tree(rng: np.random.Generator, nodes: int) -> Node:
    """A tree of so many nodes below its root."""
    root = Node()
    every = [root]
    for _ in range(nodes):
        open_to = [node for node in every if len(node.children) < WIDTH]
        parent = open_to[int(rng.integers(max(len(open_to) - 5, 0), len(open_to)))]
        node = Node(int(rng.integers(0, 30)), rng.random(dtype=np.float32), len(parent.children))
        parent.children.append(node)
        every.append(node)
    return root


def level_order(root: Node) -> list[tuple[Node, int, int, np.float32]]:
    """(node, number of its parent, depth, path) of every node below the root."""
    rows: list[tuple[Node, int, int, np.float32]] = []
    level = [(root, 0, np.float32(1))]
    depth = 0
    while level:
        depth += 1
        below = []
        for parent, number, path in level:
            for node in parent.children:
                rows.append((node, number, depth, path * node.prob))
                below.append((node, len(rows), path * node.prob))
        level = below
    return rows


def made_of(roots: list[Node], nodes: int) -> TreeRecord:
    shape = (len(roots), nodes)
    parent, token, prob = np.full(shape, -1), np.full(shape, -1), np.zeros(shape, np.float32)
    for row, root in enumerate(roots):
        for column, (node, above, _, _) in enumerate(level_order(root)):
            parent[row, column], token[row, column], prob[row, column] = above, node.token, node.prob
    return record_from_nodes(parent, token, prob, np.linspace(0, 0.5, len(roots)), WIDTH)


def random_roots(seed: int, positions: int) -> list[Node]:
    rng = np.random.default_rng(seed)
    return [random_tree(rng, int(nodes)) for nodes in rng.integers(0, NODES + 1, positions)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_what_is_derived_is_what_the_trees_are(seed: int) -> None:
    roots = random_roots(seed, 6)
    record = made_of(roots, NODES)
    assert record.nodes == NODES and record.width == WIDTH
    assert [getattr(record, name).dtype for name in ARRAYS] == [np.float32, np.int32, np.uint16, np.float32]
    assert record.first_child.shape == (6, NODES + 2)
    for position, root in enumerate(roots):
        rows = level_order(root)
        beyond = NODES - len(rows)
        assert record.count[position] == len(rows)
        assert record.parent[position].tolist() == [row[1] for row in rows] + [-1] * beyond
        assert record.rank[position].tolist() == [row[0].rank for row in rows] + [-1] * beyond
        assert record.depth[position].tolist() == [row[2] for row in rows] + [-1] * beyond
        assert record.token[position].tolist() == [row[0].token for row in rows] + [-1] * beyond
        np.testing.assert_array_equal(record.prob[position], [row[0].prob for row in rows] + [0] * beyond)
        np.testing.assert_array_equal(record.path[position], [row[3] for row in rows] + [0] * beyond)
        assert record.path.dtype == np.float32
        numbers = {id(root): 0} | {id(row[0]): number for number, row in enumerate(rows, 1)}
        for node in [root, *(row[0] for row in rows)]:
            begin, end = record.first_child[position, numbers[id(node)] :][:2].tolist()
            assert [*range(begin, end)] == [numbers[id(child)] for child in node.children]
        assert (record.first_child[position, len(rows) + 1 :] == len(rows) + 1).all()


def with_trees(seed: int = 0) -> Trace:
    """A trace of five sequences whose trees now and then hold the true text."""
    trace = small_trace(true_rank=np.zeros((102, 6), np.int16))
    rng = np.random.default_rng(seed)
    roots = random_roots(seed, len(trace.token))
    ahead = [trace.token[row : trace.offsets[1:][trace.offsets[1:] > row][0]].tolist() for row in range(102)]
    for root, text in zip(roots, ahead, strict=True):
        node = root
        for token in text:
            if not node.children or rng.random() < 0.2:
                break
            node = node.children[int(rng.integers(len(node.children)))]
            node.token = token
    return replace(trace, tree=made_of(roots, NODES))


def test_the_true_path_is_followed_token_by_token_and_ends_with_the_output() -> None:
    trace = with_trees()
    on_path = trace.tree.on_path(trace.token, trace.offsets)
    lengths = []
    for sequence in range(trace.sequences):
        for row in range(trace.offsets[sequence], trace.offsets[sequence + 1]):
            text = trace.token[row : trace.offsets[sequence + 1]]
            expected: set[int] = set()
            for node in range(1, int(trace.tree.count[row]) + 1):
                above, depth = trace.tree.parent[row, node - 1], trace.tree.depth[row, node - 1]
                follows = above == 0 or above in expected
                if follows and depth <= len(text) and trace.tree.token[row, node - 1] == text[depth - 1]:
                    expected.add(node)
            assert set((np.flatnonzero(on_path[row]) + 1).tolist()) == expected
            lengths.append(len(expected))
    assert max(lengths) > 3 and min(lengths) == 0


def test_selected_positions_keep_their_trees() -> None:
    trace = with_trees()
    some = trace.select([3, 0])
    rows = [*range(66, 69), *range(40)]
    assert some.tree.width == WIDTH
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(some.tree, name), getattr(trace.tree, name)[rows])
    assert trace.select([1]).tree is not None and small_trace().select([1]).tree is None


@pytest.mark.parametrize(
    "parent",
    [
        [[1, -1, -1]],  # its own child
        [[0, 2, -1]],
        [[0, 0, 3]],
        [[0, 1, 0]],  # not in level order
        [[0, 0, 2], [0, 2, 1]],
        [[-1, 0, 0]],  # a gap
        [[0, -1, 0]],
    ],
)
def test_parents_that_make_no_tree_in_level_order_are_refused(parent: list[list[int]]) -> None:
    shape = np.shape(parent)
    columns = np.array(parent), np.zeros(shape, int), np.ones(shape), np.zeros(len(parent))
    checks.refusal(lambda: record_from_nodes(*columns, WIDTH), "not those of trees in level order")


def assert_same_trees(first: Trace, second: Trace) -> None:
    assert (first.tree.nodes, first.tree.width) == (second.tree.nodes, second.tree.width)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(first.tree, name), getattr(second.tree, name), name)
        assert getattr(first.tree, name).dtype == getattr(second.tree, name).dtype
        assert getattr(first.tree, name).flags.writeable and getattr(first.tree, name).flags.c_contiguous


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_trace(with_trees(), tmp_path / "trace")
    return tmp_path / "trace"


@pytest.mark.parametrize("seed", range(3))
def test_what_is_written_is_read(tmp_path: Path, seed: int) -> None:
    trace = with_trees(seed)
    write_trace(trace, tmp_path / "trace")
    assert_same_trees(read_trace(tmp_path / "trace"), trace)
    pack_trace(tmp_path / "trace", tmp_path / "packed.zip")
    assert_same_trees(read_trace(tmp_path / "packed.zip"), trace)
    meta = json.loads((tmp_path / "trace" / META).read_text())
    assert meta["tree"] == {"nodes": NODES, "width": WIDTH} and TREES in meta["checksums"]


def test_trees_are_readable_with_pandas_alone(folder: Path) -> None:
    trace, table = with_trees(), pd.read_parquet(folder / TREES)
    columns = ["sequence_id", "t", "horizon", "parent", "depth", "rank", "token", "prob", "on_path"]
    assert table.columns.tolist() == columns
    assert table["sequence_id"].tolist() == np.repeat(trace.sequence_id, trace.output_tokens).tolist()
    assert table["t"].tolist() == trace.position.tolist()
    on_path = trace.tree.on_path(trace.token, trace.offsets)
    for row, count in enumerate(trace.tree.count):
        for name in ("parent", "depth", "rank", "token", "prob"):
            assert table[name][row].tolist() == getattr(trace.tree, name)[row, :count].tolist()
        assert table["on_path"][row].tolist() == on_path[row, :count].tolist()


def test_a_trace_without_trees_has_no_such_file(tmp_path: Path) -> None:
    write_trace(small_trace(), tmp_path / "trace")
    assert not (tmp_path / "trace" / TREES).exists() and read_trace(tmp_path / "trace").tree is None


def with_value(name: str, change: Callable[[Any], Any], kind: pa.DataType | None = None) -> Callable[..., pa.Table]:
    """Change the value of a column in its row of the largest tree."""

    def changed(table: pa.Table) -> pa.Table:
        values = table.column(name).to_pylist()
        counts = [len(parents) for parents in table.column("parent").to_pylist()]
        row = counts.index(max(counts))
        values[row] = change(values[row])
        wanted = kind or table.schema.field(name).type
        return table.set_column(table.column_names.index(name), name, pa.array(values, wanted))

    return changed


SHAPES: list[Any] = [
    None, [], {"nodes": NODES}, {"width": 6}, {"nodes": "20", "width": 6}, {"nodes": True, "width": 6},
    {"nodes": 20, "width": 0}, {"nodes": 1024, "width": 6},
]  # fmt: skip
DAMAGE: list[tuple[Callable[[Path], Any], str, str]] = [
    *((meta_with(tree=shape), META, r"does not give nodes and width|at `\$\.tree") for shape in SHAPES),
    (lambda folder: edit_meta(folder, lambda meta: meta["tree"].update(nodes=NODES - 1)), TREES,
     f"a tree has {NODES} nodes, more than {NODES - 1}"),
    *((table_with(TREES, lambda table, name=name: table.drop_columns([name])), TREES, f"'{name}'")
      for name in ("parent", "token", "prob", "horizon")),
    *((table_with(TREES, change), TREES, says) for change, says in (
        (lambda table: table.slice(0, 101), "rows"),
        (with_value("prob", lambda row: [*row[:-1], 1.5]), r"'prob' leaves \[0, 1\]"),
        (with_value("prob", lambda row: [*row[:-1], -0.1]), r"'prob' leaves \[0, 1\]"),
        (with_value("prob", lambda row: [*row[:-1], float("nan")]), r"'prob' leaves \[0, 1\]"),
        (with_value("token", lambda row: [*row[:-1], 2**40], pa.list_(pa.int64())), "'token'"),
        (with_value("parent", lambda row: [*row[:-1], 2**20], pa.list_(pa.int64())), "'parent'"),
        (with_value("token", lambda row: [*row[:-1], None]), "'token' has nulls"),
        (with_value("parent", lambda row: None), "'parent' has nulls"),
        (with_value("parent", lambda row: [*row[:-1], -3]), "'parent' has a negative value"),
        (with_value("token", lambda row: row[:-1]), "'parent' and 'token' differ in length"),
        (with_value("prob", lambda row: [*row, 0.5]), "'parent' and 'prob' differ in length"),
        (with_value("horizon", lambda value: None), "'horizon'"),
        (with_value("horizon", lambda value: float("nan")), r"'horizon' leaves \[0, 1\]"),
        (with_value("horizon", lambda value: 2.0), r"'horizon' leaves \[0, 1\]"),
        (lambda table: table.take([1, 0, *range(2, 102)]), "does not have the rows"),
        (lambda table: table.set_column(3, "parent", table.column("t")), "'parent'"),
        (with_value("parent", lambda row: [*row[:-1], len(row)]), "not those of trees in level order"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "file", "says"), DAMAGE)
def test_what_is_damaged_is_refused_in_a_line(
    folder: Path, damage: Callable[[Path], Any], file: str, says: str
) -> None:
    damage(folder)
    text = checks.refusal(lambda: read_trace(folder), str(folder), "" if "level order" in says else file)
    assert re.search(says, text), text
