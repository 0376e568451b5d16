"""What fits into the minutes of an experiment: the best policies on as many prompts as there is time for."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrun.experiment.pipeline import (
    ENOUGH_HELD_OUT,
    ENOUGH_POLICIES,
    LEAST_HELD_OUT,
    LEAST_PROMPTS,
    Plan,
    by_kind,
    fitting,
)
from realrun.experiment.settings import Candidate
from realrun.leaderboard.job import BoardSettings
from realrun.measure.record import RecordSettings
from specsim.policy.registry import make_policy
from tests.support.tiny import tiny_prompts

SPEEDUPS = st.lists(st.floats(0.3, 4.0), min_size=1, max_size=9)
SETTINGS = BoardSettings(RecordSettings(4, 50), minutes=2.0)


def time_of(speedups: list[float], prompts: int) -> float:
    """Of two baselines and policies, in that of the baseline on a prompt."""
    return sum(prompts / speedup for speedup in [1.0, 1.0, *speedups])


@given(speedups=SPEEDUPS, prompts=st.integers(LEAST_HELD_OUT, 40), affordable=st.floats(1.0, 800.0))
def test_the_first_policies_fit_on_as_many_prompts_as_there_is_time_for(
    speedups: list[float], prompts: int, affordable: float
) -> None:
    policies, decoded = fitting(speedups, prompts, affordable)
    assert 1 <= policies <= len(speedups) and LEAST_HELD_OUT <= decoded <= prompts
    least = policies == 1 and decoded == LEAST_HELD_OUT
    assert least or time_of(speedups[:policies], decoded) <= affordable + 1e-9
    if decoded < prompts:  # a prompt more would not have fitted
        assert time_of(speedups[:policies], decoded + 1) > affordable - 1e-9 or policies < len(speedups)
    if policies > ENOUGH_POLICIES:  # not at the expense of prompts
        assert decoded >= min(prompts, ENOUGH_HELD_OUT)


def test_every_policy_comes_before_second_variants() -> None:
    names = ["fixed_k", "fixed_k", "adaedl", "cali_ts", "adaedl"]
    assert by_kind(names, [1.5, 1.4, 1.2, 1.1, 1.3]) == [0, 4, 3, 1, 2]


def not_measured() -> float:
    raise AssertionError("the decoding step was measured")


def test_no_limit_leaves_nothing_out(tmp_path: Path) -> None:
    plan, prompts = Plan(tmp_path / "plan.json", replace(SETTINGS, minutes=0.0), not_measured), tiny_prompts(6)
    policies = [Candidate(make_policy("fixed_k", {"k": k}), "tuned", 1.0) for k in (1, 2)]
    assert plan.to_record(prompts, None) is prompts and not plan.path.exists()
    assert plan.to_decode(policies, prompts, 1e9, 0.0) == (policies, [*range(6)])


def test_a_later_start_goes_on_with_the_plan_of_the_first(tmp_path: Path) -> None:
    """Though its machine is faster; prompts are spread over the domains."""
    prompts = tiny_prompts(30)
    policies = [Candidate(make_policy("fixed_k", {"k": k}), "tuned", 1 + k / 10) for k in (1, 2, 3)]
    first = Plan(tmp_path / "plan.json", SETTINGS, lambda: 0.05)
    few = first.to_record(prompts, None)
    assert LEAST_PROMPTS <= len(few) < len(prompts) and {prompt.domain for prompt in few} == {"code", "prose", "tests"}
    chosen, decoded = first.to_decode(policies, few[:5], 20.0, 0.0)
    assert policies[-1] in chosen and decoded == sorted(set(decoded))
    again = Plan(tmp_path / "plan.json", SETTINGS, not_measured)
    assert again.to_record(prompts, None) == few and again.to_decode(policies, few[:5], 0.0, 0.0) == (chosen, decoded)
    other = Plan(tmp_path / "other.json", SETTINGS, lambda: 0.001)
    assert other.to_record(prompts, None) == prompts and other.to_decode(policies, prompts, 0.0, 0.0)[0] == policies


def test_fewer_minutes_than_the_least_takes_are_told_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At 0.05 s a step, as many minutes as are told are enough, and a tenth less are too few."""
    short = Plan(tmp_path / "1.json", replace(SETTINGS, minutes=0.01), lambda: 0.05)
    assert len(short.to_record(tiny_prompts(30), None)) == LEAST_PROMPTS
    (told,) = (record.message for record in caplog.records)
    minutes = float(re.search(r"about ([\d.]+) minutes", told)[1])  # type: ignore[index]
    for number, share in enumerate((1.05, 0.9), 2):
        plan = Plan(tmp_path / f"{number}.json", replace(SETTINGS, minutes=share * minutes), lambda: 0.05)
        assert len(plan.to_record(tiny_prompts(30), None)) == LEAST_PROMPTS
    assert len(caplog.records) == 2 and f"--minutes {0.9 * minutes:g}" in caplog.records[1].message
    plan = Plan(tmp_path / "all.json", replace(SETTINGS, minutes=0.6 * minutes), lambda: 0.05)
    assert len(plan.to_record(tiny_prompts(4), None)) == 4 and len(caplog.records) == 2


def test_what_probes_take_is_no_time_to_decode(tmp_path: Path) -> None:
    policies = [Candidate(make_policy("fixed_k", {"k": k}), "tuned", 1 + k / 10) for k in (1, 2, 3)]
    shorter = Plan(tmp_path / "1.json", replace(SETTINGS, minutes=1.2), lambda: 0.05)
    longer = Plan(tmp_path / "2.json", SETTINGS, lambda: 0.05)
    chosen = longer.to_decode(policies, tiny_prompts(12), 10.0, 48.0)
    assert chosen == shorter.to_decode(policies, tiny_prompts(12), 10.0, 0.0) and 1 < len(chosen[1]) < 12


def test_what_is_only_forecast_has_no_time_to_fit(tmp_path: Path) -> None:
    plan = Plan(tmp_path / "plan.json", replace(SETTINGS, repeats=0), lambda: 0.05)
    policies = [Candidate(make_policy("fixed_k", {"k": 1}), "tuned", 1.0)]
    assert plan.to_decode(policies, tiny_prompts(9), 0.0, 0.0) == (policies, [*range(9)])


@pytest.mark.parametrize("minutes", [0.01, 1.0, 100.0])
def test_a_board_keeps_every_row(tmp_path: Path, minutes: float) -> None:
    policies = [Candidate(make_policy("fixed_k", {"k": k}), "tuned", 1.0) for k in range(1, 8)]
    plan = Plan(tmp_path / "plan.json", replace(SETTINGS, minutes=minutes), lambda: 0.05)
    chosen, decoded = plan.to_decode(policies, tiny_prompts(9), 0.0, 0.0, least_policies=len(policies))
    assert chosen == policies and LEAST_HELD_OUT <= len(decoded) <= 9
