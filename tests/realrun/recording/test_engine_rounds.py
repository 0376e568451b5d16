"""The lab's recording, replayed as engines run, against the rounds that llama.cpp and vLLM counted of the same pair."""

from __future__ import annotations

import pytest

from realrun.decode.sampling import Sampler
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import lab_prompts
from realrun.recording.record import RecordSettings, record
from specsim.engines.conventions import CONVENTIONS
from specsim.trace.trace import Trace
from tests.specsim.engines.test_as_engine import COUNTED, replayed_rounds

TOKENS = 96  # of every prompt, in the engines; more are recorded, as vLLM accepts beyond them


@pytest.fixture(scope="module")
def recorded() -> Trace:
    pair = load_pair("lab", predictor=None)
    return record(pair, lab_prompts(pair.tokenizer, 12), RecordSettings(7, TOKENS + 8, Sampler("greedy")))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "k"), [(engine, k) for engine, counted in COUNTED.items() for k in counted])
def test_every_round_of_every_sequence_is_the_engines(recorded: Trace, engine: str, k: str) -> None:
    rounds = replayed_rounds(recorded, int(k), TOKENS, CONVENTIONS[engine])
    replayed = [["".join(str(row[column]) for row in sequence) for column in (1, 2)] for sequence in rounds]
    assert replayed == COUNTED[engine][k]
