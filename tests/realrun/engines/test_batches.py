"""An engine's batches against the simulated server: which K every round has, and what is accepted of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from realrun.engines.batches import compare_batch
from realrun.engines.check import counters_equal
from realrun.engines.compare import Agreement, Counted, Models
from realrun.engines.engine import Sums
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.engines.conventions import CONVENTIONS
from specsim.io.errors import InputError
from specsim.serving.draft_length import ScheduledK
from specsim.trace.trace import Trace

LIMIT, DEPTH, EOS = 30, 6, 99
ENDS = [30, 12, 30, 21, 4, 30, 30, 17, 30]  # of the texts, by the limit or an end of text
SURE = Models(lambda tokens: (0.9, 0.1), lambda tokens: (0.9, 0.1))
TIED = Models(lambda tokens: (0.40001, 0.4), lambda tokens: (0.40001, 0.4))
SCHEDULE = {1: 5, 3: 3, 4: 0}
Rounds = list[list[Counted]]


def made_trace(seed: int = 0) -> Trace:
    """Sequences that end at different lengths and are recorded beyond."""
    trace = generate(IID(0.7), sequences=len(ENDS), output_tokens=LIMIT + DEPTH, depth=DEPTH, seed=seed)
    token = np.random.default_rng(seed).integers(1, 50, len(trace.token)).astype(np.int32)
    for begin, end in zip(trace.offsets.tolist(), ENDS, strict=False):
        if end < LIMIT:
            token[begin + end - 1] = EOS
    prompt = np.arange(int(trace.prompt_tokens.sum()), dtype=np.int32) % 7
    return dataclasses.replace(trace, token=token, prompt=prompt, meta=trace.meta | {"eos_token_id": [EOS]})


def plain_rounds(trace: Trace, lengths: Mapping[int, int], slots: int, *, ahead: bool = True) -> Rounds:
    """vLLM's batches, written out: drafts are made at the end of a step, for the next one, by how many were in it."""

    def longest(sequences: int) -> int:
        return lengths[max(batch for batch in lengths if batch <= sequences)]

    waiting, running = [*range(len(ENDS))], list[tuple[int, int, int]]()  # sequence, t, tokens drafted
    rounds: Rounds = [[] for _ in ENDS]
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


def compare(
    trace: Trace,
    theirs: Rounds,
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
    trace = made_trace(slots)
    theirs = plain_rounds(trace, lengths, slots)
    agreements = compare(trace, theirs, lengths, slots)
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
    trace = made_trace()
    theirs = plain_rounds(trace, {1: 4}, 4)
    beyond = [1 + sum(a + 1 for _, a in rounds) > end for rounds, end in zip(theirs, ENDS, strict=True)]
    assert any(beyond[s] for s, end in enumerate(ENDS) if end < LIMIT)
    assert any(beyond[s] for s, end in enumerate(ENDS) if end == LIMIT)
    sequence = beyond.index(True)
    drafted, accepted = theirs[sequence][-1]
    theirs[sequence][-1] = drafted, accepted - 1
    agreements = compare(trace, theirs, {1: 4})
    assert [s for s, agreement in enumerate(agreements) if agreement.difference] == [sequence]


def test_a_k_that_the_simulated_server_does_not_choose_differs() -> None:
    """By its own step's sequences, and not those of the step before."""
    trace = made_trace()
    theirs = plain_rounds(trace, SCHEDULE, 4, ahead=False)
    assert theirs != plain_rounds(trace, SCHEDULE, 4)
    differences = [agreement.difference for agreement in compare(trace, theirs) if agreement.difference]
    assert any(
        "accepted in the replay, " in difference and difference.endswith("accepted in the engine")
        for difference in differences
    )


@pytest.mark.parametrize("models", [SURE, TIED], ids=["sure", "tied"])
def test_a_draft_token_is_a_near_tie_only_where_the_drafter_cannot_tell(models: Models) -> None:
    """The engine accepts nothing of one round, after which all others are in other steps, with another K."""
    trace, lengths, sequence = made_trace(2), {1: 5, 2: 4, 3: 3, 4: 2}, 7
    before = plain_rounds(trace, lengths, 4)
    position = 1 + sum(accepted + 1 for _, accepted in before[sequence][:2])
    changed = trace.match_len.copy()
    row = int(trace.offsets[sequence]) + position
    assert changed[row] > 0
    changed[row] = 0
    theirs = plain_rounds(dataclasses.replace(trace, match_len=changed), lengths, 4)
    assert sum(own != other for own, other in zip(theirs, before, strict=True)) == 4
    agreements = compare(trace, theirs, lengths, models=models)
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
def test_a_text_that_parts_is_compared_up_to_there(models: Models) -> None:
    trace = made_trace()
    outputs = outputs_of(trace)
    outputs[2][17] += 1
    theirs = plain_rounds(trace, {1: 4}, 4)
    agreements = compare(trace, theirs, {1: 4}, models=models, outputs=outputs)
    if models is TIED:
        assert [tie[:4] for tie in agreements[2].near_ties] == [(2, 17, 0, "target token")]
        assert agreements[2].difference == "" and 0 < agreements[2].identical == agreements[2].rounds < len(theirs[2])
    else:
        assert agreements[2].difference == "texts differ from position 17 on"
    others = [agreement for sequence, agreement in enumerate(agreements) if sequence != 2]
    assert all(agreement.difference == "" and agreement.identical == agreement.rounds for agreement in others)


def test_a_text_of_one_token_has_no_rounds() -> None:
    trace = made_trace()
    token = trace.token.copy()
    token[trace.offsets[3]] = EOS
    with pytest.raises(InputError, match="prompt 4 ends with its first token"):
        compare(dataclasses.replace(trace, token=token), [[] for _ in ENDS])
