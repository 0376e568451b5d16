"""The emulated threads behave as CUDA's: exchanges, barriers, and the errors they report."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from speckernels.runtime import build, launch

SOURCE = r"""
#include "platform.cuh"

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
"""


@pytest.fixture(autouse=True)
def _probe_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for header in build.source_folder().glob("*.h"):
        (tmp_path / header.name).write_text(header.read_text())
    (tmp_path / "platform.cuh").write_text((build.source_folder() / "platform.cuh").read_text())
    (tmp_path / "probe.cu").write_text(SOURCE)
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    yield
    build._loaded.cache_clear()
    launch._entry.cache_clear()


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
