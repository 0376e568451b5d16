"""Commands about acceptance models, joined traces and tuning: what they print and refuse."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import specsim
from specsim.acceptance.generate import generate, load_model, save_model
from specsim.cost.model import ConstantCost
from specsim.learn.settings import SearchSettings
from specsim.learn.tune import tune_on
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import CHAIN_POLICIES
from specsim.replaying.priced import PricedTrace
from specsim.report.tuning import tuning_result
from specsim.trace.files import read_trace, write_trace
from specsim.trace.split import split_sequences
from tests.support.acceptance_examples import difficulty, fixed_k_rounds
from tests.support.commands import Result, assert_refused, call, json_of
from tests.support.joined_traces import guessing_part, lookup_part, texts
from tests.support.reference import RampCost
from tests.support.tree_traces import tree_trace
from tests.support.tuning_cases import stretchy_trace


def acceptance(*words: object) -> Result:
    return call("specsim", "acceptance", *words)


def counters(tmp_path: Path) -> Path:
    path = tmp_path / "counters.json"
    path.write_text('{"drafted": [1000, 1000], "accepted": [800, 600]}')
    return path


def test_from_counters_to_a_trace(tmp_path: Path) -> None:
    model, out = tmp_path / "model.json", tmp_path / "trace"
    text = acceptance("fit", counters(tmp_path), "--model", "per_position", "--out", model).out
    assert "0.800" in text and "0.750" in text
    sizes = ("--sequences", 3, "--output-tokens", 40, "--max-draft-tokens", 2)
    document = json_of(acceptance("generate", model, "--out", out, *sizes, "--json"))
    assert (document["sequences"], document["output_tokens"], document["depth"]) == (3, 120, 2)
    assert read_trace(out).meta["synthetic"]["parameters"] == {"alpha": [0.8, 0.75]}
    assert "120" in acceptance("generate", model, "--out", out, *sizes, "--overwrite").out


def test_from_rounds_of_one_policy_and_from_a_trace(tmp_path: Path) -> None:
    trace = generate(difficulty(), 8, 60, 4, seed=1)
    rounds, path = fixed_k_rounds(trace, 4), tmp_path / "rounds.parquet"
    names = ("policy", "sequence_id", "t", "drafted", "accepted")
    pq.write_table(pa.table({name: getattr(rounds, name) for name in names}), path)
    arguments = ("fit", path, "--model", "iid", "--policy", "fixed_k(k=4)", "--json")
    document = json_of(acceptance(*arguments, "--out", tmp_path / "iid.json"))
    assert document["fitted_to"] == {"source": "rounds", "rounds": len(rounds.drafted)}
    assert asdict(load_model(tmp_path / "iid.json")) == document["parameters"]
    unknown = acceptance("fit", path, "--model", "iid", "--policy", "x", "--out", tmp_path / "x.json")
    assert_refused(unknown, "no rounds of policy 'x'")
    write_trace(trace, tmp_path / "trace")
    text = acceptance("fit", tmp_path / "trace", "--model", "difficulty", "--out", tmp_path / "difficulty.json").out
    assert "hidden_drift" in text
    assert load_model(tmp_path / "difficulty.json").name == "difficulty"


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    save_model(difficulty(), model)
    assert_refused(acceptance("fit", counters(tmp_path), "--model", "iid", "--out", model), "exists")
    (tmp_path / "trace").mkdir()
    assert_refused(acceptance("generate", model, "--out", tmp_path / "trace"), "exists")
    acceptance("fit", counters(tmp_path), "--model", "iid", "--out", model, "--overwrite")
    assert load_model(model).name == "iid"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces lookup/ and guess/ of twelve texts, their cost files, and both/ of the two."""
    home, given = tmp_path_factory.mktemp("traces"), texts(12)
    write_trace(lookup_part(given, 7), home / "lookup")
    write_trace(guessing_part(given, 0.8, 1), home / "guess")
    (home / "lookup.json").write_text('{"s_d": 1e-6, "s_t": 0.010}')
    (home / "guess.json").write_text('{"s_d": 0.001, "s_t": 0.010}')
    costs = [word for name in ("lookup", "guess") for word in ("--cost", home / f"{name}.json")]
    joined = json_of(call("specsim", "join", home / "lookup", home / "guess", *costs, "--out", home / "both", "--json"))
    assert joined["cost"] == str(home / "both" / "cost.json") and joined["without_trees"] == []
    return home


def test_join_says_what_it_joined(folder: Path, tmp_path: Path) -> None:
    line = ("join", folder / "lookup", folder / "guess", "--out", tmp_path / "out")
    document = json_of(call("specsim", *line, "--json"))
    parts = [specsim.read_trace(folder / name) for name in ("lookup", "guess")]
    assert document["depth"] == 5 and document["sequences"] == 12 and document["cost"] is None
    assert [part["drafter"] for part in document["drafters"]] == ["prompt lookup", "guess 1"]
    both = [np.minimum(part.match_len, 5) for part in parts]
    assert [part["mean_match_len"] for part in document["drafters"]] == [lengths.mean() for lengths in both]
    assert document["mean_longest_match"] == np.maximum(*both).mean()
    again = call("specsim", *line)
    assert again.code == 2 and "exists" in again.err
    shown = call("specsim", *line, "--overwrite").out
    assert "prompt lookup" in shown and "the longest of them" in shown and "trees" not in shown


def test_replay_tune_and_leaderboard_take_a_joined_trace(folder: Path) -> None:
    given = (folder / "both", "--cost", folder / "both" / "cost.json", "--json")
    replayed = json_of(call("specsim", "replay", *given, "--policy", "switch_match", "--set", "least=0.2"))
    assert replayed["oracle_of"] == "drafters and chains" and replayed["oracle_regret"] >= 0
    tuned = json_of(call("specsim", "tune", *given, "--policy", "first_that_drafts", "--trials", 6, "--jobs", 1))
    assert tuned["references"]["best_fixed_k"]["policy"] == "one_drafter"
    board = json_of(call("specsim", "leaderboard", *given, "--trials", 3, "--replays", 1))
    assert {row["policy"] for row in board["boards"][0]["rows"]} == {
        "one_drafter", "switch_match", "first_that_drafts"
    }  # fmt: skip
    document = json_of(call("specsim", "info", folder / "both", "--json"))
    assert document["drafter"] == "prompt lookup + guess 1"


def test_what_does_not_fit_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    write_trace(guessing_part(texts(12, seed=1), 0.8, 1), tmp_path / "other")
    both, out = folder / "both", ("--out", tmp_path / "out")
    cost = ("--cost", folder / "guess.json")
    for line, message in (
        (("join", folder / "guess", tmp_path / "other", *out), "cannot be joined: "),
        (("join", folder / "guess", folder / "guess", *out), "named twice"),
        (("join", folder / "guess", *out), "1 traces to join"),
        (("join", folder / "lookup", folder / "guess", *cost, *out), "1 cost files for 2 traces"),
        (("replay", both, "--policy", "fixed_k", "--cost", both / "cost.json"), "drafts with a single drafter"),
        (("replay", both, "--policy", "switch_match", *cost), "costs of 1 drafters for a joined trace of 2"),
        (("replay", folder / "guess", "--policy", "switch_match", *cost), "join traces with `specsim join`"),
        (
            ("replay", folder / "guess", "--policy", "fixed_k", "--cost", both / "cost.json"),
            "the trace is of a single drafter",
        ),
        (("replay", both, "--policy", "switch_match", "--as", "vllm", *cost), "this trace is joined"),
        (("tree", "search", both, "--nodes", 4), f"joined trace of 2 drafters; give a single part, such as {both}/1"),
        (("acceptance", "fit", both, "--model", "iid", "--out", tmp_path / "model.json"), "joined trace of 2 drafters"),
        (
            ("serve", "simulate", both, "--cost", "specdecode-bench-llama3.1-8b-eagle-h100"),
            "joined trace of 2 drafters",
        ),
    ):
        refused = call("specsim", *line)
        assert refused.code == 2 and message in refused.err and refused.err.count("\n") == 1, refused.err
    assert not (tmp_path / "out").exists()


def test_records_of_trees_are_left_behind_and_named(tmp_path: Path) -> None:
    trace = tree_trace(1, sequences=2, tokens=12)
    for name in ("a", "b"):
        write_trace(trace, tmp_path / name)
    line = ("join", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out")
    document = json_of(call("specsim", *line, "--json"))
    assert document["without_trees"] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert "switching policies draft chains" in " ".join(call("specsim", *line, "--overwrite").out.split())
    assert specsim.read_trace(tmp_path / "out").tree is None
    listing = json.loads((tmp_path / "out" / "joined.json").read_text())
    assert listing == {"kind": "specsim-joined-trace", "version": 1, "parts": 2}


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


def test_bad_options_are_refused(tune_command: list[object]) -> None:
    assert_refused(call(*tune_command, "--policy", "adaedl", "--jobs", 0), "--jobs")


TRACE = "example:lab-model"
FIXED = ("--policy", "fixed_k", "--trials", "4")
SAID = "Do not speculate here"


@pytest.fixture
def dear(tmp_path: Path) -> Path:
    """A draft step takes as long as the target's."""
    path = tmp_path / "dear.json"
    path.write_text('{"s_d": 0.01, "s_t": 0.01}')
    return path


@pytest.mark.parametrize("command", ["tune", "leaderboard"])
def test_a_command_that_names_a_best_says_not_to_speculate(command: str, dear: Path) -> None:
    out = call("specsim", command, TRACE, "--cost", str(dear), *FIXED).out
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
