"""What the emulation of sm_90a promises: layouts by the PTX ISA, and mistakes that show."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from speckernels.runtime import build, launch

SOURCE = r"""
#include "hopper.cuh"

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
