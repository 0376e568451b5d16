"""KV compaction in Triton: one program per tensor, sequence and head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from speckernels.ops.compact_kv import word_bytes
from speckernels.runtime.errors import Unsupported
from speckernels.runtime.triton_runtime import Variant, launch, tl, triton

TOGETHER = 8
WORDS = {2: tl.int16, 4: tl.int32, 8: tl.int64}
MAX_TILE = 8192  # words of a tile; more would not fit the registers
_captured: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}


@triton.jit
def _kernel(
    path, context_lens, steps, addresses, slots, columns, sequence_stride, head_stride, slot_stride,
    WORD: tl.constexpr, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1).to(tl.int64)
    start = sequence * sequence_stride + tl.program_id(2).to(tl.int64) * head_stride
    tensor = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(WORD)) + start
    context = tl.load(context_lens + sequence).to(tl.int64)
    path += sequence * steps
    column = tl.arange(0, COLUMNS)[None, :]
    begin = 0
    going = steps > 0
    while going:
        step = begin + tl.arange(0, TOGETHER)
        source = tl.load(path + step, mask=step < steps, other=-1)
        ended = tl.cumsum((source < 0).to(tl.int32), 0)
        moves = (ended == 0) & (source != step) & (context + source < slots)
        inside = moves[:, None] & (column < columns)
        of, to = (context + source) * slot_stride, (context + step) * slot_stride
        words = tl.load(tensor + of[:, None] + column, mask=inside)
        # All are read before any is written: threads of other columns' words may do the writing.
        tl.debug_barrier()
        tl.store(tensor + to[:, None] + column, words, mask=inside)
        tl.debug_barrier()
        begin += TOGETHER
        going = (begin < steps) & (tl.max(ended) == 0)


def compact_kv(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    path: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    tensors = (*keys, *values)
    like = tensors[0]
    heads, slots, size = like.shape[1:]
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    word = word_bytes(like, addresses, 8)
    columns = size * like.element_size() // word
    padded = triton.next_power_of_2(columns)
    if padded * TOGETHER > MAX_TILE:
        raise Unsupported(f"rows have {columns} words of {word} bytes; this backend takes {MAX_TILE // TOGETHER}")
    strides = [stride * like.element_size() // word for stride in like.stride()[:3]]
    table = _device_table(addresses, like.device)
    launch(
        _kernel, (len(tensors), len(path), heads),
        path, context_lens, path.shape[1], table, slots, columns, *strides,
        WORD=WORDS[word], TOGETHER=TOGETHER, COLUMNS=padded,
    )  # fmt: skip


def _device_table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Addresses on the device; copied there once, so call once before capturing a CUDA graph."""
    table = _copied_table(addresses, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured[addresses, device] = table  # the graph reads it as long as it lives
    return table


@lru_cache(maxsize=1024)
def _copied_table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(addresses, device=device)


def compiled_variants() -> list[Variant]:
    signature = {"path": "*i32", "context_lens": "*i32", "addresses": "*i64"}
    numbers = ("steps", "slots", "columns", "sequence_stride", "head_stride", "slot_stride")
    signature |= dict.fromkeys(numbers, "i32")
    return [
        Variant(_kernel, signature, {"WORD": WORDS[word], "TOGETHER": TOGETHER, "COLUMNS": columns})
        for word, columns in ((8, 32), (4, 64), (2, 64))
    ]
