"""Products with a head and of a few rows: logits in float32 from 16 bits; against float64, or left to torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.experiment.validate import passes
from realrun.lm import skinny_linear as module
from realrun.lm.batched_llama import BatchedLlama
from realrun.lm.cached import CachedLM, Describe
from realrun.lm.choice import make_lm
from realrun.lm.head import Float32Head, float32_product, gives_float32, head_product, with_float32_logits
from realrun.lm.kernels import use_kernels
from realrun.lm.llama import FusedLlama
from realrun.lm.number_type import NUMBER_TYPES
from realrun.lm.skinny_linear import skinny_linear
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


@torch.inference_mode()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
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


# --- A few rows ---


UNIT = torch.finfo(torch.float32).eps / 2


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows that the kernel was called with."""
    calls: list[int] = []
    real = module._product
    monkeypatch.setattr(module, "_product", lambda weight, x, out: (calls.append(len(x)), real(weight, x, out)))
    return calls


@torch.inference_mode()
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 7), (64, 33), (117, 576), (43, 1536), (3, 40000)])
@pytest.mark.parametrize("rows", [*range(1, 18), 64, 257])
def test_products_are_those_of_float64_up_to_rounding(
    rows: int, outputs: int, inputs: int, kernel_calls: list[int]
) -> None:
    """No sum is further off than its terms' sizes times a unit of rounding for each addition."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (rows, outputs))
    got = skinny_linear(x, weight)
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    assert kernel_calls == [rows] and got.shape == (rows, outputs) and got.dtype == torch.float32
    assert ((got.double() - exact).abs() <= (inputs + 1) * UNIT * sizes).all()


@torch.inference_mode()
def test_what_is_not_finite_stays_so() -> None:
    x, weight = torch.ones(3, 40), torch.ones(2, 40)
    x[0, 39], x[1, 7] = torch.nan, torch.inf
    torch.testing.assert_close(skinny_linear(x, weight), F.linear(x, weight), equal_nan=True)


@torch.inference_mode()
def test_dimensions_in_front_are_rows(kernel_calls: list[int]) -> None:
    x, weight = torch.randn(2, 3, 8), torch.randn(5, 8)
    torch.testing.assert_close(skinny_linear(x, weight), F.linear(x, weight))
    torch.testing.assert_close(skinny_linear(x[0, 0], weight), F.linear(x[0, 0], weight))
    assert kernel_calls == [6, 1]


def test_what_does_not_suit_is_torchs(kernel_calls: list[int]) -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    unsuited = {
        "float64": (x.double(), weight.double()),
        "no rows": (x[:0], weight),
        "columns that lie apart": (x, torch.randn(8, 5).T),
        "gradients": (x, weight.clone().requires_grad_()),
    }
    for name, (a, b) in unsuited.items():
        assert torch.equal(skinny_linear(a, b), F.linear(a, b)), name
    torch.set_num_threads(2)
    assert torch.equal(skinny_linear(x, weight), F.linear(x, weight))
    torch.set_num_threads(1)
    assert kernel_calls == []
    with torch.no_grad():
        skinny_linear(x, unsuited["gradients"][1])
    assert kernel_calls == [3]


@torch.inference_mode()
def test_a_head_with_a_bias_or_of_another_kind_is_called(kernel_calls: list[int]) -> None:
    hidden = torch.randn(2, 8)
    for head in (torch.nn.Linear(8, 5), torch.nn.Sequential(torch.nn.Linear(8, 5, bias=False))):
        assert torch.equal(head_product(head, hidden), head(hidden))
    assert kernel_calls == []
    head_product(torch.nn.Linear(8, 5, bias=False), hidden)
    assert kernel_calls == [2]


@torch.inference_mode()
def test_a_pass_computes_all_its_products_so(kernel_calls: list[int]) -> None:
    """The logits are the library's up to rounding."""
    model = tiny_model(3, seed=1).float()
    lm = FusedLlama(model)
    lm.prefill([4, 5, 6])
    kernel_calls.clear()
    logits = lm.forward([7, 8])
    assert kernel_calls == [2] * (4 * 3) + [2]
    again = FusedLlama(model)
    assert all(a.qkv is b.qkv and a.gate_up is b.gate_up for a, b in zip(lm.layers, again.layers, strict=True))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[4, 5, 6, 7, 8]])).logits[0, 3:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
