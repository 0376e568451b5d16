"""Acceptance models without informative features, generated traces, and model files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.acceptance.difficulty import Difficulty
from specsim.acceptance.files import load_model, save_model
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID, AcceptanceModel, PerPosition, geometric_entropy_nats
from specsim.acceptance.sources import Rounds, longest_rounds, verified_by_depth
from specsim.io.errors import InputError
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.files import read_trace, write_trace
from specsim.trace.trace import Trace
from tests.support.acceptance_examples import COST, as_counters, difficulty, fixed_k_rounds
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
