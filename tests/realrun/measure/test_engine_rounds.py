"""The lab's recording, replayed as engines run, against the rounds that llama.cpp and vLLM counted of the same pair."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import lab_prompts
from specsim.engines.conventions import CONVENTIONS
from specsim.lookup.from_text import TokenText, lookup_trace, suffix_trace
from specsim.lookup.ngram import RULES, NgramRule
from specsim.lookup.suffix import SuffixRule
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.p_min import LlamaCpp
from specsim.trace.trace import Trace
from tests.specsim.engines import test_as_engine
from tests.specsim.engines.test_as_engine import COUNTED, replayed_rounds
from tests.specsim.serving import test_vllm_schedule

TOKENS = 96  # of every prompt, in the engines; more are recorded, as vLLM accepts beyond them

# llama.cpp's of the same pair and prompts, by K and p_min.
BY_P_MIN = json.loads(Path(test_as_engine.__file__).with_name("rounds_p_min.json").read_text())
# Where the engine's own arithmetic came out on the other side of p_min: sequence, position, depth.
NEAR_TIES = {"7,0.3": (4, 53, 1), "7,0.5": (10, 62, 4)}


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
    rounds = replayed_rounds(recorded, FixedK(int(k)), TOKENS, CONVENTIONS[engine])
    assert as_digits(rounds) == COUNTED[engine][k]


@pytest.mark.slow
def test_what_the_simulated_server_is_given_is_what_is_recorded(recorded: Trace) -> None:
    match_len = np.minimum(recorded.match_len, 5).reshape(12, -1)
    assert ["".join(map(str, row)) for row in match_len] == test_vllm_schedule.COUNTED["match_len"]


def texts_of(recorded: Trace, most: int | None = None) -> list[TokenText]:
    """Its prompts and outputs, these up to so many tokens."""
    assert recorded.prompts is not None
    outputs = [output[:most].tolist() for output in np.split(recorded.token, recorded.offsets[1:-1])]
    pairs = zip(recorded.prompts, outputs, strict=True)
    return [TokenText(prompt.tolist(), output, "all", len(output)) for prompt, output in pairs]


@pytest.mark.slow
def test_prompt_lookup_from_the_text_alone_is_vllms(recorded: Trace) -> None:
    texts = texts_of(recorded)
    trace = lookup_trace(texts, NgramRule(2, 3, "first", "stop"), 4)
    assert as_digits(replayed_rounds(trace, FixedK(4), TOKENS, CONVENTIONS["vllm"])) == COUNTED["vllm-ngram"]["4"]
    others = lookup_trace(texts, RULES["specsim"], 4)
    assert as_digits(replayed_rounds(others, FixedK(4), TOKENS, CONVENTIONS["vllm"])) != COUNTED["vllm-ngram"]["4"]


@pytest.mark.slow
def test_suffix_decoding_from_the_text_alone_is_vllms(recorded: Trace) -> None:
    trace = suffix_trace(texts_of(recorded), SuffixRule(max_cached_requests=0), 8)
    assert as_digits(replayed_rounds(trace, FixedK(8), TOKENS, CONVENTIONS["vllm"])) == COUNTED["vllm-suffix"]["8"]


@pytest.mark.slow
def test_suffix_decoding_from_one_text_to_the_next_is_vllms(recorded: Trace) -> None:
    """Every round, but for what the last one accepts beyond the limit, where texts that others draft from end."""
    trace = suffix_trace(texts_of(recorded, TOKENS), SuffixRule(), 8)
    ours = as_digits(replayed_rounds(trace, FixedK(8), TOKENS, CONVENTIONS["vllm"]))
    theirs = COUNTED["vllm-suffix-cached"]["8"]
    assert [drafted for drafted, _ in ours] == [drafted for drafted, _ in theirs]
    assert [accepted[:-1] for _, accepted in ours] == [accepted[:-1] for _, accepted in theirs]
    assert all(mine[-1] <= other[-1] for (_, mine), (_, other) in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("setting", BY_P_MIN)
def test_every_round_under_p_min_is_llamacpps(recorded: Trace, setting: str) -> None:
    k, p_min = int(setting.split(",")[0]), float(setting.split(",")[1])
    assert recorded.top10_confidence is not None
    confidence = recorded.top10_confidence.copy()
    if setting in NEAR_TIES:
        sequence, position, depth = NEAR_TIES[setting]
        place = int(recorded.offsets[sequence]) + position, depth - 1
        assert confidence[place] == pytest.approx(p_min, abs=1e-4)
        confidence[place] = 2 * p_min - confidence[place]
    trace = dataclasses.replace(recorded, top10_confidence=confidence)
    rounds = replayed_rounds(trace, LlamaCpp(p_min, k), TOKENS, CONVENTIONS["llamacpp"])
    assert as_digits(rounds) == BY_P_MIN[setting]
