"""The lab's recording, replayed as engines run, against the rounds that llama.cpp and vLLM counted of the same pair."""

from __future__ import annotations

import numpy as np
import pytest

from realrun.decode.sampling import Sampler
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import lab_prompts
from realrun.recording.record import RecordSettings, record
from specsim.engines.conventions import CONVENTIONS
from specsim.trace.from_text import TokenText, lookup_trace
from specsim.trace.ngram import RULES, NgramRule
from specsim.trace.trace import Trace
from tests.specsim.engines.test_as_engine import COUNTED, replayed_rounds

TOKENS = 96  # of every prompt, in the engines; more are recorded, as vLLM accepts beyond them


@pytest.fixture(scope="module")
def recorded() -> Trace:
    pair = load_pair("lab", predictor=None)
    return record(pair, lab_prompts(pair.tokenizer, 12), RecordSettings(7, TOKENS + 8, Sampler("greedy")))


def as_digits(rounds: list[list[tuple[int, int, int]]]) -> list[list[str]]:
    """Drafted and accepted tokens of every sequence's rounds, a digit each."""
    return [["".join(str(row[column]) for row in sequence) for column in (1, 2)] for sequence in rounds]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "k"), [(engine, k) for engine in ("llamacpp", "vllm") for k in COUNTED[engine]])
def test_every_round_of_every_sequence_is_the_engines(recorded: Trace, engine: str, k: str) -> None:
    rounds = replayed_rounds(recorded, int(k), TOKENS, CONVENTIONS[engine])
    assert as_digits(rounds) == COUNTED[engine][k]


@pytest.mark.slow
def test_prompt_lookup_from_the_text_alone_is_vllms(recorded: Trace) -> None:
    prompts = recorded.prompts
    assert prompts is not None
    outputs = np.split(recorded.token, recorded.offsets[1:-1])
    texts = [
        TokenText(prompt.tolist(), output.tolist(), "all", len(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    trace = lookup_trace(texts, NgramRule(2, 3, "first", "stop"), 4)
    assert as_digits(replayed_rounds(trace, 4, TOKENS, CONVENTIONS["vllm"])) == COUNTED["vllm-ngram"]["4"]
    others = lookup_trace(texts, RULES["specsim"], 4)
    assert as_digits(replayed_rounds(others, 4, TOKENS, CONVENTIONS["vllm"])) != COUNTED["vllm-ngram"]["4"]
