"""The interval of a forecast covers what is measured later, on other prompts, in a run of its own."""

from __future__ import annotations

import numpy as np
import pytest

from specsim.io.errors import InputError
from specsim.replaying.forecast import error_summary, forecast_interval

TRUE_SPEEDUP = {"code": 2.0, "prose": 1.2}  # which domains differ by is no uncertainty, because both parts have both


def prompts(rng: np.random.Generator, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds without and with a policy of this many prompts, half of each domain, and their domains."""
    domains = np.array([*TRUE_SPEEDUP] * (number // 2))
    baseline_s = rng.uniform(0.5, 1.5, number)
    speedups = np.array([TRUE_SPEEDUP[name] for name in domains]) * rng.lognormal(0.0, 0.1, number)
    return baseline_s, baseline_s / speedups, domains


@pytest.mark.parametrize(("tuning", "held_out"), [(12, 12), (24, 6), (8, 40)])
def test_measured_speedups_lie_inside_as_often_as_said(tuning: int, held_out: int) -> None:
    rng, inside, widths = np.random.default_rng(tuning), 0, []
    runs = 1500
    for _ in range(runs):
        forecast = forecast_interval(*prompts(rng, tuning), held_out, cost_error=0.01, run_error=0.02)
        baseline_s, policy_s, _ = prompts(rng, held_out)
        off = rng.normal(0.0, 0.01) + rng.normal(0.0, 0.02)  # of the costs, and of the run
        measured = baseline_s.sum() / policy_s.sum() * np.exp(off)
        inside += forecast.low <= measured <= forecast.high
        widths.append(np.log(forecast.high / forecast))
    assert 0.93 < inside / runs < 0.98
    assert np.median(widths) < 0.25


def test_a_single_prompt_leaves_the_costs_and_the_run() -> None:
    forecast = forecast_interval(np.ones(1), np.full(1, 0.5), np.array(["all"]), 9, cost_error=0.03, run_error=0.04)
    assert forecast == 2.0 and forecast.high / 2 == pytest.approx(np.exp(1.96 * 0.05), rel=1e-4)
    with pytest.raises(InputError, match="no sequence"):
        forecast_interval(np.ones(0), np.ones(0), np.zeros(0, dtype=str), 9, cost_error=0.0, run_error=0.0)


def test_errors_are_summarised_with_their_sign() -> None:
    summary = error_summary([1.1, 0.8, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    assert summary["largest_percent"] == pytest.approx(-20) and summary["mean_percent"] == pytest.approx(-2.5)
    assert summary["median_abs_percent"] == pytest.approx(5) and summary["p90_abs_percent"] == pytest.approx(17)
