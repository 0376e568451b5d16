"""A user's own policy file: loaded by its path, wrong in a single clear line, never stale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specsim.io.errors import InputError
from specsim.learn.settings import SearchSettings
from specsim.learn.tune import tune_on
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.registry import POLICIES, find_policies, find_policy, make_policy
from specsim.policy.user_file import load_policy_file
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support import ROOT
from tests.support.reference import RampCost, small_trace

GOOD = '''
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


def write(folder: Path, text: str = GOOD, name: str = "my_policies.py") -> Path:
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
    second = GOOD.replace('name = "mine"', 'name = "other"').replace("class Mine", "class Other")
    both = write(tmp_path, GOOD + second[second.index("@dataclass") :], "both.py")
    assert [kind.name for kind in load_policy_file(both)] == ["mine", "other"]
    policies = find_policies(["adaedl", f"{both}:other", str(both)])
    assert list(policies) == ["adaedl", "other", "mine"] and policies["adaedl"] is AdaEDL
    assert find_policy(f"{both}:other") is policies["other"]
    with pytest.raises(InputError, match=r"mine, other; name a policy, such as .*both\.py:mine"):
        find_policy(str(both))
    with pytest.raises(InputError, match="no policy 'third'; it has mine, other"):
        find_policy(f"{both}:third")
    with pytest.raises(InputError, match="another file also has a policy 'mine'"):
        find_policies([str(both), str(write(tmp_path, GOOD, "again.py"))])
    with pytest.raises(InputError, match="unknown policy 'nothing'; known: fixed_k"):
        find_policies(["nothing"])


def test_a_base_class_and_imported_policies_are_not_taken(tmp_path: Path) -> None:
    extra = "from specsim.policy.chain.adaedl import AdaEDL\n\nclass _Base(ChainPolicy):\n    pass\n\nagain = Mine\n"
    assert [kind.name for kind in load_policy_file(write(tmp_path, GOOD + extra))] == ["mine"]


def test_an_unchanged_file_gives_the_same_class_and_a_changed_one_a_new_class(tmp_path: Path) -> None:
    trace, cost = small_trace(), RampCost()
    path = write(tmp_path)
    first = find_policy(str(path))
    assert find_policy(str(path)) is first
    before = replay(trace, first(), cost_table(trace, cost))
    write(tmp_path, GOOD.replace("step.confidence >= params.floor", "step.confidence < params.floor"))
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
    text = GOOD.replace("import numba as nb\n", f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
                        "import numba as nb\nfrom judging import judge\n")  # fmt: skip
    path = write(tmp_path, text.replace("step.confidence >= params.floor", "judge(step.confidence, params.floor)"))

    def run(sign: str) -> str:
        (tmp_path / "judging.py").write_text(helper.format(sign))
        command = [sys.executable, "-B", "-c", RUN, path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout

    assert run(">=") != run("<")


MISTAKES = {
    "syntax": (GOOD + "\ndef broken(:\n", r"my_policies\.py, line \d+: "),
    "error": (GOOD + "\n1 / 0\n", r"my_policies\.py, line 39: ZeroDivisionError: division by zero"),
    "exit": (GOOD + "\nraise SystemExit(3)\n", r"line 39: SystemExit: 3"),
    "missing module": ("import no_such_module_here\n", "line 1: ModuleNotFoundError: No module named"),
    "no policy": ("answer = 42\n", "defines no policy"),
    "not compiled": (GOOD.replace("@nb.njit\ndef update", "def update"), r"Mine\.update is not a compiled function"),
    "no staticmethod": (
        GOOD.replace("update = staticmethod(update)", "update = update"),
        r"Mine\.update is not a compiled function; .* update = staticmethod\(update\)",
    ),
    "missing function": (GOOD.replace("    update = staticmethod(update)\n", ""), r"Mine\.update is not a compiled"),
    "built-in name": (GOOD.replace('"mine"', '"adaedl"'), "policy 'adaedl' has the name of a built-in policy"),
    "no name": (GOOD.replace('    name = "mine"\n', ""), "Mine has no 'name'"),
    "no source": (GOOD.replace('    source = "test"\n', ""), "Mine has no 'source'"),
    "a name twice": (
        GOOD + GOOD[GOOD.index("@dataclass") :].replace("class Mine", "class Again"),
        "two policies",
    ),
    "no dataclass": (GOOD.replace("@dataclass(frozen=True)\n", ""), "Mine is no frozen dataclass"),
    "thawed": (GOOD.replace("(frozen=True)", ""), "cannot inherit non-frozen dataclass"),
    "plain field": (
        GOOD.replace('setting(6, 1, 256, bounds="depth", doc="longest draft in tokens")', "6"),
        r"Mine\.max_draft_tokens has no",
    ),
    "no longest draft": (
        GOOD.replace(
            '    max_draft_tokens: int = setting(6, 1, 256, bounds="depth", doc="longest draft in tokens")\n', ""
        ),
        "neither a setting nor a property max_draft_tokens",
    ),
    "default out of range": (GOOD.replace("setting(0.4, 0.0", "setting(0.4, 0.5"), r"floor=0\.4 is outside"),
    "old signature": (GOOD.replace("step, depth, u)", "step, depth)"), r"keep_drafting must take \(state, params, "),
    "no state returned": (GOOD.replace("params.floor, state", "params.floor"), r"must return \(continue\?, state\)"),
    "state grows": (GOOD.replace("    return state\n", "    return (state[0], 1.0)\n"), "tuples of as many floats"),
    "state changes type": (
        GOOD.replace("return (0.0,)", "return (0,)").replace("    return state\n", "    return (0.5,)\n"),
        "tuples of as many floats",
    ),
    "does not compile": (
        GOOD.replace("step.confidence >=", "step.certainty >="),
        r"Mine\.keep_drafting does not compile: .*certainty",
    ),
    "fails": (
        GOOD.replace("return (0.0,)", "return (1.0 / (params.floor - 0.4),)"),
        "initial_state fails: ZeroDivision",
    ),
}


@pytest.mark.parametrize(("text", "pattern"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_clear_line(tmp_path: Path, text: str, pattern: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=pattern) as caught:
        find_policies([str(path)])
    message = str(caught.value)
    assert "\n" not in message and "\x1b" not in message and len(message) < 600 + len(str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"policy file .*none\.py does not exist"):
        make_policy(str(tmp_path / "none.py"))
