"""Acceptance models: recovered from what they generate, their files, and the rounds and counters they are fitted to."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

import specsim
from specsim.acceptance.difficulty import KNOTS, MISSING, Difficulty, Drift, fit_drift, fit_hidden, log_likelihood
from specsim.acceptance.formulas import reliability
from specsim.acceptance.generate import generate, load_model, save_model
from specsim.acceptance.models import IID, AcceptanceModel, PerPosition, geometric_entropy_nats
from specsim.acceptance.sources import (
    Counters,
    Rounds,
    describe,
    longest_rounds,
    read_counters,
    read_rounds,
    read_source,
    verified_by_depth,
)
from specsim.io.errors import InputError
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.files import read_trace, write_trace
from specsim.trace.trace import Trace
from tests.support.acceptance_examples import COST, as_counters, difficulty, fixed_k_rounds, softmax_text
from tests.support.goodness import fit_report, summary
from tests.support.reference import Decoder, FixedLength, RampCost, small_trace

MODELS: list[AcceptanceModel] = [IID(0.7), PerPosition((0.8, 0.7, 0.75, 0.5, 0.9, 0.6)), difficulty()]
ALPHAS = (0.8, 0.7, 0.75, 0.5, 0.9)


@pytest.mark.parametrize("alpha", [0.2, 0.6, 0.9])
def test_iid_is_recovered_from_every_source(alpha: float) -> None:
    """Within 4 standard errors of a share of that many verified tokens."""
    trace = generate(IID(alpha), 100, 400, 6, seed=1)
    rounds = fixed_k_rounds(trace, 5)
    for source in (trace, rounds, as_counters(rounds)):
        verified = (
            int((trace.draft_limit > 0).sum()) if isinstance(source, Trace) else verified_by_depth(source)[1].sum()
        )
        error = np.sqrt(alpha * (1 - alpha) / verified)
        assert IID.fit(source).alpha == pytest.approx(alpha, abs=4 * error)


def test_per_position_is_recovered_from_every_source() -> None:
    trace = generate(PerPosition(ALPHAS), 200, 400, 5, seed=2)
    rounds = fixed_k_rounds(trace, 5)
    for source in (trace, rounds, as_counters(rounds)):
        verified = verified_by_depth(source)[1]
        errors = np.sqrt(np.array(ALPHAS) * (1 - np.array(ALPHAS)) / verified)
        assert (np.abs(np.array(PerPosition.fit(source).alpha) - ALPHAS) <= 4 * errors).all()


def test_the_naive_rate_is_biased_by_censoring_and_the_fit_is_not() -> None:
    """mean(a) / mean(k) counts tokens after a rejection as rejected: a (1 - a^K) / ((1 - a) K) on average."""
    alpha, k = 0.8, 6
    rounds = fixed_k_rounds(generate(IID(alpha), 100, 400, k, seed=3), k)
    whole = rounds.select(rounds.drafted == k)
    naive = whole.accepted.mean() / k
    assert naive == pytest.approx(alpha * (1 - alpha**k) / ((1 - alpha) * k), abs=0.01)
    assert naive < alpha - 0.25
    # Counting a full acceptance as a rejection at k + 1 is biased in the same way.
    assert whole.accepted.sum() / (whole.accepted + 1).sum() < alpha - 0.03
    error = np.sqrt(alpha * (1 - alpha) / verified_by_depth(whole)[1].sum())
    assert IID.fit(whole).alpha == pytest.approx(alpha, abs=4 * error)


def test_drafts_of_several_lengths_are_read_as_censored() -> None:
    """Kaplan-Meier by hand: five rounds, of which (2, 2) and (0, 0) have no outcome at the next depth."""
    rounds = Rounds(np.array([3, 2, 3, 1, 0]), np.array([3, 2, 1, 0, 0]))
    accepted, verified = verified_by_depth(rounds)
    np.testing.assert_array_equal(verified, [4, 3, 1])
    np.testing.assert_array_equal(accepted, [3, 2, 1])
    assert PerPosition.fit(rounds).alpha == (0.75, 2 / 3, 1.0)
    assert IID.fit(rounds).alpha == 6 / 8


def test_counters_of_drafts_that_end_at_random_are_unbiased() -> None:
    rng = np.random.default_rng(4)
    rounds = 200_000
    drafted = rng.integers(1, 6, rounds)
    hits = rng.random((rounds, 5)) < ALPHAS
    accepted = np.minimum(np.where(hits.all(axis=1), 5, hits.argmin(axis=1)), drafted)
    source = as_counters(Rounds(drafted, accepted))
    np.testing.assert_allclose(PerPosition.fit(source).alpha, ALPHAS, atol=0.012)


def test_depths_that_no_round_verified_are_left_out() -> None:
    model = PerPosition.fit(Rounds(np.array([4, 4, 4]), np.array([1, 0, 1])))
    assert model.alpha == (2 / 3, 0.0)
    with pytest.raises(InputError, match="depths up to 2, not 3"):
        generate(model, 1, 5, 3)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_generated_traces_are_written_read_and_replayed(model: AcceptanceModel, tmp_path: Path) -> None:
    trace = generate(model, 5, [30, 1, 17, 2, 44], 6, seed=5)
    write_trace(trace, tmp_path / "trace")
    loaded = read_trace(tmp_path / "trace")
    for field in dataclasses.fields(Trace):
        if field.name != "meta":
            np.testing.assert_array_equal(getattr(trace, field.name), getattr(loaded, field.name))
    assert loaded.meta["synthetic"]["model"] == model.name
    assert type(model)(**_tuples(loaded.meta["synthetic"]["parameters"])) == model
    plain = Decoder(loaded, FixedLength(6), RampCost()).run()
    result = replay(loaded, FixedK(k=6), cost_table(loaded, RampCost()), log=True)
    assert [row[:4] for row in result.rounds.rows()] == plain.rounds
    replay(loaded, AdaEDL(max_draft_tokens=6), cost_table(loaded, COST))


def _tuples(parameters: dict[str, object]) -> dict[str, object]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in parameters.items()}


@given(
    model=st.sampled_from(MODELS),
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=6),
    depth=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_generated_trace_is_consistent(model: AcceptanceModel, lengths: list[int], depth: int, seed: int) -> None:
    """match_len follows from the tokens, features are valid, and branches agree as documented."""
    trace = generate(model, len(lengths), lengths, depth, seed)
    assert trace.output_tokens.tolist() == lengths and trace.depth == depth
    assert (0 not in trace.token) and (trace.draft_token > 0).all()
    for s, length in enumerate(lengths):
        begin = int(trace.offsets[s])
        output = trace.token[begin : begin + length].tolist()
        for t in range(length):
            draft = trace.draft_token[begin + t].tolist()
            matched = 0
            while matched < depth and draft[matched : matched + 1] == output[t + matched : t + matched + 1]:
                matched += 1
            assert matched == trace.match_len[begin + t]
            # The same context one position later; per_position also depends on the depth.
            if matched > 0 and t + 1 < length and not isinstance(model, PerPosition):
                later = begin + t + 1
                inside = min(depth, length - t) - 1
                assert draft[1 : inside + 1] == trace.draft_token[later, :inside].tolist()
                if isinstance(model, Difficulty):
                    np.testing.assert_array_equal(
                        trace.confidence[begin + t, 1 : inside + 1], trace.confidence[later, :inside]
                    )
    assert (trace.confidence >= 0).all() and (trace.confidence <= 1).all()
    assert (trace.prob >= 0).all() and (trace.prob <= trace.confidence).all()
    assert (trace.entropy_nats >= 0).all() and np.isfinite(trace.entropy_nats).all()
    assert (trace.entropy_nats >= -np.log(np.maximum(trace.confidence, 1e-9)) - 1e-5).all()
    same = generate(model, len(lengths), lengths, depth, seed)
    for field in dataclasses.fields(Trace):
        np.testing.assert_equal(getattr(trace, field.name), getattr(same, field.name))


def test_seeds_give_different_traces() -> None:
    first, second = (generate(IID(0.5), 2, 50, 3, seed) for seed in (1, 2))
    assert (first.match_len != second.match_len).any()


def test_geometric_entropy() -> None:
    """Compared with the sum over the distribution; 0 for a certain drafter."""
    for c in (0.05, 0.3, 0.9):
        p = c * (1 - c) ** np.arange(3000)
        p = p[p > 0]
        assert geometric_entropy_nats(c) == pytest.approx(-(p * np.log(p)).sum(), rel=1e-9)
    assert geometric_entropy_nats(1.0) == 0


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_models_survive_json(model: AcceptanceModel, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    save_model(model, path, {"source": "test"})
    assert load_model(path) == model
    document = json.loads(path.read_text())
    assert (document["kind"], document["version"]) == ("specsim-acceptance", 1)
    assert (document["model"], document["fitted_to"]) == (model.name, {"source": "test"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "other"}, "not an acceptance model"),
        ({"version": 2}, "version 2, this program reads 1"),
        ({"model": "magic"}, "unknown acceptance model 'magic'; known: iid, per_position, difficulty"),
        ({"parameters": {"beta": 1}}, "parameters of the model"),
        ({"parameters": {"alpha": 1.5}}, "outside"),
        ({"parameters": None}, "parameters of the model"),
        ({"parameters": {"alpha": "high"}}, "parameters of the model"),
    ],
)
def test_bad_model_files_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    save_model(IID(0.5), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        load_model(path)
    path.write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        load_model(path)


@pytest.mark.parametrize(
    "change",
    [
        {"sequences": 0},
        {"output_tokens": 0},
        {"depth": 0},
        {"depth": 256},
        {"seed": -1},
        {"prompt_tokens": 0},
    ],
)
def test_bad_sizes_are_refused(change: dict[str, int]) -> None:
    sizes = {"sequences": 2, "output_tokens": 5, "depth": 3, "seed": 0, **change}
    with pytest.raises(InputError, match=next(iter(change))):
        generate(IID(0.5), **sizes)


def test_a_dense_trace_s_rounds_are_those_of_the_longest_draft() -> None:
    trace = small_trace(1)
    rounds, replayed = longest_rounds(trace), fixed_k_rounds(trace, trace.depth)
    np.testing.assert_array_equal(rounds.drafted, replayed.drafted)
    np.testing.assert_array_equal(rounds.accepted, replayed.accepted)


def test_a_trace_without_drafts_is_refused() -> None:
    trace = generate(IID(0.5), 3, 1, 4)
    for kind in (IID, PerPosition):
        with pytest.raises(InputError, match="drafted"):
            kind.fit(trace)


def test_rates_by_position_a_model_and_its_file_are_the_same(tmp_path: Path) -> None:
    from specsim.acceptance.generate import save_model
    from specsim.acceptance.models import PerPosition

    rates = [0.9, 0.5, 0.1]
    trace = specsim.generate(rates, depth=3, seed=2)
    assert (trace.match_len > 0).mean() == pytest.approx(0.9, abs=0.02)
    save_model(PerPosition(tuple(rates)), tmp_path / "model.json")
    for same in (np.array(rates), PerPosition(tuple(rates)), tmp_path / "model.json", str(tmp_path / "model.json")):
        assert np.array_equal(specsim.generate(same, depth=3, seed=2).match_len, trace.match_len)


def test_other_arguments_of_generate_are_refused() -> None:
    with pytest.raises(specsim.InputError, match=r"1.5 is outside \[0, 1\]"):
        specsim.generate(acceptance=1.5)
    with pytest.raises(specsim.InputError, match="does not exist"):
        specsim.generate("model.json")
    for wrong in (None, {"alpha": 0.8}, ["a"]):
        with pytest.raises(TypeError, match="acceptance is a .*expected a probability"):
            specsim.generate(wrong)


GOOD = {
    "policy": ["a", "a", "a", "b"],
    "sequence_id": [3, 3, 4, 3],
    "round": [0, 1, 0, 0],
    "t": [0, 3, 0, 0],
    "drafted": [4, 2, 0, 1],
    "accepted": [2, 2, 0, 0],
    "draft_s": [0.1, 0.1, 0.0, 0.1],
}


def write(tmp_path: Path, columns: dict[str, Any]) -> Path:
    path = tmp_path / "rounds.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_rounds_are_read_whole_and_by_policy(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    rounds = read_rounds(path)
    assert rounds.drafted.tolist() == GOOD["drafted"] and rounds.accepted.tolist() == GOOD["accepted"]
    assert rounds.t.tolist() == GOOD["t"]
    selected = read_source(path, policy="b")
    assert isinstance(selected, Rounds) and selected.drafted.tolist() == [1]
    minimal = read_rounds(write(tmp_path, {"drafted": [2], "accepted": [1]}))
    assert minimal.policy is None and minimal.t is None and minimal.sequence_id is None


def test_dropped_tokens_do_not_count_as_drafted(tmp_path: Path) -> None:
    rounds = read_rounds(write(tmp_path, {**GOOD, "verified": [3, 2, 0, 0]}))
    assert rounds.drafted.tolist() == [3, 2, 0, 0]
    with pytest.raises(InputError, match="2 of 1 drafted tokens accepted in row 0"):
        read_rounds(write(tmp_path, {**GOOD, "verified": [1, 2, 0, 0]}))


def test_two_runs_of_one_policy_are_separated_by_their_start(tmp_path: Path) -> None:
    columns = {"policy": ["a"] * 4, "sequence_id": [3] * 4, "t": [0, 3, 0, 1], "drafted": [4] * 4}
    rounds = read_rounds(write(tmp_path, {**columns, "accepted": [2, 1, 0, 4]}))
    assert len(rounds.drafted) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": [5, 2, 0, 0]}, "5 of 4 drafted tokens accepted in row 0"),
        ({"accepted": [-1, 2, 0, 0]}, "-1 of 4"),
        ({"accepted": None}, "lacks column 'accepted'"),
        ({"drafted": [4, None, 0, 1]}, "nulls"),
        ({"drafted": [4.0, 2.0, 0.0, 1.0]}, "expected whole numbers"),
        ({"drafted": [0] * 4, "accepted": [0] * 4}, "no round that drafted"),
        ({"t": [0, 4, 0, 0]}, "the round after that of sequence 3 at t = 0 with 2 accepted is missing"),
        ({"t": [-1, 2, 0, 0]}, "negative position"),
    ],
)
def test_bad_rounds_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    columns = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        read_rounds(write(tmp_path, columns))


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rounds of policy 'c'; it has: a, b"):
        read_rounds(write(tmp_path, GOOD), policy="c")
    with pytest.raises(InputError, match="no column 'policy'"):
        read_rounds(write(tmp_path, {"drafted": [2], "accepted": [1]}), policy="c")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1")
    with pytest.raises(InputError, match="not a readable Parquet"):
        read_rounds(broken)


def counters(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "counters.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_counters_are_read_down_to_the_last_depth_used(tmp_path: Path) -> None:
    source = read_source(counters(tmp_path, {"drafted": [9, 9, 0], "accepted": [7, 5, 0], "model": "x"}))
    assert isinstance(source, Counters)
    assert source.drafted.tolist() == [9, 9] and source.accepted.tolist() == [7, 5]
    assert describe(source) == {"source": "counters", "rounds": 9}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "not valid JSON"),
        ([1], "Expected `object`, got `array`"),
        ({"drafted": [3]}, "missing required field `accepted`"),
        ({"drafted": [3], "accepted": [0.5]}, r"Expected `int`, got `float` - at `\$.accepted\[0\]`"),
        ({"drafted": [3], "accepted": [-1]}, "'accepted' is not a list of counts"),
        ({"drafted": [3, 3], "accepted": [1]}, "2 depths drafted but 1 accepted"),
        ({"drafted": [3], "accepted": [4]}, "accepted must not exceed drafted"),
        ({"drafted": [3, 3], "accepted": [1, 2]}, "must not grow"),
        ({"drafted": [3, 4], "accepted": [2, 2]}, "must not grow"),
        ({"drafted": [0], "accepted": [0]}, "no token was drafted"),
    ],
)
def test_bad_counters_are_refused(document: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_counters(counters(tmp_path, document))


def test_traces_are_sources_too(tmp_path: Path) -> None:
    trace = small_trace()
    write_trace(trace, tmp_path / "trace")
    source = read_source(tmp_path / "trace")
    assert isinstance(source, Trace)
    assert describe(source) == {"source": "dense trace", "sequences": 5, "output_tokens": 102}
    np.testing.assert_array_equal(source.match_len, trace.match_len)
    with pytest.raises(InputError, match="--policy selects rounds"):
        read_source(tmp_path / "trace", policy="a")
    with pytest.raises(InputError, match="does not exist"):
        read_source(tmp_path / "nowhere")


@cache
def text_trace() -> Trace:
    return softmax_text(1)


@cache
def fitted() -> Difficulty:
    return Difficulty.fit(text_trace())


@cache
def known_trace() -> Trace:
    return generate(difficulty(), 200, 100, 8, seed=7)


@cache
def refitted() -> Difficulty:
    return Difficulty.fit(known_trace())


def speedup(trace: Trace, policy: ChainPolicy) -> float:
    return replay(trace, policy, cost_table(trace, COST)).speedup


def test_a_drift_has_its_stated_autocorrelation() -> None:
    """On 2000 sequences of 60, at lags up to 20; every position is standard normal."""
    drift = Drift(sequence=0.2, local=0.5, decay=0.8)
    x = drift.draw(np.full(2000, 60), np.random.default_rng(0)).reshape(2000, 60)
    assert x.mean() == pytest.approx(0, abs=0.06) and x.var() == pytest.approx(1, abs=0.04)
    for lag in (1, 2, 5, 20):
        assert (x[:, lag:] * x[:, :-lag]).mean() == pytest.approx(0.2 + 0.5 * 0.8**lag, abs=0.03)
    assert fit_drift(x.ravel(), np.full(2000, 60)) == pytest.approx(drift, abs=0.04)


def test_the_likelihood_is_that_of_hits_and_misses() -> None:
    """Exact for independent tokens; for two tokens compared with the orthant of a bivariate normal distribution.

    That distribution is continuous and the chain's is binomial: 15 states have an error of up to 0.5 %.
    """
    rng = np.random.default_rng(1)
    offset = rng.normal(size=(3, 5))
    accepted = (rng.random((3, 5)) < 0.6).astype(np.int8)
    accepted[0, 2] = MISSING
    seen = accepted != MISSING
    alone = np.log(ndtr(np.where(accepted == 1, 1, -1) * offset))[seen].sum()
    assert log_likelihood(Drift(0, 0, 0), offset, accepted) == pytest.approx(alone, rel=1e-9)
    pair = np.zeros((1, 2))
    for drift in (Drift(0.5, 0, 0), Drift(0, 0.6, 0.9), Drift(0.2, 0.3, 0.5)):
        r = drift.sequence + drift.local * drift.decay
        orthant = 0.25 + np.arcsin(r) / (2 * np.pi)
        both = log_likelihood(drift, pair, np.ones((1, 2), dtype=np.int8))
        assert both == pytest.approx(np.log(orthant), rel=5e-3)


def test_hidden_drift_is_recovered_from_hits_with_gaps() -> None:
    drift = Drift(0.25, 0.35, 0.9)
    rng = np.random.default_rng(2)
    offset = rng.normal(0.4, 0.5, size=(150, 100))
    accepted = (offset + drift.draw(np.full(150, 100), rng).reshape(150, 100) > 0).astype(np.int8)
    accepted[rng.random(accepted.shape) < 0.2] = MISSING
    fitted = fit_hidden(offset, accepted)
    assert fitted.sequence == pytest.approx(0.25, abs=0.12)
    assert fitted.sequence + fitted.local == pytest.approx(0.6, abs=0.12)
    assert fitted.decay == pytest.approx(0.9, abs=0.06)


def test_independent_hits_show_no_hidden_drift() -> None:
    accepted = (np.random.default_rng(3).random((60, 100)) < 0.7).astype(np.int8)
    fitted = fit_hidden(np.full(accepted.shape, 0.524), accepted)
    assert fitted.sequence + fitted.local < 0.05


def test_known_parameters_are_recovered_from_a_dense_trace() -> None:
    """20,000 tokens of 200 sequences: tables in their middle, correlations, drifts."""
    truth, fit = difficulty(), refitted()
    middle = np.abs(KNOTS) <= 1.5
    for name in ("on_confidence", "on_ratio", "hit_prob", "off_confidence"):
        np.testing.assert_allclose(
            np.array(getattr(fit, name))[middle], np.array(getattr(truth, name))[middle], atol=0.05
        )
    assert fit.on_correlation == pytest.approx(truth.on_correlation, abs=0.05)
    assert fit.feature_drift == pytest.approx(truth.feature_drift, abs=0.1)
    assert sum(fit.hidden_drift[:2]) == pytest.approx(sum(truth.hidden_drift[:2]), abs=0.12)
    assert fit.hidden_drift[2] == pytest.approx(truth.hidden_drift[2], abs=0.08)
    assert fit.off_follow == pytest.approx(truth.off_follow, abs=0.08)
    assert fit.off_common == pytest.approx(truth.off_common, abs=0.08)


def test_a_refitted_model_s_traces_look_like_the_model_s() -> None:
    """Match lengths, autocorrelation, calibration and features differ by at most twice the noise of a trace."""
    report = fit_report(refitted(), known_trace(), replicates=12)
    assert report.total_variation <= 2 * report.total_variation_noise
    for statistic in report.statistics:
        assert abs(statistic.observed - statistic.model) <= statistic.high - statistic.low, statistic


def test_generated_confidence_is_as_calibrated_as_the_model_says() -> None:
    """ECE on first tokens from the model's tables, compared with that of a trace."""
    model, trace = difficulty(), generate(difficulty(), 2000, 100, 1, seed=8)
    accept_prob, confidence = np.array(model.hit_prob), np.array(model.on_confidence)
    weight = np.exp(-(KNOTS**2) / 2) / np.exp(-(KNOTS**2) / 2).sum()
    accepted = trace.match_len > 0
    assert accepted.mean() == pytest.approx((weight * accept_prob).sum(), abs=0.01)
    assert reliability(trace.confidence[:, 0], accepted).ece == pytest.approx(
        (weight * (confidence - accept_prob)).sum(), abs=0.01
    )


@pytest.mark.parametrize(
    "policy",
    [
        FixedK(k=1),
        FixedK(k=2),
        FixedK(k=4),
        FixedK(k=8),
        MaxConfidence(lambda0=0.4, dynamic=False, max_draft_tokens=8),
        MaxConfidence(lambda0=0.6, dynamic=True, max_draft_tokens=8),
        AdaEDL(gamma=0.2, lambda0=0.4, dynamic=False, max_draft_tokens=8),
        AdaEDL(gamma=0.2, lambda0=0.3, dynamic=True, max_draft_tokens=8),
    ],
    ids=str,
)
def test_speedups_on_synthetic_traces_are_those_on_the_text_fitted_to(policy: ChainPolicy) -> None:
    """A text from another process (softmax features, acceptance that depends on earlier tokens): within 3 %."""
    synthetic = generate(fitted(), 600, 150, 8, seed=9)
    assert speedup(synthetic, policy) == pytest.approx(speedup(text_trace(), policy), rel=0.03)


def test_it_represents_what_simpler_models_cannot() -> None:
    """Match lengths of neighbouring rounds, acceptance that differs by sequence, and adaptive policies."""
    observed = summary(text_trace())
    policy = AdaEDL(gamma=0.2, lambda0=0.4, dynamic=False, max_draft_tokens=8)
    errors, spreads = [], []
    for model in (fitted(), IID.fit(text_trace()), PerPosition.fit(text_trace())):
        trace = generate(model, 600, 150, 8, seed=10)
        errors.append(abs(speedup(trace, policy) / speedup(text_trace(), policy) - 1))
        spreads.append(summary(trace)["spread of acceptance over sequences"])
    assert errors[0] < 0.03 < 0.1 < min(errors[1:])
    spread = observed["spread of acceptance over sequences"]
    assert spreads[0] == pytest.approx(spread, rel=0.25)
    assert max(spreads[1:]) < 0.6 * spread


def test_over_dispersion_is_found_in_rounds() -> None:
    """Rounds of K = 4 of the default joint distribution: the latent's strength and the speedup at other K."""
    source = generate(difficulty(hidden=(0.3, 0.2, 0.9), features=(0.3, 0.2, 0.9)), 150, 100, 8, seed=11)
    model = Difficulty.fit(fixed_k_rounds(source, 4))
    assert model.feature_drift == model.hidden_drift
    assert sum(model.hidden_drift[:2]) == pytest.approx(0.5, abs=0.15)
    synthetic = generate(model, 600, 100, 8, seed=12)
    for k in (1, 2, 4, 8):
        assert speedup(synthetic, FixedK(k=k)) == pytest.approx(speedup(source, FixedK(k=k)), rel=0.03)
    observed, generated = summary(source), summary(synthetic)
    for name in ("spread of acceptance over sequences", "autocorrelation of match length, lag 8"):
        assert generated[name] == pytest.approx(observed[name], abs=0.06)
    # The default distribution's confidence is calibrated, token by token; 600 sequences leave an error of 0.01.
    assert reliability(synthetic.confidence[:, 0], synthetic.match_len > 0).ece < 0.03


def test_insufficient_data_are_refused() -> None:
    rounds = fixed_k_rounds(small_trace(), 3)
    with pytest.raises(InputError, match="cannot be fitted to counters"):
        Difficulty.fit(as_counters(rounds))
    with pytest.raises(InputError, match="needs 200 output tokens"):
        Difficulty.fit(small_trace())
    with pytest.raises(InputError, match="needs 200 verified tokens"):
        Difficulty.fit(rounds)
    with pytest.raises(InputError, match="needs the columns sequence_id and t"):
        Difficulty.fit(Rounds(rounds.drafted, rounds.accepted))
    with pytest.raises(InputError, match="has 495 with 495 accepted"):
        Difficulty.fit(generate(IID(1.0), 5, 100, 4))


def test_a_drafter_with_uninformative_confidence_can_be_fitted() -> None:
    model = Difficulty.fit(generate(IID(0.7), 20, 60, 1))
    assert np.ptp(model.hit_prob) == 0 and model.hit_prob[0] == pytest.approx(0.7, abs=0.06)
    assert generate(model, 3, 20, 4).depth == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hit_prob": (0.5,)}, "hit_prob needs 57 values"),
        ({"on_confidence": (1.2,) * 57}, "on_confidence needs 57 values in"),
        ({"on_entropy_nats": tuple(range(57, 0, -1))}, "on_entropy_nats must not fall"),
        ({"hidden_drift": (0.7, 0.7, 0.1)}, "shares above 1"),
        ({"hidden_drift": (0.1, 0.1, 1.0)}, "decay of 1"),
        ({"off_follow": 0.9, "off_common": 0.5}, "exceeds 1"),
    ],
)
def test_impossible_parameters_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(difficulty(), **change)


def test_a_perfect_model_passes_its_own_report_and_a_wrong_one_does_not() -> None:
    trace = generate(difficulty(), 40, 80, 6, seed=13)
    right = fit_report(difficulty(), trace, replicates=20)
    wrong = fit_report(IID.fit(trace), trace, replicates=20)
    assert sum(statistic.fits for statistic in right.statistics) >= len(right.statistics) - 3
    assert sum(statistic.fits for statistic in wrong.statistics) <= 3
    assert wrong.total_variation > wrong.total_variation_noise
    assert sum(right.accepted_length) == pytest.approx(1) and len(right.accepted_length) == 7
