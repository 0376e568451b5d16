"""The fused pass gives the library's own logits, and only where it may."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from realrun.lm.llama import FusedLlama, supported
from realrun.lm.open import make_lm
from specsim.policy.registry import make_policy
from tests.support.tiny import tiny_pair


def small_model(kind: str = "llama", **changes: object) -> LlamaForCausalLM | MistralForCausalLM:
    torch.manual_seed(0)
    settings: dict[str, object] = {
        "vocab_size": 89,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        **changes,
    }
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**settings)).double().eval()
    return LlamaForCausalLM(LlamaConfig(**settings)).double().eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1},
        {"head_dim": 16},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ],
    ids=str,
)
@torch.inference_mode()
def test_logits_equal_the_librarys_over_any_cutting_and_rollback(changes: dict[str, object]) -> None:
    model = small_model(**changes)
    plain, fused = CachedLM(model), FusedLlama(model)
    rng = np.random.default_rng(5)
    for _ in range(12):
        tokens = rng.integers(0, 89, rng.integers(1, 8)).tolist()
        torch.testing.assert_close(fused.forward(tokens), plain.forward(tokens), rtol=0, atol=1e-12)
        length = int(rng.integers(0, min(plain.length, 40) + 1))
        plain.truncate(length)
        fused.truncate(length)
        assert fused.length == plain.length == length


@torch.inference_mode()
def test_weights_are_joined_in_place_and_once() -> None:
    model = small_model()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    before = model(input_ids=ids).logits.clone()
    first, second = FusedLlama(model), FusedLlama(model)
    attention = model.model.layers[1].self_attn
    assert first.layers[1].qkv.data_ptr() == second.layers[1].qkv.data_ptr() == attention.q_proj.weight.data_ptr()
    storage = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == storage
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize(
    "model",
    [
        small_model("mistral"),
        small_model(attention_bias=True),
        small_model(hidden_act="gelu"),
        small_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
    ],
    ids=["mistral", "bias", "gelu", "dynamic rope"],
)
def test_other_models_use_the_librarys_own_pass(model: LlamaForCausalLM) -> None:
    assert not supported(model)
    assert type(make_lm(model)) is CachedLM


@pytest.mark.parametrize("sampler", [Sampler("greedy"), Sampler("gumbel", 0.9, 4)], ids=["greedy", "gumbel"])
def test_decoding_is_the_same_with_either_pass(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny_pair()
    policy = make_policy("adaedl", {"lambda0": -0.5, "max_draft_tokens": 6})

    def decoded() -> list[object]:
        decoder = Decoder(pair.target, DraftModel(pair.drafter.model, ()), (), sampler)
        runs = [decoder.decode([5, 6, 7], 30, arm) for arm in (policy, None)]
        return [(run.tokens, run.log()) for run in runs]

    fused = decoded()
    monkeypatch.setattr("realrun.lm.open.supported", lambda model: False)
    assert decoded() == fused


@torch.inference_mode()
def test_a_long_prompt_equals_short_pieces() -> None:
    """Beyond LONG_PASS new tokens another attention operation is used, and the buffers grow."""
    model = small_model(max_position_embeddings=400)
    tokens = np.random.default_rng(2).integers(0, 89, 380).tolist()
    whole, pieces = FusedLlama(model), CachedLM(model)
    parts = [pieces.forward(tokens[start : start + 50]) for start in range(0, 380, 50)]
    first = whole.forward(tokens[:100])
    second = whole.forward(tokens[100:])
    torch.testing.assert_close(torch.cat([first, second]), torch.cat(parts), rtol=0, atol=1e-12)


@torch.inference_mode()
def test_bfloat16_stays_within_its_rounding() -> None:
    """Both passes round differently; each must stay as near to float64 as the other, within a factor of two."""
    exact = small_model()
    low = small_model().to(torch.bfloat16)
    tokens = list(range(1, 40))
    truth = CachedLM(exact).forward(tokens)
    ours = (FusedLlama(low).forward(tokens).double() - truth).norm()
    theirs = (CachedLM(low).forward(tokens).double() - truth).norm()
    assert 0 < ours < 2 * theirs
