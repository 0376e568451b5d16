"""A synthetic trace from a rate of acceptance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import specsim


def test_a_replay_has_the_expected_tokens_per_round() -> None:
    """Leviathan et al. 2023, Eq. 1: (1 - a**(K + 1)) / (1 - a)."""
    trace = specsim.generate(0.7, sequences=200, output_tokens=200, depth=4)
    prediction = specsim.predict(trace, {"s_d": 0.001, "s_t": 0.01}, "fixed_k", k=4)
    assert prediction.tau == pytest.approx((1 - 0.7**5) / 0.3, rel=0.03)


def test_rates_by_position_a_model_and_its_file_are_the_same(tmp_path: Path) -> None:
    from specsim.acceptance.files import save_model
    from specsim.acceptance.models import PerPosition

    rates = [0.9, 0.5, 0.1]
    trace = specsim.generate(rates, depth=3, seed=2)
    assert (trace.match_len > 0).mean() == pytest.approx(0.9, abs=0.02)
    save_model(PerPosition(tuple(rates)), tmp_path / "model.json")
    for same in (np.array(rates), PerPosition(tuple(rates)), tmp_path / "model.json", str(tmp_path / "model.json")):
        assert np.array_equal(specsim.generate(same, depth=3, seed=2).match_len, trace.match_len)


def test_other_arguments_are_refused() -> None:
    with pytest.raises(specsim.InputError, match=r"1.5 is outside \[0, 1\]"):
        specsim.generate(acceptance=1.5)
    with pytest.raises(specsim.InputError, match="does not exist"):
        specsim.generate("model.json")
    for wrong in (None, {"alpha": 0.8}, ["a"]):
        with pytest.raises(TypeError, match="acceptance is a .*expected a probability"):
            specsim.generate(wrong)
