"""KV compaction in place: bytes against the reference, and the reference against copies one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speckernels
from speckernels.ops.compact_kv import compact_kv, word_bytes
from tests.support.kernel_trees import ON_GPU, Refusals, thread_orders
from tests.support.mutants import Mutant

LAYOUTS = ("BHSD", "BSHD", "slice of BHSD")
GUARD = 3  # elements before and after a cache, which nobody may touch
# Each word size: a cache's type and head size, and whether its storage begins one element late.
WORDS = {
    16: (torch.bfloat16, 64, False),
    8: (torch.float16, 12, False),
    4: (torch.float32, 5, False),
    2: (torch.float16, 8, True),
}
MUTANTS = [
    Mutant("csrc/compact_kv.cu", "row_of(context + node) : -1", "row_of(node) : -1",
           "counts slots from the cache's begin"),
    Mutant("csrc/compact_kv.cu", "going = going && node >= 0", "going = node >= 0", "goes on behind the path's end"),
    Mutant("csrc/compact_kv.cu", "begin += TOGETHER", "begin += TOGETHER + 1", "one in nine stays"),
    Mutant("csrc/compact_kv.cu", " && context + node < slots", "", "reads behind the cache"),
    Mutant("csrc/compact_kv.cu", "column < columns", "column <= columns", "a word too many"),
    Mutant("csrc/compact_kv.cu", "row_of(context + begin + j)", "row_of(context + j)",
           "later rows overwrite the first"),
    Mutant("csrc/compact_kv.cu", "return sequence * sequence_stride", "return 0 * sequence_stride",
           "all sequences share a cache"),
    Mutant("ops/compact_kv/triton.py", "(ended == 0) & (source != step)", "(source >= 0) & (source != step)",
           "goes on behind the path's end"),
    Mutant("ops/compact_kv/triton.py", "begin += TOGETHER", "begin += 2 * TOGETHER", "half of it stays"),
    Mutant("ops/compact_kv/triton.py", "word = word_bytes(like, addresses, 8)", "word = 8", "words across rows' ends"),
    Mutant("ops/compact_kv/triton.py", "(addresses + tl.program_id(0))", "(addresses)", "first layer only"),
    Mutant("ops/compact_kv/triton.py", "start = sequence * sequence_stride +", "start =",
           "all sequences share a cache"),
]  # fmt: skip


class Cache:
    """Layers of keys and values on random bytes, with guards; NaN patterns and all."""

    def __init__(
        self, layers: int, shape: Sequence[int], dtype: torch.dtype, layout: str, late: bool, seed: int, device: str
    ) -> None:
        batch, heads, slots, size = shape
        generator = torch.Generator().manual_seed(seed)
        stored = {"BHSD": (batch, heads, slots, size), "BSHD": (batch, slots, heads, size)}
        stored["slice of BHSD"] = (batch + 1, heads + 1, slots + 2, 2 * size)
        count = int(torch.tensor(stored[layout]).prod())
        width = torch.empty(0, dtype=dtype).element_size()
        margin = 16 * GUARD // width  # so that the guard keeps the alignment
        self.storages, self.tensors = [], []
        for _ in range(2 * layers):
            bytes_ = torch.randint(256, ((count + 2 * margin + 1) * width,), generator=generator, dtype=torch.uint8)
            storage = bytes_.to(device)
            tensor = storage.view(dtype)[margin + late :][:count].view(stored[layout])
            if layout == "BSHD":
                tensor = tensor.transpose(1, 2)
            if layout == "slice of BHSD":
                tensor = tensor[1:, 1:, 1:-1, :size]
            self.storages.append(storage)
            self.tensors.append(tensor)
        self.keys, self.values = self.tensors[:layers], self.tensors[layers:]

    def bytes(self) -> torch.Tensor:
        return torch.stack(self.storages).cpu()


def paths_of(lengths: Sequence[int], steps: int, slots: int, seed: int) -> torch.Tensor:
    """Ascending paths of these lengths with holes, from 0, padded with -1."""
    generator = torch.Generator().manual_seed(seed)
    paths = torch.full((len(lengths), steps), -1, dtype=torch.int32)
    for path, length in zip(paths, lengths, strict=True):
        if length:
            later = torch.randperm(slots - 1, generator=generator)[: length - 1].sort().values + 1
            path[:length] = torch.cat([torch.zeros(1, dtype=torch.int64), later])
    return paths


def compact_alike(
    device: str,
    build: tuple[object, ...],
    path: torch.Tensor,
    context_lens: torch.Tensor,
    what: str,
) -> None:
    """The backend in force leaves the same bytes as the reference, guards included."""
    wanted = Cache(*build, "cpu")  # type: ignore[arg-type]
    with speckernels.use_backend("reference"):
        compact_kv(wanted.keys, wanted.values, path, context_lens)
    for order in thread_orders("compact_kv", device):
        got = Cache(*build, device)  # type: ignore[arg-type]
        compact_kv(got.keys, got.values, path.to(device), context_lens.to(device))
        wrong = (got.bytes() != wanted.bytes()).nonzero()
        assert not len(wrong), f"{what}, order {order}: tensor {wrong[0, 0]} differs from byte {wrong[0, 1]} on"


def check(device: str) -> None:
    context_lens = torch.tensor([0, 7, 2], dtype=torch.int32)
    slots = 40
    for number, (word, (dtype, size, late)) in enumerate(WORDS.items()):
        for layout in LAYOUTS:
            build = (2, (3, 2, slots, size), dtype, layout, late, 11)
            tensors = Cache(*build, device).tensors
            assert word_bytes(tensors[0], [tensor.data_ptr() for tensor in tensors], 16) == word
            for steps, lengths in ((1, (1, 0, 1)), (5, (5, 0, 3)), (23, (23, 8, 9)))[: 3 if layout == "BSHD" else 2]:
                path = paths_of(lengths, steps, slots - 8, seed=number + steps)
                compact_alike(device, build, path, context_lens, f"{word} byte words, {layout}, {steps} steps")
    build = (1, (1, 1, slots, 6), torch.float64, "BHSD", False, 3)
    for context, nodes in (
        (0, [0, 1, 2, 3]),  # nothing moves
        (0, [0, 2, -1, 5]),  # the path ends at -1, whatever follows
        (1, [0, 2, 4, -1, 6, 7, 8, 9, 10, 11, 12]),
        (0, [0, 2, 3, 5, 6, 7, 9, 10, 11, 12]),  # each is read after it was overwritten, if the order is wrong
        (3, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (slots - 4, [0, 3, -1]),  # up to the last slot
        (slots - 4, [1, 4, 5]),  # beyond it: not moved
    ):
        path = torch.tensor([nodes], dtype=torch.int32)
        compact_alike(device, build, path, torch.tensor([context], dtype=torch.int32), f"path {nodes} at {context}")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=3),
    st.sampled_from(LAYOUTS),
    st.integers(0, 1000),
)
def test_reference_copies_slot_by_slot(rows: list[tuple[int, int]], layout: str, seed: int) -> None:
    """From a copy of the cache, so that no order can matter."""
    contexts, lengths = zip(*rows, strict=True)
    path = paths_of(lengths, 9, 15, seed)
    cache = Cache(2, (len(rows), 2, 30, 4), torch.float32, layout, False, seed, "cpu")
    wanted = Cache(2, (len(rows), 2, 30, 4), torch.float32, layout, False, seed, "cpu")
    for tensor in wanted.tensors:
        before = tensor.clone()
        for row, (context, length) in enumerate(rows):
            for j in range(length):
                tensor[row, :, context + j] = before[row, :, context + int(path[row, j])]
    compact_kv(cache.keys, cache.values, path, torch.tensor(contexts, dtype=torch.int32))
    assert torch.equal(cache.bytes(), wanted.bytes())


@pytest.mark.parametrize("backend", speckernels.BACKENDS)
@pytest.mark.parametrize("steps", [63, 123])
def test_long_paths(backend: str, steps: int) -> None:
    path = paths_of((steps,), steps, 190, seed=steps)
    with speckernels.use_backend(backend):
        compact_alike(
            "cpu",
            (1, (1, 1, 200, 8), torch.float16, "BHSD", False, steps),
            path,
            torch.tensor([5], dtype=torch.int32),
            f"{steps} steps",
        )


@pytest.mark.parametrize("backend", speckernels.BACKENDS)
def test_nothing_to_do(backend: str) -> None:
    cache = Cache(1, (2, 1, 9, 4), torch.float32, "BHSD", False, 0, "cpu")
    before = cache.bytes()
    context = torch.zeros(2, dtype=torch.int32)
    with speckernels.use_backend(backend):
        for steps in (0, 3):  # no path, or a path that is empty
            compact_kv(cache.keys, cache.values, torch.full((2, steps), -1, dtype=torch.int32), context)
        none = [torch.empty(0, 1, 9, 4)]
        compact_kv(none, none, torch.empty(0, 3, dtype=torch.int32), context[:0])
    assert torch.equal(cache.bytes(), before)


@pytest.mark.parametrize("backend", speckernels.BACKENDS)
def test_a_single_number_per_slot_may_lie_at_any_stride(backend: str) -> None:
    """As torch has it: no stride of a dimension of size 1 matters."""
    storages = [torch.arange(20.0) for _ in range(2)]
    key, value = (storage.as_strided((1, 1, 5, 1), (20, 20, 4, 3)) for storage in storages)
    with speckernels.use_backend(backend):
        compact_kv([key], [value], torch.tensor([[0, 2, 3]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    wanted = torch.arange(20.0)
    wanted[8], wanted[12] = 12.0, 16.0
    assert all(torch.equal(storage, wanted) for storage in storages)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_as_many_layers_as_there_may_be(backend: str) -> None:
    path = torch.tensor([[0, 2]], dtype=torch.int32)
    with speckernels.use_backend(backend):
        build = (256, (1, 1, 4, 1), torch.float32, "BHSD", False, 1)
        compact_alike("cpu", build, path, torch.zeros(1, dtype=torch.int32), "256 layers")


def test_wide_rows_are_refused_by_triton_only() -> None:
    cache = [torch.zeros(1, 1, 2, 2048, dtype=torch.float64) for _ in range(2)]
    args = (cache[:1], cache[1:], torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    with speckernels.use_backend("cuda"):
        compact_kv(*args)
    with speckernels.use_backend("triton"), pytest.raises(speckernels.Unsupported, match="rows have 2048 words"):
        compact_kv(*args)


@ON_GPU
def test_offsets_beyond_32_bits(backend: str) -> None:
    slots, size = 2**24 + 64, 128
    keys, values = (torch.zeros(1, 1, slots, size, dtype=torch.float16, device="cuda") for _ in range(2))
    assert (slots - 8) * size > 2**31
    context = slots - 8
    for tensor in (keys, values):
        tensor[0, 0, context:] = torch.arange(8, device="cuda", dtype=torch.float16)[:, None]
    path = torch.tensor([[0, 2, 5, 7, -1]], dtype=torch.int32, device="cuda")
    with speckernels.use_backend(backend):
        compact_kv([keys], [values], path, torch.tensor([context], dtype=torch.int32, device="cuda"))
    for tensor in (keys, values):
        assert tensor[0, 0, context:, size - 1].tolist() == [0, 2, 5, 7, 4, 5, 6, 7]
        assert not tensor[0, 0, :context].any()


@ON_GPU
def test_in_a_cuda_graph(backend: str) -> None:
    """The graph follows the path on the device, and outlives the cache of address tables."""
    cache = Cache(3, (2, 2, 30, 8), torch.float16, "BSHD", False, 0, "cuda")
    path = torch.tensor([[0, 1], [0, 1]], dtype=torch.int32, device="cuda")
    context = torch.tensor([4, 9], dtype=torch.int32, device="cuda")
    with speckernels.use_backend(backend):
        compact_kv(cache.keys, cache.values, path, context)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compact_kv(cache.keys, cache.values, path, context)
        for _ in range(100):
            other = Cache(1, (1, 1, 4, 2), torch.float16, "BHSD", False, 0, "cuda")
            compact_kv(other.keys, other.values, path[:1], context[:1] * 0)
    path[:, 1] = 3
    wanted = [tensor.clone() for tensor in cache.tensors]
    for tensor in wanted:
        for row, start in enumerate((4, 9)):
            tensor[row, :, start + 1] = tensor[row, :, start + 3]
    graph.replay()
    for got, expected in zip(cache.tensors, wanted, strict=True):
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


def samples() -> list[tuple[Any, ...]]:
    cache = [torch.randn(1, 2, 9, 4) for _ in range(4)]
    path = torch.tensor([[0, 2, 3, -1]], dtype=torch.int32)
    return [(cache[:2], cache[2:], path, torch.tensor([1], dtype=torch.int32))]


def refusals() -> Refusals:
    cache, path = torch.zeros(1, 2, 9, 4), torch.zeros(1, 3, dtype=torch.int32)
    apart, other = torch.zeros(1, 2, 4, 9).transpose(2, 3), torch.zeros(1, 9, 2, 4).transpose(1, 2)
    good = {"keys": [cache], "values": [cache], "path": path, "context_lens": torch.zeros(1, dtype=torch.int32)}

    def layers(keys: list[torch.Tensor], values: list[torch.Tensor]) -> dict[str, Any]:
        return {"keys": keys, "values": values}

    return good, [
        ("0 keys and 0 values; give one of each per layer, 1 to 512 together", layers([], [])),
        ("1 keys and 2 values; give", layers([cache], [cache] * 2)),
        (r"keys\[0\] is int32 .*; give float16, .*with contiguous D", layers([cache.int()], [cache.int()])),
        (r"keys\[0\] is float32 .* strides \[72, 36, 1, 9\]; give", layers([apart], [apart])),
        (r"values\[1\] is float16 .*; give all layers as keys\[0\]: f", layers([cache] * 2, [cache, cache.half()])),
        (r"keys\[1\] .* strides \[72, 4, 8, 1\]; give all layers", layers([cache, other], [cache] * 2)),
        (r"path is int64 \[1, 3\]; give int32 \[1, any\]", {"path": path.long()}),
    ]
