"""`specsim tree`: a JSON object, or a tree and tables."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from specsim.cli.tree import drawing
from specsim.cost.model import ConstantCost
from specsim.policy.static_tree import shape as shapes
from specsim.policy.static_tree.optimal import optimal_trees, tree_round_cost
from specsim.policy.static_tree.rates import rates_of
from specsim.policy.static_tree.search import best_trees, node_accept_probs
from specsim.replaying.table import cost_table
from specsim.trace.files import write_trace
from tests.support.commands import Result, assert_refused, call, json_of
from tests.support.tree_cases import drawn_trace

RATES = np.array([[0.6, 0.2, 0.1], [0.5, 0.25, 0.1], [0.55, 0.2, 0.05], [0.5, 0.2, 0.1]])
CSV = "depth,top1,top2,top3\n" + "".join(f"{d},{','.join(map(str, row))}\n" for d, row in enumerate(RATES, 1))


@pytest.fixture(scope="module")
def trace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree") / "trace"
    write_trace(drawn_trace(RATES, [100, 60]), folder)
    return folder


@pytest.fixture
def rates_file(tmp_path: Path) -> Path:
    path = tmp_path / "rates.csv"
    path.write_text(CSV)
    return path


@pytest.fixture
def cost_file(tmp_path: Path) -> Path:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"s_d": 1e-3, "s_t": 1e-2}))
    return path


def tree(*args: object) -> Result:
    return call("specsim", "tree", *args)


def test_a_search_finds_the_tree_and_the_whole_curve(rates_file: Path) -> None:
    document = json_of(tree("search", rates_file, "--nodes", 20, "--json"))
    trees = best_trees(RATES, 120)
    assert document["children"] == list(trees.shape(20))
    assert shapes.from_paths(document["choices"]) == trees.shape(20)
    assert document["curve"] == trees.expected_tokens.tolist() and len(document["curve"]) == 121  # all there are
    assert document["expected_tokens"] == document["curve"][20]
    assert document["accuracies"] == RATES.tolist()
    assert document["nodes"] == 20 and document["depth"] == 4 and "measured_tokens" not in document


def test_a_search_in_a_trace_says_what_the_tree_gets_there(trace_folder: Path) -> None:
    document = json_of(tree("search", trace_folder, "--nodes", 12, "--json"))
    trace = drawn_trace(RATES, [100, 60])
    assert document["accuracies"] == rates_of(trace).tolist() and len(document["curve"]) == 257
    measured = 1 + shapes.accepted_tokens(tuple(document["children"]), trace.true_rank).mean()
    assert document["measured_tokens"] == pytest.approx(measured)


def test_people_get_the_tree_the_choices_and_a_short_curve(rates_file: Path) -> None:
    code, out, err = tree("search", rates_file, "--nodes", 11)
    shape = best_trees(RATES, 11).shape(11)
    assert code == 0 and err == ""
    choices = next(line for line in out.splitlines() if line.startswith("choices = "))
    assert shapes.from_paths(json.loads(choices.removeprefix("choices = "))) == shape
    assert sum(line.count("─ ") for line in out.splitlines() if line[0] in "├└│") == 11  # a line per node
    rows = [line.split("│")[1:4] for line in out.splitlines() if line.startswith("│") and line.endswith("│")]
    assert [row[0].strip() for row in rows] == ["1", "2", "4", "8", "11 *", "16", "32", "64"]
    assert float(rows[4][1]) == pytest.approx(node_accept_probs(RATES, shape).sum(), abs=5e-4)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("search", "missing.csv"), "missing.csv does not exist"),
        (("search", "{rates}", "--nodes", 121), "room for 120 nodes, not 121"),
        (("search", "{rates}", "--nodes", 0), "--nodes"),
        (("search", "{cost}"), "header starts with"),
        (("best", "{rates}", "--cost", "{cost}"), "is not a trace"),
    ],
)
def test_bad_input_is_one_line(rates_file: Path, cost_file: Path, args: tuple[object, ...], complaint: str) -> None:
    assert_refused(tree(*(str(arg).format(rates=rates_file, cost=cost_file) for arg in args)), complaint)


def test_the_best_tree_per_size_and_of_all(trace_folder: Path, cost_file: Path) -> None:
    document = json_of(tree("best", trace_folder, "--cost", cost_file, "--max-nodes", 20, "--max-depth", 3, "--json"))
    trace = drawn_trace(RATES, [100, 60])
    cost = tree_round_cost(cost_table(trace, ConstantCost(1e-3, 1e-2)), trace)
    trees = optimal_trees(rates_of(trace), cost, max_nodes=20, max_depth=3)
    assert [line["nodes"] for line in document["sizes"]] == list(range(1, 21))
    assert [line["tokens_per_s"] for line in document["sizes"]] == [tree.tokens_per_s for tree in trees]
    fastest = max(document["sizes"], key=lambda line: line["tokens_per_s"])
    assert {key: document["best"][key] for key in fastest} == fastest
    assert shapes.from_paths(document["best"]["choices"]) == tuple(document["best"]["children"])
    assert document["autoregressive_tokens_per_s"] == pytest.approx(100)
    for line in document["sizes"]:  # constant costs: a pass per level and a target pass
        assert line["round_s"] == pytest.approx(1e-2 + line["depth"] * 1e-3)
        assert line["speedup"] == pytest.approx(line["expected_tokens"] / line["round_s"] / 100)


def test_people_get_the_best_tree_beside_none(trace_folder: Path, cost_file: Path) -> None:
    code, out, err = tree("best", trace_folder, "--cost", cost_file, "--max-nodes", 12)
    assert code == 0 and err == "" and "choices = [[0]" in out
    rows = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│") and line.endswith("│")]
    assert rows[:5] == ["no tree", "1", "2", "4", "8"] and sum("*" in row for row in rows) == 1


def test_a_terminal_without_unicode_gets_the_tree_as_well() -> None:
    text = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=text).print(drawing((1, 0)))
    text.flush()
    assert b"root" in text.buffer.getvalue()
