"""Merging attention over two parts of a cache: what attention over both gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speckernels
from speckernels import Unsupported
from speckernels.ops.merge_attention import merge_attention, reference
from speckernels.ops.tree_attention import tree_attention
from tests.kernels.ops.test_tree_attention import Case, arguments
from tests.support.kernel_trees import Refusals, thread_orders
from tests.support.mutants import Mutant

MUTANTS = [
    Mutant("csrc/tree_attention.cu", "weight_b = exponential(b - highest)", "weight_b = exponential(a - highest)",
           "both parts weigh the same"),
    Mutant("csrc/tree_attention.cu", "share_a = total > 0 ? weight_a / total : W(0)", "share_a = weight_a / total",
           "NaN where neither was seen"),
    Mutant("csrc/tree_attention.cu", "highest + logarithm(total) : lowest", "logarithm(total) : lowest",
           "a logarithm without its maximum"),
    Mutant("csrc/tree_attention.cu", "if (row >= rows) return;", "if (row >= rows - 1) return;", "the last row stays"),
    Mutant("ops/merge_attention/triton.py", "shift + tl.log(total)", "tl.log(total)",
           "a logarithm without its maximum"),
    Mutant("ops/merge_attention/triton.py", "(weight_b / total)", "(weight_a / total)", "both parts weigh the same"),
]  # fmt: skip


def parts(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Results of two parts with log-sum-exps far apart; some rows saw one part alone, or none."""
    generator = torch.Generator().manual_seed(seed)
    outs, lses = [], []
    for part in range(2):
        lse = 30 * torch.randn(shape[:3], generator=generator, dtype=torch.promote_types(dtype, torch.float32))
        kind = torch.randint(5, shape[:3], generator=torch.Generator().manual_seed(seed + 1))
        unseen = (kind == part) | (kind == 2)
        outs.append(torch.randn(shape, generator=generator).to(dtype).masked_fill(unseen[..., None], 0))
        lses.append(lse.masked_fill(unseen, -torch.inf))
    return tuple(tensor.to(device) for tensor in (outs[0], lses[0], outs[1], lses[1]))


def merge_alike(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str) -> None:
    """Within 1e-5 of the reference in float64 and the result's own rounding, in any order of threads."""
    args = parts(shape, dtype, seed, device)
    expected, expected_lse = reference.merge_attention(*(tensor.double() for tensor in args))
    unit = torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0
    for order in thread_orders("tree_attention", device):
        out, lse = merge_attention(*args)
        wrong = (~((out.double() - expected).abs() <= 1e-5 + unit * expected.abs())).nonzero()
        assert not len(wrong), (
            f"{shape}, order {order}: {out[*wrong[0]]}, not {expected[*wrong[0]]} at {wrong[0].tolist()}"
        )
        wrong = (~(((lse - expected_lse).abs() <= 1e-5 * (1 + expected_lse.abs())) | (lse == expected_lse))).nonzero()
        assert not len(wrong), f"{shape}, order {order}: lse {lse[*wrong[0]]}, not {expected_lse[*wrong[0]]}"


def check(device: str) -> None:
    for seed, (shape, dtype) in enumerate((
        ((2, 5, 3, 40), torch.float32),
        ((1, 1, 1, 1), torch.float16),
        ((3, 4, 2, 128), torch.bfloat16),
        ((1, 7, 3, 12), torch.float64),
    )):  # fmt: skip
        if dtype != torch.float64 or speckernels.backend_for(device) != "triton":
            merge_alike(shape, dtype, seed, device)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@settings(max_examples=15, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 70)),
    st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    st.integers(0, 1000),
)
def test_any_shape(backend: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    with speckernels.use_backend(backend):
        merge_alike(shape, dtype, seed, "cpu")


@pytest.mark.parametrize("backend", speckernels.BACKENDS)
@pytest.mark.parametrize("prefix", [0, 17, 60])
def test_a_shared_prefix_and_the_rest_are_the_whole(backend: str, prefix: int) -> None:
    """The prefix as one sequence whose queries are all sequences', without a tail."""
    query, keys, values, mask_bits, context, scale = arguments(Case(4, 2, 32, 5, (60, 61, 90), 96, torch.float32))
    keys[:, :, :prefix], values[:, :, :prefix] = keys[:1, :, :prefix].clone(), values[:1, :, :prefix].clone()
    with speckernels.use_backend(backend):
        whole, whole_lse = tree_attention(query, keys, values, mask_bits, context, scale, return_lse=True)
        together = query.transpose(0, 1).flatten(1, 2)[None]  # [1, Hq, B n, D]
        none = torch.zeros(1, dtype=torch.int32)
        of_prefix, prefix_lse = tree_attention(
            together, keys[:1], values[:1], torch.zeros(1, together.shape[2], 0, dtype=torch.int32), none + prefix,
            scale, tail_lens=none, return_lse=True,
        )  # fmt: skip
        rest, rest_lse = tree_attention(
            query, keys[:, :, prefix:], values[:, :, prefix:], mask_bits, context - prefix, scale, return_lse=True
        )
        out, lse = merge_attention(of_prefix.view_as(rest), prefix_lse.view_as(rest_lse), rest, rest_lse)
    torch.testing.assert_close(out, whole, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-5)


def test_refusals() -> None:
    with speckernels.use_backend("triton"), pytest.raises(Unsupported, match="merges in float32"):
        merge_attention(*parts((1, 1, 1, 2), torch.float64, 0))


@pytest.mark.parametrize("backend", speckernels.BACKENDS)
def test_nothing_to_merge(backend: str) -> None:
    with speckernels.use_backend(backend):
        out, lse = merge_attention(*parts((0, 3, 2, 8), torch.float32, 0))
    assert (out.shape, lse.shape) == ((0, 3, 2, 8), (0, 3, 2))


def samples() -> list[tuple[Any, ...]]:
    return [parts((2, 3, 2, 8), torch.float32, 0)]


def refusals() -> Refusals:
    good = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), parts((2, 3, 2, 8), torch.float32, 0), strict=True))
    return good, [
        (r"out_a is int32 \[2, 3, 2, 8\]; give a float \[B, n, Hq, D\]", {"out_a": good["out_a"].int()}),
        (r"out_b is float16 .*; give float32 \[2, 3, 2, 8\]", {"out_b": good["out_b"].half()}),
        (r"lse_b is float32 \[2, 3\]; give float32 \[2, 3, 2\]", {"lse_b": good["lse_b"][..., 0]}),
    ]
