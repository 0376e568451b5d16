"""The pass over several sequences gives each the logits that it has alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from realrun.lm.batched_llama import BatchedLlama
from realrun.lm.llama import FusedLlama
from tests.support.checks import refusal
from tests.support.families import family_model
from tests.support.tiny import POSITIONS, VOCAB


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@torch.inference_mode()
def test_ragged_rows_have_the_logits_of_sequences_of_their_own(family: str) -> None:
    """Rows of other lengths, fed other numbers of tokens, cut back to others, and some of them gone."""
    model = family_model(family).double()
    rng = np.random.default_rng(3)
    batched, alone = BatchedLlama(model), [FusedLlama(model) for _ in range(4)]
    batched.reset(4)
    for lm in alone:
        prompt = rng.integers(0, VOCAB, rng.integers(0, 30)).tolist()
        batched.add(prompt)
        lm.prefill(prompt)
    compared = 0
    for turn in range(12):
        tokens = [rng.integers(0, VOCAB, rng.integers(0, 6)).tolist() for _ in alone]
        tokens[0] = tokens[0] or [1]
        logits = batched.forward(tokens)
        for row, (lm, fed) in enumerate(zip(alone, tokens, strict=True)):
            if fed:
                torch.testing.assert_close(logits[row, : len(fed)], lm.forward(fed), rtol=0, atol=1e-12)
                compared += len(fed)
        lengths = np.array([int(rng.integers(max(lm.length - 4, 0), lm.length + 1)) for lm in alone])
        batched.truncate(lengths)
        for lm, length in zip(alone, lengths.tolist(), strict=True):
            lm.truncate(length)
        if turn in (5, 9):  # the first of them leaves, then one in the middle
            gone = 0 if turn == 5 else 1
            batched.drop(gone)
            alone[gone] = alone[-1]
            alone.pop()
        assert batched.lengths.tolist() == [lm.length for lm in alone]
    assert len(alone) == 2 and compared > 60


@torch.inference_mode()
def test_a_row_may_be_filled_up_beyond_the_last_position() -> None:
    model = family_model("Llama").double()
    batched, alone = BatchedLlama(model), FusedLlama(model)
    batched.reset(2)
    full = np.random.default_rng(0).integers(0, VOCAB, POSITIONS - 1).tolist()
    for tokens in (full, [5]):
        batched.add(tokens)
    alone.prefill(full)
    logits = batched.forward([[7], [1, 2, 3, 4]])
    torch.testing.assert_close(logits[0, :1], alone.forward([7]), rtol=0, atol=1e-12)


def test_other_models_are_refused() -> None:
    refusal(lambda: BatchedLlama(family_model("Qwen2")), "Qwen2ForCausalLM", "choose another")
