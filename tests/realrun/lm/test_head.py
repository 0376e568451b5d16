"""Logits in float32 from weights of 16 bits: every pass and every drafter has them, and they are the exact products."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.experiment.validate import passes
from realrun.lm.batched_llama import BatchedLlama
from realrun.lm.cached import CachedLM, Describe
from realrun.lm.choice import make_lm
from realrun.lm.head import Float32Head, float32_product, gives_float32, with_float32_logits
from realrun.lm.kernels import use_kernels
from realrun.lm.number_type import NUMBER_TYPES
from realrun.measure.record import RecordSettings, record
from realrun.measure.reuse import check_pair
from realrun.pairs.drafter_files import LAB_DRAFTERS, has_lab_drafter
from realrun.pairs.pair import load_pair
from realrun.pairs.shapes import random_pair
from specsim.io.errors import InputError
from specsim.policy.registry import make_policy
from tests.support.tiny import tiny_model, tiny_prompts

NAME = "bfloat16-float32-logits"
TOKENS = [3, 1, 4, 1, 5, 9]


def have_more_digits(logits: torch.Tensor) -> bool:
    return logits.dtype == torch.float32 and not torch.equal(logits, logits.bfloat16().float())


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@torch.inference_mode()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_logits_are_the_exact_products_rounded_once(dtype: torch.dtype, bias: bool, device: str) -> None:
    torch.manual_seed(0)
    head, x = Float32Head(48, 200, bias=bias).to(device, dtype), torch.randn(2, 5, 48).to(device, dtype)
    exact = x.double() @ head.weight.double().T + (head.bias.double() if bias else 0.0)
    logits = head(x)
    assert have_more_digits(logits)
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-5)
    rounded = torch.nn.functional.linear(x, head.weight, head.bias)
    assert float((rounded.double() - exact).abs().max()) > 1e-4
    assert len(logits.unique()) > len(rounded.unique())  # fewer are equal
    heads = head.weight.view(4, 50, 48)
    batched = float32_product(x[:1, :1].expand(4, 1, 48), heads.transpose(1, 2))
    torch.testing.assert_close(batched.double(), x[0, :1].double() @ heads.double().transpose(1, 2), rtol=0, atol=1e-5)


@torch.inference_mode()
def test_every_pass_gives_them() -> None:
    """The library's, the fused one, the one over static caches and the one of batches."""
    model = with_float32_logits(tiny_model(2, seed=5, dtype=torch.bfloat16))
    assert gives_float32(model) and model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with use_kernels("reference"):
        static = make_lm(model)
    outputs = [lm.forward(TOKENS) for lm in (CachedLM(model), make_lm(model), static)]
    batch = BatchedLlama(model)
    batch.reset(1)
    batch.add([])
    outputs.append(batch.forward([TOKENS])[0])
    assert len({type(lm) for lm in (make_lm(model), static)}) == 2
    for logits in outputs:
        assert have_more_digits(logits)
        torch.testing.assert_close(logits[-1:], outputs[0][-1:], rtol=0, atol=0.1)  # states are rounded to bfloat16


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("drafter", ["model", *filter(has_lab_drafter, LAB_DRAFTERS)])
def test_target_and_drafter_decode_with_them(drafter: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, prompt = load_pair(drafter=drafter, dtype=NAME), tiny_prompts(1)[0]
    assert pair.number_type == NAME and pair.dtype == torch.bfloat16
    with use_kernels(kernels):
        decoder = Decoder(*pair.make_drafter(), (), Sampler())
        described_logits: list[torch.Tensor] = []
        own: CachedLM = decoder.drafter.lm  # type: ignore[attr-defined]
        if own.describes:
            described = own.describe

            def noted(tokens: Sequence[int], describe: Describe, follows: bool = False) -> torch.Tensor:
                def say(logits: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
                    described_logits.append(logits.clone())
                    return describe(logits, *rest)

                return described(tokens, say, follows)

            monkeypatch.setattr(own, "describe", noted)
        with passes(own) as of_draft, passes(decoder.target) as of_target:
            run = decoder.decode(prompt.tokens, 8, make_policy("fixed_k", {"k": 2}))
    assert len(run.tokens) == 8 and of_target and (of_draft or described_logits)
    assert all(map(have_more_digits, [*of_target, *of_draft, *described_logits]))


def test_a_recording_says_so_and_its_pair_is_told_from_others() -> None:
    prompts = tiny_prompts(2)
    pair, plain = (load_pair(dtype=name) for name in (NAME, "bfloat16"))
    trace = record(pair, prompts, RecordSettings(3, 8, Sampler()))
    assert trace.meta["dtype"] == trace.meta["provenance"]["dtype"] == NAME
    check_pair(trace, pair, "this")
    with pytest.raises(InputError, match=f"dtype {NAME}, this pair has bfloat16"):
        check_pair(trace, plain, "this")


def test_a_head_of_another_kind_is_refused() -> None:
    model = tiny_model(1, seed=5, dtype=torch.bfloat16)
    model.set_output_embeddings(torch.nn.Identity())
    with pytest.raises(
        InputError, match="LlamaForCausalLM has a head of type Identity, which gives no logits in float32"
    ):
        with_float32_logits(model)


def test_number_types_have_names() -> None:
    for name, dtype in NUMBER_TYPES.items():
        pair = random_pair("llama-3.1-8b", "llama-3.2-1b", device="cpu", dtype=name, smoke=True)
        assert (pair.number_type, pair.dtype) == (name, dtype)
    with pytest.raises(InputError, match="dtype 'float32-float32-logits' is unknown; known: float64, float32, "):
        load_pair(dtype="float32-float32-logits")
