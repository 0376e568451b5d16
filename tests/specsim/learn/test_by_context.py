"""Best draft lengths by context: sums are the replay's, and K changes where a closed form says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import specsim
from specsim.acceptance.formulas import mean_tokens_per_round
from specsim.io.arrays import Seconds
from specsim.learn.by_context import by_context
from tests.support.checks import refusal

EXAMPLES = {"example:lab-model": "example:lab-deep-model", "example:lab-eagle": "example:lab-deep-eagle"}


class Growing(specsim.CostModel):
    """The target's pass slows down with the cache, the drafter's does not."""

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), 0.3 * n_tokens)

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return np.asarray(context) / 500

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        return self.verify(1, context)


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_bin_is_the_replay(name: str) -> None:
    cost = EXAMPLES[name]
    (whole,) = by_context(name, cost, edges=[0]).bins
    for k, speedup in enumerate(whole.speedup, start=1):
        assert speedup == pytest.approx(specsim.predict(name, cost, "fixed_k", k=k).speedup.estimate, rel=1e-9)


def test_the_best_length_grows_where_the_target_slows_down() -> None:
    trace = specsim.generate(acceptance=0.8, sequences=1000, output_tokens=600, depth=8, prompt_tokens=64)
    result = by_context(trace, Growing(), edges=[112, 128, 240, 256, 496, 512])
    ks = np.arange(1, 9)
    for each in result.bins[1::2]:  # in the narrow bins between them chance matters more
        # Leviathan et al., Theorem 3.8: E[tokens] / (c K + 1), c = 0.3 / step
        closed = mean_tokens_per_round(0.8, ks) / (0.3 / each.step_s * ks + 1)
        assert np.abs(np.array([float(value) for value in each.speedup]) / closed - 1).max() < 0.03
    lengths = [each.k for each in result.bins]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert result.to_frame()["acceptance"].tolist() == pytest.approx([0.8] * len(lengths), abs=0.03)


def test_edges_have_to_increase() -> None:
    refusal(lambda: by_context("example:lab-model", Growing(), edges=[64, 64]), "edges=[64, 64]")
    refusal(lambda: by_context("example:lab-model", Growing(), max_draft_tokens=9), "max_draft_tokens=9")
