"""Traces of rejection sampling, and the split of sequences."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specsim.acceptance.formulas import mean_tokens_per_round
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.files import read_trace, write_trace
from specsim.trace.outcomes import DRAWS, as_recorded, drawn_match_len, outcomes
from specsim.trace.split import fold_sequences, split_sequences
from specsim.trace.trace import Trace
from tests.support.reference import build_trace, small_trace

COST = ConstantCost(1e-3, 1e-2)


def rejection_trace(trace: Trace, accept_prob: np.ndarray) -> Trace:
    decoding = {"mode": "rejection", "temperature": 1.0, "seed": 0}
    return replace(trace, meta={**trace.meta, "decoding": decoding}, accept_prob=accept_prob.astype(np.float32))


def flat_trace(chance: float, length: int = 4000, depth: int = 6) -> Trace:
    """One long sequence in which every draft token has this chance, and no text ends early."""
    trace = build_trace(np.random.default_rng(0), np.zeros((length, depth), dtype=bool), [length])
    trace = replace(trace, meta={**trace.meta, "eos_token_id": None})
    return rejection_trace(trace, np.full((length, depth), chance))


@pytest.fixture(scope="module")
def trace() -> Trace:
    base = small_trace()
    return rejection_trace(base, np.random.default_rng(5).random(base.prob.shape))


def test_a_drawn_match_is_a_run_of_independent_acceptances(trace: Trace) -> None:
    """Over many draws, the share of matches >= i is the product of the first i chances, at every position."""
    draws = np.array([drawn_match_len(trace, 3, draw) for draw in range(4000)])
    trace.drawn.clear()
    assert draws.dtype == np.uint8 and draws.shape[1] == len(trace.token)
    reach = np.cumprod(trace.accept_prob.astype(np.float64), axis=1)
    for i in range(1, trace.depth + 1):
        expected = np.where(i <= trace.draft_limit, reach[:, i - 1], 0.0)
        sd = np.sqrt(expected * (1 - expected) / len(draws))
        # 600 comparisons, at 5 standard errors each and a count for what a normal distribution misses
        assert (np.abs((draws >= i).mean(0) - expected) <= 5 * sd + 2 / len(draws)).all()


def test_draws_are_independent_over_seeds_draws_sequences_and_positions() -> None:
    flat = flat_trace(0.5)
    columns = [drawn_match_len(flat, seed, draw).astype(float) for seed, draw in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    other = drawn_match_len(replace(flat, sequence_id=flat.sequence_id + 1), 0, 0).astype(float)
    first = columns[0]
    for second in [*columns[1:], other, np.roll(first, 1)]:
        assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(len(first))


def test_certain_and_impossible_tokens(trace: Trace) -> None:
    certain = rejection_trace(trace, np.ones_like(trace.prob))
    np.testing.assert_array_equal(drawn_match_len(certain, 0, 0), trace.draft_limit)
    assert not drawn_match_len(rejection_trace(trace, np.zeros_like(trace.prob)), 0, 0).any()
    third = np.ones_like(trace.prob)
    third[:, 2] = 0
    np.testing.assert_array_equal(
        drawn_match_len(rejection_trace(trace, third), 0, 0), np.minimum(trace.draft_limit, 2)
    )


def test_a_part_of_a_trace_draws_what_the_whole_draws(trace: Trace) -> None:
    part = trace.select([3, 1])
    whole = drawn_match_len(trace, 0, 5)
    spans = [whole[trace.offsets[s] : trace.offsets[s + 1]] for s in (3, 1)]
    np.testing.assert_array_equal(drawn_match_len(part, 0, 5), np.concatenate(spans))


def test_replay_is_the_sum_of_exact_replays_of_its_outcomes(trace: Trace) -> None:
    table, policy = cost_table(trace, COST), MaxConfidence(lambda0=0.4, max_draft_tokens=5)
    whole = replay(trace, policy, table, seed=7, log=True)
    assert whole.draws == DRAWS == 16 and whole.approximate
    parts = [
        replay(replace(as_recorded(trace), match_len=match_len), policy, table, seed=seed, log=True)
        for match_len, seed in outcomes(trace, 7)
    ]
    assert len(parts) == DRAWS and not parts[0].approximate
    for name in ("num_rounds", "drafted", "accepted", "policy_steps", "output_tokens"):
        np.testing.assert_array_equal(getattr(whole, name), sum(getattr(part, name) for part in parts), name)
    np.testing.assert_allclose(whole.seconds, sum(part.seconds for part in parts), rtol=1e-12)
    np.testing.assert_allclose(whole.autoregressive_s, sum(part.autoregressive_s for part in parts), rtol=1e-12)
    assert whole.rounds.rows() == parts[0].rounds.rows()
    assert len(whole.rounds) < whole.num_rounds.sum()
    assert len({tuple(part.num_rounds) for part in parts}) > 1  # outcomes differ


def test_the_policys_uniforms_differ_between_outcomes(trace: Trace) -> None:
    seeds = [seed for _, seed in outcomes(trace, 7)]
    assert len(set(seeds)) == DRAWS
    exact = as_recorded(trace)
    assert [(m is exact.match_len, seed) for m, seed in outcomes(exact, 7)] == [(True, 7)]


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_equal_chances_give_leviathans_tokens_per_round(chance: float, k: int) -> None:
    """Over all outcomes, within 5 standard errors (see test_replay of the same distribution)."""
    flat = flat_trace(chance)
    result = replay(flat, FixedK(k=k), cost_table(flat, COST))
    tau = float(mean_tokens_per_round(chance, k))
    size = np.arange(1, k + 2)
    distribution = np.append(chance ** np.arange(k) * (1 - chance), chance**k)
    sigma = np.sqrt(max(0.0, (distribution * size**2).sum() - tau**2))
    # The budget cuts an outcome's last drafts short, which costs it two rounds at most.
    margin = 5 * sigma / np.sqrt(result.num_rounds.sum()) + 2 * DRAWS * tau / result.num_rounds.sum()
    assert abs(result.output_tokens.sum() / result.num_rounds.sum() - tau) <= margin


def test_only_rejection_with_probabilities_is_approximate(trace: Trace) -> None:
    assert trace.approximate
    assert not as_recorded(trace).approximate and as_recorded(trace).accept_prob is None
    assert as_recorded(trace).meta == trace.meta
    for decoding in ("greedy", {"mode": "gumbel", "temperature": 1.0, "seed": 0}):
        other = replace(trace, meta={**trace.meta, "decoding": decoding})
        assert not other.approximate and as_recorded(other) is other
        assert replay(other, FixedK(k=2), cost_table(other, COST)).draws == 1


def test_a_prediction_counts_every_sequence_once(trace: Trace) -> None:
    policy = FixedK(k=3)
    whole, mean = replay(trace, policy, cost_table(trace, COST)), predict_policy(PricedTrace(trace, COST), policy)
    assert mean.approximate and mean.as_dict()["approximate"] is True
    assert mean.output_tokens == trace.output_tokens.sum()
    assert mean.rounds == round(whole.num_rounds.sum() / DRAWS)
    assert mean.tau == pytest.approx(whole.output_tokens.sum() / whole.num_rounds.sum())
    assert mean.speedup.estimate == pytest.approx(mean.ar_seconds / mean.seconds) == pytest.approx(whole.speedup)
    assert mean.oracle_regret > 0
    assert predict_policy(PricedTrace(as_recorded(trace), COST), policy).as_dict()["approximate"] is False


def test_drawing_needs_the_column(trace: Trace) -> None:
    with pytest.raises(InputError, match="accept_prob"):
        drawn_match_len(as_recorded(trace), 0, 0)


@pytest.mark.parametrize("bad", [-0.1, 1.1])
def test_probabilities_outside_0_and_1_are_refused(trace: Trace, tmp_path: Path, bad: float) -> None:
    spoilt = np.array(trace.accept_prob)
    spoilt[7, 2] = bad
    write_trace(replace(trace, accept_prob=spoilt), tmp_path / "t")
    with pytest.raises(InputError, match=r"accept_prob leaves \[0, 1\]"):
        read_trace(tmp_path / "t")


def trace_of(*source: str, domain: str = "code") -> Trace:
    """A sequence from each of these files; "" is a text of its own."""
    trace = generate(IID(0.7), len(source), 6, 3)
    return dataclasses.replace(trace, source=np.array(source), domain=np.full(len(source), domain))


def before(trace: Trace, share: float, seed: int) -> tuple[list[int], list[int]]:
    """The split by prompt, as it was before traces named their files."""
    rng = np.random.default_rng(seed)
    sides: tuple[list[int], list[int]] = [], []
    for domain in np.unique(trace.domain):
        members = rng.permutation(np.flatnonzero(trace.domain == domain)).tolist()
        cut = round(len(members) * share)
        sides[0].extend(members[:cut])
        sides[1].extend(members[cut:])
    return sorted(sides[0]), sorted(sides[1])


@pytest.mark.parametrize("seed", range(8))
def test_prompts_of_one_file_fall_on_one_side(seed: int) -> None:
    files = ["a", "b", "c", "d", "e", "f"] * 3  # as `study_prompts` goes round the files
    trace = trace_of(*files)
    tuning, held = split_sequences(trace, tuning_share=2 / 3, seed=seed)
    sides = [{files[sequence] for sequence in side.tolist()} for side in (tuning, held)]
    assert not sides[0] & sides[1]
    assert (len(tuning), len(held)) == (12, 6)
    assert sorted([*tuning, *held]) == [*range(18)]
    for part in fold_sequences(trace, 3, seed=seed):
        names = [files[sequence] for sequence in part.tolist()]
        assert sorted(names) == sorted([*set(names)] * 3)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.667])
def test_traces_without_files_split_as_before(share: float) -> None:
    domains = np.array(["code", "prose", "code", "tests", "code", "prose", "tests", "code", "prose", "code"])
    trace = dataclasses.replace(generate(IID(0.7), 10, 6, 3), domain=domains)
    named = dataclasses.replace(trace, source=np.array(["", "x", "", "", "y", "", "", "", "", ""]))
    for seed in range(5):
        for split in (trace, named):  # a file with a single prompt changes nothing
            tuning, held = split_sequences(split, tuning_share=share, seed=seed)
            assert (tuning.tolist(), held.tolist()) == before(trace, share, seed)


def test_whole_files_come_as_near_to_the_share_as_they_can() -> None:
    tuning, held = split_sequences(trace_of(*"aaaaab"), tuning_share=0.5)
    assert sorted((len(tuning), len(held))) == [1, 5]


def test_one_file_alone_is_not_split() -> None:
    with pytest.raises(InputError, match=r"4 sequences from 1 files cannot be split"):
        split_sequences(trace_of(*"aaaa"))
    with pytest.raises(InputError, match="folds=3 cannot divide 4 sequences from 2 files"):
        fold_sequences(trace_of(*"abab"), 3, seed=0)


def test_domains_too_small_to_split_are_split_together() -> None:
    trace = generate(IID(0.7), 4, 6, 3)
    apart, mixed = (dataclasses.replace(trace, domain=np.array(list(names))) for names in ("abcd", "abcc"))
    assert [part.tolist() for part in split_sequences(apart)] == [part.tolist() for part in split_sequences(trace)]
    assert [len(part) for part in split_sequences(mixed)] == [1, 3]  # a domain of two is still split in half


def test_files_are_written_and_read(tmp_path: Path) -> None:
    trace = trace_of("a.py", "", "b.py", "a.py")
    write_trace(trace, tmp_path / "trace")
    again = read_trace(tmp_path / "trace")
    assert again.source.tolist() == ["a.py", "", "b.py", "a.py"]
    assert again.select([2, 0]).source.tolist() == ["b.py", "a.py"]
    write_trace(dataclasses.replace(trace, source=None), tmp_path / "old")
    assert read_trace(tmp_path / "old").source is None
