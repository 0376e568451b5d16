"""What a validation's document says: the choice by forecast and its regret, and where predictions err."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from realrun.decode.rounds import Decoded, Round
from realrun.experiment.forecast import ANEW, Forecast
from realrun.experiment.measuring import Measurement
from realrun.experiment.timing import Arm, Timings
from realrun.experiment.validate import PARTS, Promise, choice_of, error_parts, resolved
from realrun.machine_load import Load
from realrun.pairs.prompts import Prompt
from specsim.cost.profile import ProfileCost, TreeProfile
from specsim.policy.base import Policy
from specsim.policy.registry import make_policy
from specsim.replaying.intervals import NO_SPECULATION, Estimate, noise_floor_percent, paired_difference
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.report.page import choice_text
from tests.support.checks import refusal
from tests.support.tree_policies import CoinTree
from tests.support.tree_traces import tree_trace

# The choice: not speculating is a candidate, and the regret is what the measured best was ahead.


BASELINE_S = np.array([10.0, 12.0, 8.0, 11.0])


def forecast(label: str, speedup: float, measured: float, wobble: float = 0.01) -> Promise:
    return Promise(label, speedup, BASELINE_S / measured * (1 + wobble * np.array([1, -1, -1, 1])))


def test_the_regret_is_the_measured_bests_lead() -> None:
    fast, slow = forecast("a", 1.4, 1.6), forecast("b", 2.5, 1.5)
    choice = choice_of([fast, slow, forecast("c", 1.1, 0.9)], BASELINE_S, floor_percent=1.0)
    assert (choice.forecast, choice.forecast_speedup, choice.measured) == ("b", 2.5, "a")
    assert choice.measured_speedup == pytest.approx(1.5, rel=0.01)
    assert choice.regret == paired_difference(BASELINE_S, fast.seconds, slow.seconds).difference.estimate
    assert choice.regret == pytest.approx(0.1, abs=0.01) and choice.significant
    assert "b, forecast 2.500, measured 1.5" in choice_text(choice) and "the measured best is a" in choice_text(choice)
    floor = choice_of([fast, slow], BASELINE_S, floor_percent=8.0)
    assert not floor.significant and "not significant" in choice_text(floor)


def test_a_choice_that_measured_best_has_no_regret() -> None:
    choice = choice_of([forecast("a", 1.7, 1.6), forecast("b", 1.5, 1.5)], BASELINE_S, 1.0)
    assert choice.regret == Estimate(0.0, 0.0, 0.0) and not choice.significant
    assert choice_text(choice).endswith("the measured best.")


def test_where_all_policies_are_slower_the_best_is_not_to_speculate() -> None:
    """A forecast above 1 that measured 0.51 has a regret of 0.49, not of 0."""
    choice = choice_of([forecast("fixed_k(k=1)", 1.2, 0.51)], BASELINE_S, 1.0)
    assert choice.measured == NO_SPECULATION and choice.forecast == "fixed_k(k=1)"
    assert choice.regret == pytest.approx(0.49, abs=0.01) and choice.significant


def test_a_forecast_below_one_chooses_not_to_speculate() -> None:
    choice = choice_of([forecast("a", 0.9, 1.25), forecast("b", 0.8, 1.1)], BASELINE_S, 1.0)
    assert (choice.forecast, choice.forecast_speedup, choice.measured) == (NO_SPECULATION, 1.0, "a")
    assert choice.regret == pytest.approx(0.25, abs=0.01)


# The file of a forecast: what a build before wrote is read as it is, and anything else refused in a line.

WRITTEN: dict[str, Any] = {
    "kind": "specsim-forecast", "version": 1, "made": "2026-01-01T00:00:00+00:00", "sealed": True, "target": "t",
    "drafter": "d", "sequences": {"tuning": 4, "holdout": 5}, "baseline_tokens_per_s": 50, "deploy": "fixed_k(k=2)",
    "rows": [
        {"policy": "fixed_k", "label": f"fixed_k(k={k})", "params": {"k": k}, "role": "tuned",
         "tokens_per_s": 50 * speedup, "forecast": {"estimate": speedup, "low": 0.9, "high": 1.9},
         "forecast_without_probe": 1.0}
        for k, speedup in ((1, 1.25), (2, 1.5), (3, 0.75))
    ],
    "costs": {"source": "measured just before"},
}  # fmt: skip


def read_forecast(path: Path) -> Forecast:
    return Forecast.from_json(json.loads(path.read_text()), str(path), ANEW)


def test_a_forecast_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "forecast.json").write_text(json.dumps(WRITTEN))
    forecast = read_forecast(tmp_path / "forecast.json")
    assert forecast.as_dict() == WRITTEN
    assert str(forecast).startswith("forecast: fixed_k(k=2), 1.500 [0.900, 1.900] times")
    assert structs.replace(forecast, rows=forecast.rows[2:]).deploy == NO_SPECULATION


@pytest.mark.parametrize("wrong", [{"version": 2}, {"sealed": 1}, {"rows": [{"policy": "fixed_k"}]}, {"costs": None}])
def test_another_forecast_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "forecast.json").write_text(json.dumps({**WRITTEN, **wrong}))
    refusal(lambda: read_forecast(tmp_path / "forecast.json"), match=r"forecast\.json .*--overwrite$")


# Errors: parts that sum to the whole, nothing where rounds cost what was predicted, and their noise.


CONTEXTS, DEPTH = np.array([0, 60, 200]), 5
at = np.array([0.0, 1e-4, 5e-4])
SIZES = np.array([1, 4, 101])
COST = ProfileCost(
    contexts=CONTEXTS,
    draft_step_s=np.array([1e-3 / place + at for place in range(1, DEPTH + 1)]),
    catch_up_s=2e-4 + at,
    verify_s=np.array([1e-2 + 1e-3 * (n % 2) + 1e-4 * n + at for n in range(1, DEPTH + 2)]),
    autoregressive_s=9e-3 + at,
    policy_step_s=2e-5,
    round_overhead_s=4e-4,
    tree=TreeProfile(SIZES, 1e-5 * (SIZES - 1)[:, None] + 0 * at, 1e-2 + 1e-4 * SIZES[:, None] + at, 4e-5, 5e-4),
)
PRICED = PricedTrace(tree_trace(3, sequences=4), COST)
POLICIES = [make_policy("fixed_k", {"k": 3}), make_policy("adaedl", {"max_draft_tokens": 5}), CoinTree()]
policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)


def as_predicted(policy: Policy) -> tuple[Replay, list[list[Round]]]:
    """Rounds that took what was predicted: verification round by round, the other parts as means of their sequence."""
    replayed = PRICED.replay(policy, log=True)
    table = PRICED.table(policy)
    verify_s = table.tree.verify_s if isinstance(policy, CoinTree) and table.tree is not None else table.verify_s
    assert replayed.rounds is not None
    done: list[list[Round]] = [[] for _ in range(PRICED.trace.sequences)]
    for sequence, t, drafted, accepted, verified, last in replayed.rounds.rows():
        draft_s, policy_s, _, other_s = replayed.seconds[sequence] / replayed.num_rounds[sequence]
        context = int(PRICED.trace.prompt_tokens[sequence]) - 1 + t
        took_s = verify_s[verified + 1, context >> table.bucket_bits]
        done[sequence].append(Round(t, drafted, accepted, verified, last, draft_s, policy_s, float(took_s), other_s))
    return replayed, done


def errors_of(policy: Policy, change: Any = lambda round_: round_) -> tuple[dict[str, Any], Replay, list[Round]]:
    replayed, done = as_predicted(policy)
    changed = [[change(round_) for round_ in sequence] for sequence in done]
    return (
        error_parts(PRICED, replayed, changed).as_dict(),
        replayed,
        [round_ for sequence in changed for round_ in sequence],
    )


@policies
def test_rounds_that_cost_what_was_predicted_have_no_error(policy: Policy) -> None:
    errors, _, rounds = errors_of(policy)
    assert [errors[part] for part in PARTS] == pytest.approx([0.0] * 4, abs=1e-9)
    assert [each["verify"] for each in errors["by_verified"]] == pytest.approx(
        [0.0] * len(errors["by_verified"]), abs=1e-9
    )
    assert sum(each["rounds"] for each in errors["by_verified"]) == len(rounds)
    assert [each["tokens"] for each in errors["by_verified"]] == sorted({round_.verified for round_ in rounds})
    assert len(errors["by_verified"]) > 1


@policies
def test_the_parts_sum_to_the_error_of_the_whole(policy: Policy) -> None:
    rng = np.random.default_rng(4)

    def noisy(round_: Round) -> Round:
        return replace(round_, **{f"{part}_s": getattr(round_, f"{part}_s") * rng.uniform(0.5, 2) for part in PARTS})

    errors, replayed, rounds = errors_of(policy, noisy)
    measured_s = sum(round_.seconds for round_ in rounds)
    whole = 100 * (replayed.seconds.sum() / measured_s - 1)
    assert sum(errors[part] for part in PARTS) == pytest.approx(whole)
    assert sum(each["verify"] for each in errors["by_verified"]) == pytest.approx(errors["verify"])
    for number, part in enumerate(PARTS):
        took_s = sum(getattr(round_, f"{part}_s") for round_ in rounds)
        assert errors[part] == pytest.approx(100 * (replayed.seconds[:, number].sum() - took_s) / measured_s)


@policies
def test_an_error_is_told_where_it_was_made(policy: Policy) -> None:
    """Passes over three tokens took longer than predicted, drafting shorter."""

    def changed(round_: Round) -> Round:
        return replace(round_, draft_s=round_.draft_s / 2, verify_s=round_.verify_s + (round_.verified == 3) * 0.01)

    errors, replayed, rounds = errors_of(policy, changed)
    slow = sum(round_.verified == 3 for round_ in rounds)
    assert slow > 0
    whole_s = sum(round_.seconds for round_ in rounds)
    assert errors["draft"] == pytest.approx(100 * replayed.seconds[:, 0].sum() / 2 / whole_s)
    assert errors["verify"] == pytest.approx(-100 * slow * 0.01 / whole_s)
    assert errors["policy"] == pytest.approx(0, abs=1e-9) and errors["other"] == pytest.approx(0, abs=1e-9)
    for each in errors["by_verified"]:
        expected = errors["verify"] if each["tokens"] == 3 else 0.0
        assert each["verify"] == pytest.approx(expected, abs=1e-9)


# What the noise leaves.


def run_of(seconds: float) -> Decoded:
    """A round of this many seconds that emitted a token."""
    return Decoded([7], [Round(0, 0, 0, 0, 0, 0.0, 0.0, 0.0, seconds)], prefill_s=0.0)


def measured(null_s: list[float], arms_s: list[list[float]]) -> Measurement:
    """Of these seconds per sequence: those of the null arm, and those of every policy; the baseline takes 1 s each."""
    arms, timings = [[1.0] * len(null_s), *arms_s, null_s], Timings()
    for arm, seconds in enumerate(arms):
        for sequence, own_s in enumerate(seconds):
            timings.add(arm, sequence, run_of(own_s))
    prompts, places = [Prompt("all", [1])] * len(null_s), [Arm("", None, None, 0)] * len(arms)  # type: ignore[arg-type]
    return Measurement(places, prompts, timings, Load(None, None))


def test_the_noise_floor_is_how_far_two_like_arms_lie_apart() -> None:
    assert measured([1.0] * 20, []).noise_floor_percent == 0.0
    uneven = measured([0.9, 1.1] * 10, [])
    assert uneven.noise_floor_percent == pytest.approx(100 * max(uneven.null_arm.high - 1, 1 - uneven.null_arm.low))
    assert 2 < uneven.noise_floor_percent < 8
    slower = measured([1.05] * 20, [])
    assert slower.noise_floor_percent == pytest.approx(100 * (1 - 1 / 1.05))
    assert noise_floor_percent(Estimate(1.0, 0.97, 1.01)) == pytest.approx(3.0)


def test_rows_are_told_apart_beyond_the_noise_only() -> None:
    """The difference must be larger than the noise floor and the same over the sequences."""
    best, close, far, unsteady = ([base] * 20 for base in (0.5, 0.505, 0.55, 0.55))
    unsteady[0] = 1.5
    for sequence in range(1, 20):
        unsteady[sequence] = 0.5 * (1 + 0.002 * (-1) ** sequence)
    calm = measured([1.0] * 20, [best, close, far, unsteady])
    assert [resolved(calm, arm, 1) for arm in (2, 3, 4)] == [True, True, False]
    noisy = measured([0.9, 1.1] * 10, [best, close, far, unsteady])
    assert [resolved(noisy, arm, 1) for arm in (2, 3, 4)] == [False, True, False]
    assert not resolved(calm, 1, 1)
