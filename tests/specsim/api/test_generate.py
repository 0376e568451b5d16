"""A synthetic trace from a rate of acceptance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import specsim


def test_accepted_drafts_are_geometric() -> None:
    trace = specsim.generate(acceptance=0.8, sequences=200, output_tokens=100, depth=8)
    first = trace.position < 92  # where no text ends within the draft
    lengths = trace.match_len[first]
    for i in range(1, 9):
        assert (lengths >= i).mean() == pytest.approx(0.8**i, abs=0.02)
    assert (trace.sequences, trace.depth, len(trace.token)) == (200, 8, 20_000)


def test_replaying_it_gives_the_textbook_s_tokens_per_round() -> None:
    """Leviathan et al. 2023, Eq. 1: (1 - a**(K + 1)) / (1 - a)."""
    trace = specsim.generate(0.7, sequences=200, output_tokens=200, depth=4)
    found = specsim.predict(trace, {"s_d": 0.001, "s_t": 0.01}, "fixed_k", k=4)
    assert found.tau == pytest.approx((1 - 0.7**5) / 0.3, rel=0.03)


def test_a_rate_for_each_place_a_model_or_its_file(tmp_path: Path) -> None:
    from specsim.acceptance.files import save_model
    from specsim.acceptance.per_position import PerPosition

    rates = [0.9, 0.5, 0.1]
    trace = specsim.generate(rates, depth=3, seed=2)
    assert (trace.match_len > 0).mean() == pytest.approx(0.9, abs=0.02)
    save_model(PerPosition(tuple(rates)), tmp_path / "model.json")
    for same in (np.array(rates), PerPosition(tuple(rates)), tmp_path / "model.json", str(tmp_path / "model.json")):
        assert np.array_equal(specsim.generate(same, depth=3, seed=2).match_len, trace.match_len)


def test_what_is_no_acceptance_is_refused() -> None:
    with pytest.raises(specsim.InputError, match=r"1.5 is outside \[0, 1\]"):
        specsim.generate(acceptance=1.5)
    with pytest.raises(specsim.InputError, match="does not exist"):
        specsim.generate("model.json")
    for wrong in (None, {"alpha": 0.8}, ["a"]):
        with pytest.raises(TypeError, match="acceptance is a .*expected a probability"):
            specsim.generate(wrong)
