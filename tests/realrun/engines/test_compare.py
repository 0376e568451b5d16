"""An engine's rounds against a replay's or the simulated server's: what is identical, near ties, and differences."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from realrun.decode.sampling import Sampler
from realrun.engines.batches import compare_batch
from realrun.engines.check import as_lookups, best_two, compared, counters_equal
from realrun.engines.compare import Agreement, Counted, Models, compare_sequence
from realrun.engines.engine import EngineRun, Setting, Sums
from realrun.engines.hugging_face import HuggingFaceEngine
from realrun.engines.llamacpp import LlamaCppEngine
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import lab_prompts
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.engines.conventions import CONVENTIONS
from specsim.io.errors import InputError
from specsim.lookup.from_text import TokenText, lookup_trace, suffix_trace
from specsim.lookup.ngram import RULES, NgramRule
from specsim.lookup.suffix import SuffixRule
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.p_min import LlamaCpp
from specsim.serving.draft_length import ScheduledK
from specsim.trace.trace import Trace
from tests.specsim.engines import test_as_engine
from tests.specsim.engines.test_as_engine import COUNTED, replayed_rounds
from tests.specsim.serving import test_vllm_schedule

LIMIT, DEPTH, P_MIN = 30, 6, 0.5
SURE = Models(lambda tokens: (0.9, 0.1), lambda tokens: (0.9, 0.1))
TIED = Models(lambda tokens: (0.40001, 0.4), lambda tokens: (0.40001, 0.4))
RULE = LlamaCpp(P_MIN, DEPTH)


def made_trace(seed: int = 0) -> Trace:
    """Three sequences with prompts and a confidence at every step, none of them near p_min."""
    trace = generate(IID(0.7), sequences=3, output_tokens=LIMIT, depth=DEPTH, seed=seed)
    rng = np.random.default_rng(seed)
    confidence = rng.choice([0.2, 0.4, 0.6, 0.8, 0.95], trace.prob.shape, p=[0.1, 0.1, 0.2, 0.3, 0.3])
    prompt = np.arange(int(trace.prompt_tokens.sum()), dtype=np.int32) % 7
    token = rng.integers(1, 50, len(trace.token)).astype(np.int32)  # none ends the text
    return dataclasses.replace(trace, prompt=prompt, token=token, top10_confidence=confidence.astype(np.float32))


def engine_rounds(trace: Trace, policy: ChainPolicy = RULE, engine: str = "llamacpp") -> list[list[tuple[int, int]]]:
    """What an engine gives that runs just as the trace says."""
    rounds = replayed_rounds(trace, policy, LIMIT, CONVENTIONS[engine])
    return [[(drafted, accepted) for _, drafted, accepted in sequence] for sequence in rounds]


def output_of(trace: Trace, sequence: int) -> list[int]:
    return trace.token[trace.offsets[sequence] : trace.offsets[sequence + 1]].tolist()


def compare(
    trace: Trace,
    sequence: int,
    theirs: list[tuple[int, int]],
    models: Models = SURE,
    output: list[int] | None = None,
    policy: ChainPolicy = RULE,
) -> Agreement:
    text = output_of(trace, sequence) if output is None else output
    return compare_sequence(trace, sequence, policy, CONVENTIONS["llamacpp"], LIMIT, text, theirs, models)


@pytest.mark.parametrize("sequence", [0, 1, 2])
@pytest.mark.parametrize("policy", [RULE, FixedK(3)], ids=str)
def test_what_is_identical_is_said_to_be(sequence: int, policy: ChainPolicy) -> None:
    trace = made_trace()
    theirs = engine_rounds(trace, policy)[sequence]
    agreement = compare(trace, sequence, theirs, policy=policy)
    assert agreement.rounds == agreement.identical == len(theirs) > 5
    assert agreement.near_ties == [] and agreement.difference == ""


@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_probability_next_to_p_min_is_named_and_what_follows_compared(side: int, depth: int) -> None:
    """Wherever it lies: before it, at it and after it all rounds but its own are identical."""
    named = 0
    for position in range(1, LIMIT):
        trace = made_trace(position)
        confidence = trace.top10_confidence
        assert confidence is not None
        row = int(trace.offsets[1]) + position
        theirs_say, ours_say = confidence.copy(), confidence.copy()
        theirs_say[row, depth - 1], ours_say[row, depth - 1] = P_MIN + side * 2e-5, P_MIN - side * 2e-5
        engine, ours = (dataclasses.replace(trace, top10_confidence=column) for column in (theirs_say, ours_say))
        theirs = engine_rounds(engine)[1]
        agreement = compare(ours, 1, theirs)
        assert agreement.difference == "" and agreement.rounds == len(theirs)
        if theirs == engine_rounds(ours)[1]:  # no round came to look at it
            assert agreement.near_ties == [] and agreement.identical == len(theirs)
            continue
        ((sequence, at, deep, what, prob, beside),) = agreement.near_ties
        assert (sequence, at, deep, what, beside) == (1, position, depth, "p_min", P_MIN)
        assert prob == pytest.approx(P_MIN - side * 2e-5, abs=1e-7)
        both = (replayed_rounds(side_trace, RULE, LIMIT, CONVENTIONS["llamacpp"])[1] for side_trace in (engine, ours))
        assert agreement.identical == len(set.intersection(*map(set, both)))
        named += 1
    assert named >= 5


def test_a_probability_farther_away_explains_nothing() -> None:
    trace = made_trace()
    confidence = trace.top10_confidence
    assert confidence is not None
    theirs_say, ours_say = confidence.copy(), confidence.copy()
    theirs_say[: trace.offsets[1], 0], ours_say[: trace.offsets[1], 0] = 0.9, P_MIN - 2e-4
    theirs = engine_rounds(dataclasses.replace(trace, top10_confidence=theirs_say))[0]
    agreement = compare(dataclasses.replace(trace, top10_confidence=ours_say), 0, theirs)
    assert agreement.near_ties == [] and agreement.identical == 0
    drafted, accepted = theirs[0]
    assert agreement.difference.endswith(f"{accepted} of {drafted} accepted in the engine")


@pytest.mark.parametrize("models", [SURE, TIED], ids=["sure", "tied"])
def test_a_draft_token_is_a_near_tie_only_where_the_drafter_cannot_tell(models: Models) -> None:
    """The engine drafts another first token at one position, so that it accepts nothing there."""
    trace = made_trace()
    theirs_say = trace.match_len.copy()
    first = next(i for i, (_, accepted) in enumerate(engine_rounds(trace, FixedK(3))[0]) if accepted)
    position = 1 + sum(accepted + 1 for _, accepted in engine_rounds(trace, FixedK(3))[0][:first])
    theirs_say[position] = 0
    theirs = engine_rounds(dataclasses.replace(trace, match_len=theirs_say), FixedK(3))[0]
    agreement = compare(trace, 0, theirs, models, policy=FixedK(3))
    if models is TIED:
        assert [tie[:4] for tie in agreement.near_ties] == [(0, position, 1, "draft token")]
        assert agreement.difference == ""
        assert "sequence 0, position" in str(agreement.near_ties[0]) and "0.4000100 beside 0.4" in str(
            agreement.near_ties[0]
        )
    else:
        assert agreement.near_ties == [] and agreement.difference.startswith(f"round {first} at position {position}: ")
        assert agreement.identical == first


@pytest.mark.parametrize("models", [SURE, TIED], ids=["sure", "tied"])
def test_texts_that_part_are_compared_up_to_there(models: Models) -> None:
    trace = made_trace()
    output = output_of(trace, 0)
    output[17] += 1
    theirs = engine_rounds(trace)[0]
    ends = np.cumsum([0, *(accepted + 1 for _, accepted in engine_rounds(trace, FixedK(3))[0])])
    theirs = [*engine_rounds(trace, FixedK(3))[0][: int((ends <= 17).sum())], (6, 6), (6, 6)]
    agreement = compare(trace, 0, theirs, models, output, FixedK(3))
    if models is TIED:
        assert [tie[:4] for tie in agreement.near_ties] == [(0, 17, 0, "target token")]
        assert agreement.difference == "" and 3 < agreement.identical == agreement.rounds < len(theirs) - 1
    else:
        assert agreement.difference == "texts differ from position 17 on" and agreement.identical == 0


def test_a_text_that_ends_early_differs() -> None:
    trace = made_trace()
    theirs = engine_rounds(trace)[0]
    assert compare(trace, 0, theirs, output=output_of(trace, 0)[:20]).difference == "texts differ from position 20 on"
    assert compare(trace, 0, theirs, output=output_of(trace, 0)[:-1]).difference == ""  # the end of text itself


def test_counters_are_compared_by_position() -> None:
    replayed = [(1, 3, 3), (5, 3, 1), (7, 2, 0)]
    agreements = [Agreement(3, 3, [], replayed), Agreement(1, 1, [], [(1, 3, 2)])]
    assert counters_equal(Sums(4, 11, 6, [3, 2, 1]), agreements)
    assert counters_equal(Sums(4, 11, 6, [3, 2, 1, 0]), agreements)
    assert not counters_equal(Sums(4, 11, 6, [3, 3, 0]), agreements)
    assert not counters_equal(Sums(4, 11, 6, [3, 2]), agreements)
    assert not counters_equal(Sums(5, 11, 6, [3, 2, 1]), agreements)


def test_a_setting_is_accounted_for_only_if_counters_are_equal_too() -> None:
    trace, engine, setting = made_trace(), LlamaCppEngine(), Setting(DEPTH, P_MIN)
    rounds = engine_rounds(trace)
    outputs = [output_of(trace, sequence) for sequence in range(3)]
    every = [round_ for sequence in rounds for round_ in sequence]
    passed = [sum(accepted >= depth for _, accepted in every) for depth in range(1, DEPTH + 1)]
    sums = Sums(len(every), sum(d for d, _ in every), sum(passed), passed)
    row = compared(trace, engine, setting, EngineRun(outputs, rounds, sums), LIMIT, SURE)
    assert row.accounted and row.counters_equal
    assert row.sequences == row.sequences_identical == 3
    assert row.rounds == row.rounds_identical == len(every)
    assert row.accepted_per_position == passed[: len(row.accepted_per_position)]
    wrong = sums._replace(accepted=sums.accepted + 1)
    assert not compared(trace, engine, setting, EngineRun(outputs, rounds, wrong), LIMIT, SURE).accounted
    rounds[2][0] = (rounds[2][0][0], rounds[2][0][1] + 1)
    row = compared(trace, engine, setting, EngineRun(outputs, rounds, None), LIMIT, SURE)
    assert not row.accounted and row.counters_equal is None and row.sequences_identical == 2
    assert len(row.differences) == 1 and row.differences[0].startswith("sequence 2: round 0 ")


def test_lookups_are_those_of_the_engines_rule() -> None:
    trace = made_trace()
    token = np.tile(np.array([5, 6, 7, 5, 6, 8], np.int32), len(trace.token) // 6)
    rule = HuggingFaceEngine.lookup_rule
    assert rule is not None
    trace = dataclasses.replace(trace, token=token, meta=trace.meta | {"eos_token_id": [3]})
    lookups = as_lookups(trace, rule, 4, past_end=False)
    assert lookups.depth == 4 and lookups.sequences == 3
    assert lookups.draft_token[5].tolist() == [0, 1, 2, -1]  # what follows 5 6 in the prompt, up to an end of text
    assert as_lookups(trace, rule, 4, past_end=True).draft_token[5].tolist() == [0, 1, 2, 3]


TOKENS = 96  # of every prompt, in the engines; more are recorded, as vLLM accepts beyond them
# llama.cpp's of the same pair and prompts, by K and p_min.
BY_P_MIN = json.loads(Path(test_as_engine.__file__).with_name("rounds_p_min.json").read_text())
# Where the engine's own arithmetic came out on the other side of p_min: sequence, position, depth.
NEAR_TIES = {"7,0.3": (4, 53, 1), "7,0.5": (10, 62, 4)}


@pytest.mark.slow
def test_what_llamacpp_counted_is_accounted_for_with_its_near_ties_named() -> None:
    pair = load_pair("lab", predictor=None)
    trace = record(pair, lab_prompts(pair.tokenizer, 12), RecordSettings(7, TOKENS, Sampler("greedy")))
    outputs = np.split(trace.token, trace.offsets[1:-1])
    models = Models(best_two(pair.target), best_two(pair.drafter.weights(pair.target)[0]))
    engine, near_ties = LlamaCppEngine(), {}
    for name, counted in [*COUNTED["llamacpp"].items(), *BY_P_MIN.items()]:
        k, _, p_min = name.partition(",")
        rounds = [[*zip(map(int, drafted), map(int, accepted), strict=True)] for drafted, accepted in counted]
        run = EngineRun([output.tolist() for output in outputs], rounds)
        row = compared(trace, engine, Setting(int(k), float(p_min or 0)), run, TOKENS, models)
        assert row.accounted and row.rounds - row.rounds_identical <= len(row.near_ties)
        near_ties[name] = [tie[:4] for tie in row.near_ties]
    assert {name: ties for name, ties in near_ties.items() if ties} == {
        name: [(*tie, "p_min")] for name, tie in NEAR_TIES.items()
    }


# Batches: which K every round has, and what is accepted of it.


EOS = 99
ENDS = [30, 12, 30, 21, 4, 30, 30, 17, 30]  # of the texts, by the limit or an end of text
SCHEDULE = {1: 5, 3: 3, 4: 0}
BatchRounds = list[list[Counted]]


def batch_trace(seed: int = 0) -> Trace:
    """Sequences that end at different lengths and are recorded beyond."""
    trace = generate(IID(0.7), sequences=len(ENDS), output_tokens=LIMIT + DEPTH, depth=DEPTH, seed=seed)
    token = np.random.default_rng(seed).integers(1, 50, len(trace.token)).astype(np.int32)
    for begin, end in zip(trace.offsets.tolist(), ENDS, strict=False):
        if end < LIMIT:
            token[begin + end - 1] = EOS
    prompt = np.arange(int(trace.prompt_tokens.sum()), dtype=np.int32) % 7
    return dataclasses.replace(trace, token=token, prompt=prompt, meta=trace.meta | {"eos_token_id": [EOS]})


def plain_rounds(trace: Trace, lengths: Mapping[int, int], slots: int, *, ahead: bool = True) -> BatchRounds:
    """vLLM's batches, written out: drafts are made at the end of a step, for the next one, by how many were in it."""

    def longest(sequences: int) -> int:
        return lengths[max(batch for batch in lengths if batch <= sequences)]

    waiting, running = [*range(len(ENDS))], list[tuple[int, int, int]]()  # sequence, t, tokens drafted
    rounds: BatchRounds = [[] for _ in ENDS]
    while waiting or running:
        entered = [waiting.pop(0) for _ in range(min(slots - len(running), len(waiting)))]
        k = longest(len(running) + len(entered))
        after = []
        for sequence, t, drafted_before in running:
            drafted = drafted_before if ahead else longest(len(running))
            accepted = min(drafted, int(trace.match_len[trace.offsets[sequence] + t]))
            if drafted:
                rounds[sequence].append((drafted, accepted))
            if t + accepted + 1 < ENDS[sequence]:
                after.append((sequence, t + accepted + 1, k))
        running = after + [(sequence, 1, k) for sequence in entered]
    return rounds


def outputs_of(trace: Trace) -> list[list[int]]:
    """Without the ends of texts."""
    texts = zip(np.split(trace.token, trace.offsets[1:-1]), ENDS, strict=True)
    return [[token for token in text[:end].tolist() if token != EOS] for text, end in texts]


def compare_in_batches(
    trace: Trace,
    theirs: BatchRounds,
    lengths: Mapping[int, int] = SCHEDULE,
    slots: int = 4,
    models: Models = SURE,
    outputs: list[list[int]] | None = None,
) -> list[Agreement]:
    texts = outputs_of(trace) if outputs is None else outputs
    return compare_batch(trace, ScheduledK(lengths), slots, CONVENTIONS["vllm"], LIMIT, texts, theirs, models)


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("lengths", [SCHEDULE, {1: 2, 2: 6}, {1: 4}], ids=str)
def test_an_engine_written_out_is_the_simulated_server(slots: int, lengths: Mapping[int, int]) -> None:
    trace = batch_trace(slots)
    theirs = plain_rounds(trace, lengths, slots)
    agreements = compare_in_batches(trace, theirs, lengths, slots)
    assert [agreement.difference for agreement in agreements] == [""] * len(ENDS)
    assert (
        [entry.identical for entry in agreements]
        == [entry.rounds for entry in agreements]
        == [len(entry) for entry in theirs]
    )
    every = [round_ for sequence in theirs for round_ in sequence]
    passed = [sum(accepted >= depth for _, accepted in every) for depth in range(1, DEPTH + 1)]
    assert len(every) > 5 and {drafted for drafted, _ in every} <= {*lengths.values()}
    assert counters_equal(Sums(len(every), sum(drafted for drafted, _ in every), sum(passed), passed), agreements)


def test_what_is_accepted_beyond_the_output_is_compared() -> None:
    """Of whole drafts, behind ends of texts and beyond the limit."""
    trace = batch_trace()
    theirs = plain_rounds(trace, {1: 4}, 4)
    beyond = [1 + sum(a + 1 for _, a in rounds) > end for rounds, end in zip(theirs, ENDS, strict=True)]
    assert any(beyond[s] for s, end in enumerate(ENDS) if end < LIMIT)
    assert any(beyond[s] for s, end in enumerate(ENDS) if end == LIMIT)
    sequence = beyond.index(True)
    drafted, accepted = theirs[sequence][-1]
    theirs[sequence][-1] = drafted, accepted - 1
    agreements = compare_in_batches(trace, theirs, {1: 4})
    assert [s for s, agreement in enumerate(agreements) if agreement.difference] == [sequence]


def test_a_k_that_the_simulated_server_does_not_choose_differs() -> None:
    """By its own step's sequences, and not those of the step before."""
    trace = batch_trace()
    theirs = plain_rounds(trace, SCHEDULE, 4, ahead=False)
    assert theirs != plain_rounds(trace, SCHEDULE, 4)
    differences = [agreement.difference for agreement in compare_in_batches(trace, theirs) if agreement.difference]
    assert any(
        "accepted in the replay, " in difference and difference.endswith("accepted in the engine")
        for difference in differences
    )


@pytest.mark.parametrize("models", [SURE, TIED], ids=["sure", "tied"])
def test_a_draft_token_of_a_batch_is_a_near_tie_only_where_the_drafter_cannot_tell(models: Models) -> None:
    """The engine accepts nothing of one round, after which all others are in other steps, with another K."""
    trace, lengths, sequence = batch_trace(2), {1: 5, 2: 4, 3: 3, 4: 2}, 7
    before = plain_rounds(trace, lengths, 4)
    position = 1 + sum(accepted + 1 for _, accepted in before[sequence][:2])
    changed = trace.match_len.copy()
    row = int(trace.offsets[sequence]) + position
    assert changed[row] > 0
    changed[row] = 0
    theirs = plain_rounds(dataclasses.replace(trace, match_len=changed), lengths, 4)
    assert sum(own != other for own, other in zip(theirs, before, strict=True)) == 4
    agreements = compare_in_batches(trace, theirs, lengths, models=models)
    agreement = agreements.pop(sequence)
    assert all(
        other.difference == "" and other.identical == other.rounds and not other.near_ties for other in agreements
    )
    if models is TIED:
        assert [tie[:4] for tie in agreement.near_ties] == [(sequence, position, 1, "draft token")]
        assert agreement.difference == "" and agreement.identical == agreement.rounds - 1
        assert [row[1:] for row in agreement.replayed] == theirs[sequence]
    else:
        assert agreement.difference.startswith(f"round 2 at position {position}: ") and agreement.identical == 2


@pytest.mark.parametrize("models", [SURE, TIED], ids=["sure", "tied"])
def test_a_text_of_a_batch_that_parts_is_compared_up_to_there(models: Models) -> None:
    trace = batch_trace()
    outputs = outputs_of(trace)
    outputs[2][17] += 1
    theirs = plain_rounds(trace, {1: 4}, 4)
    agreements = compare_in_batches(trace, theirs, {1: 4}, models=models, outputs=outputs)
    if models is TIED:
        assert [tie[:4] for tie in agreements[2].near_ties] == [(2, 17, 0, "target token")]
        assert agreements[2].difference == "" and 0 < agreements[2].identical == agreements[2].rounds < len(theirs[2])
    else:
        assert agreements[2].difference == "texts differ from position 17 on"
    others = [agreement for sequence, agreement in enumerate(agreements) if sequence != 2]
    assert all(agreement.difference == "" and agreement.identical == agreement.rounds for agreement in others)


def test_a_text_of_one_token_has_no_rounds() -> None:
    trace = batch_trace()
    token = trace.token.copy()
    token[trace.offsets[3]] = EOS
    with pytest.raises(InputError, match="prompt 4 ends with its first token"):
        compare_in_batches(dataclasses.replace(trace, token=token), [[] for _ in ENDS])


# The lab's recording, replayed as engines run, against the rounds that llama.cpp and vLLM counted of the same pair.


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
