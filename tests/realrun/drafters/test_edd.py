"""EDD's decoder sees what it should: the target's states of all verified tokens, then embeddings of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from realrun.drafters.edd import EffectiveDraftDecoderLM, one_layer_model, own_state
from realrun.lm.layer_stack import model_parts
from realrun.lm.split_target import SplitTarget
from realrun.pairs.pair import Pair
from tests.support.pairs.state import PROMPTS, layer_alone, state_pair
from tests.support.split_targets import LIBRARY, NAMES, close_to, stacked, target_of
from tests.support.tiny import random_prompts

CLOSE = {"rtol": 0.0, "atol": 1e-10}


def reference(pair: Pair, context: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
    """Logits [V] of the decoder, by the library's layers and without a cache.

    Row by row: the target's states of all tokens of the context but the pending one, then the embeddings of
    that one and of what was drafted, all at the positions of their tokens.
    """
    inner, known = pair.drafter.decoder.model, len(context) - 1
    rows = inner.embed_tokens(torch.tensor([*context[known:], *drafted]))
    if known:
        output = pair.target(input_ids=torch.tensor([context[:known]]), use_cache=False, output_hidden_states=True)
        rows = torch.cat([output.hidden_states[pair.drafter.split][0], rows])
    out = layer_alone(inner.layers[0], inner.rotary_emb, rows)
    logits: torch.Tensor = pair.drafter.decoder.get_output_embeddings()(inner.norm(out[-1:]))[0]
    return logits


@torch.inference_mode()
def test_the_states_and_only_those_of_verified_tokens_decide() -> None:
    """The check above would see it: a reference that lacks a state, or has one more, says something else."""
    pair = state_pair("edd")
    text = PROMPTS[2].tokens
    whole = reference(pair, text, [])
    inner = pair.drafter.decoder.model
    output = pair.target(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
    own = inner.embed_tokens(torch.tensor(text[-1:]))
    for states in (output.hidden_states[2][0], output.hidden_states[2][0, 1:-1], output.hidden_states[1][0, :-1]):
        out = layer_alone(inner.layers[0], inner.rotary_emb, torch.cat([states, own]))
        logits = pair.drafter.decoder.get_output_embeddings()(inner.norm(out[-1:]))[0]
        assert float((logits - whole).abs().max()) > 1e-2
    assert len(text) > 4


@pytest.mark.parametrize("name", ["llama", "qwen2-sdpa"])
def test_a_decoder_starts_with_the_targets_embedding_norm_and_head(name: str) -> None:
    target = target_of(name)
    decoder, other = one_layer_model(target, seed=1), one_layer_model(target, seed=2)
    theirs = target.state_dict()
    for key, value in decoder.state_dict().items():
        if ".layers." in key:
            assert "norm" in key or not torch.equal(value, theirs[key])  # of one shape, and random
            assert "proj.weight" not in key or not torch.equal(value, other.state_dict()[key])
        else:
            assert torch.equal(value, theirs[key]) and value.data_ptr() != theirs[key].data_ptr()
    assert len(decoder.model.layers) == 1 and type(decoder) is type(target) and decoder.dtype == target.dtype
    assert decoder.config._attn_implementation == target.config._attn_implementation
    assert ("lm_head.weight" in own_state(decoder)) == (name != "llama")
    state = torch.get_rng_state()
    one_layer_model(target, seed=3)
    assert torch.equal(torch.get_rng_state(), state)


# --- Keys and values alone ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_filling_slots_leaves_the_keys_and_values_of_a_pass(name: str) -> None:
    """In pieces, over slots that were taken before, and behind the first room of the buffers."""
    target = target_of(name)
    parts = model_parts(target)
    ran, filled = parts.stack(target.model.layers[2:3]), parts.stack(target.model.layers[2:3])
    rows = torch.randn(300, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if name not in LIBRARY:
        rows = rows[:150]  # the fused pass knows as many positions as the model has
    count = len(rows)
    for start, end in ((0, 9), (9, 10), (10, 60), (40, 70), (70, count)):
        x = rows[start:end] + (0.5 if end == 60 else 0.0)  # written anew by the next
        ran.run(x, start, slice(start, end), parts.causal_mask(end - start, end))
        assert filled.fill(x, start, slice(start, end)) is None  # type: ignore[func-returns-value]
        for ran_layer, filled_layer in zip(stacked(ran, end), stacked(filled, end), strict=True):
            for a, b in zip(ran_layer, filled_layer, strict=True):
                assert torch.equal(a, b) and float(a[:, -1].abs().max()) > 0
    # What runs behind them sees them.
    more = rows[:2]
    mask = parts.causal_mask(2, count + 2)
    out = [stack.run(more, count, slice(count - 2, count), mask) for stack in (ran, filled)]
    torch.testing.assert_close(*out, **close_to(name))


def test_filling_is_for_stacks_of_one_layer() -> None:
    for name in ("llama", "qwen2-sdpa"):
        target = target_of(name)
        stack = model_parts(target).stack(target.model.layers[:2])
        with pytest.raises((AssertionError, ValueError)):
            stack.fill(torch.zeros(1, 32, dtype=torch.float64), 0, slice(0, 1))


@torch.inference_mode()
def test_rows_of_a_round_end_with_it() -> None:
    """Fed on after a truncation, at whatever length, the pass says what a new one does."""
    pair = state_pair("edd")
    (text,) = random_prompts(1, seed=4, lengths=(30, 31))
    target = SplitTarget(pair.target, pair.drafter.split)
    lm = EffectiveDraftDecoderLM(target, pair.drafter.decoder)
    lm_state: list[Any] = []
    for verified, drafted, length in ((4, 5, 9), (6, 2, 5), (6, 3, 6), (12, 6, 0), (20, 1, 40)):
        target.prefill(text[target.length : verified])
        logits = lm.forward(text[lm.length : verified + drafted])
        assert len(logits) == drafted  # of rows that are the drafter's own
        for number, row in enumerate(logits):
            expected = reference(pair, text[: verified + 1], text[verified + 1 : verified + 1 + number])
            torch.testing.assert_close(row, expected, **CLOSE)
        lm.truncate(length)
        assert lm.length == lm.state_rows == min(length, verified)
        lm_state.append(lm.state_rows)
    assert len(set(lm_state)) > 3
