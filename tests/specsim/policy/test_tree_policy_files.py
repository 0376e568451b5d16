"""A user's own tree policy in a file: it serves like a built-in one, and is wrong in a single clear line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from docs.pages import block
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.policy.registry import find_policies, make_policy
from specsim.policy.tree.base import TreePolicy
from specsim.policy.tree.pct import PCT
from specsim.policy.user_file import load_policy_file
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.specsim.policy.test_tree_policies import Drafter, grow, path_of, recorded_text, rounds_of

GOOD = block("extending.md", "class KeepLikely")

STATIC = '''
from dataclasses import dataclass

from specsim.policy.base import setting
from specsim.policy.tree.static import StaticTree


@dataclass(frozen=True)
class Fork(StaticTree):
    """As many children of the root as `width`, each with a child."""

    width: int = setting(2, 1, 8, doc="children of the root")

    name = "fork"
    source = "test"

    @property
    def shape(self):
        return (self.width,) + (1,) * self.width + (0,) * self.width
'''


def write(folder: Path, text: str = GOOD) -> Path:
    path = folder / "keep_likely.py"
    path.write_text(text)
    return path


def load(path: Path, **settings: object) -> TreePolicy:
    policy = make_policy(str(path), settings)
    assert isinstance(policy, TreePolicy)
    return policy


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file, so that its replay is compiled once."""
    return write(tmp_path_factory.mktemp("example"))


def test_a_file_grows_the_trees_it_describes(example: Path) -> None:
    policy = load(example, likely="0.1", width=4)
    for seed in range(10):
        drafter = Drafter(seed)
        grown = grow(policy, drafter)
        likely = {node for node in grown.nodes if path_of(drafter, node) >= 0.1}
        assert grown.kept == likely
        assert {node for level in grown.expanded for node in level} == {node for node in likely if len(node) < 8}


@pytest.mark.parametrize("nodes", [None, 12])
def test_a_file_replays_like_a_built_in_policy(example: Path, nodes: int | None) -> None:
    """PCT with the same threshold for both tests is the same policy, but for expanding the root in any case."""
    trace, _ = recorded_text(nodes)
    mine = load(example, likely=0.05, max_depth=3)
    twin = PCT(cost_ratio=0.05, leaf_threshold=0.05, width=3, max_depth=3)
    table = cost_table(trace, ConstantCost(1.0, 10.0))
    ours, theirs = (replay(trace, policy, table, log=True) for policy in (mine, twin))
    assert ours.rounds.rows() == theirs.rounds.rows()
    np.testing.assert_array_equal(ours.seconds, theirs.seconds)
    np.testing.assert_array_equal(ours.truncated, theirs.truncated)
    if nodes:
        assert ours.rounds.rows() == rounds_of(mine, nodes)[0]


def test_a_static_tree_of_a_file_replays(tmp_path: Path) -> None:
    trace, _ = recorded_text(12)
    result = replay(trace, load(write(tmp_path, STATIC), width=3), cost_table(trace, ConstantCost(1.0, 10.0)))
    rounds = result.num_rounds.sum()
    assert result.verified.sum() <= 6 * rounds and 0 < result.accepted.sum() <= 2 * rounds


def test_chain_and_tree_policies_share_a_file(tmp_path: Path) -> None:
    from tests.specsim.policy.test_policy_files import GOOD as CHAIN

    chain = (
        CHAIN[CHAIN.index("@nb.njit") :].replace("def update", "def chain_update").replace("(update)", "(chain_update)")
    )
    both = GOOD.replace("import TreePolicy, setting", "import ChainPolicy, TreePolicy, setting") + chain
    assert [kind.name for kind in load_policy_file(write(tmp_path, both))] == ["keep_likely", "mine"]


MISTAKES = {  # what is written instead of what, and the answer
    "not compiled": ("@nb.njit\ndef select", "def select", r"KeepLikely\.select is not a compiled function"),
    "missing function": (
        "    expand = staticmethod(expand)\n",
        "",
        r"KeepLikely\.expand is not .* staticmethod\(expand\)",
    ),
    "arguments": ("tree, count, keep)", "tree, keep)", r"select must take \(state, params, tree, count, keep\)"),
    "does not compile": ("if tree.path[i]", "if tree.paths[i]", r"expand does not compile: .*paths"),
    "fails": ("int(params.width)", "int(1 / (params.width - 3))", "expand fails: ZeroDivisionError"),
    "no state": (
        "int(params.width)\n    return state\n",
        "int(params.width)\n",
        "expand must return the state, a tuple of as many floats as it came",
    ),
    "state grows": ("return state", "return (1.0, 2.0)", "expand must return the state, a tuple of as many"),
    "relative widths": (
        "widths[i] =",
        "widths[i - first] =",
        r"expand must write widths\[i\] of the nodes i from first",
    ),
    "too wide": ("int(params.width)", "int(params.width) + 2", "asks for 5 children .* from 0 to max_width = 3"),
    "negative width": ("int(params.width)", "-1", "asks for -1 children of a node; they must be from 0"),
    "no floor": ("    return params.likely  #", "    #", "select must return its floor, a float"),
    "whole floor": ("return params.likely  #", "return 1  #", "select must return its floor, a float"),
    "too many": ("self.max_depth * int(1 / self.likely)", "1", "select keeps 3 nodes, more than max_nodes = 1"),
    "beyond the tree": (
        "    return params.likely",
        "    keep[count] = True\n    return params.likely",
        r"write keep\[i\] of the",
    ),
    "no depth": ("    max_depth: int", "    levels: int", "does not say its max_depth; add a setting or a property"),
    "no bound": ("def max_nodes", "def most", "does not say its max_nodes; add a setting or a property"),
    "no width": ("def max_width", "def widest", "does not say its max_width; add a setting or a property"),
    "no number": ("return self.width", "return 2.5", r"max_width is 2\.5, not a whole number from 1"),
    "built-in name": ('"keep_likely"', '"adaedl"', "policy 'adaedl' has the name of a built-in policy"),
}
STATIC_MISTAKES = {
    "no shape": ("def shape", "def form", "Fork has no shape; add a property"),
    "no tree": ("+ (0,) * self.width", "", r"fork: child counts \[2, 1, 1\] are not a tree's"),
}


@pytest.mark.parametrize(
    ("text", "old", "new", "pattern"),
    [(GOOD, *mistake) for mistake in MISTAKES.values()] + [(STATIC, *mistake) for mistake in STATIC_MISTAKES.values()],
    ids=[*MISTAKES, *STATIC_MISTAKES],
)
def test_a_mistake_is_one_clear_line(tmp_path: Path, text: str, old: str, new: str, pattern: str) -> None:
    assert old in text
    path = write(tmp_path, text.replace(old, new))
    with pytest.raises(InputError, match=pattern) as caught:
        find_policies([str(path)])
    message = str(caught.value)
    assert "\n" not in message and "\x1b" not in message and len(message) < 600 + len(str(path))
