"""Rivals of tree attention: each gives the reference's result on what it is given."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from speckernels.bench.cases import attention_rivals
from speckernels.bench.cases.attention_rivals import PAGE_SLOTS, RIVALS
from speckernels.bench.cases.base import SEED, Arguments, Case
from speckernels.bench.cases.tree_attention import OPERATION
from speckernels.ops.tree_attention import tree_attention


def arguments_of(case: Case) -> Arguments:
    return OPERATION.inputs(case, torch.Generator().manual_seed(SEED))


IN_ONE_PIECE, PAGED = OPERATION.small[:2], OPERATION.small[2]


@pytest.mark.parametrize("case", IN_ONE_PIECE, ids=str)
@pytest.mark.parametrize("name", ["sdpa", "sdpa_packed", "sdpa_expanded", "prefix_merge"])
def test_it_gives_what_the_reference_gives(name: str, case: Case) -> None:
    args = arguments_of(case)
    OPERATION.check(OPERATION.reference(*args), RIVALS[name].prepare(case, args)(*args), case)


@pytest.mark.parametrize("nodes", [1, 8, 40])
def test_pages_and_mask_of_xqa_say_what_the_cache_and_the_bits_do(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's function is played by our own reference, which reads the arguments as its documentation says."""
    case = Case(
        "tree_attention",
        {"nodes": nodes, "context": 150, "batch": 2, "q_heads": 4, "kv_heads": 2, "head": 16},
        torch.float32,
    )

    def xqa(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor,
        output: torch.Tensor, workspace: torch.Tensor, semaphores: torch.Tensor, num_kv_heads: int, page_size: int,
        *, kv_layout: str, q_scale: float, q_seq_len: int, mask: torch.Tensor | None,
    ) -> None:  # fmt: skip
        assert (kv_layout, page_size, num_kv_heads) == ("HND", PAGE_SLOTS, k.shape[1])
        assert not semaphores.view(torch.int32).any() and q.dim() == (5 if nodes > 1 else 4)
        bits = torch.ones(len(q), 1, 1, dtype=torch.int32) if mask is None else mask.view(torch.int32)
        context = seq_lens.view(torch.int32)[:, 0] - q_seq_len
        query = q.view(len(q), nodes, *q.shape[-2:]).transpose(1, 2)
        scale = q_scale / q.shape[-1] ** 0.5
        output.copy_(tree_attention(query, k, v, bits, context, scale, block_table=page_table).view(output.shape))

    module = ModuleType("flashinfer.xqa")
    module.xqa = xqa  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.xqa", module)
    monkeypatch.setattr(attention_rivals, "FLASHINFER_WORKSPACE_BYTES", 1)
    args = arguments_of(case)
    OPERATION.check(OPERATION.reference(*args), RIVALS["xqa"].prepare(case, args)(*args), case)


def test_flex_is_measured_with_and_without_autotuning(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic, mode: modes.append(mode))
    case = OPERATION.small[0]
    for name in ("flex", "flex_tuned"):
        RIVALS[name].prepare(case, arguments_of(case))
    assert modes == [None, "max-autotune-no-cudagraphs"]


def test_a_cache_in_pages_is_the_same_cache() -> None:
    args = arguments_of(PAGED)
    shape = {name: size for name, size in PAGED.shape.items() if name != "page"}
    whole = arguments_of(Case(PAGED.op, shape, PAGED.dtype))
    assert torch.equal(OPERATION.run(*args), OPERATION.run(*whole)) and args[1].shape[2] == 16
    assert not any(rival.applies(PAGED) for rival in OPERATION.rivals.values())
