"""Two runs compared: what is caught, what is not, and how often by chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.claims.diff import diff_validations, holm, read_diff
from specsim.io.errors import InputError
from specsim.replaying.intervals import ratio_interval
from tests.support.commands import call

# A run of the lab: 12 sequences of some 80 tokens, nine policies, 15 ms a token. Seconds of a sequence vary by 1 % of
# their own; what policies cost beside the baseline varies from run to run by 1.5 %, all alike, and by 0.7 % of its own.
SEQUENCES, POLICIES, OF_A_SEQUENCE, OF_ALL, OF_EACH = 12, 9, 0.01, 0.015, 0.007
FOUND_PERCENT = {1: 10, 3: 5}  # by runs a side: a change of so much is found in nine of ten pairs of sides


def simulated(rng: np.random.Generator, prompts: int, *, slower: float = 1.0) -> dict[str, Any]:
    """A validation as the machine's noise would give it. prompts : seed of what they are"""
    fixed = np.random.default_rng(prompts)
    tokens = fixed.integers(60, 96, SEQUENCES)
    baseline_s = 0.015 * tokens
    speedups = fixed.uniform(1.1, 1.8, POLICIES)[:, None] * fixed.lognormal(0, 0.2, (POLICIES, SEQUENCES))

    def noisy(seconds: Any, of_a_run: float = 0.0) -> Any:
        return seconds * rng.lognormal(0, OF_A_SEQUENCE, SEQUENCES) * rng.lognormal(0, of_a_run)

    measured_s, null_s, run = noisy(baseline_s), noisy(baseline_s), rng.lognormal(0, OF_ALL)
    null = ratio_interval(measured_s, null_s)
    return {
        "kind": "specsim-validation",
        "noise_floor_percent": 100 * max(null.high - 1, 1 - null.low),
        "autoregressive_sequence_seconds": measured_s.tolist(),
        "rows": [
            {
                "label": f"policy {number}",
                "measured": {"estimate": float(measured_s.sum() / own_s.sum()), "low": 1.0, "high": 2.0},
                "sequence_seconds": own_s.tolist(),
                "sequence_tokens": tokens.tolist(),
            }
            for number, speedup in enumerate(speedups)
            for own_s in [noisy(baseline_s / speedup * slower * run, OF_EACH)]
        ],
    }


def compared(seed: int, *, slower: float, runs: int = 1) -> set[str]:
    rng = np.random.default_rng(seed)
    before = [("old", simulated(rng, prompts=seed)) for _ in range(runs)]
    after = [("new", simulated(rng, prompts=seed, slower=slower)) for _ in range(runs)]
    return {line.change for line in diff_validations(before, after).lines}


@pytest.mark.parametrize("runs", FOUND_PERCENT)
def test_noise_is_no_change(runs: int) -> None:
    """Of 500 pairs of sides without a change, something is seen in at most 5 %."""
    alarms = sum(compared(seed, slower=1.0, runs=runs) != {"no change"} for seed in range(500))
    assert alarms <= 25, alarms


@pytest.mark.parametrize(("runs", "percent"), FOUND_PERCENT.items())
def test_a_regression_is_caught(runs: int, percent: int) -> None:
    """In at least nine of ten, of 500."""
    caught = sum("slower" in compared(seed, slower=1 + percent / 100, runs=runs) for seed in range(500, 1000))
    assert caught >= 450, caught


def test_a_diff_names_the_command_that_measures_both_versions_at_once(tmp_path: Path) -> None:
    runs = [write(tmp_path / f"{seed}.json", simulated(np.random.default_rng(seed), prompts=0)) for seed in range(2)]
    assert "`realrun compare` measures both versions at once" in call("specsim", "claims", "diff", *runs).out


def test_what_is_faster_is_said_too() -> None:
    assert compared(0, slower=0.9) == {"faster"}


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_rows_of_other_settings_or_prompts_are_not_compared(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    before, after = simulated(rng, prompts=1), simulated(rng, prompts=1)
    after["rows"][0]["label"] = "policy with other settings"
    after["rows"][1]["sequence_tokens"][0] += 1
    diff = read_diff(write(tmp_path / "old.json", before), write(tmp_path / "new.json", after))
    notes = {line.name: line.note for line in diff.lines if line.change == "not comparable"}
    assert notes == {
        "policy 0": "only in the old run",
        "policy 1": "other sequences were decoded",
        "policy with other settings": "only in the new run",
    }
    assert len(diff.lines) == POLICIES + 1 and diff.as_dict()["slower"] == []


def test_a_noise_of_ones_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    old, new = simulated(rng, prompts=1), simulated(rng, prompts=1, slower=1.15)
    paths = write(tmp_path / "old.json", old), write(tmp_path / "new.json", new)
    assert len(read_diff(*paths).slower) == POLICIES
    quiet = read_diff(*paths, between_runs_percent=20.0)
    assert quiet.slower == [] and all(line.ratio and line.ratio.low < 1 < line.ratio.high for line in quiet.lines)


def test_several_runs_of_a_side_are_taken_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    old, new = ([simulated(rng, prompts=1) for _ in range(2)] for _ in range(2))
    new[1]["rows"][0]["label"] = "policy with other settings"
    new[0]["rows"][1]["sequence_tokens"][0] += 1
    paths = [write(tmp_path / f"{number}.json", document) for number, document in enumerate([*old, *new])]
    lines = {line.name: line for line in read_diff(paths[0], paths[2], more_old=[paths[1]], more_new=[paths[3]]).lines}
    assert lines["policy 0"].note == "not in every run" and lines["policy 1"].note == "other sequences were decoded"
    baseline, own = ([*map(sum, zip(*both, strict=True))] for both in zip(*map(columns, old), strict=True))
    assert lines["policy 2"].old == pytest.approx(sum(baseline) / sum(own), rel=1e-12)
    single = {line.name: line for line in read_diff(paths[0], paths[2]).lines}["policy 2"].ratio
    both_ways = lines["policy 2"].ratio
    assert both_ways.high / both_ways.low < single.high / single.low


def columns(document: dict[str, Any]) -> tuple[list[float], list[float]]:
    return document["autoregressive_sequence_seconds"], document["rows"][2]["sequence_seconds"]


def test_holm_is_between_one_for_all_and_each_for_itself() -> None:
    assert holm([0.01, 0.02, 0.06]) == [True, True, False]
    assert holm([0.06, 0.001, 0.03]) == [False, True, False]
    assert holm([]) == []


def kernels(scale: float) -> dict[str, Any]:
    row = {"op": "tree_verify", "label": "small", "dtype": "bfloat16", "backend": "cuda", "mode": "graph"}
    times = {"median_us": 10 * scale, "p20_us": 9.9 * scale, "p80_us": 10.1 * scale}
    return {"kind": "speckernels-bench", "rows": [{**row, **times}, {**row, "mode": "cold", "median_us": None}]}


def benchmarks(scale: float) -> dict[str, Any]:
    stats = {"median": 0.1 * scale, "q1": 0.099 * scale, "q3": 0.101 * scale}
    return {"benchmarks": [{"fullname": "tests/test_it.py::test_it", "stats": stats}]}


@pytest.mark.parametrize("make", [kernels, benchmarks])
@pytest.mark.parametrize(
    ("scale", "change"), [(1.0, "no change"), (1.04, "no change"), (1.2, "slower"), (0.8, "faster")]
)
def test_times_of_benchmarks(tmp_path: Path, make: Any, scale: float, change: str) -> None:
    diff = read_diff(write(tmp_path / "old.json", make(1.0)), write(tmp_path / "new.json", make(scale)))
    assert [line.change for line in diff.lines] == [change]


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ({}, {}, "not a measurement"),
        ([], [], "not a measurement"),
        (kernels(1), benchmarks(1), "the same kind"),
        ({"kind": "specsim-validation", "rows": 3}, kernels(1), "no rows"),
        ({**kernels(1), "rows": [{"median_us": "fast"}]}, kernels(1), "positive"),
        ({"benchmarks": [{"fullname": "a"}]}, benchmarks(1), "stats"),
        ({"benchmarks": []}, benchmarks(1), "in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, old: Any, new: Any, word: str) -> None:
    with pytest.raises(InputError, match=word):
        read_diff(write(tmp_path / "old.json", old), write(tmp_path / "new.json", new))


def test_further_runs_are_of_validations_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "bench.json", kernels(1))
    with pytest.raises(InputError, match="must be validations"):
        read_diff(path, path, more_new=[path])
