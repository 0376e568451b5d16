"""A low-rank adapter: off, on, merged and taken away again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from realrun.drafters.medusa import MedusaHeads
from realrun.pairs.drafter_files import describe_target, load_drafter, save_drafter
from realrun.train.common.lora import Adapter, AdapterSettings, adapted_modules
from specsim.io.errors import InputError
from tests.support.tiny import VOCAB, tiny_model

SIZE = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15}


def target() -> LlamaForCausalLM:
    return tiny_model(2, seed=1)


def perturbed(adapter: Adapter, scale: float = 0.1) -> None:
    """Give B other values than zero."""
    generator = torch.Generator().manual_seed(0)
    adapter.load({name: scale * torch.randn(v.shape, generator=generator) for name, v in adapter.tensors().items()})


def tokens(seed: int = 0, rows: int = 3, length: int = 20) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def test_an_adapter_changes_nothing_until_trained_and_nothing_when_off() -> None:
    model, ids = target(), tokens()
    before = logits(model, ids)
    adapter = Adapter(model, AdapterSettings(rank=4, alpha=8))
    assert torch.equal(logits(model, ids), before)
    perturbed(adapter)
    assert (logits(model, ids) - before).abs().max() > 0.01
    with adapter.off():
        assert torch.equal(logits(model, ids), before)
    assert (logits(model, ids) - before).abs().max() > 0.01


def test_a_removed_adapter_leaves_the_model_as_it_was() -> None:
    model, ids = target(), tokens()
    model.model.norm.weight.requires_grad_(False)
    untouched = copy.deepcopy(model)
    adapter = Adapter(model, AdapterSettings())
    perturbed(adapter)
    adapter.remove()
    assert torch.equal(logits(model, ids), logits(untouched, ids))
    assert [type(m) for m in model.modules()] == [type(m) for m in untouched.modules()]
    assert vars(model).keys() == vars(untouched).keys()
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    assert trainable == {name: p.requires_grad for name, p in untouched.named_parameters()}
    assert not trainable["model.norm.weight"]


def test_dropout_follows_the_generator_and_is_off_elsewhere() -> None:
    model, ids = target(), tokens()
    adapter = Adapter(model, AdapterSettings(rank=4, dropout=0.3))
    perturbed(adapter)
    whole = logits(model, ids)

    def dropped(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        with adapter.dropping():
            return logits(model, ids)

    first = dropped(1)
    assert torch.equal(first, dropped(1)) and not torch.equal(first, dropped(2))
    assert not torch.equal(first, whole) and torch.equal(logits(model, ids), whole)
    with adapter.dropping(), adapter.off():
        assert torch.equal(logits(model, ids), logits(target(), ids))


def llama(tied: bool) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZE, **HEADS, tie_word_embeddings=tied))


def qwen2(tied: bool) -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**SIZE, **HEADS, tie_word_embeddings=tied))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [llama, qwen2])
def test_the_merged_model_is_the_model_with_its_adapter_on(make: Any, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = make(tied).double().eval(), tokens()
    described = describe_target(model, "tiny")
    adapter = Adapter(model, AdapterSettings(rank=4, alpha=6))
    assert len(adapter.names) == 2 * 7 + (not tied)
    perturbed(adapter)
    wanted = logits(model, ids)
    tensors = adapter.tensors()
    adapter.remove()
    heads = MedusaHeads(model, 1).state_dict()
    facts = {"target": described, "heads": 1, "adapter": {"rank": 4, "alpha": 6}}
    save_drafter(tmp_path, "medusa", {**heads, **tensors}, facts)
    merged, _ = load_drafter(tmp_path, model)
    assert (wanted - logits(model, ids)).abs().max() > 0.01
    torch.testing.assert_close(logits(merged, ids), wanted, rtol=0, atol=1e-10)
    assert torch.equal(merged.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_the_adapter_lies_on_every_linear_layer_but_a_tied_head() -> None:
    tied, untied = adapted_modules(llama(True)), adapted_modules(llama(False))
    assert set(untied) - set(tied) == {"lm_head"} and set(tied) <= set(untied)
    kinds = {name.split(".")[-1] for name in tied}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    with pytest.raises(InputError, match="has no linear layers to adapt"):
        adapted_modules(
            type("Bare", (), {"get_output_embeddings": lambda self: None, "named_modules": lambda self: []})()
        )
