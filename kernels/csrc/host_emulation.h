// CUDA kernels on the CPU: every thread of a block is a fiber, blocks run one after another.
//
// For tests only. Barriers and warp collectives switch fibers; a block in which all fibers wait
// is reported as an error, as are threads that leave a collective out. Threads and blocks run in
// an order set by speckernels_host_order: a result that changes with it has a race. Shared
// memory starts as NaN bits where it is dynamic, and with the previous block's contents where it
// is static.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

// The types' own headers work in any C++ compiler, but belong to the CUDA toolkit; two small
// types with the conversions that kernels use keep the host build free of it.
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline __nv_bfloat16 __float2bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return {uint16_t(0x7fff)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline float __half2float(__half x) {
  const uint32_t sign = uint32_t(x.bits >> 15) << 31, exponent = (x.bits >> 10) & 31, fraction = x.bits & 1023;
  if (exponent == 0) {
    const float y = std::ldexp(float(fraction), -24);
    return sign ? -y : y;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (fraction << 13);
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline __half __float2half(float x) {
  if (x != x) return {uint16_t(0x7fff)};
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double size = std::fabs(double(x));
  if (size >= 65520.0) return {uint16_t(sign | 0x7c00)};
  if (size == 0) return {sign};
  int exponent = 0;
  std::frexp(size, &exponent);  // size = f * 2^exponent, f in [1/2, 1)
  const int step = std::max(exponent - 11, -24);  // the value of the last bit is 2^step
  const auto whole = uint16_t(std::nearbyint(std::ldexp(size, -step)));  // ties to even
  return {uint16_t(sign + (uint16_t(step + 24) << 10) + whole)};
}

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
using cudaStream_t = void*;
inline const char* cudaGetErrorString(cudaError_t code);

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulation {

constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 256 * 1024, SLOT_BYTES = 64, SHARED_ALIGNMENT = 1024;

struct AsyncCopy {
  void* to;
  const void* from;
  int bytes, group;
};

struct Fiber {
  ucontext_t context;
  dim3 thread;
  int index = 0;
  bool done = false;
  std::vector<AsyncCopy> copies;  // not yet arrived, see tensor_core.cuh
  int committed = 0;              // closed groups of copies
};

struct Warp {
  int arrived = 0;
  unsigned generation = 0;
  unsigned char slots[2][WARP][SLOT_BYTES];
};

struct State {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Fiber* current = nullptr;
  std::function<void()> body;
  std::function<const char*()> left_over;  // what is wrong with a block that ends as this one has, or null
  dim3 block, grid, block_size;
  std::vector<unsigned char> shared;
  int alive = 0, arrived = 0;
  unsigned generation = 0, seed = 0;
  unsigned blocks = 0;  // that have run, this one included
  unsigned events = 0;  // for which threads wait elsewhere than at barriers and collectives, see hopper_emulation.h
  int votes[2] = {0, 0};
  const char* error = nullptr;
  std::vector<std::unique_ptr<unsigned char[]>> stacks;
};

inline State& state() {
  static State s;
  return s;
}

// Start of dynamic shared memory, with exactly the requested alignment.
template <size_t alignment = SHARED_ALIGNMENT>
inline unsigned char* shared_memory() {
  static_assert(SHARED_ALIGNMENT % alignment == 0);
  unsigned char* memory = state().shared.data();
  memory += SHARED_ALIGNMENT - uintptr_t(memory) % SHARED_ALIGNMENT;
  return alignment < SHARED_ALIGNMENT ? memory + alignment : memory;
}

inline void yield() {
  State& s = state();
  Fiber* me = s.current;
  swapcontext(&me->context, &s.scheduler);
}

inline void fail(const char* why) {
  State& s = state();
  if (!s.error) s.error = why;
  s.current->done = true;
  yield();  // never resumed
}

// Number of threads with a nonzero `vote`, known to all after all have arrived.
inline int block_barrier(int vote) {
  State& s = state();
  const unsigned mine = s.generation;
  s.votes[mine & 1] += vote != 0;
  if (++s.arrived == s.alive) {
    s.arrived = 0;
    s.votes[(mine + 1) & 1] = 0;
    ++s.generation;
  }
  while (s.generation == mine) yield();
  return s.votes[mine & 1];
}

// Every lane gives a value and may read those of all lanes; needs the full warp.
template <typename T>
inline const T* warp_exchange(const T& value, T (&all)[WARP]) {
  static_assert(sizeof(T) <= SLOT_BYTES, "value too large for a warp exchange");
  State& s = state();
  Fiber* me = s.current;
  Warp& warp = s.warps[me->index / WARP];
  const unsigned mine = warp.generation;
  std::memcpy(warp.slots[mine & 1][me->index % WARP], &value, sizeof(T));
  if (++warp.arrived == WARP) {
    warp.arrived = 0;
    ++warp.generation;
  }
  while (warp.generation == mine) yield();
  for (int lane = 0; lane < WARP; ++lane) std::memcpy(&all[lane], warp.slots[mine & 1][lane], sizeof(T));
  return all;
}

inline void enter() {
  State& s = state();
  Fiber* me = s.current;
  s.body();
  if (!me->copies.empty()) fail("a thread returned before its asynchronous copies arrived");
  me->done = true;
  --s.alive;
  // A thread that has returned no longer counts at barriers.
  if (s.alive > 0 && s.arrived == s.alive) {
    s.arrived = 0;
    s.votes[(s.generation + 1) & 1] = 0;
    ++s.generation;
  }
  yield();
}

inline std::vector<int> order(int count, unsigned seed) {
  std::vector<int> indices(count);
  std::iota(indices.begin(), indices.end(), 0);
  if (seed == 1) std::reverse(indices.begin(), indices.end());
  if (seed > 1) std::shuffle(indices.begin(), indices.end(), std::mt19937(seed));
  return indices;
}

inline void run_block(int threads) {
  State& s = state();
  ++s.blocks;
  std::fill(s.shared.begin(), s.shared.end(), 0xff);
  s.fibers.clear();
  s.fibers.resize(threads);
  s.warps.assign((threads + WARP - 1) / WARP, Warp());
  s.alive = threads;
  s.arrived = 0;
  s.votes[0] = s.votes[1] = 0;
  while (int(s.stacks.size()) < threads) s.stacks.emplace_back(new unsigned char[STACK_BYTES]);
  for (int i = 0; i < threads; ++i) {
    Fiber& f = s.fibers[i];
    f.index = i;
    f.thread = dim3(i % s.block_size.x, i / s.block_size.x % s.block_size.y, i / (s.block_size.x * s.block_size.y));
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = s.stacks[i].get();
    f.context.uc_stack.ss_size = STACK_BYTES;
    f.context.uc_link = nullptr;
    makecontext(&f.context, reinterpret_cast<void (*)()>(enter), 0);
  }
  const std::vector<int> indices = order(threads, s.seed);
  int idle_rounds = 0;
  while (s.alive > 0 && !s.error) {
    const unsigned before = s.generation, events_before = s.events;
    const int alive_before = s.alive;
    unsigned warps_before = 0, warps_after = 0;
    for (const Warp& w : s.warps) warps_before += w.generation;
    for (int i : indices) {
      if (s.fibers[i].done || s.error) continue;
      s.current = &s.fibers[i];
      swapcontext(&s.scheduler, &s.fibers[i].context);
    }
    for (const Warp& w : s.warps) warps_after += w.generation;
    const bool progress = s.generation != before || s.events != events_before || s.alive != alive_before ||
                          warps_after != warps_before;
    idle_rounds = progress ? 0 : idle_rounds + 1;
    if (idle_rounds > 2) s.error = "deadlock: threads of a block wait at different barriers";
  }
  if (s.left_over && !s.error) s.error = s.left_over();
}

template <typename Kernel, typename... Args>
cudaError_t launch(Kernel kernel, dim3 grid, dim3 block, size_t shared_bytes, Args... args) {
  State& s = state();
  const int threads = block.x * block.y * block.z;
  if (threads < 1 || threads > 1024 || shared_bytes > 227 * 1024 || grid.y > 65535 || grid.z > 65535 || grid.x < 1 ||
      grid.y < 1 || grid.z < 1)
    return cudaErrorInvalidValue;
  s.error = nullptr;
  s.grid = grid;
  s.block_size = block;
  s.shared.resize(shared_bytes + 2 * SHARED_ALIGNMENT);
  s.body = [&] { kernel(args...); };
  for (int b : order(int(grid.x * grid.y * grid.z), s.seed)) {
    s.block = dim3(b % grid.x, b / grid.x % grid.y, b / (grid.x * grid.y));
    run_block(threads);
    if (s.error) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

}  // namespace emulation

inline const char* cudaGetErrorString(cudaError_t code) {
  if (code == cudaErrorLaunchFailure && emulation::state().error) return emulation::state().error;
  return code == cudaSuccess ? "success" : "invalid launch arguments";
}

extern "C" __attribute__((visibility("default"))) void speckernels_host_order(unsigned seed) {
  emulation::state().seed = seed;
}

#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ((void)(stream), emulation::launch((kernel), (grid), (block), (shared_bytes), __VA_ARGS__))
#define ALLOW_SHARED_MEMORY(kernel, bytes) cudaSuccess
#define SHARED_MEMORY(name, alignment) unsigned char* name = emulation::shared_memory<(alignment)>()

#define threadIdx (emulation::state().current->thread)
#define blockIdx (emulation::state().block)
#define gridDim (emulation::state().grid)
#define blockDim (emulation::state().block_size)

inline void __syncthreads() { emulation::block_barrier(0); }
inline int __syncthreads_count(int vote) { return emulation::block_barrier(vote); }
inline int __syncthreads_or(int vote) { return emulation::block_barrier(vote) != 0; }
inline void __threadfence() {}

constexpr unsigned FULL_WARP = 0xffffffffu;
inline int emulated_lane() { return emulation::state().current->index % emulation::WARP; }

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source) {
  T all[emulation::WARP];
  if (mask != FULL_WARP) emulation::fail("warp collectives need the full mask here");
  return emulation::warp_exchange(value, all)[source & 31];
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return __shfl_sync(mask, value, emulated_lane() ^ bits);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, int delta) {
  const int source = emulated_lane() + delta;
  return __shfl_sync(mask, value, source < 32 ? source : emulated_lane());
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, int delta) {
  const int source = emulated_lane() - delta;
  return __shfl_sync(mask, value, source >= 0 ? source : emulated_lane());
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
  int all[emulation::WARP];
  if (mask != FULL_WARP) emulation::fail("warp collectives need the full mask here");
  emulation::warp_exchange(vote, all);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane] != 0) << lane;
  return bits;
}
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == FULL_WARP; }
inline void __syncwarp(unsigned mask = FULL_WARP) { __ballot_sync(mask, 0); }

// Blocks and fibers run one at a time and switch at barriers only, so plain memory is atomic.
template <typename T>
inline T atomicAdd(T* address, T value) {
  return std::exchange(*address, T(*address + value));
}
template <typename T>
inline T atomicMax(T* address, T value) {
  return std::exchange(*address, T(std::max(*address, value)));
}
template <typename T>
inline T atomicMin(T* address, T value) {
  return std::exchange(*address, T(std::min(*address, value)));
}
template <typename T>
inline T atomicOr(T* address, T value) {
  return std::exchange(*address, T(*address | value));
}
template <typename T>
inline T atomicExch(T* address, T value) {
  return std::exchange(*address, value);
}
template <typename T>
inline T atomicCAS(T* address, T expected, T value) {
  const T before = *address;
  if (before == expected) *address = value;
  return before;
}

template <typename T>
inline T __ldg(const T* address) {
  return *address;
}
template <typename T>
inline T __ldcg(const T* address) {
  return *address;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
template <typename T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
inline T max(T a, T b) {
  return a < b ? b : a;
}
inline unsigned __float_as_uint(float x) {
  unsigned y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __uint_as_float(unsigned x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float __int_as_float(int x) { return __uint_as_float(unsigned(x)); }
inline long long __double_as_longlong(double x) {
  long long y;
  std::memcpy(&y, &x, 8);
  return y;
}
inline double __longlong_as_double(long long x) {
  double y;
  std::memcpy(&y, &x, 8);
  return y;
}
