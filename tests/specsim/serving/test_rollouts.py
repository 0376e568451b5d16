"""Rollouts: three sequences by hand, schedules against all schedules, drafts from earlier texts alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

import specsim
from specsim.cost.batches import BatchCost, BatchTokens
from specsim.io.arrays import Seconds
from specsim.lookup.from_text import TokenText, suffix_trace
from specsim.lookup.suffix import SuffixDecoder, SuffixRule
from specsim.serving.rollouts import best_schedule, rollouts, together
from specsim.trace.trace import Trace
from tests.support.checks import refusal


@dataclass(frozen=True)
class ByToken(BatchCost):
    """A draft pass takes half a second, a pass of the target a second and a share of it for every token."""

    token_s: float = 0.25

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        return np.full(np.shape(tokens.sequences), 0.5)

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        return np.asarray(1.0 + self.token_s * tokens.new)


def accepting_all(lengths: list[int]) -> Trace:
    return specsim.generate(acceptance=1.0, sequences=len(lengths), output_tokens=lengths, depth=2)


def test_three_sequences_by_hand() -> None:
    trace = accepting_all([2, 4, 8])
    # Without speculation: 2 rounds of 3 sequences, 2 of 2, 4 of 1, of 1.75, 1.5 and 1.25 s.
    assert together(trace, ByToken(), {1: 0}).total_s == pytest.approx(11.5)
    # K = 1, all accepted: passes over 6 and 4 tokens and twice over 2, with a draft pass each.
    assert together(trace, ByToken(), {1: 1}).total_s == pytest.approx(3.0 + 2.5 + 2.0 + 2.0)
    # K = 0 while 3 run: 2 rounds of 1.75 s; then B has 2 tokens left and C has 6: 4 tokens, 2 and 2.
    assert together(trace, ByToken(), {1: 1, 3: 0}).total_s == pytest.approx(3.5 + 2.5 + 2.0 + 2.0)
    refused = specsim.generate(acceptance=0.0, sequences=3, output_tokens=8, depth=2)
    assert best_schedule(refused, ByToken(), 2) == {1: 0}
    (step,) = rollouts(trace, ByToken(), max_draft_tokens=1).steps
    assert (step.baseline_s, step.fixed_k, step.fixed_s) == (11.5, 1, 9.5)
    assert step.speedup >= 11.5 / 9.5


@pytest.mark.parametrize("seed", range(6))
def test_a_schedule_is_as_short_as_the_shortest_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 24, size=3)
    trace = specsim.generate(acceptance=0.7, sequences=3, output_tokens=lengths, depth=2, seed=seed)
    cost = ByToken(0.4)
    every = [together(trace, cost, {1: one, 2: two}).total_s for one, two in product(range(3), repeat=2)]
    assert together(trace, cost, best_schedule(trace, cost, 2)).total_s == pytest.approx(min(every))


def test_the_tail_is_what_the_last_tenth_takes() -> None:
    trace = specsim.generate(acceptance=0.0, sequences=20, output_tokens=[1] * 19 + [11], depth=2)
    (step,) = rollouts(trace, ByToken()).steps
    # A pass over 20 tokens, 6 s, and 10 over the one that is left, 1.25 s each; nothing is drafted.
    assert step.scheduled_s == step.baseline_s == pytest.approx(6.0 + 12.5)
    assert step.tail_share == pytest.approx(12.5 / 18.5)


def test_refreshing_the_drafter_pays_by_what_drift_costs() -> None:
    traces = [specsim.generate(rate, sequences=4, output_tokens=40, depth=2) for rate in (0.9, 0.8, 0.6)]
    often, seldom = (rollouts(traces, ByToken(0.05), refresh_s=seconds) for seconds in (0.0, 1e6))
    times = [step.scheduled_s for step in often.steps]
    assert times == sorted(times)
    assert (often.refresh_every, seldom.refresh_every) == (1, 3)
    assert often.mean_s == pytest.approx([times[0], sum(times[:2]) / 2, sum(times) / 3])
    assert seldom.mean_s[1] == pytest.approx((sum(times[:2]) + 1e6) / 2)


def test_texts_of_a_step_draft_from_earlier_steps_and_not_from_each_other() -> None:
    rng = np.random.default_rng(2)
    earlier, texts = ([TokenText([1], rng.integers(1, 4, 30).tolist(), "all", 30) for _ in range(3)] for _ in range(2))
    trace = suffix_trace(texts, SuffixRule(), 3, vocabulary=8, earlier=earlier)
    for number, text in enumerate(texts):
        decoder = SuffixDecoder(SuffixRule())
        for other in earlier:
            decoder.begin(other.prompt)
            decoder.extend(other.output)
        decoder.begin(text.prompt, counted=False)
        for row, token in enumerate(text.output, start=int(trace.offsets[number])):
            drafted = decoder.propose(3).tokens
            assert trace.draft_token[row].tolist() == [*drafted, -1, -1, -1][:3]
            decoder.extend([token])
    alone = suffix_trace(texts[:1], SuffixRule(), 3, vocabulary=8, earlier=[])
    assert (trace.match_len[:30] > alone.match_len).any()


def test_a_repeated_text_is_drafted_from_the_step_before() -> None:
    one = specsim.generate(acceptance=0.3, sequences=3, output_tokens=[10, 20, 40], depth=4)
    one = replace(one, meta={**one.meta, "text": True}, prompt=np.arange(int(one.prompt_tokens.sum()), dtype=np.int32))
    result = rollouts([one, one], ByToken(0.05))
    suffix = next(step for step in result.steps if step.drafter == "suffix")
    recorded = result.steps[1]
    assert suffix.step == 1
    assert suffix.scheduled_s < recorded.scheduled_s
    # All of a repeated text but its first tokens is drafted: K = 4, nearly 5 tokens a round, no draft passes.
    assert suffix.baseline_s / suffix.scheduled_s > 3


def test_what_rollouts_cannot_tell_is_refused() -> None:
    trace = accepting_all([4, 4])
    refusal(lambda: rollouts([], ByToken()), "no trace")
    refusal(lambda: rollouts(trace, ByToken(), max_draft_tokens=3), "max_draft_tokens=3")
    refusal(lambda: rollouts(trace, ByToken(), refresh_s=-1.0), "refresh_s=-1.0")
    refusal(lambda: rollouts(trace, specsim.ConstantCost(0.1, 1.0)), "batch size 1 alone")
