"""Products of a few rows: against float64, and left to torch where they do not suit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from realrun.lm import skinny_linear as module
from realrun.lm.head import head_product
from realrun.lm.llama import FusedLlama
from realrun.lm.skinny_linear import MOST_ROWS, skinny_linear
from tests.support.tiny import tiny_model

UNIT = torch.finfo(torch.float32).eps / 2


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows that the kernel or the product with a copy was called with."""
    calls: list[int] = []
    few, many = module._product, module._packed_product
    monkeypatch.setattr(module, "_product", lambda weight, x, out: (calls.append(len(x)), few(weight, x, out)))

    def packed(x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        calls.append(x.numel() // x.shape[-1])
        return many(x, copy)

    monkeypatch.setattr(module, "_packed_product", packed)
    return calls


@torch.inference_mode()
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 7), (64, 33), (17, 576), (40, 1536)])
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


@pytest.mark.parametrize("inference", [False, True])
def test_a_copy_is_made_once_and_again_when_the_matrix_changes(
    inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[tuple[int, ...]] = []
    real = module._packed
    monkeypatch.setattr(module, "_packed", lambda weight: (copied.append(weight.shape), real(weight))[1])
    before = len(module._copies)
    with torch.inference_mode() if inference else torch.no_grad():
        x, weight = torch.randn(MOST_ROWS + 1, 8), torch.randn(5, 8)
        for _ in range(2):
            torch.testing.assert_close(skinny_linear(x, weight), F.linear(x, weight))
        assert copied == [(5, 8)] and len(module._copies) == before + 1
        if not inference:  # matrices made in inference mode have no version, and are not trained
            weight *= 2
            torch.testing.assert_close(skinny_linear(x, weight), F.linear(x, weight))
            assert len(copied) == 2
        del weight
    assert len(module._copies) == before


@torch.inference_mode()
def test_no_copies_are_made_where_memory_is_short(
    kernel_calls: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the memory stays free."""
    memory = tmp_path / "meminfo"
    monkeypatch.setattr(module, "MEMORY", memory)
    x = torch.randn(MOST_ROWS + 1, 64)
    for available_kib, copies in ((241, False), (251, False), (253, True)):  # the matrix has 2 KiB
        memory.write_text(f"MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  {available_kib} kB\n")
        weight = torch.randn(8, 64)
        torch.testing.assert_close(skinny_linear(x, weight), F.linear(x, weight))
        assert kernel_calls == [len(x)] * copies
    memory.unlink()
    skinny_linear(x, torch.randn(8, 64))
    assert kernel_calls == [len(x)]


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
