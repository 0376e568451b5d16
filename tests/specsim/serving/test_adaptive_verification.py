"""vLLM's adaptive verification, beside vLLM's own two files (see tests/support/vllm_adaptive.py), and in a server."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specsim.cost.batches import BatchCost, BatchTokens
from specsim.io.arrays import Seconds
from specsim.serving.draft_length import DraftRounds, Running
from specsim.serving.rules.adaptive_verification import AdaptiveVerification
from tests.support import vllm_adaptive as vllm


class Curves(BatchCost):
    """What the passes of the recorded run took: by tokens, and by requests."""

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        return np.asarray(vllm.draft_ms(float(tokens.sequences)) * (place == 0))

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
