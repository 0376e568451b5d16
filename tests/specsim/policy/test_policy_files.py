"""A user's own policies in files: loaded by path, serving like built-in ones, wrong in one clear line, never stale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from docs.pages import block
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.learn.settings import SearchSettings
from specsim.learn.tune import tune_on
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.registry import POLICIES, find_policies, find_policy, make_policy
from specsim.policy.tree.base import TreePolicy
from specsim.policy.tree.pct import PCT
from specsim.policy.user_file import load_policy_file
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.specsim.policy.test_tree_policies import Drafter, grow, path_of, recorded_text, rounds_of
from tests.support import ROOT
from tests.support.checks import refusal
from tests.support.reference import RampCost, small_trace

CHAIN = '''
from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim import ChainPolicy, setting


@nb.njit
def initial_state(params):
    return (0.0,)


@nb.njit
def keep_drafting(state, params, step, depth, u):
    return step.confidence >= params.floor, state


@nb.njit
def update(state, params, drafted, accepted):
    return state


@dataclass(frozen=True)
class Mine(ChainPolicy):
    """Static Max-Confidence under another name."""

    floor: float = setting(0.4, 0.0, 1.0, tune=(0.0, 0.9), doc="least confidence")
    max_draft_tokens: int = setting(6, 1, 256, bounds="depth", doc="longest draft in tokens")

    name = "mine"
    source = "test"
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)
'''


def write(folder: Path, text: str = CHAIN, name: str = "my_policies.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_replays_and_tunes_like_the_policy_it_repeats(tmp_path: Path) -> None:
    trace, cost = small_trace(), RampCost()
    policy = make_policy(str(write(tmp_path)), {"floor": 0.5})
    twin = POLICIES["max_confidence"](lambda0=0.5, dynamic=False, max_draft_tokens=6)
    mine, built_in = (replay(trace, p, cost_table(trace, cost), log=True) for p in (policy, twin))
    assert mine.rounds.rows() == built_in.rounds.rows()
    np.testing.assert_array_equal(mine.seconds, built_in.seconds)
    result = tune_on(type(policy), PricedTrace(trace, cost), PricedTrace(trace, cost), SearchSettings(trials=5))
    assert (
        result.best.name == "mine"
        and result.train.speedup.estimate
        >= predict_policy(PricedTrace(trace, cost), make_policy(f"{tmp_path / 'my_policies.py'}:mine")).speedup.estimate
        - 1e-12
    )


def test_names_find_built_in_policies_files_and_one_of_a_file(tmp_path: Path) -> None:
    second = CHAIN.replace('name = "mine"', 'name = "other"').replace("class Mine", "class Other")
    both = write(tmp_path, CHAIN + second[second.index("@dataclass") :], "both.py")
    assert [kind.name for kind in load_policy_file(both)] == ["mine", "other"]
    policies = find_policies(["adaedl", f"{both}:other", str(both)])
    assert list(policies) == ["adaedl", "other", "mine"] and policies["adaedl"] is AdaEDL
    assert find_policy(f"{both}:other") is policies["other"]
    refusal(lambda: find_policy(str(both)), "mine, other; name a policy, such as ", "both.py:mine")
    refusal(lambda: find_policy(f"{both}:third"), "no policy 'third'; it has mine, other")
    with pytest.raises(InputError, match="another file also has a policy 'mine'"):
        find_policies([str(both), str(write(tmp_path, CHAIN, "again.py"))])
    refusal(lambda: find_policies(["nothing"]), "unknown policy 'nothing'; known: fixed_k")


def test_a_base_class_and_imported_policies_are_not_taken(tmp_path: Path) -> None:
    extra = "from specsim.policy.chain.adaedl import AdaEDL\n\nclass _Base(ChainPolicy):\n    pass\n\nagain = Mine\n"
    assert [kind.name for kind in load_policy_file(write(tmp_path, CHAIN + extra))] == ["mine"]


def test_an_unchanged_file_gives_the_same_class_and_a_changed_one_a_new_class(tmp_path: Path) -> None:
    trace, cost = small_trace(), RampCost()
    path = write(tmp_path)
    first = find_policy(str(path))
    assert find_policy(str(path)) is first
    before = replay(trace, first(), cost_table(trace, cost))
    write(tmp_path, CHAIN.replace("step.confidence >= params.floor", "step.confidence < params.floor"))
    second = find_policy(str(path))
    assert second is not first
    after = replay(trace, second(), cost_table(trace, cost))
    assert after.drafted.sum() != before.drafted.sum()
    np.testing.assert_array_equal(replay(trace, first(), cost_table(trace, cost)).drafted, before.drafted)


RUN = """
import sys
from tests.support.reference import RampCost, small_trace
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
trace = small_trace()
print(replay(trace, make_policy(sys.argv[1]), cost_table(trace, RampCost())).drafted.tolist())
"""


def test_no_compiled_code_outlives_the_program(tmp_path: Path) -> None:
    """What the file calls changes between runs, though the file itself does not."""
    helper = "import numba as nb\n\n@nb.njit\ndef judge(confidence, floor):\n    return confidence {} floor\n"
    text = CHAIN.replace("import numba as nb\n", f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
                        "import numba as nb\nfrom judging import judge\n")  # fmt: skip
    path = write(tmp_path, text.replace("step.confidence >= params.floor", "judge(step.confidence, params.floor)"))

    def run(sign: str) -> str:
        (tmp_path / "judging.py").write_text(helper.format(sign))
        command = [sys.executable, "-B", "-c", RUN, path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout

    assert run(">=") != run("<")


CHAIN_MISTAKES = {
    "syntax": (CHAIN + "\ndef broken(:\n", r"my_policies\.py, line \d+: "),
    "NUL": (CHAIN + "\0", r"my_policies\.py: SyntaxError: .*null bytes"),
    "error": (CHAIN + "\n1 / 0\n", r"my_policies\.py, line 39: ZeroDivisionError: division by zero"),
    "exit": (CHAIN + "\nraise SystemExit(3)\n", r"line 39: SystemExit: 3"),
    "missing module": ("import no_such_module_here\n", "line 1: ModuleNotFoundError: No module named"),
    "no policy": ("answer = 42\n", "defines no policy"),
    "not compiled": (CHAIN.replace("@nb.njit\ndef update", "def update"), r"Mine\.update is not a compiled function"),
    "no staticmethod": (
        CHAIN.replace("update = staticmethod(update)", "update = update"),
        r"Mine\.update is not a compiled function; .* update = staticmethod\(update\)",
    ),
    "missing function": (CHAIN.replace("    update = staticmethod(update)\n", ""), r"Mine\.update is not a compiled"),
    "built-in name": (CHAIN.replace('"mine"', '"adaedl"'), "policy 'adaedl' has the name of a built-in policy"),
    "no name": (CHAIN.replace('    name = "mine"\n', ""), "Mine has no 'name'"),
    "no source": (CHAIN.replace('    source = "test"\n', ""), "Mine has no 'source'"),
    "a name twice": (
        CHAIN + CHAIN[CHAIN.index("@dataclass") :].replace("class Mine", "class Again"),
        "two policies",
    ),
    "no dataclass": (CHAIN.replace("@dataclass(frozen=True)\n", ""), "Mine is no frozen dataclass"),
    "thawed": (CHAIN.replace("(frozen=True)", ""), "cannot inherit non-frozen dataclass"),
    "plain field": (
        CHAIN.replace('setting(6, 1, 256, bounds="depth", doc="longest draft in tokens")', "6"),
        r"Mine\.max_draft_tokens has no",
    ),
    "no longest draft": (
        CHAIN.replace(
            '    max_draft_tokens: int = setting(6, 1, 256, bounds="depth", doc="longest draft in tokens")\n', ""
        ),
        "neither a setting nor a property max_draft_tokens",
    ),
    "default out of range": (CHAIN.replace("setting(0.4, 0.0", "setting(0.4, 0.5"), r"floor=0\.4 is outside"),
    "old signature": (CHAIN.replace("step, depth, u)", "step, depth)"), r"keep_drafting must take \(state, params, "),
    "no state returned": (CHAIN.replace("params.floor, state", "params.floor"), r"must return \(continue\?, state\)"),
    "state grows": (CHAIN.replace("    return state\n", "    return (state[0], 1.0)\n"), "tuples of as many floats"),
    "state changes type": (
        CHAIN.replace("return (0.0,)", "return (0,)").replace("    return state\n", "    return (0.5,)\n"),
        "tuples of as many floats",
    ),
    "does not compile": (
        CHAIN.replace("step.confidence >=", "step.certainty >="),
        r"Mine\.keep_drafting does not compile: .*certainty",
    ),
    "fails": (
        CHAIN.replace("return (0.0,)", "return (1.0 / (params.floor - 0.4),)"),
        "initial_state fails: ZeroDivision",
    ),
}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refusal(lambda: make_policy(str(tmp_path / "none.py")), "policy file ", "none.py does not exist")


TREE = block("extending.md", "class KeepLikely")

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


def load(path: Path, **settings: object) -> TreePolicy:
    policy = make_policy(str(path), settings)
    assert isinstance(policy, TreePolicy)
    return policy


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file, so that its replay is compiled once."""
    return write(tmp_path_factory.mktemp("example"), TREE)


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
    chain = (
        CHAIN[CHAIN.index("@nb.njit") :].replace("def update", "def chain_update").replace("(update)", "(chain_update)")
    )
    both = TREE.replace("import TreePolicy, setting", "import ChainPolicy, TreePolicy, setting") + chain
    assert [kind.name for kind in load_policy_file(write(tmp_path, both))] == ["keep_likely", "mine"]


TREE_MISTAKES = {  # what is written instead of what, and the answer
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


def wrong(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        *CHAIN_MISTAKES.values(),
        *((wrong(TREE, *change), pattern) for *change, pattern in TREE_MISTAKES.values()),
        *((wrong(STATIC, *change), pattern) for *change, pattern in STATIC_MISTAKES.values()),
    ],
    ids=[*CHAIN_MISTAKES, *(f"tree, {name}" for name in (*TREE_MISTAKES, *STATIC_MISTAKES))],
)
def test_a_mistake_is_one_clear_line(tmp_path: Path, text: str, pattern: str) -> None:
    path = write(tmp_path, text)
    message = refusal(lambda: find_policies([str(path)]), match=pattern)
    assert "\n" not in message and "\x1b" not in message and len(message) < 600 + len(str(path))
