// Additions of sm_90a to tensor_core.cuh: barriers in shared memory, boxes of a tensor that the tensor memory accelerator
// fetches, and products that a warpgroup, four warps, has the tensor cores do meanwhile.
//
// Both lay a matrix into shared memory in rows of 128 bytes, whose 16-byte chunks are swizzled: chunk c of row r lies
// where chunk c ^ (r % 8) would. Rows begin at multiples of 1024 bytes, so that r % 8 is three bits of the address.
#pragma once

#include "tensor_core.cuh"

template <typename T>
constexpr bool is_bfloat16 = false;
template <>
constexpr bool is_bfloat16<__nv_bfloat16> = true;

#ifdef SPECKERNELS_HOST
#pragma GCC optimize("O1")
#include "hopper_emulation.h"
#define HOPPER

inline uint32_t shared_address(const void* pointer) { return emulation::shared_address(pointer); }
inline void barrier_init(uint64_t* barrier, int arrivals) {
  const emulation::Barrier fresh = {0, uint16_t(arrivals), uint16_t(arrivals), 0};
  std::memcpy(barrier, &fresh, sizeof fresh);
}
inline void barriers_ready() {}
inline void barrier_arrive(uint64_t* barrier) { emulation::arrive(emulation::checked(barrier), 0); }
inline void barrier_expect(uint64_t* barrier, int bytes) { emulation::arrive(emulation::checked(barrier), bytes); }
inline void barrier_wait(uint64_t* barrier, unsigned parity) { emulation::wait(barrier, parity); }

inline void copy_box_async(void* shared, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z, int w) {
  if (shared_address(shared) % 128) emulation::fail("a box for a misaligned place in shared memory");
  const emulation::BoxCopy copy = {shared_address(shared), *map, {x, y, z, w}, &emulation::checked(barrier)};
  if (emulation::early())
    emulation::land(copy);
  else
    emulation::hopper().copies.push_back(copy);
}

inline void async_proxy_fence() {
  std::vector<unsigned char>& view = emulation::hopper().async_view;
  std::memcpy(view.data(), emulation::shared_memory(), view.size() - 2 * emulation::SHARED_ALIGNMENT);
}
template <int THREADS>
inline void named_barrier() {
  emulation::wait_for_threads(THREADS);
}

template <typename... Registers>
inline void warpgroup_fence(Registers&...) {
  emulation::this_thread().fenced = true;
}
inline void warpgroup_commit() { emulation::commit(); }
template <int PENDING, typename... Registers>
inline void warpgroup_wait(Registers&...) {
  emulation::finish(PENDING);
}
template <int REGISTERS>
inline void registers_down_to() {}
template <int REGISTERS>
inline void registers_up_to() {}

template <typename T, int N>
inline void multiply_add_async(float (&sums)[N][4], uint64_t left, uint64_t right, bool accumulate) {
  emulation::issue({sums, nullptr, left, right, 8 * N, 0, accumulate, is_bfloat16<T>, false, {}});
}
template <typename T, int N>
inline void multiply_add_async(float (&sums)[N][4], const uint32_t (&left)[4], uint64_t right) {
  emulation::issue({sums, left, 0, right, 8 * N, 0, true, is_bfloat16<T>, true, {}});
}

inline cudaError_t make_tensor_map(CUtensorMap* map, bool, const void* base, const uint64_t (&sizes)[4],
                                   const uint64_t (&strides_bytes)[3], unsigned rows) {
  *map = {static_cast<const unsigned char*>(base), {}, {2}, rows};
  std::copy_n(sizes, 4, map->sizes);
  std::copy_n(strides_bytes, 3, map->strides_bytes + 1);
  bool taken = uintptr_t(base) % 16 == 0 && rows >= 1 && rows <= 256;
  for (uint64_t size : sizes) taken &= size >= 1 && size <= uint64_t(1) << 32;
  for (uint64_t stride : strides_bytes) taken &= stride % 16 == 0 && stride < uint64_t(1) << 40;
  return taken ? cudaSuccess : cudaErrorInvalidValue;
}
#pragma GCC optimize("O0")

#else
#include <cuda.h>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER
#endif

// A barrier in shared memory completes a phase when all have arrived and all bytes that it expects have landed.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Of the thread that has initialised barriers, before a barrier of the block.
__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and adds to the bytes that this phase waits for.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Waits for a phase to complete: the first has parity 0, the next 1, and so on.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, unsigned parity) {
  uint32_t done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  } while (!done);
}

// Fetches the box whose first element is (x, y, z, w), 64 columns of it, into rows of 128 bytes; its bytes count for
// the barrier. Elements outside of the tensor are 0.
__device__ __forceinline__ void copy_box_async(void* shared, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                                               int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Makes this thread's stores to shared memory visible to products and copies issued after a barrier.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier for the first THREADS of a block.
template <int THREADS>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// Keeps the compiler from moving what is done with registers across this place.
template <int N>
__device__ __forceinline__ void pin(float (&registers)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(registers[n][i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&registers)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(registers[n][i])::"memory");
}

// Between what changes or reads registers and the products that do so.
template <typename... Registers>
__device__ __forceinline__ void warpgroup_fence(Registers&... registers) {
  (pin(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes a group of products.
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all groups but the last PENDING, and so for these sums.
template <int PENDING, typename... Registers>
__device__ __forceinline__ void warpgroup_wait(Registers&... sums) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
  (pin(sums), ...);
}

// A warpgroup gives registers back, or takes those that others have given back.
template <int REGISTERS>
__device__ __forceinline__ void registers_down_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void registers_up_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#define SUMS(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define SUMS_8(n) SUMS(n), SUMS(n + 1), SUMS(n + 2), SUMS(n + 3), SUMS(n + 4), SUMS(n + 5), SUMS(n + 6), SUMS(n + 7)
#define NAMES_32                                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                          \
  NAMES_32                                                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PRODUCT(shape, type, names, operands, add) \
  "{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." type "." type \
  " {" names "}, " operands ";\n}\n"
#define BY_TYPE(product)          \
  if constexpr (is_bfloat16<T>) \
    product("bf16");            \
  else                          \
    product("f16")
#define LEFT_IN_REGISTERS "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right)

// sums (64 x 128) = or += left (64 x 16) right (16 x 128); both matrices are in shared memory, in rows along the 16.
template <typename T>
__device__ __forceinline__ void multiply_add_async(float (&sums)[16][4], uint64_t left, uint64_t right,
                                                   bool accumulate) {
#define OF(type)                                                                                          \
  asm volatile(PRODUCT("m64n128k16", type, NAMES_64, "%64, %65, add, 1, 1, 0, 0", "%66")                  \
               : SUMS_8(0), SUMS_8(8)                                                                     \
               : "l"(left), "l"(right), "r"(int(accumulate)))
  BY_TYPE(OF);
#undef OF
}

// sums (64 x 128) += left right; left in registers as tensor_core.cuh has it, a warp's 16 rows each, right in rows
// along the 128 columns.
template <typename T>
__device__ __forceinline__ void multiply_add_async(float (&sums)[16][4], const uint32_t (&left)[4], uint64_t right) {
#define OF(type)                                                                                                  \
  asm volatile(PRODUCT("m64n128k16", type, NAMES_64, "{%64, %65, %66, %67}, %68, add, 1, 1, 1", "1")              \
               : SUMS_8(0), SUMS_8(8)                                                                             \
               : LEFT_IN_REGISTERS)
  BY_TYPE(OF);
#undef OF
}

// The same for 64 columns.
template <typename T>
__device__ __forceinline__ void multiply_add_async(float (&sums)[8][4], const uint32_t (&left)[4], uint64_t right) {
#define OF(type)                                                                                                 \
  asm volatile(PRODUCT("m64n64k16", type, NAMES_32, "{%32, %33, %34, %35}, %36, add, 1, 1, 1", "1")              \
               : SUMS_8(0)                                                                                       \
               : LEFT_IN_REGISTERS)
  BY_TYPE(OF);
#undef OF
}

// A tensor of 16-bit numbers in four dimensions, innermost first, whose boxes have 64 columns and `rows` rows. The
// driver's function is looked up, so that nothing has to be linked.
inline cudaError_t make_tensor_map(CUtensorMap* map, bool bfloat16, const void* base, const uint64_t (&sizes)[4],
                                   const uint64_t (&strides_bytes)[3], unsigned rows) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult how;
#if CUDART_VERSION >= 12050
  const cudaError_t code =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &how);
#else
  const cudaError_t code = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &how);
#endif
  if (code != cudaSuccess || !found) return cudaErrorInsufficientDriver;
  const cuuint64_t extents[] = {sizes[0], sizes[1], sizes[2], sizes[3]};
  const cuuint64_t strides[] = {strides_bytes[0], strides_bytes[1], strides_bytes[2]};
  const cuuint32_t box[] = {64, rows, 1, 1}, steps[] = {1, 1, 1, 1};
  const CUresult made = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found)(
      map, bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, const_cast<void*>(base),
      extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
#endif

// A matrix in shared memory in rows of 128 swizzled bytes, 8 rows every `stride` bytes; where more than 64 columns lie
// along its rows, each 64 of them every `leading` bytes.
__device__ __forceinline__ uint64_t matrix_in_shared(const void* start, int stride, int leading = 16) {
  constexpr uint64_t SWIZZLE_128_BYTES = uint64_t(1) << 62;
  return SWIZZLE_128_BYTES | uint64_t(stride >> 4) << 32 | uint64_t(leading >> 4) << 16 | shared_address(start) >> 4;
}
