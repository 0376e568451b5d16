"""A user's own cost model is a class, which predicts, tunes and ranks as those that ship."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import specsim
from specsim.acceptance.formulas import leviathan_speedup

# --- What a user writes ----------------------------------------------------------------------------


class MemoryBound(specsim.CostModel):
    """Every target pass takes 10 ms, however many tokens it verifies, every draft step 1 ms."""

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return np.full(np.shape(context), 1e-3 * n_tokens)

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return np.full(np.shape(context), 1e-2)

    def autoregressive_step(self, context: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return np.full(np.shape(context), 1e-2)


# ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace() -> specsim.Trace:
    return specsim.generate(acceptance=0.8, sequences=30, output_tokens=400, depth=8)


def test_it_prices_a_prediction_as_leviathans_formula_does(trace: specsim.Trace) -> None:
    speedup = specsim.predict(trace, MemoryBound(), "fixed_k", k=4).speedup
    assert speedup.low < leviathan_speedup(0.8, 4, 0.1) < speedup.high


def test_it_is_the_constant_cost_of_the_same_seconds(trace: specsim.Trace) -> None:
    same = specsim.ConstantCost(s_d=1e-3, s_t=1e-2)
    for policy in ("adaedl", "time_gain"):
        ours, theirs = (specsim.predict(trace, cost, policy) for cost in (MemoryBound(), same))
        assert ours.speedup == theirs.speedup
    assert (
        specsim.tune(trace, MemoryBound(), "fixed_k", trials=8).best
        == specsim.tune(trace, same, "fixed_k", trials=8).best
    )


def test_it_ranks(trace: specsim.Trace) -> None:
    frame = specsim.leaderboard(trace, MemoryBound(), policies=["fixed_k", "beta_ts"], trials=4).to_frame()
    assert set(frame["policy"]) == {"fixed_k", "beta_ts"}
