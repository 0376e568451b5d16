"""The emulated threads behave as CUDA's and as sm_90a's: exchanges, barriers, layouts, and mistakes that show."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from speckernels.runtime import build, launch

SOURCE = r"""
#include "hopper.cuh"

__global__ void half_kernel(const float* in, float* out, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    out[i] = __half2float(__float2half(in[i]));
    out[n + i] = __bfloat162float(__float2bfloat16(in[i]));
  }
}
EXPORT int halves(const float* in, int64_t n, float* out, void* stream) {
  return LAUNCH(half_kernel, dim3(1), dim3(32), 0, stream, in, out, int(n));
}

__global__ void sum_kernel(const int* in, int* out) {
  __shared__ int total[8];
  int x = in[blockIdx.x * blockDim.x + threadIdx.x];
  for (int bits = 16; bits; bits /= 2) x += __shfl_xor_sync(0xffffffffu, x, bits);
  if (threadIdx.x % 32 == 0) total[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int i = 0; i < int(blockDim.x) / 32; ++i) sum += total[i];
    out[blockIdx.x] = sum;
  }
}
EXPORT int sums(const int* in, int64_t blocks, int64_t threads, int* out, void* stream) {
  return LAUNCH(sum_kernel, dim3(unsigned(blocks)), dim3(unsigned(threads)), 0, stream, in, out);
}

// Thread 0 publishes after the others have read, in some order: a race.
__global__ void race_kernel(int* out) {
  __shared__ int value;
  if (threadIdx.x == 31) value = 7;
  out[threadIdx.x] = value;
}
EXPORT int race(int* out, void* stream) { return LAUNCH(race_kernel, dim3(1), dim3(32), 0, stream, out); }

__global__ void stuck_kernel(int* out) {
  if (threadIdx.x < 32) __syncwarp();
  if (threadIdx.x == 40) __ballot_sync(0xffffffffu, 1);  // without its warp
  __syncthreads();
  out[threadIdx.x] = 1;
}
EXPORT int stuck(int* out, void* stream) { return LAUNCH(stuck_kernel, dim3(1), dim3(64), 0, stream, out); }

__global__ void dynamic_kernel(float* out) {
  SHARED_MEMORY(bytes, 16);
  out[threadIdx.x] = reinterpret_cast<float*>(bytes)[threadIdx.x];
}
EXPORT int dynamic(float* out, void* stream) { return LAUNCH(dynamic_kernel, dim3(1), dim3(32), 128, stream, out); }

// A product of matrices that lie in an image of shared memory, as two descriptors without its address say.
// mistake: 1 no fence, 2 result read before the wait, 3 descriptors by warp, 4 no fence of the proxy, 5 no wait
template <int N>
__global__ void product_kernel(const uint4* image, int chunks, uint64_t left, uint64_t right, const uint32_t* rows,
                               int mistake, float* out) {
  SHARED_MEMORY(shared, 1024);
  for (int i = threadIdx.x; i < chunks; i += 128) reinterpret_cast<uint4*>(shared)[i] = image[i];
  if (mistake != 4) async_proxy_fence();
  __syncthreads();
  const int warp = threadIdx.x / 32, row = warp * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4;
  const uint64_t base = shared_address(shared) >> 4;
  float sums[N / 8][4] = {};
  uint32_t registers[4];
  for (int r = 0; r < 4; ++r) registers[r] = rows[(row + 8 * (r % 2)) * 8 + column + 4 * (r / 2)];
  if (mistake != 1) warpgroup_fence(sums);
  if (mistake == 3) right += warp;
  if constexpr (N == 128) multiply_add_async<__half>(sums, left + base, right + base, false);
  if constexpr (N == 64) multiply_add_async<__half>(sums, registers, right + base);
  warpgroup_commit();
  const float seen = sums[0][0];
  if (mistake != 5) warpgroup_wait<0>(sums);
  if (mistake == 2) sums[0][0] = seen;
  for (int n = 0; n < N / 8; ++n)
    for (int i = 0; i < 4; ++i) out[(row + 8 * (i / 2)) * N + 8 * n + 2 * column + i % 2] = sums[n][i];
}
EXPORT int product(const uint4* image, int64_t bytes, int64_t left, int64_t right, const uint32_t* rows,
                   int64_t columns, int64_t mistake, float* out, void* stream) {
  if (columns == 64)
    return LAUNCH(product_kernel<64>, dim3(1), dim3(128), 65536, stream, image, int(bytes / 16), left, right, rows,
                  int(mistake), out);
  return LAUNCH(product_kernel<128>, dim3(1), dim3(128), 65536, stream, image, int(bytes / 16), left, right, rows,
                int(mistake), out);
}

// A box of 16 rows, fetched by the last thread. mistake: 1 read before the wait, 2 no barrier, 3 more arrivals than
// expected, 4 bytes that never come, 5 the wrong parity, 6 nobody waits
__global__ void box_kernel(const __grid_constant__ CUtensorMap map, int x, int y, int z, int mistake, uint16_t* out) {
  SHARED_MEMORY(shared, 1024);
  uint64_t* barrier = reinterpret_cast<uint64_t*>(shared + 2048);
  if (threadIdx.x == 0 && mistake != 2) {
    barrier_init(barrier, 1);
    barriers_ready();
  }
  __syncthreads();
  if (threadIdx.x == 63) {
    barrier_expect(barrier, mistake == 4 ? 4096 : 2048);
    copy_box_async(shared, &map, barrier, x, y, z, 0);
    if (mistake == 3) barrier_arrive(barrier);
  }
  __syncthreads();
  const uint16_t early = reinterpret_cast<uint16_t*>(shared)[threadIdx.x];
  __syncthreads();
  if (mistake != 6) barrier_wait(barrier, mistake == 5);
  for (int i = threadIdx.x; i < 1024; i += 64) out[i] = reinterpret_cast<uint16_t*>(shared)[i];
  if (mistake == 1) out[threadIdx.x] = early;
}
EXPORT int box(const void* tensor, int64_t columns, int64_t rows, int64_t planes, int64_t x, int64_t y, int64_t z,
               int64_t mistake, uint16_t* out, void* stream) {
  const uint64_t sizes[] = {uint64_t(columns), uint64_t(rows), uint64_t(planes), 1};
  const uint64_t strides[] = {2 * sizes[0], 2 * sizes[0] * sizes[1], 2 * sizes[0]};
  CUtensorMap map;
  const cudaError_t code = make_tensor_map(&map, false, tensor, sizes, strides, 16);
  if (code != cudaSuccess) return code;
  return LAUNCH(box_kernel, dim3(1), dim3(64), 4096, stream, map, int(x), int(y), int(z), int(mistake), out);
}
"""
LATE, EARLY, BY_CHANCE = 0, 1, 7  # orders of threads, and when what is asynchronous happens
MODES = {8: 1, 4: 2, 2: 3, 1: 0}  # chunks of 16 bytes in a row of the swizzled pattern: mode in the descriptor


@pytest.fixture(autouse=True)
def _probe_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_libraries: None) -> Iterator[None]:
    for header in [*build.source_folder().glob("*.h"), *build.source_folder().glob("*.cuh")]:
        shutil.copy(header, tmp_path)
    (tmp_path / "probe.cu").write_text(SOURCE)
    with monkeypatch.context() as patch:
        patch.setattr(build, "source_folder", lambda: tmp_path)
        launch.set_host_order("probe", LATE)
        yield


def test_half_types_round_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    special = [0.0, -0.0, 1e-8, 6e-8, 5.96e-8, 2.98e-8, 65504.0, 65519.99, 65520.0, 1e30, np.inf, -np.inf, np.nan]
    x = torch.cat([torch.tensor(special), torch.from_numpy(bits.view(np.float32)), torch.randn(10_000)])
    out = torch.empty(2, len(x))
    launch.call("probe", "halves", x, len(x), out)
    for row, dtype in zip(out, (torch.float16, torch.bfloat16), strict=True):
        expected = x.to(dtype).float()
        assert torch.equal(row.nan_to_num(12345.0), expected.nan_to_num(12345.0))
        assert torch.equal(row.signbit()[: len(special) - 1], expected.signbit()[: len(special) - 1])


@pytest.mark.parametrize("order", [0, 1, 7])
def test_collectives_and_barriers_in_any_order(order: int) -> None:
    launch.set_host_order("probe", order)
    x = torch.arange(3 * 128, dtype=torch.int32).view(3, 128)
    out = torch.empty(3, dtype=torch.int32)
    launch.call("probe", "sums", x, 3, 128, out)
    assert out.tolist() == x.sum(1).tolist()


def test_a_race_shows_in_the_order() -> None:
    results = []
    for order in (0, 1):
        launch.set_host_order("probe", order)
        out = torch.zeros(32, dtype=torch.int32)
        launch.call("probe", "race", out)
        results.append(out.tolist())
    assert results[0] != results[1]


def test_a_thread_missing_from_a_collective_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="stuck failed: deadlock"):
        launch.call("probe", "stuck", torch.zeros(64, dtype=torch.int32))


def test_dynamic_shared_memory_starts_as_nan() -> None:
    out = torch.zeros(32)
    launch.call("probe", "dynamic", out)
    assert out.isnan().all()


def test_bad_launch_arguments_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="sums failed: invalid launch arguments"):
        launch.call("probe", "sums", torch.zeros(1, dtype=torch.int32), 1, 4096, torch.zeros(1, dtype=torch.int32))


def test_no_gpu_is_needed_to_load() -> None:
    assert isinstance(build.load("probe", None), ctypes.CDLL)


# --- sm_90a: boxes and products by the PTX ISA ---


def places(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Offsets of a CuTe layout of one mode, the first size fastest."""
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(shape, strides, strict=True):
        offsets = (np.arange(size)[:, None] * stride + offsets).ravel()
    return offsets


def lay_out(matrix: torch.Tensor, chunks: int, *, mn_major: bool, at: int = 0) -> tuple[np.ndarray, int]:
    """An image of [rows, 16] float16 by the canonical layouts of the PTX ISA, in units of elements, and its descriptor.

    chunks : as in MODES; at : where in the image it begins, in bytes
    """
    rows, t = len(matrix), 8
    if mn_major:
        repeats, leading, stride = rows // (t * chunks), 64 * chunks, 64 * rows // t + 64
        if chunks == 1:
            leading, stride = stride, leading
            offsets = places((t, 1, repeats), (1, t, stride)), places((8, 2), (t, leading))
        else:
            offsets = places((t, chunks, repeats), (1, t, leading)), places((8, 2), (chunks * t, stride))
    else:
        leading, stride = 64 * rows // t + 64, 64 * chunks
        if chunks == 1:
            offsets = places((8, rows // 8), (t, stride)), places((t, 2), (1, leading))
        else:
            offsets = places((8, rows // 8), (chunks * t, stride)), places((t, 2), (1, t))
    addresses = at + 2 * (offsets[0][:, None] + offsets[1])
    addresses ^= (addresses >> 7 & chunks - 1) << 4  # Swizzle<log2(chunks), 4, 3>
    image = np.full(16384, 0x7E00, np.uint16)  # NaN
    image[addresses // 2] = matrix.numpy().view(np.uint16)
    descriptor = MODES[chunks] << 62 | stride * 2 >> 4 << 32 | leading * 2 >> 4 << 16 | at >> 4
    return image, descriptor - (1 << 64) * (descriptor >> 63)


def multiply(columns: int, chunks: int, at: int = 0, mistake: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The emulated product, and the right one: of 128 columns both matrices K-major, of 64 the right one N-major."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(rows, 16, generator=generator).half() for rows in (64, columns))
    images, descriptors = zip(
        lay_out(left, chunks, mn_major=False, at=at), lay_out(right, chunks, mn_major=columns == 64, at=at), strict=True
    )
    image = torch.from_numpy(np.concatenate(images).view(np.int16))
    out = torch.zeros(64, columns)
    second = descriptors[1] + (images[0].nbytes >> 4)
    launch.call("probe", "product", image, image.nbytes, descriptors[0], second, left, columns, mistake, out)
    return out, left.float() @ right.float().T


@pytest.mark.parametrize("chunks", MODES)
@pytest.mark.parametrize("columns", [64, 128])
def test_products_follow_the_layouts_of_the_isa(columns: int, chunks: int) -> None:
    for order in (LATE, EARLY, BY_CHANCE):
        launch.set_host_order("probe", order)
        for at in (0, 32, 96) if columns == 128 and chunks == 8 else (0,):  # steps along k inside of the pattern
            got, wanted = multiply(columns, chunks, at)
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [(1, "without a fence"), (3, "disagree on their products"), (5, "while copies or products were under way")],
)
def test_mistakes_with_products_are_errors(mistake: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        multiply(128, 8, mistake=mistake)


@pytest.mark.parametrize("mistake", [2, 4])
def test_sums_before_the_wait_and_matrices_behind_no_fence_are_nan(mistake: int) -> None:
    got, _ = multiply(128, 8, mistake=mistake)
    assert got.isnan().any()


def fetch(mistake: int = 0, corner: tuple[int, int, int] = (0, 0, 0)) -> tuple[torch.Tensor, torch.Tensor]:
    """16 rows of 64 columns in shared memory, and what belongs there: swizzled, 0 outside of the tensor."""
    tensor = torch.arange(1, 1 + 3 * 20 * 72, dtype=torch.int16).view(3, 20, 72)
    out = torch.zeros(16, 8, 8, dtype=torch.int16)
    launch.call("probe", "box", tensor, 72, 20, 3, *corner, mistake, out)
    padded = torch.zeros(5, 40, 200, dtype=torch.int16)
    padded[:3, :20, :72] = tensor
    x, y, z = corner
    box = padded[z, y : y + 16, x : x + 64].reshape(16, 8, 8)
    return out, torch.stack([row[torch.arange(8) ^ number % 8] for number, row in enumerate(box)])


@pytest.mark.parametrize("order", [LATE, EARLY, BY_CHANCE])
def test_boxes_are_swizzled_and_zero_outside(order: int) -> None:
    launch.set_host_order("probe", order)
    for corner in ((0, 0, 0), (0, 7, 2), (64, 3, 1), (0, 18, 1), (8, 0, 3)):
        got, wanted = fetch(corner=corner)
        assert torch.equal(got, wanted), corner


def test_what_was_not_waited_for_may_be_there_or_not() -> None:
    late, wanted = fetch(1)
    launch.set_host_order("probe", EARLY)
    early, _ = fetch(1)
    assert torch.equal(early, wanted)
    assert late.flatten()[:64].eq(-1).all() and torch.equal(late.flatten()[64:], wanted.flatten()[64:])


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (2, "was not initialised"),
        (3, "more arrivals"),
        (4, "deadlock"),
        (5, "while copies or products were under way"),
        (6, "while copies or products were under way"),
    ],
)
def test_mistakes_with_barriers_are_errors(mistake: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        fetch(mistake)
