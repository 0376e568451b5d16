"""`specsim join`, and what the other commands do with what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import specsim
from specsim.trace.files import write_trace
from tests.support.commands import call, json_of
from tests.support.joined_traces import guessing_part, lookup_part, texts
from tests.support.tree_traces import tree_trace


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
    board = json_of(call("specsim", "leaderboard", *given, "--trials", 3, "--replays", 1, "--no-sensitivity"))
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
