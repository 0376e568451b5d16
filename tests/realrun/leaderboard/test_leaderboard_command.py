"""All drafters on one board: one baseline, one split, honest ties, real runs, a job that goes on, and its command."""

from __future__ import annotations

import copy
import csv
import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from markupsafe import escape

import realrun.experiment.measuring as measuring_module
import realrun.experiment.pipeline as pipeline_module
import realrun.leaderboard.job as costs_module
import realrun.measure.sweeps as probes_module
from realrun.cli.board import print_board
from realrun.decode.sampling import Sampler
from realrun.drafters.lookup import LookupKind
from realrun.drafters.registry import DRAFTERS
from realrun.experiment.settings import Candidate
from realrun.leaderboard.job import (
    ADAPTIVE,
    FIXED,
    LOOPS,
    PAPER,
    TREE,
    BoardSettings,
    best_of_roles,
    named,
    run_leaderboard,
    trigram_shares,
)
from realrun.lm.variants import expand
from realrun.measure.record import RecordSettings
from realrun.measure.stream import Stream
from realrun.measure.sweeps import Prober
from realrun.pairs.drafter_files import LAB_DRAFTERS
from realrun.pairs.pair import LOOKUP, Pair
from realrun.pairs.prompts import Prompt
from specsim.cost.files import read_cost
from specsim.cost.profile import Profile
from specsim.io.errors import InputError
from specsim.policy.base import build_policy
from specsim.policy.registry import POLICIES, make_policy
from specsim.replaying.intervals import NO_SPECULATION, simultaneous
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.report.drafters import DEFINITIONS, render_drafters
from specsim.report.experiment import DrafterBoard
from specsim.trace.files import read_trace
from specsim.trace.split import split_sequences
from tests.realrun.cli.test_drafter_commands import command
from tests.realrun.cli.test_drafter_commands import home as home
from tests.support.pairs.inside import early_exit_pair, skipping_pair, target_of
from tests.support.reference import small_trace
from tests.support.tiny import tiny_prompts

CHOICE = Sampler("gumbel", 0.8, 0)
KINDS = tuple(POLICIES[name] for name in ("fixed_k", "max_confidence", "vct"))
SETTINGS = BoardSettings(RecordSettings(3, 20, CHOICE, tree_nodes=8, tree_width=3), KINDS, trials=4, repeats=3)
ENDS = (3, 17, 40, 66)  # so many that outputs differ in length
NAMES = ["exit", "tuned", LOOKUP]
CLOCKS = {
    "load",  # in documents, what is measured by a clock or follows from that
    *("speedup", "leader_minus_this", "tied_with_leader", "measured", "error_percent", "token_seconds"),
    *("sequence_seconds", "null_arm", "noise_floor_percent", "median_abs_error_percent", "step_ratio"),
    *(
        "autoregressive_token_seconds",
        "choice",
        "baseline",
        "wall_clock_speedup",
        "wall_clock_differs",
        "measured_sequence_seconds",
        "baseline_sequence_seconds",
        *("text_known", "costs_known", "errors"),
        "without_loops",
        "mean_s",
        "median_s",
        "p25_s",
        "p75_s",
        "provenance",
        "environment",
    ),
}
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
    """Short slices of the costs, over small trees, and few probes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs_module, "TREE_TOKENS", 7)
        patch.setattr(probes_module, "ENOUGH", 3)
        patch.setattr(costs_module, "SLICES", 1)
        yield


def start(out: Path, settings: BoardSettings = SETTINGS, **options: Any) -> dict[str, Any]:
    pairs, plain = tiny_pairs()
    return run_leaderboard(pairs, plain, prompts_of(), settings, out, lambda *step: None, **options).as_dict()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, quick: None) -> Job:
    out = tmp_path_factory.mktemp("board") / "out"
    return start(out), out


def by_drafter(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["drafter"] == name]


def test_it_writes_what_it_promises(job: Job) -> None:
    document, out = job
    assert {path.name for path in out.iterdir()} == {
        *(*NAMES, "autoregressive", "decoded", "settings.json", "forecast.json"),
        *("leaderboard.json", "leaderboard.csv", "report.html"),
    }
    for name in NAMES:
        assert {path.name for path in (out / name).iterdir()} == {
            *("trace", "profile.json", "samples.json", "tuned.json", "tuning_profile.json")
        }
    assert json.loads((out / "leaderboard.json").read_text()) == json.loads(json.dumps(document))
    with (out / "leaderboard.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["drafter"] for line in lines] == [row["drafter"] for row in document["rows"]]
    assert [float(line["speedup"]) for line in lines] == [row["speedup"]["estimate"] for row in document["rows"]]
    page = (out / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "src=" not in page and page.count("<svg") == 2
    assert all(name in page for name in NAMES) and all(escape(term) in page for term in DEFINITIONS)
    assert render_drafters(DrafterBoard.from_json(document, "the board", "rank again")) == page


def test_every_drafter_has_the_best_of_each_role_that_it_can_have(job: Job) -> None:
    document, out = job
    for name in NAMES:
        rows = {row["role"]: row for row in by_drafter(document, name)}
        assert set(rows) == {"fixed K", "adaptive chain"} | (set() if name == LOOKUP else {"tree"})
        tried = json.loads((out / name / "tuned.json").read_text())
        for role, policies in (("fixed K", {"fixed_k"}), ("adaptive chain", {"max_confidence"}), ("tree", {"vct"})):
            own = [
                row["train_speedup"]
                for variant, row in tried.items()
                if variant.partition(",")[0] in policies and "train_speedup" in row
            ]
            assert role not in rows or rows[role]["train_speedup"] == pytest.approx(max(own))
        best = [row for row in rows.values() if row["best_of_drafter"]]
        assert [row["train_speedup"] for row in best] == [max(row["train_speedup"] for row in rows.values())]
    assert "vct" in [entry["policy"] for entry in document["skipped"] if entry["drafter"] == LOOKUP]


def test_all_share_one_baseline_and_one_split(job: Job) -> None:
    """Predictions are made under what was measured while decoding; the baseline is the plain target's for all."""
    document, out = job
    _, held = split_sequences(read_trace(out / "exit" / "trace"), tuning_share=0.5, seed=0)
    assert document["sequences"] == {"tuning": 12 - len(held), "holdout": len(held)}
    baseline = None
    for row in document["rows"]:
        trace = read_trace(out / row["drafter"] / "trace").select(held)
        cost = read_cost(out / row["drafter"] / "profile.json")
        policy = build_policy(POLICIES[row["policy"]], row["params"])
        replayed = replay(trace, policy, cost_table(trace, cost, policy), seed=0)
        if not row["own_target"]:
            same = baseline is None or np.array_equal(baseline, replayed.autoregressive_s)
            assert same
            baseline = replayed.autoregressive_s
            assert row["sequence_seconds"] == pytest.approx(replayed.speculative_s)
            assert row["speedup"]["estimate"] == pytest.approx(replayed.speedup)
        assert row["tau"] == pytest.approx(replayed.output_tokens.sum() / replayed.num_rounds.sum())
    assert baseline is not None
    assert {row["drafter"] for row in document["rows"] if row["own_target"]} == {"tuned"}
    for row in document["rows"]:
        assert row["speedup"]["estimate"] == pytest.approx(baseline.sum() / sum(row["sequence_seconds"]))


def test_all_are_tuned_against_one_baseline(job: Job) -> None:
    """The plain target's median; every other cost is the drafter's own median, and no mean is left to be read."""
    _, out = job
    plain = json.loads((out / "autoregressive" / "samples.json").read_text())["profile"]
    for name in NAMES:
        own = json.loads((out / name / "samples.json").read_text())["profile"]
        tuning = json.loads((out / name / "tuning_profile.json").read_text())
        assert tuning["mean_s"] is None
        assert tuning["median_s"]["autoregressive"] == plain["median_s"]["autoregressive"]
        assert tuning["median_s"]["verify"] == own["median_s"]["verify"]
        assert read_cost(out / name / "tuning_profile.json").autoregressive_s.tolist() == pytest.approx(
            plain["median_s"]["autoregressive"]
        )


TRUE_MS = {"autoregressive": 10.0, "verify": 11.0, "draft": 0.5}


def slowing(factors: dict[tuple[str, int], float], taken: list[tuple[str, float]]) -> Any:
    """A profile on a machine that is slower by a factor in some slices of some; all costs are otherwise TRUE_MS."""
    counts: dict[str, int] = {}

    def measure(pair: Any, done: list[Stream], count: int, *, contexts: list[int], depth: int, **_: Any) -> Profile:
        number = counts[pair] = counts.get(pair, 0) + 1
        factor = factors.get((pair, number), 1.0)
        taken.append((pair, factor))
        done.append(stream := Stream())
        for context in contexts:
            for _sweep in range(count):
                stream.points["autoregressive",].append((context, 1e-3 * factor * TRUE_MS["autoregressive"]))
                for tokens in range(1, depth + 2):
                    stream.points["verify", tokens].append((context, 1e-3 * factor * TRUE_MS["verify"]))
                for place in range(1, depth + 1):
                    stream.points["draft", place].append((context, 1e-3 * factor * TRUE_MS["draft"]))
        whole = Stream()
        for sweep in done:
            whole.merge(sweep.as_dict())
        return Profile.from_json({"contexts": contexts, **whole.tables(contexts, depth, [], masks=False)}, "given")

    return measure


def costs_on(
    out: Path,
    names: str,
    factors: dict[tuple[str, int], float],
    monkeypatch: pytest.MonkeyPatch,
    limit_s: float = math.inf,
) -> Any:
    taken: list[tuple[str, float]] = []
    monkeypatch.setattr(costs_module, "profile_slice", slowing(factors, taken))
    monkeypatch.setattr(costs_module, "SLICES", 5)
    pairs: Any = {name: name for name in names}
    how: Any = {"contexts": [8, 64], "record": RecordSettings(4, 20, CHOICE), "seed": 0}
    costs = costs_module.SlicedCosts(pairs, "plain", out, **how)  # type: ignore[arg-type]
    return {name: made.cost for name, made in costs.measure(lambda *step: None, limit_s).items()}, taken


@pytest.mark.parametrize(("limit_s", "slices"), [(math.inf, 5), (0.0, 3)])
def test_costs_take_fewer_slices_where_time_is_short(
    limit_s: float, slices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every drafter as many as the others."""
    _, taken = costs_on(tmp_path, "ab", {}, monkeypatch, limit_s)
    assert {*Counter(name for name, _ in taken).values()} == {slices} and len(taken) == 3 * slices


@pytest.mark.parametrize(
    "slow", [{("plain", 1): 2.6}, {("a", 1): 2.6}, {("a", 2): 3.0, ("plain", 4): 3.0, ("b", 5): 3.0}]
)
def test_a_machine_that_was_slow_for_a_slice_counts_against_nobody(
    slow: dict[tuple[str, int], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between 14 and 38 ms a token: the forecast stays within 1 %, where a ratio of means was wrong by 74 %."""
    models, _ = costs_on(tmp_path, "ab", slow, monkeypatch)
    for cost in models.values():
        assert cost.autoregressive_s == pytest.approx([0.010] * 2, rel=0.01)
        assert cost.verify_s == pytest.approx(np.full((5, 2), 0.011), rel=0.01)
        assert cost.draft_step_s == pytest.approx(np.full((4, 2), 0.0005), rel=0.01)


def test_costs_that_cannot_be_are_measured_further_and_refused_if_that_does_not_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow in the first three slices of the plain target, a round would take half the step that it contains."""
    early = {("plain", number): 2.6 for number in (1, 2, 3)}
    models, taken = costs_on(tmp_path / "early", "a", early, monkeypatch)
    assert len(taken) == 2 * 10 and models["a"].autoregressive_s == pytest.approx([0.010] * 2, rel=0.01)
    always = {("plain", number): 2.6 for number in range(1, 99)}
    with pytest.raises(InputError, match="tuning costs of a: a round at K = 1 takes .* of a step without speculation"):
        costs_on(tmp_path / "always", "a", always, monkeypatch)
    assert not (tmp_path / "always" / "a" / "tuning_profile.json").exists()


def test_the_forecast_is_written_before_anything_held_out_is_decoded(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, out = job
    again = tmp_path / "again"
    shutil.copytree(out, again)
    (again / "forecast.json").unlink()
    written: list[dict[str, float]] = []

    def measure(*_: Any, **__: Any) -> Any:
        rows = json.loads((again / "forecast.json").read_text())["rows"]
        written.append({row["label"]: row["forecast"]["estimate"] for row in rows})
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline_module, "measure_in_turns", measure)
    with pytest.raises(KeyboardInterrupt):
        start(again)
    assert written == [{row["label"]: row["train_speedup"] for row in document["rows"]}]


def test_a_target_of_its_own_is_charged_for_as_much_text(job: Job) -> None:
    """Its outputs may be shorter or longer than the baseline's; seconds are for the baseline's length."""
    document, out = job
    own, plain = (read_trace(out / name / "trace") for name in ("tuned", "exit"))
    _, held = split_sequences(own, tuning_share=0.5, seed=0)
    assert not np.array_equal(own.output_tokens[held], plain.output_tokens[held])
    row = by_drafter(document, "tuned")[0]
    policy = build_policy(POLICIES[row["policy"]], row["params"])
    runs = [
        replay(trace, policy, cost_table(trace, read_cost(out / name / "profile.json"), policy), seed=0)
        for name, trace in (("tuned", own.select(held)), ("exit", plain.select(held)))
    ]
    expected = runs[0].speculative_s * runs[1].autoregressive_s / runs[0].autoregressive_s
    assert row["sequence_seconds"] == pytest.approx(expected)


def measured_seconds(out: Path, document: dict[str, Any]) -> tuple[Any, list[Any]]:
    """By medians, for as much text as the baseline's: the baseline's seconds, and those of every row."""
    base_s, wanted = seconds_and_tokens(out, "autoregressive")
    measured = [seconds_and_tokens(out, f"{row['drafter']}: {row['role']}") for row in document["rows"]]
    return base_s, [own_s / tokens * wanted for own_s, tokens in measured]


def test_order_and_ties_follow_from_the_held_out_prompts(job: Job) -> None:
    document, out = job
    rows = document["rows"]
    speedups = [row["measured"]["estimate"] for row in rows]
    assert speedups == sorted(speedups, reverse=True)
    assert rows[0]["leader_minus_this"] is None and not rows[0]["tied_with_leader"]
    base_s, seconds = measured_seconds(out, document)
    assert document["baseline_sequence_seconds"] == pytest.approx(base_s)
    intervals = simultaneous(base_s, seconds)
    for at, (row, own_s) in enumerate(zip(rows, seconds, strict=True)):
        assert row["measured_sequence_seconds"] == pytest.approx(own_s)
        spread = intervals.speedups[at]
        assert (row["measured"]["low"], row["measured"]["high"]) == pytest.approx((spread.low, spread.high))
        if at == 0:
            continue
        behind = row["leader_minus_this"]
        assert behind["difference"]["estimate"] == pytest.approx(speedups[0] - row["measured"]["estimate"])
        low, high = behind["difference"]["low"], behind["difference"]["high"]
        assert row["tied_with_leader"] == (low <= 0 <= high)
        expected = intervals.difference(0, at).difference
        assert (low, high) == pytest.approx((expected.low, expected.high))
    forecasts = {NO_SPECULATION: 1.0} | {row["label"]: row["train_speedup"] for row in rows}
    real = {NO_SPECULATION: 1.0} | {row["label"]: row["measured"]["estimate"] for row in rows}
    choice, chosen = document["choice"], max(forecasts, key=lambda label: forecasts[label])
    assert choice["forecast"] == chosen and choice["forecast_speedup"] == forecasts[chosen]
    assert real[choice["measured"]] == max(real.values())
    assert choice["regret"]["estimate"] == pytest.approx(max(real.values()) - real[chosen])


def test_prompts_that_loop_are_counted_and_left_out_once_more(job: Job) -> None:
    document, out = job
    trace = read_trace(out / "exit" / "trace")
    _, held = split_sequences(trace, tuning_share=0.5, seed=0)
    trace = trace.select(held)
    texts = [trace.token[start:end].tolist() for start, end in zip(trace.offsets, trace.offsets[1:], strict=False)]
    shares = [
        len(set(trigrams)) / len(trigrams) if (trigrams := [*zip(t, t[1:], t[2:], strict=False)]) else 1.0
        for t in texts
    ]
    flows = np.array([share > 0.5 for share in shares])
    assert document["looping_prompts"] == (~flows).sum()
    base_s, seconds = measured_seconds(out, document)
    for row, own_s in zip(document["rows"], seconds, strict=True):
        if flows.sum() < 2:
            assert row["without_loops"] is None
        else:
            assert row["without_loops"]["estimate"] == pytest.approx(base_s[flows].sum() / own_s[flows].sum())


def test_a_board_that_is_only_predicted_is_ranked_by_that_and_claims_no_more(job: Job, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(job[1], again)
    document = start(again, replace(SETTINGS, repeats=0))
    speedups = [row["speedup"]["estimate"] for row in document["rows"]]
    assert speedups == sorted(speedups, reverse=True) and document["choice"] is document["baseline"] is None
    assert "by predicted speedup" in (again / "report.html").read_text()


def decoded_runs(out: Path, repeat: int) -> dict[str, list[dict[str, Any]]]:
    """Every arm's runs of the held-out sequences, in their order."""
    files = sorted((out / "decoded").glob(f"{repeat}-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for document in map(json.loads, map(Path.read_text, files)):
        for (arm, _), run in zip(document["arms"], document["runs"], strict=True):
            by_arm.setdefault(arm, []).append(run)
    return by_arm


def seconds_and_tokens(out: Path, arm: str) -> tuple[Any, Any]:
    """Of an arm's sequences: seconds, each round at the median of three repeats, and output tokens."""
    parts = [f"{part}_s" for part in ("draft", "policy", "verify", "other")]
    repeats = [decoded_runs(out, repeat)[arm] for repeat in range(3)]
    seconds = [
        sum(np.median([[sum(round_[part] for part in parts) for round_ in run["rounds"]] for run in same], axis=0))
        for same in zip(*repeats, strict=True)
    ]
    return np.array(seconds), np.array([len(run["tokens"]) for run in repeats[-1]])


def test_every_row_was_really_decoded_as_replayed(job: Job) -> None:
    document, out = job
    assert set(json.loads((out / "decoded" / "probes.json").read_text())) == {*NAMES}
    runs = decoded_runs(out, repeat=0)
    assert len(runs) == len(document["rows"]) + 2  # with two baselines
    base_s, wanted = seconds_and_tokens(out, "autoregressive")
    for row in document["rows"]:
        own_s, tokens = seconds_and_tokens(out, f"{row['drafter']}: {row['role']}")
        assert row["rounds_identical_percent"] == row["output_identical_percent"] == 100.0
        expected = base_s.sum() / (own_s / tokens * wanted).sum()
        assert row["measured"]["estimate"] == pytest.approx(expected)
        assert row["error_percent"] == pytest.approx((row["speedup"]["estimate"] / expected - 1) * 100)
    assert document["median_abs_error_percent"] == np.median([abs(row["error_percent"]) for row in document["rows"]])
    null_s, tokens = seconds_and_tokens(out, "null arm")
    assert np.array_equal(tokens, wanted)
    null = document["null_arm"]
    assert null["estimate"] == pytest.approx(base_s.sum() / null_s.sum())
    assert document["noise_floor_percent"] == pytest.approx(100 * max(null["high"] - 1, 1 - null["low"]))
    assert f"{document['noise_floor_percent']:.2f} %" in (out / "report.html").read_text()


def test_a_second_start_goes_on(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document, out = job
    again = tmp_path / "again"
    shutil.copytree(out, again)
    with monkeypatch.context() as patch:
        for module, name in (
            (costs_module, "profile_slice"),
            (pipeline_module, "_tuned"),
            (measuring_module, "decode_sequence"),
            (measuring_module, "warm_up"),
            (Prober, "begin"),
        ):
            patch.setattr(module, name, None)  # calling it would raise
        second = start(again)
        second["environment"]["date"] = document["environment"]["date"]
        assert json.loads(json.dumps(second)) == json.loads(json.dumps(document))
        predicted = start(again, replace(SETTINGS, repeats=0))
    assert all(row["measured"] is row["error_percent"] is None for row in predicted["rows"])
    assert predicted["null_arm"] is predicted["noise_floor_percent"] is None
    assert {row["label"] for row in predicted["rows"]} == {row["label"] for row in document["rows"]}
    first_runs = decoded_runs(again, repeat=0)
    start(again, replace(SETTINGS, repeats=5))
    assert decoded_runs(again, repeat=0) == first_runs and decoded_runs(again, repeat=1).keys() == first_runs.keys()


def without_clocks(value: Any) -> Any:
    """A document without what follows from seconds; places and orders are those of what stays."""
    if isinstance(value, dict):
        return {key: without_clocks(inner) for key, inner in value.items() if key not in CLOCKS}
    return [without_clocks(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("sequences", [2, 8])
def test_a_job_that_was_stopped_in_a_repeat_ends_as_one_that_was_not(
    job: Job, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    """Tuned under the same costs, it runs the same rounds and knows as many samples of every cost."""
    _, out = job
    twice = replace(SETTINGS, repeats=5)
    for name in ("whole", "stopped"):
        shutil.copytree(out, tmp_path / name)
        shutil.rmtree(tmp_path / name / "decoded")
    whole = start(tmp_path / "whole", twice)

    class Stopped(Exception):
        pass

    decode_sequence, decoded = measuring_module.decode_sequence, list[int]()

    def decode(*args: Any, **options: Any) -> Any:
        decoded.append(args[3])
        if len(decoded) == sequences + 1:
            raise Stopped
        return decode_sequence(*args, **options)

    monkeypatch.setattr(measuring_module, "decode_sequence", decode)
    with pytest.raises(Stopped):
        start(tmp_path / "stopped", twice)
    assert len([*(tmp_path / "stopped" / "decoded").iterdir()]) == sequences
    stopped = start(tmp_path / "stopped", twice)
    assert len(decoded) == 5 * whole["sequences"]["holdout"] + 1

    def by_label(document: dict[str, Any]) -> Any:
        rows = sorted(document["rows"], key=lambda row: row["label"])
        return {**document, "rows": rows}

    assert without_clocks(by_label(stopped)) == without_clocks(by_label(whole))
    for repeat in range(2):
        ended = [decoded_runs(tmp_path / name, repeat) for name in ("whole", "stopped")]
        assert len({json.dumps(document) for document in map(rounds_done, ended)}) == 1
    for name in NAMES:
        profiles = [json.loads((tmp_path / job / name / "profile.json").read_text()) for job in ("whole", "stopped")]
        assert len({json.dumps(without_clocks(document), sort_keys=True) for document in profiles}) == 1


def rounds_done(decoded: dict[str, list[dict[str, Any]]]) -> Any:
    """What a repeat did, without its seconds: t, drafted, accepted, verified and last of every round, and the text."""
    return {
        label: [(run["tokens"], [[*round_.values()][:5] for round_ in run["rounds"]]) for run in runs]
        for label, runs in decoded.items()
    }


def test_costs_of_all_are_measured_slice_by_slice_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, taken = costs_on(tmp_path, "abc", {}, monkeypatch)
    turns = [name for name, _ in taken]
    rounds = [turns[i : i + 4] for i in range(0, len(turns), 4)]
    assert len(rounds) == 5 and all({*round_} == {"a", "b", "c", "plain"} for round_ in rounds)
    assert len({tuple(round_) for round_ in rounds}) > 1  # in another order each time


def test_it_refuses_what_does_not_fit(job: Job, tmp_path: Path) -> None:
    _, out = job
    with pytest.raises(InputError, match="trials=4, asked for 9; pass --overwrite"):
        start(out, replace(SETTINGS, trials=9))
    pairs, plain = tiny_pairs()
    deeper = {name: replace(pair, target=expand(pair.target, 9)) for name, pair in pairs.items()}
    with pytest.raises(InputError, match="layers=.*asked for 9"):  # though of the same fingerprint
        run_leaderboard(deeper, plain, prompts_of(), SETTINGS, out, lambda *step: None)
    with pytest.raises(InputError, match="choose --mode greedy-draft"):
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
    print_board(DrafterBoard.from_json(document, "the board", "rank again"))
    shown = capsys.readouterr().out
    assert "autoregressive" in shown and "tuned (own target)" in shown and "decomposition" in shown
    for row in document["rows"]:
        assert f"{row['speedup']['estimate']:.3f} [" in shown and f"{row['measured']['estimate']:.3f} [" in shown


@pytest.mark.slow
def test_the_command_ranks_drafters_of_any_target(home: Path, tmp_path: Path, quick: None) -> None:
    folder = home / "llama"
    drafters = f"{LOOKUP},{folder / 'eesd'},{folder / 'medusa'}"
    options = ["--target", folder / "target", "--drafters", drafters, "--prompts", home / "prompts.jsonl"]
    options += ["--num-prompts", 12, "--max-new-tokens", 16, "--max-draft-tokens", 3]
    options += ["--tree-nodes", 0, "--dtype", "float64"]
    options += ["--policy", "fixed_k", "--policy", "max_confidence", "--trials", 4, "--repeats", 3, "--json"]
    document = json.loads(command("board", "--out", tmp_path / "board", *options))
    assert {row["drafter"] for row in document["rows"]} == {LOOKUP, "eesd", "medusa"}
    assert all(row["rounds_identical_percent"] == 100.0 for row in document["rows"])
    assert not any(drafter["trees"] for drafter in document["drafters"])


@pytest.mark.slow
@pytest.mark.bench
def test_the_labs_drafters_on_one_board(tmp_path: Path) -> None:
    options = ["--drafters", f"model,eagle,{LOOKUP}", "--num-prompts", 24]
    options += ["--max-new-tokens", 64, "--max-draft-tokens", 6]
    options += ["--tree-nodes", 24, "--trials", 10, "--repeats", 3, "--dtype", "float64", "--mode", "greedy"]
    options += [word for name in ("fixed_k", "adaedl", "vct") for word in ("--policy", name)]
    document = json.loads(command("board", "--out", tmp_path / "board", *options, "--json"))
    assert len(document["rows"]) == 2 * 3 + 2
    assert all(row["rounds_identical_percent"] == 100.0 for row in document["rows"])
    assert document["median_abs_error_percent"] < 20
    tau = {row["drafter"]: row["tau"] for row in document["rows"] if row["role"] == "fixed K"}
    assert min(tau.values()) > 1.1


def test_a_text_that_repeats_itself_has_few_trigrams() -> None:
    trace = small_trace()
    counts = np.diff(trace.offsets)
    tokens = [np.arange(n) if at % 2 else np.resize([3, 4], n) for at, n in enumerate(counts)]
    shares = trigram_shares(
        trace.__class__(**{**vars(trace), "token": np.concatenate(tokens).astype(trace.token.dtype)})
    )
    long_enough = [at for at, n in enumerate(counts) if n > 8]
    assert long_enough and all((shares[at] > LOOPS) == bool(at % 2) for at in long_enough)


def test_the_best_of_each_role_and_the_papers_policy_are_compared() -> None:
    speeds = {"fixed_k": 3.0, "max_confidence": 2.0, "eagle2": 1.5, "adaedl": 1.2, "sparse_tree": 1.1}
    tuned = [Candidate(make_policy(name, {}), "tuned", speed, name) for name, speed in speeds.items()]

    def rows_of(paper: str) -> list[tuple[str, str]]:
        return [(chosen.variant, chosen.role) for chosen in best_of_roles(tuned, paper)]

    roles = [("fixed_k", FIXED), ("max_confidence", ADAPTIVE), ("eagle2", TREE), ("sparse_tree", PAPER)]
    assert rows_of("sparse_tree") == roles and rows_of("eagle2") == roles[:3]


def test_papers_policies_exist() -> None:
    named = {kind.paper_policy for kind in DRAFTERS.values()} - {None}
    assert named and named <= POLICIES.keys()
