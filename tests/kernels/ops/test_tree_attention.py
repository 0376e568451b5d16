"""Tree attention: errors against float64, beside those that rounding alone makes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speckernels
from speckernels import Unsupported
from speckernels.ops.tree_attention import (
    GOOD_ENOUGH,
    SMALL_SHARED_BYTES,
    pack_bits,
    reference,
    split_count,
    tree_attention,
)
from speckernels.runtime.launch import block_slots
from tests.support.kernel_trees import (
    BACKENDS,
    ON_GPU,
    SHAPES,
    Refusals,
    forest,
    mask_bits_of,
    path_to_root,
    thread_orders,
)
from tests.support.mutants import Mutant

# Kernels may round the weights before they are divided by their sum, and sum in another order.
TIMES_ROUNDING_ERROR = 2.0
# Where rounding happens to make no error at all; a few units of values of size 1.
FLOOR = {torch.float16: 1e-4, torch.bfloat16: 1e-3, torch.float32: 3e-6, torch.float64: 1e-13}
LAYOUTS = ("BHLD", "BLHD", "B L keys-and-values H D")
MUTANTS = [
    Mutant("csrc/tree_attention.cu", "copy_async_wait<S::STAGES - 2>", "copy_async_wait<S::STAGES - 1>",
           "reads a tile before it has arrived"),
    Mutant("csrc/tree_attention.cu",
           "__syncthreads();  // this tile is here, and all have finished with the one before", "",
           "reads what other threads have yet to copy"),
    Mutant("csrc/tree_attention.cu", "copy_async_wait<0>();", "",
           "results overwritten by a query that arrives late, where a block has no tiles"),
    Mutant("csrc/tree_attention.cuh", "word(index + 1)", "word(index)", "mask words do not join"),
    Mutant("csrc/tree_attention.cuh", "i < 0 ? ~0u", "i < 0 ? 0u", "context masked where the tree begins in its tile"),
    Mutant("csrc/tree_attention.cuh", "weights[m][upper][child] = fast_exp2(stats[child].x - finite_shift(highest))",
           "weights[m][upper][child] = 1", "splits merged without their maxima"),
    Mutant("csrc/tree_attention.cuh", "__syncthreads();  // all have read the slot that the next level overwrites", "",
           "race between levels of the merge"),
    Mutant("csrc/tree_attention.cu", "slot < of.end && chunk", "chunk", "values behind the tail times weight 0"),
    Mutant("csrc/tree_attention.cuh", "moved |= now != before", "moved |= now < before",
           "old sums keep an old maximum"),
    Mutant("csrc/tree_attention.cu", "chunk * 8 < a.dim ? 16 : 0;\n    const", "true ? 16 : 0;\n    const",
           "columns behind a head that fills its shape in part"),
    Mutant("csrc/tree_attention.cu", "slot * a.value_slot;", "slot * a.key_slot;", "values by the keys' stride"),
    Mutant("csrc/tree_attention.cuh", "min(context + tail, a.capacity)", "min(context + a.nodes, a.capacity)",
           "a tail as long as the queries"),
    Mutant("csrc/tree_attention.cu", "other < 32 * a.words && ", "", "simple kernel: reads behind the mask"),
    Mutant("csrc/tree_attention.cu", "if (now == lowest) continue;", "", "simple kernel: NaN where nothing is seen"),
    Mutant("ops/tree_attention/triton.py", "head = kv_head * group + row % group\n    d =",
           "head = kv_head * group + row * 0\n    d =", "a group's heads all take the first one's query"),
    Mutant("ops/tree_attention/triton.py", "(place & 31)", "(place & 15)", "wrong bit of the mask"),
    Mutant("ops/tree_attention/triton.py", "row_sum * old", "row_sum", "splits merged without their maxima"),
    Mutant("ops/tree_attention/triton.py", "rescale = tl.exp2(row_max - shift)",
           "rescale = tl.exp2(shift - shift)", "old sums keep an old maximum"),
    Mutant("ops/tree_attention/triton.py", "tl.load(tail_lens + batch) if TAILS else nodes", "nodes",
           "a tail as long as the queries"),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A batch, one sequence per entry of contexts; trees of different shapes."""

    heads: int
    kv_heads: int
    dim: int
    nodes: int
    contexts: Sequence[int]
    capacity: int
    dtype: torch.dtype
    layout: str = LAYOUTS[0]


# Which path of the CUDA kernel a case takes: rows = nodes * heads / kv_heads choose tiles of 16, 64
# or 128 rows; the capacity allows splits, the context uses them.
CASES = [
    Case(2, 1, 32, 1, (0, 31, 64), 90, torch.float16),  # one split
    Case(4, 2, 32, 5, (0, 1, 31, 32, 63, 64), 90, torch.bfloat16, LAYOUTS[1]),
    Case(4, 2, 32, 5, (0, 200), 300, torch.float32, LAYOUTS[2]),
    Case(2, 2, 40, 33, (31,), 400, torch.float64, LAYOUTS[1]),  # several of the splits stay empty
    Case(2, 1, 32, 2, (2200,), 2400, torch.float16),  # two levels of merges, 16 rows
    Case(6, 2, 64, 11, (700, 130), 900, torch.bfloat16, LAYOUTS[2]),  # two levels, 64 rows
    Case(6, 1, 32, 63, (500,), 640, torch.float16, LAYOUTS[1]),  # two levels, tiles of 128 rows
    Case(3, 1, 64, 33, (63, 0), 200, torch.bfloat16),
    Case(2, 2, 128, 123, (200,), 2048, torch.float16, LAYOUTS[1]),
    Case(2, 1, 256, 5, (100,), 300, torch.bfloat16),
    Case(4, 2, 80, 9, (70,), 200, torch.float16),  # fills shapes of 96, 128 and 192 in part or whole
    Case(4, 1, 96, 33, (70,), 200, torch.bfloat16),
    Case(2, 2, 112, 40, (70,), 200, torch.float16, LAYOUTS[2]),
    Case(2, 1, 192, 5, (100,), 300, torch.float16, LAYOUTS[1]),
    Case(2, 1, 44, 5, (100,), 300, torch.float16),  # rows of no whole 16 bytes
]
TIGHT_CASES = [
    Case(2, 1, 128, 3, (100,), 300, torch.bfloat16),
    Case(4, 1, 128, 33, (63, 200), 400, torch.float16, LAYOUTS[1]),
    Case(6, 1, 64, 33, (130,), 300, torch.bfloat16),
    Case(2, 1, 80, 33, (130,), 300, torch.float16),
    Case(2, 1, 256, 5, (100,), 300, torch.bfloat16),
]
LARGE_CASES = [
    Case(32, 8, 128, 64, (8192 - 64,), 8192, torch.bfloat16),
    Case(32, 8, 128, 64, (32768, 1000, 0, 20000), 40000, torch.bfloat16, LAYOUTS[1]),
    Case(32, 8, 128, 1, (32767,), 32768, torch.float16),
    Case(16, 1, 64, 256, (5000, 100), 6000, torch.float16, LAYOUTS[2]),
    Case(24, 8, 64, 123, (3000,), 131072, torch.bfloat16, LAYOUTS[1]),
    Case(8, 4, 256, 63, (4097, 63), 8192, torch.bfloat16),
    Case(12, 12, 64, 63, (1000,), 2048, torch.float32),
    Case(4, 2, 80, 17, (500,), 600, torch.float64, LAYOUTS[1]),
]


def arguments(case: Case, device: str = "cpu", seed: int = 0) -> tuple[Any, ...]:
    """Peaked attention, so that each key matters; slots behind the tree hold NaN and infinity."""
    generator = torch.Generator(device).manual_seed(seed)
    batch, c = len(case.contexts), case
    shapes = tuple(SHAPES[i % len(SHAPES)] for i in range(batch))
    context = torch.tensor(c.contexts, dtype=torch.int32)
    mask_bits = mask_bits_of(forest(shapes, c.nodes, seed).to(device))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(c.dtype)

    query = 3 * normal(batch, c.nodes, c.heads, c.dim).transpose(1, 2)
    if c.layout == "BHLD":
        keys, values = (normal(batch, c.kv_heads, c.capacity, c.dim) for _ in range(2))
    elif c.layout == "BLHD":
        keys, values = (normal(batch, c.capacity, c.kv_heads, c.dim).transpose(1, 2) for _ in range(2))
    else:
        keys, values = normal(batch, c.capacity, 2, c.kv_heads, c.dim).permute(2, 0, 3, 1, 4)
    for sequence, length in enumerate(c.contexts):
        keys[sequence, :, length + c.nodes :] = torch.nan
        values[sequence, :, length + c.nodes :] = torch.tensor([torch.nan, torch.inf]).repeat(c.dim)[: c.dim]
    return query, keys, values, mask_bits, context.to(device), c.dim**-0.5


def exact(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *others: Any) -> torch.Tensor:
    """The reference in float64."""
    return reference.tree_attention(query.double(), keys.double(), values.double(), *others)


def rounded(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask_bits: torch.Tensor,
    context: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The same with the weights rounded to the type: the error that tensor cores cannot avoid."""
    nodes, kind = query.shape[2], query.dtype
    wide = torch.promote_types(kind, torch.float32)
    sequences = []
    for sequence, length in enumerate(context.tolist()):
        end = length + nodes
        used = (cache[sequence, :, :end].to(wide) for cache in (keys, values))
        k, v = (cache.repeat_interleave(query.shape[1] // len(cache), 0) for cache in used)
        sees = torch.ones(nodes, end, dtype=torch.bool, device=query.device)
        j = torch.arange(nodes, device=query.device)
        sees[:, length:] = (mask_bits[sequence][:, j // 32] >> (j % 32) & 1).bool()
        scores = (query[sequence].to(wide) @ k.mT * scale).masked_fill(~sees, -torch.inf)
        sequences.append((scores.softmax(-1).to(kind).to(wide) @ v).transpose(0, 1))
    return torch.stack(sequences).to(kind)


def assert_close(got: torch.Tensor, case: Case, args: tuple[Any, ...]) -> None:
    expected = exact(*args)
    assert got.dtype == case.dtype and got.shape == expected.shape and got.is_contiguous(), case
    assert got.isfinite().all(), f"{case}: not finite at {(~got.isfinite()).nonzero()[0].tolist()} (b, node, head, d)"
    unavoidable = (rounded(*args).double() - expected).abs().max().item()
    error = (got.double() - expected).abs()
    limit = TIMES_ROUNDING_ERROR * unavoidable + FLOOR[case.dtype]
    worst = (error == error.max()).nonzero()[0].tolist()
    assert error.max() <= limit, f"{case}: error {error.max():.2e} at {worst} (b, node, head, d), limit {limit:.2e}"


def check(device: str) -> None:
    """Errors within the limit, and the same bits in any order of threads and blocks."""
    for case in CASES:
        if case.dtype != torch.float64 or speckernels.backend_for(device) != "triton":
            check_case(case, device)
    for tails in TAILS_CASES:
        check_tails(tails, device)


def check_case(case: Case, device: str, source: str = "tree_attention") -> None:
    args = arguments(case, device)
    first = None
    for _ in thread_orders(source, device):
        got = tree_attention(*args)
        first = got if first is None else first
        assert torch.equal(got, first), f"{case}: depends on the order of threads"
    assert first is not None
    assert_close(first, case, args)


@dataclass(frozen=True)
class Tails:
    """A batch whose tails are longer or shorter than its queries, each with a context and a tail."""

    heads: int
    kv_heads: int
    dim: int
    nodes: int
    lens: Sequence[tuple[int, int]]  # context, tail
    words: int  # of the mask
    dtype: torch.dtype
    spare: int = 0  # slots behind the longest sequence


TAILS_CASES = [
    Tails(4, 2, 32, 5, ((40, 9), (0, 0), (70, 40), (3, 1)), 2, torch.float16),
    Tails(4, 2, 40, 5, ((40, 9), (0, 0), (70, 40), (3, 35)), 1, torch.float32),
    Tails(6, 1, 96, 33, ((130, 70), (0, 0)), 3, torch.bfloat16, 300),  # tiles of 128 rows, some of which see nothing
    Tails(2, 2, 80, 40, ((64, 0), (65, 33)), 2, torch.float16),
    Tails(2, 1, 16, 3, ((700, 4), (0, 3)), 1, torch.float32, 200),
    Tails(4, 1, 64, 3, ((900, 10), (100, 10)), 1, torch.bfloat16, 100),  # several splits
]


def tails_arguments(c: Tails, device: str = "cpu", seed: int = 0) -> tuple[Any, ...]:
    """All that must not be read holds NaN; keys and values lie differently."""
    generator = torch.Generator().manual_seed(seed)
    batch, slots = len(c.lens), max(1, max(context + tail for context, tail in c.lens) + c.spare)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(c.dtype)

    query = 3 * normal(batch, c.nodes, c.heads, c.dim).transpose(1, 2)
    mask_bits = torch.randint(-(2**31), 2**31, (batch, c.nodes, c.words), generator=generator).int()
    keys, values = normal(batch, c.kv_heads, slots, c.dim), normal(batch, slots, c.kv_heads, c.dim).transpose(1, 2)
    for sequence, (context, tail) in enumerate(c.lens):
        keys[sequence, :, context + tail :], values[sequence, :, context + tail :] = torch.nan, torch.nan
        if not context + tail:
            query[sequence] = torch.nan  # sees nothing, which is 0 whatever it asks
    context_lens, tail_lens = (torch.tensor(part, dtype=torch.int32) for part in zip(*c.lens, strict=True))
    tensors = (query, keys, values, mask_bits, context_lens, c.dim**-0.5, tail_lens)
    return tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in tensors)


def in_float64(args: tuple[Any, ...], *, sizes: bool = False) -> torch.Tensor:
    """The reference in float64. sizes : of the values' absolute values"""
    query, keys, values, *others = args
    return reference.tree_attention(
        query.double(), keys.double(), (values.abs() if sizes else values).double(), *others
    )


def check_tails(c: Tails, device: str, seed: int = 0, source: str = "tree_attention") -> None:
    """Within 1e-5 and what rounding of weights and result to the type makes, and the same bits in any order."""
    if c.dtype == torch.float64 and speckernels.backend_for(device) == "triton":
        return
    args = tails_arguments(c, device, seed)
    first = None
    for _ in thread_orders(source, device):
        got = tree_attention(*args[:6], tail_lens=args[6])
        first = got if first is None else first
        assert torch.equal(got, first), f"{c}: depends on the order of threads"
    expected = in_float64(args)
    unit = torch.finfo(c.dtype).eps / 2 if c.dtype.itemsize == 2 else 0
    limit = 1e-5 + 1.1 * unit * (in_float64(args, sizes=True) + expected.abs())
    wrong = (~((got.double() - expected).abs() <= limit)).nonzero()
    assert not len(wrong), (
        f"{c}: {got[*wrong[0]]}, not {expected[*wrong[0]]}, at {wrong[0].tolist()} (b, node, head, d)"
    )


@st.composite
def tails(draw: st.DrawFn) -> Tails:
    """Small batches of all kinds."""
    nodes, kv_heads = draw(st.integers(1, 20)), draw(st.integers(1, 2))
    return Tails(
        kv_heads * draw(st.integers(1, 3)),
        kv_heads,
        draw(st.sampled_from((4, 8, 24, 32, 80))),
        nodes,
        draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=3)),
        draw(st.integers(0, 3)),
        draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16))),
        draw(st.sampled_from((0, 200))),
    )


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@settings(max_examples=10, deadline=None)
@given(tails(), st.integers(0, 1000))
def test_tails_of_any_length(backend: str, case: Tails, seed: int) -> None:
    """Each backend against the reference in float64, in three orders of threads."""
    with speckernels.use_backend(backend):
        check_tails(case, "cpu", seed)


@settings(max_examples=25, deadline=None)
@given(tails(), st.integers(0, 1000))
def test_reference_sees_context_and_tail(case: Tails, seed: int) -> None:
    """Each node alone, over the slots that it may see, gathered one by one."""
    args = tails_arguments(case, seed=seed)
    query, keys, values, mask_bits, _, scale, _ = args
    got = in_float64(args)
    for sequence, (context, tail) in enumerate(case.lens):
        for node in range(case.nodes):
            bits = [int(word) >> bit & 1 for word in mask_bits[sequence, node] for bit in range(32)]
            seen = [*range(context), *(context + j for j in range(min(tail, len(bits))) if bits[j])]
            if not seen:
                assert not got[sequence, node].any()
                continue
            for head in range(case.heads):
                at = (sequence, head * case.kv_heads // case.heads)
                scores = keys[at][seen].double() @ query[sequence, head, node].double() * scale
                expected = scores.softmax(0) @ values[at][seen].double()
                torch.testing.assert_close(got[sequence, node, head], expected)


def test_a_tree_that_grows_by_levels_needs_no_empty_queries() -> None:
    """The last nodes of a tree as the queries and all of it as the tail: what all nodes together give."""
    case = Case(4, 2, 32, 40, (70,), 120, torch.float32)
    query, keys, values, mask_bits, context, scale = arguments(case)
    new = slice(36, 40)
    for backend in speckernels.BACKENDS:
        with speckernels.use_backend(backend):
            whole = tree_attention(query, keys, values, mask_bits, context, scale)
            tails = torch.tensor([40], dtype=torch.int32)
            last = tree_attention(query[:, :, new], keys, values, mask_bits[:, new], context, scale, tail_lens=tails)
        torch.testing.assert_close(last, whole[:, new], rtol=0, atol=FLOOR[case.dtype])


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("case", TIGHT_CASES, ids=str)
def test_little_shared_memory(backend: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles for GPUs whose blocks have 99 KiB, which take fewer stages or rows."""
    module = importlib.import_module(f"speckernels.ops.tree_attention.{backend}")
    monkeypatch.setattr(module, "shared_bytes", lambda device: SMALL_SHARED_BYTES)
    args = arguments(case)
    with speckernels.use_backend(backend):
        if backend == "cuda" and case.dim > 128:
            with pytest.raises(Unsupported, match="99 KiB of shared memory per block, 163 KiB for D above 128"):
                tree_attention(*args)
            return
        assert_close(tree_attention(*args), case, args)
    monkeypatch.setattr(module, "shared_bytes", lambda device: 48 * 1024)
    if backend == "cuda":
        with speckernels.use_backend("cuda"), pytest.raises(Unsupported, match="needs a GPU with 99 KiB"):
            tree_attention(*args)


@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
@ON_GPU
def test_large(backend: str, case: Case) -> None:
    if backend == "triton" and case.dtype == torch.float64:
        pytest.skip("float64 is not for Triton")
    args = arguments(case, "cuda")
    with speckernels.use_backend(backend):
        assert_close(tree_attention(*args), case, args)


@ON_GPU
def test_replays_in_a_cuda_graph(backend: str) -> None:
    """Lengths are read on the device: a replay follows them."""
    case = Case(8, 2, 64, 33, (900,), 1000, torch.float16)
    longer, shorter = arguments(case, "cuda"), arguments(Case(8, 2, 64, 33, (100,), 1000, torch.float16), "cuda")
    static: list[Any] = [x.clone() if isinstance(x, torch.Tensor) else x for x in longer]
    with speckernels.use_backend(backend):
        tree_attention(*static)  # builds and allocates
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = tree_attention(*static)
        for args in (longer, shorter, longer):
            for to, source in zip(static[:5], args[:5], strict=True):
                to.copy_(source)
            graph.replay()
            assert_close(got, case, args)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 100), st.integers(0, 1000))
def test_bits_are_packed_lowest_first(size: int, seed: int) -> None:
    mask = torch.rand(3, size, generator=torch.Generator().manual_seed(seed)) < 0.5
    words = pack_bits(mask)
    assert words.dtype == torch.int32 and words.shape == (3, -(-size // 32))
    for row, numbers in zip(mask.tolist(), words.tolist(), strict=True):
        assert [bool(numbers[i // 32] >> (i % 32) & 1) for i in range(32 * len(numbers))] == row + [False] * (
            32 * len(numbers) - size
        )


def test_bits_of_known_masks() -> None:
    assert pack_bits(torch.tensor([True, False, True])).tolist() == [5]
    assert pack_bits(torch.arange(34) >= 31).tolist() == [-(2**31), 3]


@pytest.mark.parametrize("backend", ["reference", "triton", "cuda"])
def test_a_chain_is_causal_attention(backend: str) -> None:
    nodes, context = 21, 50
    case = Case(4, 2, 32, nodes, (context,), 80, torch.float32)
    query, keys, values, _, lengths, scale = arguments(case)
    mask_bits = mask_bits_of(forest(("chain",), nodes, 0))
    with speckernels.use_backend(backend):
        got = tree_attention(query, keys, values, mask_bits, lengths, scale)
    causal = torch.ones(nodes, context + nodes, dtype=torch.bool).tril(context)
    k, v = (cache[:, :, : context + nodes].repeat_interleave(2, 1) for cache in (keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=causal, scale=scale)
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=0, atol=FLOOR[torch.float32])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(1, 70), st.integers(0, 70), st.integers(0, 1000))
def test_reference_sees_the_context_and_the_path_to_the_root(shape: str, nodes: int, context: int, seed: int) -> None:
    """Each node alone: softmax over the keys that it may see, gathered one by one."""
    case = Case(2, 1, 4, nodes, (context,), context + nodes + 3, torch.float64)
    query, keys, values, _, lengths, scale = arguments(case, seed=seed)
    parents = forest((shape,), nodes, seed)
    got = tree_attention(query, keys, values, mask_bits_of(parents), lengths, scale)
    for node in range(0, nodes, 7):
        slots = [*range(context), *(context + j for j in path_to_root(parents[0].tolist(), node))]
        weights = (keys[0, 0, slots] @ query[0, :, node].mT * scale).softmax(0)
        torch.testing.assert_close(got[0, node], weights.mT @ values[0, 0, slots], rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_rows_that_are_not_aligned(backend: str) -> None:
    """Tensor cores read 16 bytes at a time; other strides take the simple kernel."""
    case = Case(2, 1, 32, 5, (40,), 50, torch.float16)
    query, keys, values, *others = arguments(case)
    wider = torch.full((1, 1, 50, 33), torch.nan, dtype=torch.float16)
    wider[..., 1:] = values
    args = (query, keys, wider[..., 1:], *others)
    with speckernels.use_backend(backend):
        assert_close(tree_attention(*args), case, args)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_caches_beyond_32_bit_offsets(backend: str, device: str) -> None:
    """The second head begins 2^31 elements on; pages in between are never touched."""
    apart, slots, case = 2**31 + 64, 70, Case(4, 2, 32, 5, (60,), 70, torch.float16)
    query, keys, values, *others = arguments(case, device)
    storage = torch.empty(apart + 2 * slots * case.dim, dtype=case.dtype, device=device)
    far: list[Any] = []
    for offset, cache in ((0, keys), (slots * case.dim, values)):
        far.append(storage.as_strided(cache.shape, (0, apart, case.dim, 1), offset))
        far[-1].copy_(cache)
    with speckernels.use_backend(backend):
        assert_close(tree_attention(query, *far, *others), case, (query, keys, values, *others))


@pytest.mark.parametrize(
    ("blocks", "tiles"), [(1, 512), (8, 128), (16, 512), (100, 512), (132, 9), (1000, 512), (3, 1)]
)
def test_splits_fill_the_gpu(blocks: int, tiles: int) -> None:
    slots = 132
    splits = split_count(blocks, tiles, slots)
    assert 1 <= splits <= max(1, tiles // 2)

    def use(splits: int) -> float:
        return blocks * splits / (-(-blocks * splits // slots) * slots)

    best = max(use(s) for s in range(1, max(1, min(slots, tiles // 2)) + 1))
    assert use(splits) >= GOOD_ENOUGH * best
    assert all(use(fewer) < GOOD_ENOUGH * best for fewer in range(1, splits))


def test_slots_follow_the_shapes() -> None:
    """Without a GPU as many blocks as shared memory and all registers allow: two of the smallest, else one."""
    found = {
        (dim, rows): block_slots(torch.device("cpu"), "tree_attention", "tree_attention_occupancy", dim, rows, 0) // 132
        for dim, rows in ((32, 16), (64, 16), (128, 16), (64, 128), (128, 128), (256, 64))
    }
    assert found == {(32, 16): 2, (64, 16): 2, (128, 16): 1, (64, 128): 1, (128, 128): 1, (256, 64): 1}


def samples() -> list[tuple[Any, ...]]:
    return [arguments(CASES[1]), tails_arguments(TAILS_CASES[0])]


def test_refusals() -> None:
    with speckernels.use_backend("cuda"), pytest.raises(Unsupported, match="heads of up to 256, not 264"):
        tree_attention(*arguments(Case(2, 1, 264, 3, (5,), 10, torch.float16)))
    with speckernels.use_backend("triton"), pytest.raises(Unsupported, match=r"no torch.float64 with D = 16"):
        tree_attention(*arguments(Case(2, 1, 16, 3, (5,), 10, torch.float64)))


def refusals() -> Refusals:
    names = ("query", "keys", "values", "mask_bits", "context_lens", "scale")
    good = dict(zip(names, arguments(Case(4, 2, 8, 3, (5, 6), 10, torch.float32)), strict=True))
    query, keys, values, mask_bits, context, _ = good.values()
    return good, [
        (r"query is torch.int32 \[2, 4, 3, 8\]; give a float", {"query": query.int()}),
        (r"\[2, 4, 257, 8\]; give a float \[B, Hq, n, D\] with 1 to 256 nodes",
         {"query": query[:, :, :1].expand(-1, -1, 257, -1)}),
        (r"keys is torch.float16 .*; give torch.float32 \[2, Hkv, L, 8\]", {"keys": keys.half()}),
        (r"keys is .* with Hkv a divisor of 3", {"query": query[:, :3]}),
        (r"values is .*\[2, 2, 9, 8\]; give .* the same for keys and values", {"values": values[:, :, :9]}),
        (r"keys has stride 10 along D; make its last dimension contiguous", {"keys": keys.mT.contiguous().mT}),
        (r"mask_bits is int32 \[2, 3\]; give int32 \[2, 3, 1\]", {"mask_bits": mask_bits[..., 0]}),
        (r"mask_bits is int32 \[2, 2, 1\]; give int32 \[2, 3, any\]",
         {"mask_bits": mask_bits[:, :2], "tail_lens": context}),
        (r"context_lens is int64 \[2\]; give int32 \[2\]", {"context_lens": context.long()}),
        (r"tail_lens is int32 \[1\]; give int32 \[2\]", {"tail_lens": context[:1]}),
        (r"scale is -1; give a positive number", {"scale": -1}),
    ]  # fmt: skip
