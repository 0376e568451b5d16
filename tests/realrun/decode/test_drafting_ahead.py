"""Drafting ahead for real: the hits that a replay counts are those of a drafter that prepared its drafts."""

from __future__ import annotations

import numpy as np
import pytest

from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import lab_prompts
from specsim.cost.model import ConstantCost
from specsim.learn.draft_ahead import learn_outcomes
from specsim.replaying.ahead import READY, AheadSettings, reads_text_alone, replay_ahead
from specsim.replaying.table import cost_table
from tests.support.drafting_ahead import decode_ahead

PROMPTS, TOKENS, DEPTH = 8, 32, 8


@pytest.mark.parametrize(("k", "prepared"), [(2, 1), (2, 4), (3, 8)])
@pytest.mark.parametrize(("drafter", "text_alone"), [("model", True), ("eagle", False)])
def test_every_hit_of_the_replay_is_one_of_the_real_run(drafter: str, text_alone: bool, k: int, prepared: int) -> None:
    pair = load_pair(drafter=drafter, dtype="float64")
    prompts = lab_prompts(pair.tokenizer, PROMPTS)
    trace = record(pair, prompts, RecordSettings(max_draft_tokens=DEPTH, max_new_tokens=TOKENS))
    assert reads_text_alone(trace) == text_alone
    model = learn_outcomes(trace, 8)
    settings = AheadSettings(k, prepared, pearl=False, own_device=True, text_alone=text_alone)
    rounds = replay_ahead(trace, settings, model.on(trace), cost_table(trace, ConstantCost(0.1, 1.0)))
    real = decode_ahead(pair, [prompt.tokens for prompt in prompts], TOKENS, settings, model, DEPTH)
    for sequence, (output, ready) in enumerate(real):
        rows = slice(trace.offsets[sequence], trace.offsets[sequence + 1])
        assert output == trace.token[rows].tolist()
        replayed = rounds.draft_of[rows]
        starts = [t for t in np.flatnonzero(replayed >= 0).tolist() if t < TOKENS - 1]  # the last token needs no draft
        assert [(t, replayed[t] == READY) for t in starts] == ready
    assert sum(ready for _, rounds_ in real for _, ready in rounds_) == rounds.hits.sum() > 0
