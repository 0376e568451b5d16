"""`specsim tune` prints what the tuner found: a JSON object, or tables and warnings; and where no policy is faster than
decoding without speculation, commands say so: the baseline is a candidate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specsim.cost.model import ConstantCost
from specsim.learn.search import find_best
from specsim.learn.settings import SearchSettings
from specsim.learn.tune import cross_validate_with, tune_on
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import CHAIN_POLICIES
from specsim.replaying.priced import PricedTrace
from specsim.report.tuning import tuning_result
from specsim.trace.files import read_trace, write_trace
from specsim.trace.split import split_sequences
from tests.support.commands import assert_refused, call, json_of
from tests.support.reference import RampCost
from tests.support.tuning_cases import stretchy_trace

COST = ConstantCost(1e-3, 1e-2)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune") / "trace"
    write_trace(stretchy_trace(16, 60), folder)
    return folder


@pytest.fixture
def tune_command(trace: Path, tmp_path: Path) -> list[object]:
    """The command on the trace, at these costs."""
    (tmp_path / "cost.json").write_text(json.dumps({"s_d": COST.s_d, "s_t": COST.s_t}))
    return ["specsim", "tune", trace, "--cost", tmp_path / "cost.json"]


@pytest.mark.parametrize("search", ["grid", "optuna"])
def test_one_object_with_everything_found(tune_command: list[object], trace: Path, search: Any) -> None:
    document = json_of(
        call(*tune_command, "--policy", "adaedl", "--search", search, "--trials", 20, "--seed", 2, "--json")
    )
    whole = read_trace(trace)
    train, holdout = (whole.select(part) for part in split_sequences(whole, seed=2))
    tuned = tune_on(
        AdaEDL, PricedTrace(train, COST), PricedTrace(holdout, COST), SearchSettings(search=search, trials=20, seed=2)
    )
    assert (document.pop("cost"), document.pop("cost_band")) == ("cost.json", None)
    assert document == json.loads(json.dumps(tuned.as_dict()))
    assert document["references"].keys() == {"runner_up", "default", "best_fixed_k"}
    assert document["references"]["best_fixed_k"]["comparison"].keys() >= {"difference", "significant"}
    assert document["search"] == search and document["holdout"]["oracle_regret"] > 0


def test_folds_tune_on_everything_and_report_what_was_held_out(tune_command: list[object], trace: Path) -> None:
    args = ("--policy", "adaedl", "--search", "grid", "--trials", 25, "--folds", 4)
    document = json_of(call(*tune_command, *args, "--json"))
    whole = read_trace(trace)
    folded = cross_validate_with(PricedTrace(whole, COST), AdaEDL, SearchSettings(search="grid", trials=25), folds=4)
    assert (
        document["best_params"]
        == find_best(AdaEDL, PricedTrace(whole, COST), SearchSettings(search="grid", trials=25)).best.settings
    )
    assert document["holdout"]["speedup"] == folded.estimate.speedup.as_dict()
    assert document["holdout"]["output_tokens"] == document["train"]["output_tokens"] == 16 * 60
    assert [fold["sequences"] for fold in document["folds"]] == [4] * 4
    code, out, err = call(*tune_command, *args)
    assert code == 0 and err == "" and "4 folds" in out and "best fixed K" in out


def test_tables_are_for_people(tune_command: list[object]) -> None:
    code, out, err = call(*tune_command, "--policy", "max_confidence", "--search", "grid", "--trials", 60)
    assert code == 0 and err == ""
    for part in (" trials on 8 sequences", "grid", "held-out", "default settings", "best fixed K"):
        assert part in out
    assert "warning: not significant on 8 sequences: the tuned policy's speedup differs from that of" in out


def test_a_file_keeps_any_number_of_searches(tune_command: list[object], tmp_path: Path) -> None:
    file = tmp_path / "searches.jsonl"
    args = (*tune_command, "--policy", "adaedl", "--search", "grid", "--trials", 9, "--json")
    first = json_of(call(*args, "--storage", file))
    assert json_of(call(*args, "--storage", file)) == first
    other = json_of(call(*args, "--seed", 1, "--storage", file))
    assert other == json_of(call(*args, "--seed", 1)) != first
    json_of(call(*tune_command, "--policy", "fixed_k", "--folds", 2, "--storage", file, "--json"))
    assert {path.name for path in tmp_path.iterdir()} == {"cost.json", file.name}
    file.write_text("not Optuna's")
    assert_refused(call(*args, "--storage", file), file, "not a journal of Optuna's")


def test_ctrl_c_before_any_result_says_what_is_kept(
    tune_command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specsim.learn.tune.tune_on", interrupted)
    storage = tmp_path / "journal"
    code, _, err = call(*tune_command, "--policy", "adaedl", "--storage", storage)
    assert (code, err) == (130, f"interrupted: the configurations tried are in {storage}; the same command goes on\n")
    code, _, err = call(*tune_command, "--policy", "adaedl")
    assert (code, err) == (130, "interrupted: nothing is kept, the same command starts anew\n")


@pytest.mark.parametrize("name", CHAIN_POLICIES)
def test_every_policy_can_be_tuned_by_every_search(name: str) -> None:
    trace = stretchy_trace(6, 40)
    kind = CHAIN_POLICIES[name]
    if any(getattr(trace, feature) is None for feature in kind.features):
        pytest.skip("not in this trace")
    train, holdout = trace.select([0, 1, 2, 3]), trace.select([4, 5])
    for search in ("grid", "optuna"):
        tuned = tune_on(
            kind,
            PricedTrace(train, RampCost()),
            PricedTrace(holdout, RampCost()),
            SearchSettings(search=search, trials=9),
        )
        assert type(tuned.best) is kind and tuned.train.speedup.estimate > 0
        assert tuned.references["best_fixed_k"].prediction.policy.name == FixedK.name


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--folds", 1), "--folds"),
        (("--folds", 17), "folds=17"),
        (("--jobs", 0), "--jobs"),
    ],
)
def test_bad_options_are_refused(tune_command: list[object], args: tuple[object, ...], message: str) -> None:
    assert_refused(call(*tune_command, "--policy", "adaedl", *args), message)


TRACE = "example:lab-model"
FIXED = ("--policy", "fixed_k", "--trials", "4")
SAID = "Do not speculate here"


@pytest.fixture
def dear(tmp_path: Path) -> Path:
    """A draft step takes as long as the target's."""
    path = tmp_path / "dear.json"
    path.write_text('{"s_d": 0.01, "s_t": 0.01}')
    return path


@pytest.mark.parametrize("command", [("tune",), ("leaderboard", "--no-sensitivity")])
def test_a_command_that_names_a_best_says_not_to_speculate(command: tuple[str, ...], dear: Path) -> None:
    name, *more = command
    out = call("specsim", name, TRACE, "--cost", str(dear), *FIXED, *more).out
    assert SAID in " ".join(out.split())


def test_the_page_of_a_tuning_says_so(dear: Path) -> None:
    document = json_of(call("specsim", "tune", TRACE, "--cost", str(dear), *FIXED, "--json"))
    assert document["holdout"]["speedup"]["high"] < 1 and SAID in tuning_result(document).verdict


def test_a_sweep_says_so_of_each_cell(dear: Path) -> None:
    cheap = dear.with_name("cheap.json")
    cheap.write_text('{"s_d": 0.0001, "s_t": 0.01}')
    out = call("specsim", "sweep", TRACE, "--cost", str(dear), "--cost", str(cheap), *FIXED).out
    lines = {path.name: next(line for line in out.splitlines() if path.stem in line) for path in (dear, cheap)}
    assert "slower" in lines["dear.json"] and "faster" in lines["cheap.json"]
