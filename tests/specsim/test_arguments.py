"""Names, paths, classes and objects are taken wherever a trace, costs or a policy is; else it is said what would be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import specsim
from specsim.policy.chain.fixed_k import FixedK

TRACE, COST = "example:lab-model", "example:lab-deep-model"
CONSTANT = {"s_d": 0.001, "s_t": 0.010}
FEW = {"trials": 4, "seed": 1}

MINE = """
import dataclasses, numba, specsim

@numba.njit
def initial_state(params):
    return (0.0,)

@numba.njit
def keep_drafting(state, params, step, depth, u):
    return step.confidence > params.floor, state

@numba.njit
def update(state, params, drafted, accepted):
    return state

@dataclasses.dataclass(frozen=True)
class Floor(specsim.ChainPolicy):
    floor: float = specsim.setting(0.3, 0.0, 1.0, tune=(0.05, 0.95))
    max_draft_tokens: int = specsim.setting(8, 1, 255, bounds="depth")
    name = "my_floor"
    source = "these tests"
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    specsim.write_trace(specsim.read_trace(TRACE), folder / "trace")
    (folder / "cost.json").write_text(json.dumps(CONSTANT))
    (folder / "mine.py").write_text(MINE)
    return folder


def own_class() -> type[specsim.ChainPolicy]:
    """A class as a cell of a notebook defines it: of no module's, in no file."""
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(MINE, "<cell 1>", "exec"), names)
    return names["Floor"]


def test_traces_and_costs_by_name_path_text_and_object_are_the_same(folder: Path) -> None:
    trace, cost = specsim.read_trace(TRACE), specsim.read_cost(folder / "cost.json")
    wanted = specsim.predict(trace, cost, "fixed_k", k=3).as_dict()
    for a_trace in (TRACE, folder / "trace", str(folder / "trace")):
        for a_cost in (folder / "cost.json", str(folder / "cost.json"), CONSTANT):
            assert specsim.predict(a_trace, a_cost, "fixed_k", k=3).as_dict() == wanted
    assert specsim.replay(folder / "trace", CONSTANT, "fixed_k", k=3).rounds is not None
    assert specsim.tune(folder / "trace", CONSTANT, "fixed_k", **FEW).best.name == "fixed_k"
    assert specsim.cross_validate(TRACE, CONSTANT, "fixed_k", folds=2, **FEW).folds
    assert specsim.leaderboard(TRACE, CONSTANT, policies=["fixed_k"], **FEW).rows
    joined = specsim.join_traces({"lookup": "example:lab-lookup", "eagle": folder.parent / folder.name / "trace"})
    assert [part.meta["drafter"] for part in joined.parts] == ["prompt-lookup", trace.meta["drafter"]]


def test_a_trace_is_written_from_where_it_is(folder: Path, tmp_path: Path) -> None:
    specsim.write_trace(folder / "trace", tmp_path / "copy")
    assert np.array_equal(specsim.read_trace(tmp_path / "copy").token, specsim.read_trace(TRACE).token)


def test_a_mapping_is_read_as_its_file_would_be() -> None:
    for name in ("vllm-llama3.1-8b-eagle-h100", "adaedl-llama2-7b-115m"):
        from specsim.cost.files import shipped_costs

        document = json.loads(shipped_costs()[name].read_text())
        assert specsim.read_cost(document) == specsim.read_cost(name)
    assert specsim.read_cost({"s_d": np.float32(0.5), "s_t": np.int64(1)}) == specsim.ConstantCost(0.5, 1.0)
    assert specsim.read_cost({"s_d": 0.05, "s_t": 1}).s_t == 1
    for wrong, why in (({"s_d": 0.05}, "neither a profile nor"), ({"s_d": "x", "s_t": 1}, "Expected `float`"),
                       ({"s_d": float("nan"), "s_t": 1}, "finite"), ({"s_d": -1.0, "s_t": 1}, "positive")):  # fmt: skip
        with pytest.raises(specsim.InputError, match=why):
            specsim.read_cost(wrong)


def test_one_name_is_one_policy(folder: Path) -> None:
    board = specsim.leaderboard(TRACE, COST, policies="fixed_k", **FEW)
    several = specsim.leaderboard(TRACE, COST, policies=["fixed_k"], **FEW)
    assert board.to_frame().equals(several.to_frame()) and {row.policy.name for row in board.rows} == {"fixed_k"}
    by_name, listed = specsim.policies(str(folder / "mine.py")), specsim.policies([folder / "mine.py"])
    assert by_name == listed and "my_floor" in by_name and "fixed_k" in by_name


def test_a_class_is_a_policy_everywhere() -> None:
    wanted = specsim.predict(TRACE, COST, "fixed_k", k=3)
    assert specsim.predict(TRACE, COST, FixedK, k=3) == wanted
    assert specsim.replay(TRACE, COST, FixedK, k=3).speedup == wanted.speedup
    assert specsim.tune(TRACE, COST, FixedK, **FEW) == specsim.tune(TRACE, COST, "fixed_k", **FEW)
    assert specsim.cross_validate(TRACE, COST, FixedK, folds=2, **FEW).estimate.policy.name == "fixed_k"
    assert specsim.make_policy(FixedK, k=3) == wanted.policy
    learned = specsim.predict(TRACE, COST, specsim.policies()["time_gain"])
    assert learned == specsim.predict(TRACE, COST, "time_gain") and learned.learned_on > 0


def test_a_class_of_a_notebook_is_a_policy_everywhere(folder: Path) -> None:
    mine, filed = own_class(), f"{folder / 'mine.py'}:my_floor"
    assert specsim.predict(TRACE, COST, mine, floor=0.4).v_d == specsim.predict(TRACE, COST, filed, floor=0.4).v_d
    best = specsim.tune(TRACE, COST, mine, **FEW).best
    assert type(best) is mine and best.settings == specsim.tune(TRACE, COST, filed, **FEW).best.settings
    board = specsim.leaderboard(TRACE, COST, policies=["fixed_k", mine], **FEW)
    assert {row.policy.name for row in board.rows} == {"fixed_k", "my_floor"}
    assert specsim.make_policy(mine, floor=0.4).settings["floor"] == 0.4
    assert "my_floor" in specsim.policies(mine)


def test_a_class_that_cannot_serve_is_refused_in_words() -> None:
    class NoFunctions(specsim.ChainPolicy):
        """Has neither a name nor functions."""

    with pytest.raises(specsim.InputError, match="NoFunctions has no 'name'"):
        specsim.predict(TRACE, COST, NoFunctions)
    usurper = own_class()
    usurper.name = "fixed_k"
    with pytest.raises(specsim.InputError, match="has the name of a built-in policy"):
        specsim.leaderboard(TRACE, COST, policies=usurper)


def test_settings_are_keywords() -> None:
    assert specsim.make_policy("fixed_k", k=3).k == 3
    assert specsim.make_policy("fixed_k", {"k": 3}) == specsim.make_policy("fixed_k", k="3")
    policy = specsim.make_policy("adaedl", gamma=0.2)
    changed = specsim.make_policy(policy, lambda0=0.4)
    assert changed.settings == {**policy.settings, "lambda0": 0.4}
    asked = specsim.predict(TRACE, COST, specsim.make_policy("fixed_k"), k=2)
    assert asked.policy == specsim.make_policy("fixed_k", k=2)
    for call in (lambda: specsim.make_policy("fixed_k", width=3), lambda: specsim.make_policy(policy, width=3)):
        with pytest.raises(specsim.InputError, match="no setting 'width'"):
            call()


WRONG = {
    "a list for one policy": (lambda: specsim.tune(TRACE, COST, ["fixed_k"]), "policy is a list; expected a name"),
    "no policy": (lambda: specsim.predict(TRACE, COST, None), "policy is a NoneType; expected"),
    "a number": (lambda: specsim.leaderboard(TRACE, COST, policies=3), "policy is a int; expected"),
    "a class of something else": (lambda: specsim.predict(TRACE, COST, dict), "policy is a type; expected"),
    "settings that are chosen": (
        lambda: specsim.tune(TRACE, COST, specsim.make_policy("fixed_k", k=3)),
        "policy is fixed_k(k=3), whose settings are already chosen; give its name 'fixed_k' or class",
    ),
    "the same on a board": (
        lambda: specsim.leaderboard(TRACE, COST, policies=[specsim.make_policy("fixed_k")]),
        "already chosen",
    ),
    "an array for a trace": (
        lambda: specsim.predict(np.zeros(3), COST, "fixed_k"),
        "trace is a ndarray; expected a Trace, its folder",
    ),
    "a trace for costs": (
        lambda: specsim.predict(TRACE, specsim.read_trace(TRACE), "fixed_k"),
        "cost is a Trace; expected a cost model",
    ),
    "a number for costs": (lambda: specsim.tune(TRACE, 0.1, "fixed_k"), "cost is a float; expected"),
    "no costs": (lambda: specsim.read_cost(None), "cost is a NoneType; expected"),
    "no trace": (lambda: specsim.leaderboard(None, COST), "trace is a NoneType; expected"),
    "nothing to write": (lambda: specsim.write_trace({}, "x"), "trace is a dict; expected"),
    "nothing to read": (lambda: specsim.read_trace(3), "trace is a int; expected"),
    "numbers to join": (lambda: specsim.join_traces({"a": 1, "b": 2}), "trace is a int; expected"),
    "one trace to join": (lambda: specsim.join_traces(TRACE), "traces is a str; expected a mapping"),
    "parts that are no costs": (lambda: specsim.JoinedCost((1, 2)), "cost is a int; expected"),
}


@pytest.mark.parametrize("case", WRONG)
def test_anything_else_is_refused_in_words(case: str) -> None:
    call, why = WRONG[case]
    with pytest.raises(TypeError, match=re.escape(why)) as error:
        call()
    assert "\n" not in str(error.value)
