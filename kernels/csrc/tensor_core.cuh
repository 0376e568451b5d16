// Tensor-core instructions of sm_80 and later in the layouts of the PTX ISA, and on the host
// the same layouts by exchange between emulated threads.
//
// In a 16 x 16 operand, lane l holds in register r the two neighbours
//   row l / 4 + 8 * (r % 2), columns 2 * (l % 4) + 8 * (r / 2) + {0, 1};
// in a 16 x 8 result, in elements 2 * h + {0, 1},
//   row l / 4 + 8 * h, columns 2 * (l % 4) + {0, 1}.
#pragma once

#include "platform.cuh"

#ifdef SPECKERNELS_HOST

#define EMULATED __attribute__((noinline)) inline  // kernels unroll these hundreds of times

// An asynchronous copy lands only at the wait for it, so that a missing wait shows.
EMULATED void copy_async_16(void* shared, const void* global, int bytes) {
  emulation::Fiber& me = *emulation::state().current;
  if ((uintptr_t(shared) | uintptr_t(global)) % 16) emulation::fail("asynchronous copy of misaligned addresses");
  me.copies.push_back({shared, global, bytes, me.committed});
}

inline void copy_async_commit() { ++emulation::state().current->committed; }

template <int PENDING>
EMULATED void copy_async_wait() {
  emulation::Fiber& me = *emulation::state().current;
  size_t kept = 0;
  for (const emulation::AsyncCopy& copy : me.copies) {
    if (copy.group >= me.committed - PENDING) {
      me.copies[kept++] = copy;
      continue;
    }
    std::memset(copy.to, 0, 16);
    std::memcpy(copy.to, copy.from, copy.bytes);
  }
  me.copies.resize(kept);
}

EMULATED void load_matrices(uint32_t (&m)[4], const void* row) {
  if (uintptr_t(row) % 16) emulation::fail("ldmatrix of a misaligned row");
  const int lane = emulated_lane();
  const void* rows[emulation::WARP];
  emulation::warp_exchange(row, rows);
  for (int r = 0; r < 4; ++r)
    std::memcpy(&m[r], static_cast<const char*>(rows[8 * r + lane / 4]) + 4 * (lane % 4), 4);
}

EMULATED void load_matrices_transposed(uint32_t (&m)[4], const void* row) {
  if (uintptr_t(row) % 16) emulation::fail("ldmatrix of a misaligned row");
  const int lane = emulated_lane();
  const void* rows[emulation::WARP];
  emulation::warp_exchange(row, rows);
  for (int r = 0; r < 4; ++r) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i)
      std::memcpy(&pair[i], static_cast<const char*>(rows[8 * r + 2 * (lane % 4) + i]) + 2 * (lane / 4), 2);
    std::memcpy(&m[r], pair, 4);
  }
}

namespace emulation {

template <typename T>
inline float half_of(uint32_t pair, int which);
template <>
inline float half_of<__nv_bfloat16>(uint32_t pair, int which) {
  return __bfloat162float({uint16_t(pair >> (16 * which))});
}
template <>
inline float half_of<__half>(uint32_t pair, int which) {
  return __half2float({uint16_t(pair >> (16 * which))});
}

}  // namespace emulation

template <typename T>
EMULATED void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const int lane = emulated_lane();
  Operands all[emulation::WARP];
  emulation::warp_exchange(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, all);
  for (int element = 0; element < 4; ++element) {
    const int row = lane / 4, upper = element / 2, column = 2 * (lane % 4) + element % 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const uint32_t from_a = all[4 * row + k % 8 / 2].a[upper + 2 * (k / 8)];
      const uint32_t from_b = all[4 * column + k % 8 / 2].b[k / 8];
      sum += emulation::half_of<T>(from_a, k % 2) * emulation::half_of<T>(from_b, k % 2);
    }
    c[element] += sum;
  }
}

template <typename T>
inline uint32_t pack(float low, float high);
template <>
inline uint32_t pack<__nv_bfloat16>(float low, float high) {
  return __float2bfloat16(low).bits | uint32_t(__float2bfloat16(high).bits) << 16;
}
template <>
inline uint32_t pack<__half>(float low, float high) {
  return __float2half(low).bits | uint32_t(__float2half(high).bits) << 16;
}

inline float fast_exp2(float x) { return std::exp2(x); }

// Kernels after this are unrolled into much code, whose compilation would take longer than its
// run: nearly all of that is spent in the functions above.
#pragma GCC optimize("O0")

#else

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies `bytes` (0 or 16) from global memory and fills up to 16 with zeros; arrives with its
// group's wait, for other threads with the barrier after it.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(bytes)
               : "memory");
}

// Closes a group of copies.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread but the last PENDING.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8. Register r then
// holds row lane / 4, columns 2 * (lane % 4) + {0, 1} of matrix r.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same of the transposed matrices: rows 2 * (lane % 4) + {0, 1}, column lane / 4.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

// c += a b for a 16 x 16 and b 16 x 8, given as the operand that b's transpose would be.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers rounded into one register, `low` in its lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// 2^x to about 2 units in the last place; results below the normal range are 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif
