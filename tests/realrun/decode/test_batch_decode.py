"""Chains decoded in batches: every sequence as it is alone, and the rounds that the simulation has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from realrun.decode.batch import BatchDecoding
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.lm.batched_llama import BatchedLlama
from realrun.measure.record import RecordSettings, record
from specsim.cost.linear import LinearCost, LinearPass
from specsim.policy.chain.fixed_k import FixedK
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import lockstep
from tests.support.checks import refusal
from tests.support.tiny import POSITIONS, tiny_pair, tiny_prompts

TOKENS = 30
PROMPTS = tiny_prompts(5)
COST = LinearCost(LinearPass(0.01), LinearPass(0.002))


def decoded(k: int, count: int = 5, eos: tuple[int, ...] = (), budgets: Any = None) -> BatchDecoding:
    pair = tiny_pair(eos)
    target, drafter = BatchedLlama(pair.target), BatchedLlama(pair.drafter.model)
    prompts = [prompt.tokens for prompt in PROMPTS[:count]]
    decoding = BatchDecoding(target, drafter, prompts, budgets or [TOKENS] * count, k, eos)
    while not decoding.done:
        decoding.advance()
    return decoding


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_sequence_is_decoded_as_it_is_alone(count: int, k: int) -> None:
    free = decoded(k, count)
    common = max(range(97), key=lambda token: sum(token in row.output for row in free.rows))
    for eos in ((), (common,)):
        together = decoded(k, count, eos)
        decoder = Decoder(*tiny_pair(eos).make_drafter(), eos, Sampler())
        for prompt, row in zip(PROMPTS, together.rows, strict=False):
            alone = decoder.decode(prompt.tokens, TOKENS, FixedK(k=k) if k else None)
            assert (row.output, row.rounds) == (alone.tokens, alone.log())
    if count == 5:
        assert len({len(row.output) for row in together.rows}) > 1  # texts end at different times
        assert not k or len({tuple(row.rounds) for row in together.rows}) > 1


@pytest.mark.parametrize("k", [0, 3])
def test_rounds_are_those_of_the_simulation(k: int) -> None:
    """Sequence by sequence, and which of them share a round of the batch."""
    trace = record(tiny_pair(), PROMPTS, RecordSettings(4, TOKENS, Sampler()))
    simulated = lockstep(drafts_of(trace, FixedK(k=k) if k else None), COST, 5).rounds
    real = decoded(k)
    for row in real.rows:
        mine = simulated.sequence == row.number
        columns = (simulated.t, simulated.drafted, simulated.accepted)
        assert row.rounds == list(zip(*(column[mine].tolist() for column in columns), strict=True))
        took_part = [number for number, round_ in enumerate(real.rounds) if row.number in round_.numbers]
        assert took_part == simulated.batch_round[mine].tolist()
    drafted = np.zeros(len(real.rounds), dtype=int)
    np.maximum.at(drafted, simulated.batch_round, simulated.drafted)
    assert [len(round_.step_s) for round_ in real.rounds] == drafted.tolist()
    assert all(round_.verify_s > 0 and round_.other_s > 0 for round_ in real.rounds)


def test_budgets_differ_and_the_position_is_the_mean_of_all() -> None:
    decoding = decoded(2, 3, budgets=[1, 7, 20])
    assert [len(row.output) for row in decoding.rows] == [1, 7, 20] and decoding.position == 28 / 3
    assert decoding.rounds[0].numbers == (0, 1, 2) and set(decoding.rounds[-1].numbers) == {2}


def test_what_cannot_be_decoded_is_refused() -> None:
    refusal(lambda: decoded(1, 0), "no prompts")
    refusal(lambda: decoded(1, 2, budgets=[5, 0]), "at least 1")
    refusal(lambda: decoded(1, 2, budgets=[5, POSITIONS]), "160 positions")
