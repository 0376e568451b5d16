"""The papers' formulas: against their printed tables, by hand, and against replays where their assumptions hold."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.acceptance import formulas
from specsim.acceptance.difficulty import Difficulty
from specsim.acceptance.formulas import eq14_speedup, leviathan_speedup, mean_tokens_per_round
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID, PerPosition
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.policy.chain.time_gain import TimeGain
from specsim.replaying.prediction import summarise
from specsim.replaying.replay import Replay, replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from studies.papers.tables import Row, read_table
from tests.support.reference import small_trace

COST = ConstantCost(s_d=2e-3, s_t=17e-3)
ROUNDS = 40_000  # of every cell of the grid


def run(trace: Trace, policy: ChainPolicy, *, log: bool = False) -> Replay:
    return replay(trace, policy, cost_table(trace, COST), log=log)


def whole_rounds(trace: Trace, k: int) -> np.ndarray:
    """Accepted tokens of the rounds that could draft k tokens: those before the sequence's last k + 1 positions.

    Which rounds these are depends on where they begin, not on how they end, so their distribution is
    that of a round in an endless text.
    """
    log = run(trace, FixedK(k=k), log=True).rounds
    left = trace.output_tokens[log.sequence] - log.t
    counted = log[left > k]
    assert (counted.drafted == k).all()
    return counted.accepted


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.4, 0.6, 0.8, 0.9, 0.95, 1.0])
def test_fixed_k_emits_as_many_tokens_per_round_as_leviathan_says(alpha: float) -> None:
    """Eq. 1, (1 - a^(K+1)) / (1 - a), within 4 standard errors of the mean over some 40,000 rounds."""
    longest = 12
    lengths = np.full(4, round(ROUNDS / 4 * mean_tokens_per_round(alpha, longest)))
    trace = generate(IID(alpha), 4, lengths, longest, seed=11)
    for k in (1, 2, 3, 5, 8, 12):
        emitted = whole_rounds(trace, k) + 1
        assert len(emitted) > 0.9 * ROUNDS
        expected = float(mean_tokens_per_round(alpha, k))
        error = emitted.std() / np.sqrt(len(emitted))
        assert abs(emitted.mean() - expected) <= 4 * error + 1e-12, (k, emitted.mean(), expected)


def test_that_test_has_the_power_to_see_one_percent() -> None:
    """Acceptance off by 0.01 moves the mean by far more than 4 standard errors."""
    trace = generate(IID(0.79), 4, ROUNDS, 8, seed=12)
    emitted = whole_rounds(trace, 8) + 1
    error = emitted.std() / np.sqrt(len(emitted))
    assert abs(emitted.mean() - float(mean_tokens_per_round(0.8, 8))) > 4 * error


@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_leviathan_s_speedup_in_expectation(alpha: float, k: int) -> None:
    """Theorem 3.8, over sequences long enough that their ends, at most K tokens, do not count.

    The tolerance is 4 standard errors of the sequences' mean, plus K tokens' share.
    """
    tokens = 4_000
    result = run(generate(IID(alpha), 30, tokens, k, seed=13), FixedK(k=k))
    speedups = result.autoregressive_s / result.speculative_s
    expected = float(leviathan_speedup(alpha, k, COST.s_d / COST.s_t))
    tolerance = 4 * speedups.std() / np.sqrt(len(speedups)) + expected * k / tokens
    assert speedups.mean() == pytest.approx(expected, abs=tolerance)


@cache
def difficult(seed: int) -> Trace:
    """A trace of a difficulty model fitted to another trace."""
    rng = np.random.default_rng(seed)
    trace = small_trace(seed)
    source = generate(PerPosition(tuple(rng.uniform(0.5, 0.9, 6))), 10, 60, trace.depth, seed)
    return generate(Difficulty.fit(source), 12, rng.integers(1, 90, 12), 6, seed)


def filled(trace: Trace) -> Trace:
    """The trace as if its outputs had ended by their budget and no token ended a text."""
    return replace(trace, meta={**trace.meta, "eos_token_id": None}, budget_tokens=trace.output_tokens)


TRACES = {
    "recorded": lambda: filled(small_trace(3)),
    "iid": lambda: generate(IID(0.75), 7, [1, 2, 9, 40, 100, 3, 64], 8, seed=1),
    "nothing accepted": lambda: generate(IID(0.0), 3, 20, 6, seed=2),
    "everything accepted": lambda: generate(IID(1.0), 3, 20, 6, seed=2),
    "difficulty": lambda: difficult(4),
}
CHAIN = [
    FixedK(k=1),
    FixedK(k=6),
    MaxConfidence(lambda0=0.6, max_draft_tokens=6),
    AdaEDL(gamma=0.3, lambda0=0.2, max_draft_tokens=5),
    TimeGain(max_draft_tokens=6),
]


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("policy", CHAIN, ids=str)
def test_eq14_is_the_replayed_speedup_under_its_own_assumptions(name: str, policy: ChainPolicy) -> None:
    """Constant s_d and s_t, nothing else costs: EESD Eq. 13 and Eq. 14, whatever the trace and the policy."""
    trace = TRACES[name]()
    result = run(trace, policy)
    summary = summarise(result)
    time_s = summary.drafted * COST.s_d + summary.rounds * COST.s_t
    assert summary.seconds == pytest.approx(time_s, rel=1e-12)
    assert summary.ar_seconds == pytest.approx(summary.output_tokens * COST.s_t, rel=1e-12)
    assert summary.output_tokens == summary.accepted + summary.rounds
    if summary.accepted:
        predicted = float(eq14_speedup(summary.v_d, summary.r_d, COST.s_d / COST.s_t))
        assert summary.speedup.estimate == pytest.approx(predicted, rel=1e-12)


def test_an_accepted_end_token_leaves_no_room_for_the_target_s_own() -> None:
    """Eq. 14 takes every round to emit a + 1 tokens: it misses by the rounds that accept the end. Eq. 13 does not."""
    trace = small_trace(3)
    result = run(trace, FixedK(k=6), log=True)
    rounds = result.rounds
    ends_inside = int((rounds.t + rounds.accepted == trace.output_tokens[rounds.sequence]).sum())
    summary = summarise(result)
    assert ends_inside > 0
    assert summary.output_tokens == summary.accepted + summary.rounds - ends_inside
    assert summary.seconds == pytest.approx(summary.drafted * COST.s_d + summary.rounds * COST.s_t, rel=1e-12)


def test_eq14_knows_no_draft_that_is_all_rejected() -> None:
    """v_d = r_d = 0 leaves 0 / 0: there Eq. 14 answers 1, as if nothing had been drafted, while Eq. 13 has it right."""
    summary = summarise(run(TRACES["nothing accepted"](), FixedK(k=3)))
    assert summary.v_d == summary.r_d == 0 and summary.drafted > 0
    assert float(eq14_speedup(summary.v_d, summary.r_d, 0.1)) == 1.0
    assert summary.speedup.estimate < 0.8


ROUNDING = 0.005  # v_d, r_d and speed-ups are printed to two places


# Effective T_d/T_t per (target, method) of EESD's tables 10 to 13: a single number for all data sets, about 1.5 times
# the measured share because it also absorbs what Eq. 14 leaves out.
EFFECTIVE_ALPHA = {
    ("LLaMA-2-70B", "Vanilla SD"): 0.350,
    ("LLaMA-2-70B", "Self SD"): 0.561,
    ("LLaMA-2-70B", "EESD (+Cali-TS)"): 0.124,
    ("LLaMA-2-13B", "Medusa"): 0.022,
    ("LLaMA-2-13B", "EESD (+Beta-TS)"): 0.149,
    ("LLaMA-2-13B", "EESD (+Cali-TS)"): 0.145,
}
DATASETS = {"gsm8k": "eesd_10", "xsum": "eesd_11", "humaneval": "eesd_12", "mt_bench": "eesd_13"}
ROWS = [
    row
    for table in DATASETS.values()
    for row in read_table(table).rows
    if (row["target"], row["method"]) in EFFECTIVE_ALPHA
]


def column(name: str) -> np.ndarray:
    return np.array([row.number(name) for row in ROWS])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.place())
def test_hm_is_the_printed_hm_to_the_rounding_of_its_inputs(row: Row) -> None:
    """HM rises with both inputs, so their rounding intervals bound it."""
    v_d, r_d = row.number("v_d"), row.number("r_d")
    low = 100 * formulas.harmonic_mean(v_d - ROUNDING, r_d - ROUNDING)
    high = 100 * formulas.harmonic_mean(v_d + ROUNDING, r_d + ROUNDING)
    assert low - 0.005 <= row.number("hm_percent") <= high + 0.005
    assert high - low < 1.3  # a bound that says something


def test_eq14_reproduces_the_printed_speedups_with_an_effective_ratio_per_method() -> None:
    """Four data sets, speed-ups from 1.21 to 2.29: mean error below 2 %, largest below 3.5 %."""
    alpha_c = [EFFECTIVE_ALPHA[row["target"], row["method"]] for row in ROWS]
    error = np.abs(formulas.eq14_speedup(column("v_d"), column("r_d"), alpha_c) / column("speedup") - 1)
    assert len(ROWS) == 18 and error.mean() < 0.02 and error.max() < 0.035


def test_eq13_and_eq14_overstate_a_measured_run_by_what_they_leave_out() -> None:
    """EESD table 8, XSum, LLaMA-2-13B, Beta-TS: 3.656 s drafting, 7.986 s verifying, 0.54 s else."""
    row = read_table(DATASETS["xsum"]).row("LLaMA-2-13B", "EESD (+Beta-TS)")
    v_d, r_d = row.number("v_d"), row.number("r_d")
    drafted, rounds, target_s = 512 * r_d / v_d, 512 * (1 - r_d), 22.46 / 512
    draft_s = 3.656 / drafted
    time_s = drafted * draft_s + rounds * target_s
    assert time_s == pytest.approx(3.656 + 22.46 * 0.34, rel=1e-12)
    assert row.number("time_s") == pytest.approx(3.656 + 7.986 + 0.014 + 0.526, abs=0.01)
    speedup = float(formulas.eq14_speedup(v_d, r_d, draft_s / target_s))
    assert speedup == pytest.approx(22.46 / time_s, rel=1e-12)
    assert speedup / row.number("speedup") == pytest.approx(1.08, abs=0.01)


counts, seconds = st.integers(0, 20_000), st.floats(1e-5, 1.0)
runs = st.tuples(st.integers(1, 2000), counts, counts, seconds, seconds).filter(lambda run: 0 < run[1] <= 50 * run[0])


@given(runs)
def test_eq14_is_eq13_divided_into_the_baseline(run: tuple[int, int, int, float, float]) -> None:
    """For a run that emits accepted + rounds tokens; the cancellation in Eq. 14 costs at most 50 eps."""
    rounds, accepted, rejected, draft_s, target_s = run
    drafted, output = accepted + rejected, accepted + rounds
    v_d, r_d = formulas.draft_precision(accepted, drafted), formulas.draft_recall(accepted, output)
    expected = output * target_s / (drafted * draft_s + rounds * target_s)
    alpha_c = draft_s / target_s
    assert formulas.eq14_speedup(v_d, r_d, alpha_c) == pytest.approx(expected, rel=1e-12)
    if abs(alpha_c - v_d) > 1e-9:
        assert (formulas.eq14_speedup(v_d, r_d, alpha_c) > 1) == (alpha_c < v_d)


def test_rates_by_hand() -> None:
    """8 drafted, 6 accepted, 2 rounds: 8 tokens."""
    assert formulas.draft_precision(6, 8) == 0.75
    assert formulas.draft_recall(6, 8) == 0.75
    assert formulas.tokens_per_round(8, 2) == 4
    assert formulas.harmonic_mean(0.5, 1.0) == pytest.approx(2 / 3)
    np.testing.assert_array_equal(formulas.draft_precision([3, 0], [4, 0]), [0.75, 0])
    np.testing.assert_array_equal(formulas.harmonic_mean([0.0, 1.0], [0.0, 1.0]), [0, 1])


def test_a_run_that_drafts_nothing_has_speedup_1() -> None:
    assert formulas.eq14_speedup(0.0, 0.0, 0.1) == 1
    np.testing.assert_array_equal(formulas.eq14_speedup([0.0, 0.5], [0.0, 0.5], [0.1, 0.5]), [1, 1])


def test_eq5_is_negative_where_drafting_saves_time() -> None:
    """EDD + PCT, appendix B: 1.1 and 29.8 ms on 7B, so the break-even path probability is 0.037."""
    extra_s = formulas.eq5_expected_extra_time_s([1.0, 0.038, 0.036, 0.0], 1.1e-3, 29.8e-3)
    assert (extra_s < 0).tolist() == [True, True, False, False]
    assert extra_s[[0, 3]] == pytest.approx([1.1e-3 - 29.8e-3, 1.1e-3])
    # The paper's left side: (1 - p)(s_t + s_d) + p s_d - s_t
    assert extra_s[1] == pytest.approx(0.962 * 30.9e-3 + 0.038 * 1.1e-3 - 29.8e-3)


# Leviathan et al. 2023, arXiv:2211.17192, table 1: (alpha, gamma, speed at c = 0).
LEVIATHAN = [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)]


@pytest.mark.parametrize(("accept_prob", "k", "speed"), LEVIATHAN)
def test_leviathans_table(accept_prob: float, k: int, speed: float) -> None:
    assert formulas.leviathan_speedup(accept_prob, k, 0.0) == pytest.approx(speed, abs=ROUNDING)


# Agrawal et al. 2024 (AdaEDL), table 1: autoregressive and Base-SPD tokens/s at K = 3, 7, 16, with
# the acceptance fitted per data set. The draft cost ratio 0.096 is fitted once for all nine rates.
ADAEDL = [
    ("cnn_dm", 0.724, 25.74, (54.10, 51.50, 36.30)),
    ("dolly_15k", 0.648, 29.02, (54.70, 47.60, 32.10)),
    ("wmt_19", 0.463, 29.80, (40.90, 32.70, 22.30)),
]


@pytest.mark.parametrize(("dataset", "accept_prob", "baseline", "rates"), ADAEDL)
def test_a_single_cost_ratio_explains_base_spd(
    dataset: str, accept_prob: float, baseline: float, rates: tuple[float, ...]
) -> None:
    """Four parameters for nine rates between 22 and 55 tokens/s: mean error below 2 %, largest 4 %."""
    predicted = baseline * formulas.leviathan_speedup(accept_prob, [3, 7, 16], 0.096)
    error = np.abs(predicted / rates - 1)
    assert error.mean() < 0.02 and error.max() < 0.04


@given(accept_prob=st.floats(0, 1), k=st.integers(0, 256))
def test_mean_tokens_per_round_is_the_geometric_sum(accept_prob: float, k: int) -> None:
    """1 + a + ... + a^K, up to a = 1 and next to it."""
    exact = math.fsum(accept_prob**i for i in range(k + 1))
    assert formulas.mean_tokens_per_round(accept_prob, k) == pytest.approx(exact, rel=1e-12)


def test_leviathans_formula_at_its_limits() -> None:
    assert formulas.mean_tokens_per_round([0.0, 1.0, 0.5], [7, 7, 0]).tolist() == [1, 8, 1]
    assert formulas.mean_tokens_per_round(math.nextafter(1, 0), 7) == pytest.approx(8, rel=1e-14)
    assert formulas.mean_tokens_per_round(0.8, 1e6) == pytest.approx(5)
    assert formulas.leviathan_speedup(1.0, 4, 0.25) == 2.5
    assert formulas.leviathan_speedup(0.0, 4, 0.25) == 0.5
    assert formulas.leviathan_speedup(0.3, 0, 0.25) == pytest.approx(1)


@pytest.mark.parametrize(("accept_prob", "k"), [(-0.01, 1), (1.01, 1), (math.nan, 1), (0.5, -1), (0.5, math.nan)])
def test_leviathans_formula_refuses_what_is_no_probability(accept_prob: float, k: float) -> None:
    with pytest.raises(InputError, match="accept_prob must lie in"):
        formulas.mean_tokens_per_round([0.5, accept_prob], k)


def test_adaedl_stops_at_the_entropies_of_its_score() -> None:
    """1 - sqrt(0.2 H) reaches 0.8, 0.6, 0.4, 0.2, 0 at H = 0.2, 0.8, 1.8, 3.2, 5 nats."""
    np.testing.assert_allclose(
        formulas.adaedl_score([0.2, 0.8, 1.8, 3.2, 5.0, 20.0], 0.2), [0.8, 0.6, 0.4, 0.2, 0, -1], atol=1e-15
    )


def test_reliability_by_hand() -> None:
    """Gaps 0.05, 0.15 and twice |0.975 - 0.5| over four tokens: ECE 0.2875."""
    result = formulas.reliability([0.05, 0.15, 0.95, 1.0], [False, False, True, False])
    assert result.count.tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0, 2]
    assert result.ece == pytest.approx((0.05 + 0.15 + 2 * 0.475) / 4)
    assert result.accept_rate[[0, 1, 9]].tolist() == [0, 0, 0.5]
    assert result.mean_confidence[[0, 1, 9]] == pytest.approx([0.05, 0.15, 0.975])
    assert np.isnan(result.accept_rate[2:9]).all() and np.isnan(result.mean_confidence[2:9]).all()
    assert result.edges == pytest.approx(np.linspace(0, 1, 11))


def test_reliability_bins_hold_their_lower_edge_and_the_last_bin_holds_1() -> None:
    result = formulas.reliability([0.0, 0.25, 0.5, 0.75, 1.0, np.float32(1.0000001)], [1] * 6, bins=4)
    assert result.count.tolist() == [1, 1, 1, 3]
    assert formulas.reliability([1.0, 1.0], [1, 1]).ece == 0
    assert formulas.reliability([1.0, 1.0], [0, 0]).ece == 1
    with pytest.raises(InputError, match="no data"):
        formulas.reliability([], [])


def test_ece_tells_a_calibrated_drafter_from_an_overconfident_one() -> None:
    """n tokens in B bins: a calibrated ECE is about sqrt(B / n) * 0.33 = 0.003 here."""
    rng = np.random.default_rng(0)
    confidence, u = rng.random(100_000), rng.random(100_000)
    assert formulas.reliability(confidence, u < confidence).ece < 0.006
    # Acceptance c^2 instead of c: the gap averages to 1/2 - 1/3.
    assert formulas.reliability(confidence, u < confidence**2).ece == pytest.approx(1 / 6, abs=0.01)


def test_distinct_trigrams_by_hand() -> None:
    repeating, fresh, short = np.array([1, 2, 3, 1, 2, 3]), np.arange(9), np.array([1, 2])
    assert formulas.distinct_trigrams([repeating]) == 0.75  # 123 231 312 123
    assert formulas.distinct_trigrams([fresh]) == 1
    assert formulas.distinct_trigrams([np.zeros(12, dtype=int)]) == 0.1
    assert formulas.distinct_trigrams([repeating, fresh, short]) == 0.875
    assert formulas.distinct_trigrams([short]) == formulas.distinct_trigrams([]) == 1
