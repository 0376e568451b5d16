"""All drafters on one board: one baseline, one split, honest ties, real runs, a job that goes on, and its command."""

from __future__ import annotations

import copy
import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import realrun.leaderboard.costs as costs_module
import realrun.leaderboard.job as job_module
import realrun.leaderboard.measure as measure_module
import realrun.profiling.profile as profile_module
from realrun.cli.leaderboard import print_board
from realrun.decode.sampling import Sampler
from realrun.drafters.lookup import LookupKind
from realrun.leaderboard.job import Settings, named, run_leaderboard
from realrun.pairs.pair import LAB_DRAFTERS, LOOKUP, Pair
from realrun.pairs.prompts import Prompt
from realrun.recording.record import RecordSettings
from specsim.cost.profile import read_cost
from specsim.errors import InputError
from specsim.policy.base import build_policy
from specsim.policy.registry import POLICIES
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.report.drafters import DEFINITIONS, render_drafters
from specsim.speedup.intervals import paired_difference
from specsim.trace.files import read_trace
from specsim.trace.split import split_sequences
from tests.realrun.cli.test_drafter_commands import command
from tests.realrun.cli.test_drafter_commands import home as home
from tests.support.pairs.inside import early_exit_pair, skipping_pair, target_of
from tests.support.tiny import tiny_prompts

CHOICE = Sampler("gumbel", 0.8, 0)
KINDS = tuple(POLICIES[name] for name in ("fixed_k", "max_confidence", "vct"))
SETTINGS = Settings(RecordSettings(3, 20, CHOICE, tree_nodes=8, tree_width=3), KINDS, trials=4, repeats=1)
ENDS = (3, 17, 40, 66)  # so many that outputs differ in length
NAMES = ["exit", "tuned", LOOKUP]
Job = tuple[dict[str, Any], Path]


def prompts_of() -> list[Prompt]:
    return tiny_prompts(12)


def tiny_pairs() -> tuple[dict[str, Pair], Pair]:
    """Three drafters of one target, one of which brings a tuned copy of it, and the target with none."""
    target = target_of()
    tuned = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(1.1)
    plain = replace(skipping_pair(target), draft_name=LOOKUP, drafter=LookupKind())
    pairs = [replace(pair, eos_token_ids=ENDS) for pair in (early_exit_pair(target), early_exit_pair(tuned), plain)]
    return dict(zip(NAMES, pairs, strict=True)), pairs[-1]


@pytest.fixture(scope="module")
def quick() -> Any:
    """Short slices of the costs, over small trees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs_module, "SLICE_REPEATS", 2)
        patch.setattr(costs_module, "TREE_TOKENS", 7)
        patch.setattr(profile_module, "WARMUP_ROUNDS", 1)
        patch.setattr(job_module, "SLICES", 1)
        yield


def start(out: Path, settings: Settings = SETTINGS, **options: Any) -> dict[str, Any]:
    pairs, plain = tiny_pairs()
    return run_leaderboard(pairs, plain, prompts_of(), settings, out, lambda *step: None, **options)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, quick: None) -> Job:
    out = tmp_path_factory.mktemp("board") / "out"
    return start(out), out


def by_drafter(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["drafter"] == name]


def test_it_writes_what_it_promises(job: Job) -> None:
    document, out = job
    assert {path.name for path in out.iterdir()} == {
        *(*NAMES, "autoregressive", "decoded", "settings.json"),
        *("leaderboard.json", "leaderboard.csv", "report.html"),
    }
    for name in NAMES:
        assert {path.name for path in (out / name).iterdir()} == {"trace", "profile.json", "samples.json", "tuned.json"}
    assert json.loads((out / "leaderboard.json").read_text()) == json.loads(json.dumps(document))
    with (out / "leaderboard.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["drafter"] for line in lines] == [row["drafter"] for row in document["rows"]]
    assert [float(line["speedup"]) for line in lines] == [row["speedup"]["estimate"] for row in document["rows"]]
    page = (out / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "src=" not in page and page.count("<svg") == 2
    assert all(name in page for name in NAMES) and all(term in page for term in DEFINITIONS)
    assert render_drafters(document) == page


def test_every_drafter_has_the_best_of_each_role_that_it_can_have(job: Job) -> None:
    document, out = job
    for name in NAMES:
        rows = {row["role"]: row for row in by_drafter(document, name)}
        assert set(rows) == {"fixed K", "adaptive chain"} | (set() if name == LOOKUP else {"tree"})
        tried = json.loads((out / name / "tuned.json").read_text())["rows"]
        for role, policies in (("fixed K", {"fixed_k"}), ("adaptive chain", {"max_confidence"}), ("tree", {"vct"})):
            own = [row["train_speedup"] for row in tried if row["policy"] in policies]
            assert role not in rows or rows[role]["train_speedup"] == max(own)
        best = [row for row in rows.values() if row["best_of_drafter"]]
        assert [row["train_speedup"] for row in best] == [max(row["train_speedup"] for row in rows.values())]
    assert "vct" in [one["policy"] for one in document["skipped"] if one["drafter"] == LOOKUP]


def test_all_share_one_baseline_and_one_split(job: Job) -> None:
    document, out = job
    plain = json.loads((out / "autoregressive" / "profile.json").read_text())["median_s"]["autoregressive"]
    _, held = split_sequences(read_trace(out / "exit" / "trace"), tuning_share=0.5, seed=0)
    assert document["sequences"] == {"tuning": 12 - len(held), "holdout": len(held)}
    baseline = None
    for row in document["rows"]:
        trace = read_trace(out / row["drafter"] / "trace").select(held)
        cost = replace(read_cost(out / row["drafter"] / "profile.json"), autoregressive_s=np.array(plain))
        policy = build_policy(POLICIES[row["policy"]], row["params"])
        replayed = replay(trace, policy, cost_table(trace, cost, policy), seed=0)
        if not row["own_target"]:
            baseline = replayed.autoregressive_s
            assert row["sequence_seconds"] == pytest.approx(replayed.speculative_s)
            assert row["speedup"]["estimate"] == pytest.approx(replayed.speedup)
        assert row["tau"] == pytest.approx(replayed.output_tokens.sum() / replayed.num_rounds.sum())
    assert baseline is not None
    assert {row["drafter"] for row in document["rows"] if row["own_target"]} == {"tuned"}
    for row in document["rows"]:
        assert row["speedup"]["estimate"] == pytest.approx(baseline.sum() / sum(row["sequence_seconds"]))


def test_a_target_of_its_own_is_charged_for_as_much_text(job: Job) -> None:
    """Its outputs may be shorter or longer than the baseline's; seconds are for the baseline's length."""
    document, out = job
    own, plain = (read_trace(out / name / "trace") for name in ("tuned", "exit"))
    _, held = split_sequences(own, tuning_share=0.5, seed=0)
    assert not np.array_equal(own.output_tokens[held], plain.output_tokens[held])
    row = by_drafter(document, "tuned")[0]
    cost = json.loads((out / "autoregressive" / "profile.json").read_text())["median_s"]["autoregressive"]
    model = replace(read_cost(out / "tuned" / "profile.json"), autoregressive_s=np.array(cost))
    policy = build_policy(POLICIES[row["policy"]], row["params"])
    runs = [replay(t, policy, cost_table(t, model, policy), seed=0) for t in (own.select(held), plain.select(held))]
    expected = runs[0].speculative_s * runs[1].autoregressive_s / runs[0].autoregressive_s
    assert row["sequence_seconds"] == pytest.approx(expected)


def test_order_and_ties_follow_from_the_held_out_prompts(job: Job) -> None:
    document, _ = job
    rows = document["rows"]
    speedups = [row["speedup"]["estimate"] for row in rows]
    assert speedups == sorted(speedups, reverse=True)
    assert rows[0]["leader_minus_this"] is None and not rows[0]["tied_with_leader"]
    baseline = np.array(rows[0]["sequence_seconds"]) * 0 + 1.0
    for row in rows[1:]:
        behind = row["leader_minus_this"]
        assert behind["difference"]["estimate"] == pytest.approx(speedups[0] - row["speedup"]["estimate"])
        low, high = behind["difference"]["low"], behind["difference"]["high"]
        assert row["tied_with_leader"] == (low <= 0 <= high)
    same = paired_difference(baseline, rows[0]["sequence_seconds"], rows[0]["sequence_seconds"])
    assert not same.separated


def test_every_row_was_really_decoded_as_replayed(job: Job) -> None:
    document, out = job
    (repeat,) = (out / "decoded").iterdir()
    decoded = json.loads(repeat.read_text())
    assert len(decoded) == len(document["rows"]) + 1
    base = decoded["autoregressive"]
    for row in document["rows"]:
        own = decoded[f"{row['drafter']}: {row['role']}"]
        assert row["rounds_identical_percent"] == row["output_identical_percent"] == 100.0
        per_token = np.array(own["seconds"]) / own["tokens"]
        expected = sum(base["seconds"]) / (per_token * base["tokens"]).sum()
        assert row["measured"]["estimate"] == pytest.approx(expected)
        assert row["error_percent"] == pytest.approx((row["speedup"]["estimate"] / expected - 1) * 100)
    assert document["median_abs_error_percent"] == np.median([abs(row["error_percent"]) for row in document["rows"]])


def test_a_second_start_goes_on(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document, out = job
    again = tmp_path / "again"
    shutil.copytree(out, again)
    with monkeypatch.context() as patch:
        for module, name in (
            (costs_module, "profile"),
            (job_module, "leaderboard"),
            (measure_module, "take_turns"),
        ):
            patch.setattr(module, name, None)  # calling it would raise
        second = start(again)
        assert json.loads(json.dumps(second["rows"])) == json.loads(json.dumps(document["rows"]))
        predicted = start(again, replace(SETTINGS, repeats=0))
    assert all(row["measured"] is row["error_percent"] is None for row in predicted["rows"])
    assert [row["label"] for row in predicted["rows"]] == [row["label"] for row in document["rows"]]
    kept = (again / "decoded" / "0.json").read_text()
    more = start(again, replace(SETTINGS, repeats=2))
    assert (again / "decoded" / "0.json").read_text() == kept and (again / "decoded" / "1.json").is_file()
    assert more["slices"] == document["slices"] + 1


def test_costs_of_all_are_measured_slice_by_slice_in_turn(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []
    measured = costs_module.Costs._slice

    def noted(self: costs_module.Costs, name: str, *asked: Any) -> None:
        turns.append(name)
        measured(self, name, *asked)

    monkeypatch.setattr(costs_module.Costs, "_slice", noted)
    monkeypatch.setattr(job_module, "SLICES", slices := 3)
    chains = RecordSettings(2, 8, CHOICE)
    document = start(tmp_path / "out", replace(SETTINGS, repeats=0, kinds=KINDS[:1], record=chains))
    size = len(NAMES)
    assert len(turns) == 2 * slices * size and document["slices"] == slices
    assert set(turns[::2]) == {"autoregressive"}  # beside every slice of a drafter
    turns = turns[1::2]
    rounds = [turns[i : i + size] for i in range(0, len(turns), size)]
    assert all(set(one) == {*NAMES} for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1  # in another order each time


def test_it_refuses_what_does_not_fit(job: Job, tmp_path: Path) -> None:
    _, out = job
    with pytest.raises(InputError, match="trials=4, asked for 9; pass --overwrite"):
        start(out, replace(SETTINGS, trials=9))
    with pytest.raises(InputError, match="greedy and Gumbel"):
        start(tmp_path / "out", replace(SETTINGS, record=RecordSettings(4, 20, Sampler("rejection"))))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match="holds other files"):
        start(tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "mine.txt").read_text() == "keep"
    with pytest.raises(InputError, match="two drafters are called medusa"):
        named("a/medusa,b/medusa", "lab")
    with pytest.raises(InputError, match="name the drafters of some/model"):
        named(None, "some/model")
    with pytest.raises(InputError, match="cannot be called decoded"):
        named("model,x/decoded", "lab")
    default = [*named(None, "lab")]
    assert default[0] == "model" and default[-1] == LOOKUP and set(default) <= {"model", *LAB_DRAFTERS, LOOKUP}


def test_the_table_shows_every_row(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    document, _ = job
    print_board(document)
    shown = capsys.readouterr().out
    assert "autoregressive" in shown and "tuned (own target)" in shown and "median absolute error" in shown
    for row in document["rows"]:
        assert f"{row['speedup']['estimate']:.3f} [" in shown and f"{row['measured']['estimate']:.3f} [" in shown


@pytest.mark.slow
def test_the_command_ranks_drafters_of_any_target(home: Path, tmp_path: Path, quick: None) -> None:
    folder = home / "llama"
    drafters = f"{LOOKUP},{folder / 'eesd'},{folder / 'medusa'}"
    options = ["--target", folder / "target", "--drafters", drafters, "--prompts", home / "prompts.jsonl"]
    options += ["--num-prompts", 12, "--max-new-tokens", 16, "--max-draft-tokens", 3]
    options += ["--tree-nodes", 0, "--dtype", "float64"]
    options += ["--policy", "fixed_k", "--policy", "max_confidence", "--trials", 4, "--repeats", 1, "--json"]
    document = json.loads(command("leaderboard", "--out", tmp_path / "board", *options))
    assert {row["drafter"] for row in document["rows"]} == {LOOKUP, "eesd", "medusa"}
    assert all(row["rounds_identical_percent"] == 100.0 for row in document["rows"])
    assert not any(one["trees"] for one in document["drafters"])


@pytest.mark.slow
@pytest.mark.bench
def test_the_labs_drafters_on_one_board(tmp_path: Path) -> None:
    options = ["--drafters", f"model,medusa-1,medusa-2,{LOOKUP}", "--num-prompts", 24]
    options += ["--max-new-tokens", 64, "--max-draft-tokens", 6]
    options += ["--tree-nodes", 24, "--trials", 10, "--repeats", 1, "--dtype", "float64", "--mode", "greedy"]
    options += [word for name in ("fixed_k", "adaedl", "vct") for word in ("--policy", name)]
    document = json.loads(command("leaderboard", "--out", tmp_path / "board", *options, "--json"))
    assert len(document["rows"]) == 3 * 3 + 2
    assert {row["drafter"] for row in document["rows"] if row["own_target"]} == {"medusa-2"}
    assert all(row["rounds_identical_percent"] == 100.0 for row in document["rows"])
    assert document["median_abs_error_percent"] < 20
    tau = {row["drafter"]: row["tau"] for row in document["rows"] if row["role"] == "fixed K"}
    assert min(tau.values()) > 1.1
