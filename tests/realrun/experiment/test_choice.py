"""The choice by forecast: not speculating is a candidate, and the regret is what the measured best was ahead."""

from __future__ import annotations

import numpy as np
import pytest

from realrun.experiment.document import Forecast, choice_of
from specsim.replaying.intervals import NO_SPECULATION, paired_difference
from specsim.report.page import choice_text

BASELINE_S = np.array([10.0, 12.0, 8.0, 11.0])


def forecast(label: str, speedup: float, measured: float, wobble: float = 0.01) -> Forecast:
    return Forecast(label, speedup, BASELINE_S / measured * (1 + wobble * np.array([1, -1, -1, 1])))


def test_the_regret_is_the_measured_bests_lead() -> None:
    fast, slow = forecast("a", 1.4, 1.6), forecast("b", 2.5, 1.5)
    choice = choice_of([fast, slow, forecast("c", 1.1, 0.9)], BASELINE_S, floor_percent=1.0)
    assert (choice["forecast"], choice["forecast_speedup"], choice["measured"]) == ("b", 2.5, "a")
    assert choice["measured_speedup"]["estimate"] == pytest.approx(1.5, rel=0.01)
    assert choice["regret"]["estimate"] == paired_difference(BASELINE_S, fast.seconds, slow.seconds).difference.estimate
    assert choice["regret"]["estimate"] == pytest.approx(0.1, abs=0.01) and choice["significant"]
    assert "b, forecast 2.500, measured 1.5" in choice_text(choice) and "the measured best is a" in choice_text(choice)
    floor = choice_of([fast, slow], BASELINE_S, floor_percent=8.0)
    assert not floor["significant"] and "not significant" in choice_text(floor)


def test_a_choice_that_measured_best_has_no_regret() -> None:
    choice = choice_of([forecast("a", 1.7, 1.6), forecast("b", 1.5, 1.5)], BASELINE_S, 1.0)
    assert choice["regret"] == {"estimate": 0.0, "low": 0.0, "high": 0.0} and not choice["significant"]
    assert choice_text(choice).endswith("the measured best.")


def test_where_all_policies_are_slower_the_best_is_not_to_speculate() -> None:
    """A forecast above 1 that measured 0.51 has a regret of 0.49, not of 0."""
    choice = choice_of([forecast("fixed_k(k=1)", 1.2, 0.51)], BASELINE_S, 1.0)
    assert choice["measured"] == NO_SPECULATION and choice["forecast"] == "fixed_k(k=1)"
    assert choice["regret"]["estimate"] == pytest.approx(0.49, abs=0.01) and choice["significant"]


def test_a_forecast_below_one_chooses_not_to_speculate() -> None:
    choice = choice_of([forecast("a", 0.9, 1.25), forecast("b", 0.8, 1.1)], BASELINE_S, 1.0)
    assert (choice["forecast"], choice["forecast_speedup"], choice["measured"]) == (NO_SPECULATION, 1.0, "a")
    assert choice["regret"]["estimate"] == pytest.approx(0.25, abs=0.01)
