"""Studies of AdaEDL, Thompson sampling and stop signals: figures by hand, and against what a recording holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch

from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import study_prompts
from specsim.acceptance.formulas import adaedl_score, leviathan_speedup
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.model import ConstantCost
from specsim.cost.profile import ProfileCost
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.priced import PricedTrace
from studies import common
from studies.adaedl import run
from studies.adaedl.run import Signals
from studies.common import smollm2_costs
from studies.policies import signals as stop_signals
from studies.thompson import gains
from studies.thompson.gains import PerPrompt
from tests.support.checks import refusal


def signals(acceptance: Any = None, prompts: int = 20, each: int = 30) -> Signals:
    """Positions of random entropy; their acceptance is random too unless given as a function of the entropy."""
    rng = np.random.default_rng(0)
    entropy = rng.uniform(0, 4, prompts * each)
    accepted = rng.uniform(0, 1, prompts * each) if acceptance is None else acceptance(entropy)
    return Signals(np.repeat(np.arange(prompts), each), entropy, rng.uniform(0, 1, prompts * each), accepted)


def test_both_kinds_of_drafts_are_recorded_along_the_same_texts(tmp_path: Path) -> None:
    config = {"depth": 2, "max_new_tokens": 6, "prompts": 3, "every": 2, "seed": 0}
    traces = common.recorded(tmp_path, load_pair(), {"temperature": 0.8}, config, lambda what, done, total: None)
    greedy, sampled = traces["greedy-draft"], traces["rejection"]
    assert greedy.token.tolist() == sampled.token.tolist() and greedy.sequence_id.tolist() == [0, 2]
    assert sampled.meta["decoding"]["mode"] == "rejection"


def test_gamma_is_found_again_where_the_score_is_the_acceptance() -> None:
    exact = signals(lambda entropy: adaedl_score(entropy, 0.13))
    assert run.bounding_gamma(exact, 0.9) == pytest.approx(0.13)


def test_the_bounding_gamma_is_the_least_that_bounds_so_many_positions() -> None:
    sample = signals()
    gamma = run.bounding_gamma(sample, 0.95)
    assert run.violated(sample, gamma * (1 + 1e-9)).estimate <= 5
    assert run.violated(sample, gamma * (1 - 1e-9)).estimate > 5 - 100 / len(sample.sequence)
    sure = Signals(np.array([0]), np.array([0.0]), np.array([1.0]), np.array([0.5]))
    assert run.bounding_gamma(sure, 0.95) == np.inf  # sure of itself and wrong: no gamma helps


def test_violations_by_hand() -> None:
    by_hand = Signals(
        np.array([0, 0, 1, 1]), np.array([0.0, 1.25, 5.0, 0.2]), np.ones(4), np.array([0.9, 0.6, 0.1, 0.7])
    )  # scores at 0.2: 1, 0.5, 0, 0.8
    assert run.violated(by_hand, 0.2).estimate == pytest.approx(50)
    assert run.violated(by_hand.of(np.array([1])), 0.2).estimate == pytest.approx(50)


def test_correlations_are_pearsons_and_of_no_gamma() -> None:
    sample = signals()
    score, sure = run.correlations(sample, repeats=50)
    for gamma in (0.05, 0.8):
        scores = adaedl_score(sample.entropy_nats, gamma)
        assert score.estimate == pytest.approx(np.corrcoef(scores, sample.acceptance)[0, 1])
    assert sure.estimate == pytest.approx(np.corrcoef(sample.confidence, sample.acceptance)[0, 1])
    assert score.low < score.estimate < score.high


def test_the_papers_ratio_is_found_again_from_rates_that_it_made() -> None:
    base, acceptance = np.array([20.0, 30.0, 25.0]), np.array([0.5, 0.65, 0.8])
    rates = {str(k): (base * leviathan_speedup(acceptance, k, 0.08)).tolist() for k in (3, 7, 16)}
    ratio, fitted = run.paper_ratio(base.tolist(), rates)
    assert ratio == pytest.approx(0.08, rel=1e-4)
    assert fitted == pytest.approx(acceptance, rel=1e-4)


@pytest.fixture(scope="module")
def recorded() -> tuple[Any, Any, Any]:
    """The lab's target with its EAGLE, three prompts, and their trace by rejection sampling."""
    pair = load_pair("lab", drafter="eagle", threads=1)
    prompts = study_prompts(pair.tokenizer, 3)
    return pair, prompts, record(pair, prompts, RecordSettings(3, 24, Sampler("rejection", 1.3)))


@torch.inference_mode()
def test_acceptance_is_one_less_the_distance_of_the_distributions_or_p_of_the_likeliest_token(
    recorded: tuple[Any, Any, Any],
) -> None:
    """Of sampled and of greedy drafts of the drafter that decodes, after a position's text, in float64 by numpy."""
    pair, prompts, trace = recorded
    sampled, greedy = (run.signals_of(pair, trace, prompts)[mode] for mode in ("rejection", "greedy-draft"))
    for sequence, t in ((0, 0), (1, 7), (2, 20)):
        row = trace.offsets[sequence] + t
        text = [*prompts[sequence].tokens, *trace.token[trace.offsets[sequence] : row].tolist()]
        target, drafter = pair.make_drafter()
        target.prefill(text[:-1])
        drafted = drafter.lm.forward(text)[-1]
        wanted = pair.target(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        q, p = (scipy.special.softmax(logits.double().numpy() / 1.3) for logits in (drafted, wanted))
        assert sampled.acceptance[row] == pytest.approx(1 - np.abs(p - q).sum() / 2, abs=1e-4)
        assert greedy.acceptance[row] == pytest.approx(p[q.argmax()], abs=1e-4)
        assert sampled.confidence[row] == pytest.approx(q.max(), abs=1e-4)
        assert sampled.entropy_nats[row] == pytest.approx(-(q * np.log(q)).sum(), abs=1e-3)


def test_drafted_tokens_are_accepted_with_that_probability_in_the_mean(recorded: tuple[Any, Any, Any]) -> None:
    pair, prompts, trace = recorded
    signals = run.signals_of(pair, trace, prompts)
    for mode, drafted in (("rejection", trace.text_accept[:, 0]), ("greedy-draft", trace.true_rank[:, 0] == 0)):
        assert abs((drafted - signals[mode].acceptance).mean()) < 4 * drafted.std() / np.sqrt(len(drafted))


def test_signals_read_again_are_the_same(tmp_path: Path) -> None:
    sample = signals()
    run.save_signals(tmp_path / "signals.npz", sample)
    again = run.read_signals(tmp_path / "signals.npz")
    assert all(np.array_equal(getattr(again, name), values) for name, values in vars(sample).items())


CONFIG: dict[str, Any] = {"trials": 3, "replay_seeds": 3, "keeps": [0.3, 0.7], "seed": 0, "threads": 1}


def priced(model: IID | PerPrompt, seed: int, sequences: int = 12, tokens: int = 80) -> PricedTrace:
    return PricedTrace(generate(model, sequences, tokens, 6, seed), ConstantCost(1.0, 20.0))


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.2, 0.4])
def test_prompts_of_any_spread_accept_alike_in_the_mean(spread: float) -> None:
    probability = PerPrompt(0.7, spread).probabilities(2000)
    assert probability.mean() == pytest.approx(0.7, abs=1e-3)
    assert probability.std() == pytest.approx(spread, abs=2e-3)
    assert ((probability >= 0) & (probability <= 1)).all()


def test_a_spread_that_no_beta_distribution_has_is_refused() -> None:
    refusal(lambda: PerPrompt(0.5, 0.5), "no Beta distribution has mean 0.5 and spread 0.5; choose less spread")


def test_each_prompt_accepts_with_its_own_probability() -> None:
    model = PerPrompt(0.6, 0.25)
    trace = generate(model, 40, 3000, 4)
    assert np.sort(gains.accepted_shares(trace)) == pytest.approx(model.probabilities(40), abs=0.04)
    fitted = PerPrompt.fit(trace)
    assert (fitted.mean, fitted.spread) == pytest.approx((0.6, 0.25), abs=0.02)


@pytest.mark.parametrize("keep", [0.2, 0.8])
def test_geometric_lengths_have_their_mean_whatever_is_accepted(keep: float) -> None:
    for alpha in (0.3, 0.9):
        played = priced(IID(alpha), 0, tokens=2000).replay(gains.geometric(keep, 6))
        mean = played.drafted.sum() / played.num_rounds.sum()
        assert mean == pytest.approx((1 - keep**6) / (1 - keep), rel=0.03)


def test_hindsight_bounds_what_is_chosen_once_for_all_prompts() -> None:
    train, held = (priced(PerPrompt(0.7, 0.3), seed) for seed in (0, 1))
    taken, best_k = gains.times(train, held, CONFIG)
    for each, once in ((gains.FIXED_EACH, gains.FIXED), (gains.DRAWN_EACH, gains.DRAWN)):
        assert (taken[each] <= taken[once]).all()
        assert taken[each].sum() < taken[once].sum()
    seconds = [train.replay(FixedK(k)).speculative_s.sum() for k in range(1, 7)]
    assert min(seconds) == seconds[best_k - 1]
    document = gains.comparison(train, held, CONFIG)
    ratio = taken[gains.FIXED].sum() / taken[gains.DRAWN].sum()
    assert document["gains"][gains.DRAWN]["estimate"] == pytest.approx(100 * (ratio - 1))
    assert document["speedup"]["estimate"] == pytest.approx(held.baseline_s.sum() / taken[gains.FIXED].sum())
    assert gains.CALI not in document["gains"]  # the confidence of synthetic prompts says nothing


def test_a_spread_is_passed_only_if_all_larger_ones_are() -> None:
    above, below = {"low": 1.0}, {"low": -0.5}
    assert gains.passes_from([(0.1, below), (0.2, above), (0.3, above)]) == 0.2
    assert gains.passes_from([(0.1, above), (0.2, below), (0.3, above)]) == 0.3
    assert gains.passes_from([(0.1, above), (0.2, below)]) is None


def test_contexts_beyond_the_measured_ones_take_the_times_of_the_nearest() -> None:
    cost, document = smollm2_costs()
    assert isinstance(cost, ProfileCost) and document["drafter"] == "smollm2/eagle"
    low, high = cost.contexts[0], cost.contexts[-1]
    asked = np.array([1, low, high, 10 * high])
    for times in (cost.verify(3, asked), cost.draft(2, asked), cost.autoregressive_step(asked)):
        assert times[0] == times[1] != times[2] == times[3]


def test_the_share_of_the_gap_is_of_speedups() -> None:
    """A baseline of 12 s in 4, 3 and 2 s is 3, 4 and 6 times as fast: (4 - 3) / (6 - 3)."""
    fixed_s, rule_s, oracle_s = (np.full(15, seconds) for seconds in (4.0, 3.0, 2.0))
    share = stop_signals.gap_closed(rule_s, fixed_s, oracle_s)
    assert (share.estimate, share.low, share.high) == pytest.approx((1 / 3,) * 3)
    assert stop_signals.gap_closed(fixed_s, fixed_s, oracle_s).estimate == 0
    assert stop_signals.gap_closed(oracle_s, fixed_s, oracle_s).estimate == 1
    spread = stop_signals.gap_closed(rule_s + np.linspace(-0.5, 0.5, 15), fixed_s, oracle_s)
    assert spread.low < 1 / 3 < spread.high


@pytest.mark.parametrize(("kind", "column"), [("ScoreThreshold", "score"), ("Top10Threshold", "top10_confidence")])
def test_a_threshold_stops_after_the_first_token_below_it(kind: str, column: str) -> None:
    """A signal that is 0.9 for accepted tokens and 0.1 for others drafts one token too many in every round."""
    trace = generate(IID(0.7), 12, 80, 6)
    signal = np.where(np.arange(6) < trace.match_len[:, None], 0.9, 0.1).astype(np.float32)
    trace = replace(trace, **{column: signal})
    drafted = np.zeros(12, int)
    for sequence, (t, end) in enumerate(zip(trace.offsets[:-1], trace.offsets[1:], strict=True)):
        while t < end:
            drafted[sequence] += min(trace.match_len[t] + 1, trace.draft_limit[t])
            t += trace.match_len[t] + 1
    policy = getattr(stop_signals, kind)(p_min=0.5, max_draft_tokens=6)
    assert (PricedTrace(trace, ConstantCost(1.0, 20.0)).replay(policy).drafted == drafted).all()
    assert stop_signals.ranking(trace, {"score": "predictor"}.get(column, "top-10")) == 1  # which tells all apart


def test_every_rule_has_the_time_of_a_decision_in_which_more_signals_take_longer() -> None:
    times = stop_signals.decision_us({"seed": 0, "vocabulary": 1000, "width": 8, "depth": 8})
    assert list(times) == [rule.label for rule in stop_signals.rules(8)] and min(times.values()) > 0
    assert times["posterior: Beta-TS"] < times["confidence: threshold"] < times["entropy: threshold"]
