"""vLLM's adaptive verification, beside vLLM's own two files (see tests/support/vllm_adaptive.py), and in a server."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.batches import BatchCost, BatchTokens
from specsim.io.arrays import FloatArray, Ints, Seconds
from specsim.serving.arrivals import requests_of_trace
from specsim.serving.continuous import run_server
from specsim.serving.draft_length import DraftRounds, Running
from specsim.serving.drafts import drafts_of
from specsim.serving.rules.adaptive_verification import AdaptiveVerification, looked_up
from tests.support import vllm_adaptive as vllm
from tests.support.acceptance_examples import difficulty
from tests.support.checks import refusal
from tests.support.serving_costs import COST


class Curves(BatchCost):
    """Seconds of the recorded run's passes, by tokens and by requests."""

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        requests = float(np.max(tokens.sequences))  # the same at every place
        return np.asarray(vllm.draft_ms(requests) * (np.asarray(place) == 0))

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        return np.asarray(vllm.verify_ms(float(tokens.new)))


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return dict(json.loads(vllm.FILE.read_text()))


RULE = AdaptiveVerification(Curves(), max_draft_tokens=vllm.K, max_num_seqs=vllm.SLOTS)


def test_profiles_are_those_of_vllm(recorded: dict[str, Any]) -> None:
    draft = [RULE.draft_profile(size) for size in range(vllm.SLOTS + 1)]
    assert draft == pytest.approx(recorded["draft_ms"], rel=1e-12)
    assert RULE.verify_profile(np.array(vllm.ASKED)) == pytest.approx(recorded["verify_ms"], rel=1e-12)


def test_admits_the_tokens_that_vllm_admits_and_learns_what_it_learns(recorded: dict[str, Any]) -> None:
    state, learned, admitted = RULE.initial_state(), [], []
    for turn in vllm.turns():
        count = len(turn.request)
        if not count:
            admitted.append("")
            continue
        request, zeros = np.array(turn.request), np.zeros(count, dtype=np.int64)
        prompts = (
            len(turn.prompts), sum(new for _, new, _ in turn.prompts), sum(ends for *_, ends in turn.prompts)
        )  # fmt: skip
        running = Running(request, zeros, zeros, zeros, zeros, zeros, count, None, *prompts)
        drafted = np.full(count, vllm.K)
        verified = RULE.verify(state, running, turn.prob, drafted)
        admitted.append("".join(map(str, verified.tolist())))
        accepted = np.minimum(turn.match, verified)
        rounds = DraftRounds(drafted, verified, accepted, accepted + 1, zeros, zeros, True, turn.prob)
        state = RULE.update(state, running, rounds)
        if not state.steps:
            learned.append([state.slope, *state.intercepts])
    assert admitted == recorded["admitted"]
    assert sum(map(bool, admitted)) >= 1000
    assert len(learned) == 10
    assert np.abs(np.array(learned) - recorded["coefficients"]).max() < 1e-5


SEEN: list[tuple[int, int, int, int]] = []


class Spy(AdaptiveVerification):
    """Records the prefills that `verify` is told of."""

    def verify(self, state: Any, running: Running, survival: FloatArray, drafted: Ints) -> Ints:
        SEEN.append((running.prompts, running.prompt_tokens, running.prompts_ending, len(drafted)))
        return super().verify(state, running, survival, drafted)


def test_a_server_trims_drafts_once_it_knows_which_prompts_the_step_reads() -> None:
    trace = generate(difficulty(), sequences=12, output_tokens=30, depth=4, seed=4, prompt_tokens=90)
    sent = requests_of_trace(trace, 24, seed=0)
    SEEN.clear()
    run = run_server(drafts_of(trace, Spy(COST, max_draft_tokens=3), served=True), COST, sent, slots=6, users=6,
                     step_tokens=60)  # fmt: skip
    steps = run.steps
    mixed = steps["drafted"] > 0
    read = steps["tokens"] - steps["sequences"] - steps["verified"]
    facts = np.stack([steps["prompts"], read, steps["prefill_output"], steps["sequences"]], axis=1)[mixed]
    assert facts.astype(int).tolist() == [[*seen] for seen in SEEN]
    assert facts[:, 0].any() and (facts[:, 2] < facts[:, 0]).any() and run.steps["tokens"].max() <= 60
    assert 0 < steps["verified"].sum() < steps["drafted"].sum()


def test_what_the_trace_does_not_have_is_refused() -> None:
    trace = generate(difficulty(), sequences=2, output_tokens=9, depth=3)
    refusal(lambda: drafts_of(trace, AdaptiveVerification(COST, max_draft_tokens=3, head=True)), "confidence head")
    blind = generate(IID(0.5), sequences=2, output_tokens=9, depth=3)
    refusal(lambda: drafts_of(blind, AdaptiveVerification(COST, max_draft_tokens=3)), "no drafter confidence")


@pytest.mark.parametrize(("second", "verified"), [(0.1, [1, 1]), (0.02, [0, 0])])
def test_a_confidence_head_is_taken_at_its_word(second: float, verified: list[int]) -> None:
    """Two requests, K = 1. Three tokens are padded to four: b = 0, 1, 2 give 2 / 12, 2.3 / 14, 2.4 (2.32) / 14 a ms."""

    class Line(Curves):
        def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
            return np.asarray(0.0)

        def batch_verify(self, tokens: BatchTokens) -> Seconds:
            return np.asarray(10.0 + float(tokens.new))

    rule = AdaptiveVerification(Line(), max_draft_tokens=1, head=True)
    two, none, said = np.arange(2), np.zeros(2, dtype=np.int64), np.array([[0.3], [second]], dtype=np.float32)
    running = Running(two, none, none, none, none, none, 2)
    state = rule.initial_state()
    assert rule.verify(state, running, said, none + 1).tolist() == [1, 1]  # chances of 1, of requests that are new
    state = rule.update(state, running, DraftRounds(none + 1, none + 1, none, none + 1, none, none, True, said))
    assert (state.slope, state.statistics.sum()) == (0.5, 0.0)  # nothing is learned
    assert rule.verify(state, running, said, none + 1).tolist() == verified


def test_times_between_and_beyond_profiled_sizes() -> None:
    """Up to the largest profiled size, a pass takes the time of the next size, as CUDA graphs are padded; beyond it,
    0.125 s more for each token."""
    sizes, seconds, asked = np.array([4.0, 8.0, 16.0]), np.array([0.5, 1.0, 2.0]), np.array([3, 4, 5, 12, 16, 24])
    assert looked_up(sizes, seconds, asked).tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 3.0]
    assert looked_up(sizes[:1], seconds[:1], asked).tolist() == [0.5] * 6
