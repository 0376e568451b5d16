// Included by every kernel source: CUDA, or its emulation on the host.
//
// Kernels use the subset of CUDA that host_emulation.h implements, launch through LAUNCH, and
// take dynamic shared memory through SHARED_MEMORY. Exported functions return cudaError_t as
// int, take pointers, int64_t and double, and the stream last.
#pragma once

#include <cstdint>

#ifdef SPECKERNELS_HOST
#include "host_emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ((kernel)<<<(grid), (block), (shared_bytes), static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__), cudaGetLastError())

// Raises the limit on dynamic shared memory of a kernel; needed beyond 48 KiB.
#define ALLOW_SHARED_MEMORY(kernel, bytes) \
  cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, (bytes))

#define SHARED_MEMORY(name, alignment) extern __shared__ __align__(alignment) unsigned char name[]
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* speckernels_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of a kernel that a multiprocessor holds at once; without a device those that its source promises.
template <typename Kernel>
int resident_blocks(Kernel kernel, int threads, size_t shared_bytes, int promised) {
#ifdef SPECKERNELS_HOST
  return promised;
#else
  int blocks = 0;
  if (ALLOW_SHARED_MEMORY(kernel, int(shared_bytes)) != cudaSuccess ||
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes) != cudaSuccess)
    cudaGetLastError();  // so that no later call reports it
  return blocks > 0 ? blocks : promised;
#endif
}
