"""Draft statistics: tokens and ids to the bit and sums within bounds; the reference against plain Python."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speckernels
from speckernels.ops.draft_statistics import DraftStatistics, cuda, draft_statistics, result_type, split
from speckernels.runtime import launch
from speckernels.runtime.launch import block_slots
from tests.support.kernel_trees import BACKENDS, ON_GPU, Refusals, thread_orders
from tests.support.mutants import Mutant

SLOTS = 528  # blocks that an H100 or H200 runs at once
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# A weight exp(x - maximum) has the rounding errors of the difference, of its exponential and of the sum: a few units
# of the last place, times the difference where it is large. Nothing grows with V: the sums are trees.
UNITS = 16
MUTANTS = [
    Mutant("csrc/draft_statistics.cu", "if (score > part.score) {", "if (score >= part.score) {", "last of ties wins"),
    Mutant("csrc/draft_statistics.cu", "if (split == args.splits - 1 && tail", "if (split == 0 && tail < 0 && tail",
           "tail is forgotten"),
    Mutant("csrc/draft_statistics.cu", "s = factor * (s + d * z)", "s = factor * s", "entropy ignores a new maximum"),
    Mutant("csrc/draft_statistics.cu", "row * args.logits_stride", "int(row * args.logits_stride)", "32-bit offsets"),
    Mutant("csrc/draft_statistics.cu", "sort_lanes(good ? mine : no_entry<X>())", "good ? mine : no_entry<X>()",
           "merges a list out of order"),
    Mutant("csrc/draft_statistics.cu", "if (good) mine = next(x, index, mine);", "mine = no_entry<X>();",
           "takes one entry a lane"),
    Mutant("csrc/draft_statistics.cu", "first_of_two == rising ? before(other, a)", "first_of_two ? before(other, a)",
           "a sort that never turns round"),
    Mutant("ops/draft_statistics/triton.py", "inside = index < end", "inside = index < vocabulary",
           "parts overlap"),
    Mutant("ops/draft_statistics/triton.py", "_first(tile_score, index)", "_first(x, index)",
           "noise is ignored"),
    Mutant("ops/draft_statistics/triton.py", "if arrived == splits - 1:", "if arrived == 0:",
           "first program merges"),
    Mutant("ops/draft_statistics/triton.py", "(x < bound) | ((x == bound) & (index > bound_index))",
           "x < bound", "top-k drops ties"),
]  # fmt: skip


def compare(got: DraftStatistics, wanted: DraftStatistics, largest_x: torch.Tensor, what: str) -> None:
    """Tokens and ids are equal, the rest is within a few units of the last place.

    largest_x : [n], the largest size of a finite x: logsumexp has its rounding error
    """
    for name, a, b in zip(got._fields, got, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{what}: {name} is {a.dtype} {a.shape}"
        assert not a.isnan().any(), f"{what}: NaN in {name}"
    assert got.values[:, 0].tolist() == wanted.values[:, 0].tolist(), f"{what}: tokens"
    assert got.top_ids.tolist() == wanted.top_ids.tolist(), f"{what}: top ids"
    info = torch.finfo(wanted.values.dtype)
    unit, smallest = UNITS * info.eps, info.smallest_normal

    def close(name: str, a: torch.Tensor, b: torch.Tensor, bound: torch.Tensor) -> None:
        off = (a.double() - b.double()).abs() > bound
        assert not off.any(), f"{what}: {name} is {a[off][0]}, not {b[off][0]}; at {off.nonzero()[0].tolist()}"

    def relative(p: torch.Tensor) -> torch.Tensor:  # p = exp(d): an error of a unit in d
        p = p.double()
        return unit * p * (1 - p.clamp(min=1e-300).log()) + smallest

    close("prob", got.prob, wanted.prob, relative(wanted.prob))
    close("confidence", got.confidence, wanted.confidence, relative(wanted.confidence))
    close("top probs", got.top_probs, wanted.top_probs, relative(wanted.top_probs))
    entropy = wanted.entropy_nats.double()
    close("entropy", got.entropy_nats, wanted.entropy_nats, unit * (1 + entropy))
    assert (got.entropy_nats >= 0).all(), f"{what}: negative entropy"
    some = wanted.logsumexp > -math.inf
    assert torch.equal(got.logsumexp > -math.inf, some), f"{what}: logsumexp"
    bound = unit * (1 + largest_x.double() + entropy)
    close("logsumexp", got.logsumexp[some], wanted.logsumexp[some], bound[some])


def compare_with_reference(
    device: str,
    logits: torch.Tensor,
    what: str,
    *,
    noise: torch.Tensor | None = None,
    temperature: float = 1.0,
    token_ids: torch.Tensor | None = None,
    top_k: int = 0,
) -> None:
    """The backend in force, on this device, against the reference on the CPU.

    The tensors may lie on either; those on the device keep their strides.
    """

    def run(where: str) -> DraftStatistics:
        moved = [None if tensor is None else tensor.to(where) for tensor in (logits, noise, token_ids)]
        result = draft_statistics(moved[0], noise=moved[1], temperature=temperature, token_ids=moved[2], top_k=top_k)
        return DraftStatistics(*(tensor.cpu() for tensor in result))

    with speckernels.use_backend("reference"):
        wanted = run("cpu")
    largest_x = logits.cpu().to(result_type(logits)).nan_to_num(0, 0, 0).abs().amax(-1) / temperature
    compare(run(device), wanted, largest_x, what)


def rows_of(rows: int, vocabulary: int, dtype: torch.dtype, seed: int, size: float = 4.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * size).to(dtype)


def gumbel_like(logits: torch.Tensor, seed: int) -> torch.Tensor:
    return rows_of(*logits.shape, result_type(logits), seed + 1000)


def awkward_rows(vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of special values, and of ties."""
    plain = rows_of(1, vocabulary, dtype, 3)[0]
    largest = torch.finfo(dtype).max
    rows = []
    for fill in (0.0, -7.0, -math.inf, math.nan, math.inf, largest, -largest):
        rows.append(torch.full((vocabulary,), fill, dtype=dtype))
    for step, value in (
        (2, -math.inf),
        (2, math.nan),
        (3, math.inf),
        (3, largest),
        (3, -largest),
        (5, 50.0),
        (3, -0.0),
    ):
        rows.append(plain.clone())
        rows[-1][1::step] = value
    alone = torch.full((vocabulary,), -math.inf, dtype=dtype)
    alone[-1] = -3.0
    signs = torch.full((vocabulary,), -0.0, dtype=dtype)  # the zeros are equal, so the first one wins
    signs[vocabulary // 2] = 0.0
    last = torch.full((vocabulary,), -60000.0, dtype=dtype)
    last[vocabulary // 2 :] = 60000.0  # distances whose weight is 0
    return torch.stack([*rows, alone, signs, last])


def check_special_values(device: str) -> None:
    for dtype, vocabulary in ((torch.float32, 123), (torch.bfloat16, 7), (torch.float16, 131), (torch.float64, 61)):
        logits = awkward_rows(vocabulary, dtype)
        what = f"special values, {dtype}"
        if dtype != torch.float32:
            compare_with_reference(device, logits, what, temperature=0.7)
            continue
        compare_with_reference(device, logits, what, top_k=5)
        noise = gumbel_like(logits, 5)
        noise[:, 2::3] = math.inf
        noise[:, 4::5] = -math.inf
        noise[:, 1::7] = math.nan
        compare_with_reference(device, logits, f"{what}, noise", noise=noise, temperature=0.3)
        noise[::2] = -math.inf  # nothing to choose
        compare_with_reference(device, logits, f"{what}, no token", noise=noise, temperature=1e-30)


def orders(vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that make a list of the largest change often, seldom, in one lane alone, or by ties."""
    index = torch.arange(vocabulary, dtype=torch.float64)
    one_lane = torch.where(index % 256 < 8, 50 + index / vocabulary, index / 100)
    return torch.stack([index / 64, -index / 64, index % 5, one_lane, torch.zeros(vocabulary)]).to(dtype)


def ties() -> torch.Tensor:
    """Equal maxima on both sides of every boundary that a kernel may have: the first one wins."""
    vocabulary = 9001  # three parts, and a tail
    splits, chunk = split(5, vocabulary, SLOTS)
    assert splits == 3
    logits = torch.zeros(5, vocabulary, dtype=torch.float16)
    for row, step in enumerate((1, 8, 256, chunk)):
        logits[row, vocabulary % step :: step] = 2.0
    logits[4, -1] = 2.0
    return logits


def check(device: str) -> None:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # interpreted Triton computes in numpy
        check_special_values(device)
        compare_with_reference(device, ties(), "ties", top_k=3)
        compare_with_reference(device, orders(3000, torch.float32), "orders", top_k=12)
        compare_with_reference(device, ties()[:, :3100], "ties", temperature=0.3)
        for vocabulary, rows in ((1, 5), (7, 2), (123, 2), (1000, 2), (4097, 1)):
            for number, dtype in enumerate(DTYPES):
                logits = rows_of(rows, vocabulary, dtype, vocabulary)
                what = f"{dtype} [{rows}, {vocabulary}]"
                token_ids = torch.tensor([vocabulary - 1, -1, 0, vocabulary, 1 << 20])[:rows]
                noise = gumbel_like(logits, number)
                if (number + vocabulary) % 2:
                    compare_with_reference(device, logits, what, noise=noise, temperature=0.7, top_k=1)
                    compare_with_reference(device, logits, what)
                else:
                    compare_with_reference(device, logits, what, token_ids=token_ids, temperature=1.3)
                    compare_with_reference(device, logits[:1], what, noise=noise[:1], token_ids=token_ids[:1], top_k=9)
        check_strides(device)
        check_large_offsets(device)


def check_strides(device: str) -> None:
    """Rows that do not begin at 16 bytes, that lie apart, or whose neighbours do."""
    for number, dtype in enumerate(DTYPES):
        wide = rows_of(3, 130, dtype, 8).to(device)
        noise = gumbel_like(wide, number).to(device)
        for first, last, top_k in ((1, 124, 0), (number + 2, 130, 0), (5, 6, 3)):
            part, what = slice(first, last), f"columns {first}:{last}, {dtype}"
            compare_with_reference(device, wide[:, part], what, noise=noise[:, part], top_k=top_k)
    compare_with_reference(device, wide[:, :4].t(), "transposed", noise=noise[:, :4].t().contiguous())
    compare_with_reference(device, wide[:1].expand(3, -1), "one row three times", noise=noise[:, :1].expand(-1, 130))


def check_large_offsets(device: str) -> None:
    """The second row begins so far behind the first one that 32 bits would find it inside the first."""
    stride = (1 << 32) + 8
    if device == "cpu":  # address space without memory behind it: only what is touched becomes real
        space = mmap.mmap(-1, 2 * (stride + 64), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        storage = torch.frombuffer(space, dtype=torch.float16)
    elif torch.cuda.mem_get_info()[0] > 3 * stride:  # bytes
        storage = torch.empty(stride + 64, dtype=torch.float16, device=device)
    else:
        return
    logits = storage.as_strided((2, 61), (stride, 1))
    logits.copy_(rows_of(2, 61, torch.float16, 4))
    compare_with_reference(device, logits, "large offsets", top_k=2)


MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # missing in Python 3.11; the value is Linux's


def test_order_of_threads_does_not_matter() -> None:
    logits = rows_of(2, 9001, torch.float32, 6)
    logits[1] = ties()[1]
    for noise, top_k in ((None, 0), (gumbel_like(logits, 6), 20)):
        first = None
        with speckernels.use_backend("cuda"):
            for order in thread_orders("draft_statistics", "cpu"):
                compare_with_reference("cpu", logits, f"order {order}", noise=noise, top_k=top_k)
                got = draft_statistics(logits, noise=noise, top_k=top_k)
                first = first or got
                assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True)), f"order {order}"


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize(("rows", "vocabulary"), [(63, 1000), (1, 33000), (5, 33000)])
def test_more_shapes(backend: str, device: str, rows: int, vocabulary: int) -> None:
    if backend == "triton" and device == "cpu" and rows == 63:
        pytest.skip("slow when interpreted, and nothing new")
    logits = rows_of(rows, vocabulary, torch.bfloat16 if rows == 63 else torch.float32, 1)
    with speckernels.use_backend(backend):
        compare_with_reference(device, logits, f"[{rows}, {vocabulary}]", noise=gumbel_like(logits, 2), temperature=0.9)
        if rows == 1:
            compare_with_reference(device, logits, f"[{rows}, {vocabulary}]", top_k=32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_counters_are_left_as_zeros(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next call, which uses them again, merges too early."""
    counters = torch.zeros(3, dtype=torch.int32, device=device)
    monkeypatch.setattr(cuda, "counters", lambda like, count: counters)
    logits = rows_of(3, 9001, torch.float32, 1)
    assert split(3, 9001, SLOTS)[0] > 1
    with speckernels.use_backend("cuda"):
        compare_with_reference(device, logits, "first call")
        compare_with_reference(device, logits, "second call")
    assert not counters.any()


@pytest.mark.parametrize("temperature", [0.7, 3.0, 1 + 2**-23, 2 - 2**-23, 1e-12, 1e30])
def test_quotients_are_rounded_as_ieee_does(temperature: float) -> None:
    """The kernel divides by multiplication: where two x become one, the first must win, and where not, the larger."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(-3, 1, (60, 64), generator=generator)
    largest = torch.rand(60, 1, generator=generator) * 8 - 4
    logits = (largest.view(torch.int32) + steps * largest.sign().int()).view(torch.float32)  # a few units below
    wanted = (logits / torch.tensor(temperature)).tolist()
    with speckernels.use_backend("cuda"):
        token = draft_statistics(logits, temperature=temperature).token.tolist()
    assert token == [row.index(max(row)) for row in wanted]


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 300, 5000])
@pytest.mark.parametrize("vocabulary", [1, 4096, 4097, 32001, 50257, 128256, 1 << 24])
def test_splits_cover_each_row_once(rows: int, vocabulary: int) -> None:
    splits, chunk = split(rows, vocabulary, SLOTS)
    assert chunk % 16 == 0 and 1 <= splits <= 32
    assert (splits - 1) * chunk < vocabulary <= splits * chunk
    if vocabulary <= 4096:
        assert splits == 1


def test_splits_fill_the_gpu_where_there_is_work() -> None:
    assert split(1, 128 * 1024, SLOTS) == (32, 4096)
    assert split(64, 128 * 1024, SLOTS) == (8, 16384)
    assert split(64, 128 * 1024, SLOTS // 2) == (4, 32768)  # with top-k: one wave of half as many blocks


def test_slots_follow_the_registers() -> None:
    """What the source promises of each variant, without a GPU: with top-k and in float64 half as many blocks."""
    cpu = torch.device("cpu")
    found = {
        (kind, top): block_slots(cpu, "draft_statistics", "draft_statistics_occupancy", kind, 0, top)
        for kind in (1, 2, 3)
        for top in (0, 1)
    }
    assert found == {(1, 0): 528, (1, 1): 264, (2, 0): 528, (2, 1): 264, (3, 0): 264, (3, 1): 132}


@settings(max_examples=5, deadline=None)
@given(
    st.integers(1, 2500),
    st.integers(1, 32),
    st.sampled_from(DTYPES),
    st.sampled_from((1.0, 0.7)),
    st.integers(0, 1000),
)
def test_the_largest_of_any_row(vocabulary: int, top_k: int, dtype: torch.dtype, temperature: float, seed: int) -> None:
    """Random rows and those of `orders`, in three orders of threads."""
    logits = torch.cat([orders(vocabulary, dtype), rows_of(2, vocabulary, dtype, seed)])
    logits = logits[torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))[:3]]
    with speckernels.use_backend("cuda"):
        for order in thread_orders("draft_statistics", "cpu"):
            compare_with_reference("cpu", logits, f"order {order}", top_k=top_k, temperature=temperature)


values_of_logits = st.one_of(st.floats(-30, 30, width=16), st.sampled_from([-math.inf, math.nan, math.inf, 0.0, 1.0]))


@settings(max_examples=60, deadline=None)
@given(st.lists(values_of_logits, min_size=1, max_size=40), st.floats(0.25, 4), st.integers(0, 8))
def test_reference_is_what_plain_python_gives(row: list[float], temperature: float, top_k: int) -> None:
    logits = torch.tensor([row], dtype=torch.float64)
    got = draft_statistics(logits, temperature=temperature, top_k=top_k)
    largest = torch.finfo(torch.float64).max
    usable = {i: min(x / temperature, largest) for i, x in enumerate(row) if x > -math.inf}
    if not usable:
        assert got.values.tolist() == [[-1, 0, 0, 0, -math.inf]]
        assert got.top_ids.tolist() == [[-1] * top_k] and not got.top_probs.any()
        return
    highest = max(usable.values())
    total = math.fsum(math.exp(x - highest) for x in usable.values())
    probs = {i: math.exp(x - highest) / total for i, x in usable.items()}
    best = min(i for i, x in usable.items() if x == highest)
    entropy = math.fsum(-p * math.log(p) for p in probs.values() if p > 0)
    expected = [best, probs[best], probs[best], entropy, highest + math.log(total)]
    assert got.values[0].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-13)
    order = sorted(usable, key=lambda i: (-usable[i], i))[:top_k]
    assert got.top_ids[0].tolist() == order + [-1] * (top_k - len(order))
    assert got.top_probs[0, : len(order)].tolist() == pytest.approx([probs[i] for i in order], rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(0, 1000), st.floats(-50, 50), st.sampled_from(DTYPES))
def test_properties_of_the_reference(vocabulary: int, seed: int, shift: float, dtype: torch.dtype) -> None:
    """The probabilities of all tokens sum to 1, the entropy lies in 0..log V, and a shift changes logsumexp alone."""
    logits = rows_of(1, vocabulary, dtype, seed)
    tokens = torch.arange(vocabulary)
    each = draft_statistics(logits.expand(vocabulary, -1), token_ids=tokens)
    tolerance = 1e-5 if each.prob.dtype == torch.float32 else 1e-12
    assert float(each.prob.sum()) == pytest.approx(1, abs=tolerance)
    assert torch.equal(each.token, tokens) and torch.equal(each.prob.amax(), each.confidence[0])
    assert -tolerance <= float(each.entropy_nats[0]) <= math.log(vocabulary) + tolerance
    plain = draft_statistics(logits.double())
    shifted = draft_statistics(logits.double() + shift)
    assert shifted.values[0, 1:4].tolist() == pytest.approx(plain.values[0, 1:4].tolist(), abs=1e-11)
    assert float(shifted.logsumexp - plain.logsumexp) == pytest.approx(shift, abs=1e-11)
    assert float(plain.entropy_nats) >= 0


@pytest.mark.parametrize("backend", speckernels.BACKENDS)
def test_gumbel_noise_draws_from_p(backend: str) -> None:
    """A chi-square of 63 draws would say little, so: the token is that of the same argmax in torch."""
    logits = rows_of(9, 50, torch.float32, 0)
    noise = -torch.rand(9, 50, generator=torch.Generator().manual_seed(2)).clamp(min=1e-30).log().neg().log()
    with speckernels.use_backend(backend):
        got = draft_statistics(logits, noise=noise, temperature=0.5)
    assert torch.equal(got.token, (logits / 0.5 + noise).argmax(-1))
    assert torch.allclose(got.prob, (logits / 0.5).softmax(-1).gather(1, got.token[:, None])[:, 0])


@pytest.mark.parametrize("backend", speckernels.BACKENDS)
def test_no_rows(backend: str) -> None:
    with speckernels.use_backend(backend):
        got = draft_statistics(torch.empty(0, 9), noise=torch.empty(0, 9), top_k=3)
    assert [tuple(tensor.shape) for tensor in got] == [(0, 5), (0, 3), (0, 3)]


@pytest.mark.parametrize("backend", speckernels.BACKENDS)
def test_sure_rows_have_no_entropy(backend: str) -> None:
    """From far apart down to a difference of one: near 0 and never below."""
    logits = torch.zeros(40, 300)
    logits[:, 17] = torch.linspace(1, 120, 40)
    with speckernels.use_backend(backend):
        got = draft_statistics(logits)
    rest = 299 * torch.exp(-logits[:, 17].double())
    exact = torch.log1p(rest) + logits[:, 17] * rest / (1 + rest)
    assert (got.entropy_nats >= 0).all()
    assert ((got.entropy_nats - exact).abs() <= UNITS * torch.finfo(torch.float32).eps * (1 + exact)).all()


@ON_GPU
@pytest.mark.parametrize("warm", [True, False])
def test_in_cuda_graphs(backend: str, warm: bool) -> None:
    """Two graphs and eager calls, each with counters of its own."""
    logits = rows_of(5, 70000, torch.float32, 0).cuda()
    with speckernels.use_backend(backend):
        draft_statistics(logits)  # compiles outside the capture
        if not warm:
            launch._for_graphs.clear()
        graphs, results = [], []
        for _ in range(2):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                results.append(draft_statistics(logits))
        for seed in (1, 2):
            logits.copy_(rows_of(5, 70000, torch.float32, seed))
            torch.cuda.synchronize()
            for graph in graphs:
                with torch.cuda.stream(torch.cuda.Stream()):
                    graph.replay()
            eager = draft_statistics(logits)
            torch.cuda.synchronize()
            for result in results:
                assert torch.equal(result.values, eager.values)


@ON_GPU
def test_streams_do_not_disturb_each_other(backend: str) -> None:
    logits = rows_of(64, 32000, torch.float32, 0).cuda()
    with speckernels.use_backend(backend):
        wanted = draft_statistics(logits)
        streams = [torch.cuda.Stream() for _ in range(4)]
        torch.cuda.synchronize()
        results = []
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(draft_statistics(logits))
        torch.cuda.synchronize()
    assert all(torch.equal(result.values, wanted.values) for result in results)


@ON_GPU
def test_offsets_beyond_32_bits(backend: str) -> None:
    rows, vocabulary = 16400, 1 << 17
    if torch.cuda.mem_get_info()[0] < 3 * rows * vocabulary:
        pytest.skip("needs 6.5 GB of GPU memory")
    logits = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device="cuda")
    assert logits.numel() > 1 << 31
    places = (torch.arange(rows, device="cuda") * 7919) % vocabulary
    logits[torch.arange(rows, device="cuda"), places] = 9.0
    with speckernels.use_backend(backend):
        got = draft_statistics(logits, top_k=2)
    assert torch.equal(got.token, places) and torch.equal(got.top_ids[:, 0], places)
    total = math.exp(9) + vocabulary - 1
    assert torch.allclose(got.prob, torch.full_like(got.prob, math.exp(9) / total), rtol=1e-5)


def samples() -> list[tuple[Any, ...]]:
    logits = rows_of(3, 40, torch.float16, 0)
    return [(logits, None, 1.0, None, 0), (logits, gumbel_like(logits, 0), 0.5, torch.tensor([1, 2, 3]), 4)]


def refusals() -> Refusals:
    good = torch.zeros(2, 9)
    return {"logits": good}, [
        (r"logits is int64 \[2, 9\]; give float16 or bfloat16 or float32 or float64", {"logits": good.long()}),
        (r"logits is float32 \[9\]; give", {"logits": good[0]}),
        ("logits has 0 columns; give 1 to 16777216", {"logits": good[:, :0]}),
        ("logits has 16777217 columns", {"logits": torch.zeros(1, 1).expand(1, (1 << 24) + 1)}),
        (r"noise is float16 \[2, 9\]; give float32 \[2, 9\]", {"logits": good.half(), "noise": good.half()}),
        (r"noise is float32 \[2, 8\]; give float32 \[2, 9\]", {"noise": good[:, 1:]}),
        (r"token_ids is int32 \[2\]; give int64 \[2\]", {"token_ids": torch.zeros(2, dtype=torch.int32)}),
        *(("temperature is .*; give 1e-30 to 1e", {"temperature": t}) for t in (0.0, -1.0, math.nan, math.inf, 1e-40)),
        *((f"top_k is {top_k}; give 0 to 32", {"top_k": top_k}) for top_k in (-1, 33)),
    ]
