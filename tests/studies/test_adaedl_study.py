"""The study of AdaEDL: gammas, violations and correlations by hand, and signals against what a recording holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import study_prompts
from specsim.acceptance.formulas import adaedl_score, leviathan_speedup
from studies.adaedl import bound, run
from studies.adaedl.bound import Signals

CONFIG = {
    "target": "lab", "prompts": 3, "tuning_share": 0.5, "max_new_tokens": 10, "depth": 3, "trials": 2, "gamma": 0.2,
    "bounded_share": 0.95, "seed": 0, "dtype": "float32", "threads": 1,
    "small": {"text_tokens": 3e6, "distill_tokens": 1e6},
    "table1": {"autoregressive": [25.0, 30.0], "base_spd": {"3": [50.0, 40.0], "7": [45.0, 35.0]}},
}  # fmt: skip


def signals(acceptance: Any = None, prompts: int = 20, each: int = 30) -> Signals:
    """Positions of random entropy; their acceptance is random too unless given as a function of the entropy."""
    rng = np.random.default_rng(0)
    entropy = rng.uniform(0, 4, prompts * each)
    accepted = rng.uniform(0, 1, prompts * each) if acceptance is None else acceptance(entropy)
    return Signals(np.repeat(np.arange(prompts), each), entropy, rng.uniform(0, 1, prompts * each), accepted)


def test_gamma_is_found_again_where_the_score_is_the_acceptance() -> None:
    exact = signals(lambda entropy: adaedl_score(entropy, 0.13))
    assert bound.fitted_gamma(exact) == pytest.approx(0.13)
    assert bound.bounding_gamma(exact, 0.9) == pytest.approx(0.13)
    assert bound.gap(exact, 0.13).estimate == pytest.approx(0, abs=1e-12)


def test_the_fitted_gamma_is_the_best_in_least_squares() -> None:
    sample = signals()
    best = bound.fitted_gamma(sample)

    def error(gamma: float) -> float:
        return float(((adaedl_score(sample.entropy_nats, gamma) - sample.acceptance) ** 2).sum())

    assert all(error(best) < error(best * factor) for factor in (0.98, 1.02))


def test_the_bounding_gamma_is_the_least_that_bounds_so_many_positions() -> None:
    sample = signals()
    gamma = bound.bounding_gamma(sample, 0.95)
    assert bound.violated(sample, gamma * (1 + 1e-9)).estimate <= 5
    assert bound.violated(sample, gamma * (1 - 1e-9)).estimate > 5 - 100 / len(sample.sequence)
    sure = Signals(np.array([0]), np.array([0.0]), np.array([1.0]), np.array([0.5]))
    assert bound.bounding_gamma(sure, 0.95) == np.inf  # sure of itself and wrong: no gamma helps


def test_violations_and_gaps_by_hand() -> None:
    by_hand = Signals(
        np.array([0, 0, 1, 1]), np.array([0.0, 1.25, 5.0, 0.2]), np.ones(4), np.array([0.9, 0.6, 0.1, 0.7])
    )  # scores at 0.2: 1, 0.5, 0, 0.8
    assert bound.violated(by_hand, 0.2).estimate == pytest.approx(50)
    assert bound.gap(by_hand, 0.2).estimate == pytest.approx((-0.1 + 0.1 + 0.1 - 0.1) / 4)
    assert bound.violated(by_hand.of(np.array([1])), 0.2).estimate == pytest.approx(50)


def test_correlations_are_pearsons_and_of_no_gamma() -> None:
    sample = signals()
    score, sure, less = bound.correlations(sample, repeats=50)
    for gamma in (0.05, 0.8):
        scores = adaedl_score(sample.entropy_nats, gamma)
        assert score.estimate == pytest.approx(np.corrcoef(scores, sample.acceptance)[0, 1])
    assert sure.estimate == pytest.approx(np.corrcoef(sample.confidence, sample.acceptance)[0, 1])
    assert less.estimate == pytest.approx(score.estimate - sure.estimate)
    assert score.low < score.estimate < score.high


def test_the_papers_ratio_is_found_again_from_rates_that_it_made() -> None:
    base, acceptance = np.array([20.0, 30.0, 25.0]), np.array([0.5, 0.65, 0.8])
    rates = {str(k): (base * leviathan_speedup(acceptance, k, 0.08)).tolist() for k in (3, 7, 16)}
    ratio, fitted = bound.paper_ratio(base.tolist(), rates)
    assert ratio == pytest.approx(0.08, rel=1e-4)
    assert fitted == pytest.approx(acceptance, rel=1e-4)


@pytest.fixture(scope="module")
def recorded() -> tuple[Any, Any, Any]:
    """The lab's pair, three prompts, and their trace by rejection sampling."""
    pair = load_pair("lab", threads=1, predictor=None)
    prompts = study_prompts(pair.tokenizer, 3)
    return pair, prompts, record(pair, prompts, RecordSettings(3, 10, Sampler("rejection", 1.3)))


def test_signals_are_those_of_the_recording(recorded: tuple[Any, Any, Any]) -> None:
    pair, prompts, trace = recorded
    signals = run.signals_of(pair, trace, prompts)
    assert signals.entropy_nats == pytest.approx(trace.entropy_nats[:, 0], abs=1e-4)
    assert signals.confidence == pytest.approx(trace.confidence[:, 0], abs=1e-5)
    assert ((signals.acceptance > 0) & (signals.acceptance < 1)).all()
    # A drafted token is accepted with probability 1 - TVD in the mean over drafts, a draft per position.
    drafted = trace.accept_prob[:, 0]
    assert abs((drafted - signals.acceptance).mean()) < 4 * drafted.std() / np.sqrt(len(drafted))


def test_signals_read_again_are_the_same(recorded: tuple[Any, Any, Any], tmp_path: Path) -> None:
    pair, prompts, trace = recorded
    run.save_signals(tmp_path / "signals.npz", pair, trace, CONFIG)
    signals, again = run.signals_of(pair, trace, prompts), run.read_signals(tmp_path / "signals.npz")
    assert np.array_equal(again.sequence, signals.sequence)
    assert again.acceptance == pytest.approx(signals.acceptance, abs=1e-6)
