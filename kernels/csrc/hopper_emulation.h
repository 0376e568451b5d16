// Emulation of sm_90a on the host: barriers in shared memory, the tensor memory accelerator, products of warpgroups.
//
// What is asynchronous happens as late or as early as it may: in order 0 of speckernels_host_order a box lands when
// somebody waits for it, and a product reads its operands when it is waited for; in order 1 both do so where they are
// issued; in others one or the other by chance, and warps fall behind each other. Until it is waited for, a product's
// result is NaN. Products see shared memory as the async proxy does: without what threads have stored since the last
// fence.
#pragma once

#include <map>

#include "host_emulation.h"

// A tensor of 16-bit numbers in four dimensions, innermost first, and a box of it that is 128 bytes wide.
struct alignas(64) CUtensorMap {
  const unsigned char* base;
  uint64_t sizes[4], strides_bytes[4];
  unsigned rows;  // of a box, along the second dimension
};

namespace emulation {

constexpr int WARPGROUP = 128, BOX_BYTES = 128;
constexpr unsigned FIRST_ADDRESS = 1024;  // of shared memory: below it is the system's

// Takes 8 bytes, as on a GPU. Dynamic shared memory begins as ones, which no barrier is.
struct Barrier {
  int32_t bytes;  // to come
  uint16_t pending;
  uint16_t arrivals : 15, parity : 1;
};
static_assert(sizeof(Barrier) == 8);

struct BoxCopy {
  unsigned to;  // shared address
  CUtensorMap map;
  int corner[4];
  Barrier* barrier;
};

struct Product {
  float (*sums)[4];    // of this thread: 4 for each 8 of n columns
  const uint32_t* left;  // 4 registers, or null: in shared memory
  uint64_t left_matrix, right_matrix;
  int n, group;
  bool accumulate, bfloat16, right_is_n_major;
  std::vector<float> result;  // of a product that was early
};

struct NamedBarrier {
  int arrived = 0;
  unsigned generation = 0;
};

struct Hopper {
  struct Thread {
    std::vector<Product> products;  // not waited for
    std::map<float (*)[4], std::vector<float>> sums;  // what theirs are meanwhile
    int committed = 0;
    bool fenced = false;
    uint64_t digest = 0;  // of what was issued since the last commit
    unsigned waits = 0;
  };
  unsigned block = 0;
  std::vector<unsigned char> async_view;
  std::vector<BoxCopy> copies;  // under way
  std::vector<Thread> threads;
  std::map<std::pair<int, int>, uint64_t> digests;  // by warpgroup and number of its commit
  NamedBarrier barrier;
  std::mt19937 chance;
};

inline Hopper& hopper() {
  static Hopper h;
  State& s = state();
  if (h.block != s.blocks) {
    h = Hopper();
    h.block = s.blocks;
    h.async_view.assign(s.shared.size(), 0xff);
    h.threads.resize(s.fibers.size());
    h.chance.seed(s.seed);
    s.left_over = [] {
      const auto busy = [](const Hopper::Thread& thread) { return !thread.products.empty(); };
      const bool done = h.block != state().blocks  // of a kernel that used nothing of this
                        || (h.copies.empty() && std::none_of(h.threads.begin(), h.threads.end(), busy));
      return done ? nullptr : "a block ended while copies or products were under way";
    };
  }
  return h;
}

inline Hopper::Thread& this_thread() { return hopper().threads[state().current->index]; }

inline bool early() {
  const unsigned seed = state().seed;
  return seed > 1 ? hopper().chance() & 1 : seed == 1;
}

// By chance a warp goes on so late that others have done much meanwhile.
inline void fall_behind() {
  State& s = state();
  if (s.seed < 2) return;
  unsigned chance = s.seed;
  for (unsigned part : {s.blocks, unsigned(s.current->index / WARP), this_thread().waits++})
    chance = (chance ^ part) * 0x9e3779b1u, chance ^= chance >> 15;
  if (chance % 8) return;
  for (int round = 0; round < 20; ++round) {
    ++s.events;
    yield();
  }
}

inline unsigned shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - shared_memory();
  if (offset < 0 || size_t(offset) >= state().shared.size()) fail("no address of dynamic shared memory");
  return FIRST_ADDRESS + unsigned(offset);
}

// Offset of a byte if every 1024, 512 or 256 bytes are swizzled: 8 rows of 8, 4 or 2 chunks of 16 bytes.
inline unsigned swizzled(unsigned address, unsigned chunks) { return address ^ (address >> 7 & (chunks - 1)) << 4; }

inline Barrier& checked(uint64_t* barrier) {
  Barrier& b = *reinterpret_cast<Barrier*>(barrier);
  if (b.arrivals < 1 || b.arrivals > 1024) fail("a barrier in shared memory that was not initialised");
  return b;
}

inline void complete(Barrier& b) {
  if (b.pending || b.bytes) return;
  b.parity ^= 1;
  b.pending = b.arrivals;
  ++state().events;
}

inline void arrive(Barrier& b, int bytes) {
  if (!b.pending) fail("a barrier in shared memory has more arrivals in a phase than it was initialised for");
  b.bytes += bytes;
  --b.pending;
  complete(b);
}

inline void land(const BoxCopy& copy) {
  Hopper& h = hopper();
  const CUtensorMap& map = copy.map;
  for (unsigned row = 0; row < map.rows; ++row)
    for (unsigned column = 0; column < BOX_BYTES / 2; ++column) {
      const int64_t at[4] = {copy.corner[0] + column, copy.corner[1] + row, copy.corner[2], copy.corner[3]};
      const unsigned char* from = map.base;
      bool inside = true;
      for (int d = 0; d < 4; ++d) {
        inside &= at[d] >= 0 && uint64_t(at[d]) < map.sizes[d];
        from += at[d] * int64_t(map.strides_bytes[d]);
      }
      const unsigned to = swizzled(copy.to + row * BOX_BYTES + 2 * column, 8) - FIRST_ADDRESS;
      std::memset(shared_memory() + to, 0, 2);
      if (inside) std::memcpy(shared_memory() + to, from, 2);
      std::memcpy(h.async_view.data() + to, shared_memory() + to, 2);
    }
  copy.barrier->bytes -= int(map.rows) * BOX_BYTES;
  complete(*copy.barrier);
}

inline void wait(uint64_t* barrier, unsigned parity) {
  Barrier& b = checked(barrier);
  while (b.parity == parity) {
    std::vector<BoxCopy>& copies = hopper().copies;
    const auto rest = std::stable_partition(copies.begin(), copies.end(), [&](auto& c) { return c.barrier != &b; });
    const std::vector<BoxCopy> due(rest, copies.end());
    copies.erase(rest, copies.end());
    for (const BoxCopy& copy : due) land(copy);
    if (b.parity == parity) yield();
  }
  fall_behind();
}

inline void wait_for_threads(int count) {
  NamedBarrier& b = hopper().barrier;
  const unsigned mine = b.generation;
  if (++b.arrived == count) {
    b.arrived = 0;
    ++b.generation;
    ++state().events;
  }
  while (b.generation == mine) yield();
}

// Element (row or column, k) of a matrix in shared memory, as its descriptor and the PTX ISA's canonical layouts say.
inline uint16_t element(uint64_t matrix, bool mn_major, int mn, int k) {
  const unsigned start = (matrix & 0x3fff) << 4, mode = matrix >> 62;
  const unsigned leading = (matrix >> 16 & 0x3fff) << 4, stride = (matrix >> 32 & 0x3fff) << 4;
  if (matrix >> 49 & 7) fail("a matrix descriptor with a base offset is not emulated");
  const unsigned chunks = mode ? 16 >> mode : 1;  // of 16 bytes, in a row of the swizzled pattern
  unsigned at = start;
  if (!mn_major)
    at += mn % 8 * 16 * chunks + mn / 8 * stride + k % 8 * 2 + k / 8 * (mode ? 16 : leading);
  else if (!mode)
    at += mn % 8 * 2 + mn / 8 * stride + k % 8 * 16 + k / 8 * leading;
  else
    at += mn % 8 * 2 + mn / 8 % chunks * 16 + mn / (8 * chunks) * leading + k % 8 * 16 * chunks + k / 8 * stride;
  at = swizzled(at, chunks);
  const std::vector<unsigned char>& view = hopper().async_view;
  if (at < FIRST_ADDRESS || at - FIRST_ADDRESS + 2 > view.size()) fail("a matrix lies outside of shared memory");
  uint16_t bits;
  std::memcpy(&bits, view.data() + at - FIRST_ADDRESS, 2);
  return bits;
}

// This thread's part of a product of 64 x 16 and 16 x n; a warp's threads call it together.
inline void compute(const Product& p, std::vector<float>& result) {
  const auto number = [&](uint16_t bits) {
    return p.bfloat16 ? __bfloat162float({bits}) : __half2float({bits});
  };
  const int lane = emulated_lane(), row = state().current->index % WARPGROUP / WARP * 16 + lane / 4;
  float left[2][16];
  if (p.left) {
    struct Registers {
      uint32_t r[4];
    } mine, all[WARP];
    std::memcpy(mine.r, p.left, sizeof mine.r);
    warp_exchange(mine, all);
    for (int upper = 0; upper < 2; ++upper)
      for (int k = 0; k < 16; ++k)
        left[upper][k] = number(uint16_t(all[lane / 4 * 4 + k % 8 / 2].r[upper + k / 8 * 2] >> k % 2 * 16));
  } else {
    for (int upper = 0; upper < 2; ++upper)
      for (int k = 0; k < 16; ++k) left[upper][k] = number(element(p.left_matrix, false, row + 8 * upper, k));
  }
  result.assign(p.n / 2, 0.f);
  for (int i = 0; i < p.n / 4; ++i) {  // 2 of every 8 columns
    const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const float right = number(element(p.right_matrix, p.right_is_n_major, column, k));
      for (int upper = 0; upper < 2; ++upper) result[i / 2 * 4 + upper * 2 + i % 2] += left[upper][k] * right;
    }
  }
}

inline void issue(Product p) {
  Hopper::Thread& me = this_thread();
  if (!me.fenced) fail("wgmma without a fence behind what may have changed its registers");
  for (uint64_t part : {p.left ? 0 : p.left_matrix, p.right_matrix, uint64_t(p.n), uint64_t(p.accumulate)})
    me.digest = (me.digest ^ part) * 0x100000001b3u;
  std::vector<float>& sums = me.sums[p.sums];
  if (sums.empty()) {
    sums.assign(&p.sums[0][0], &p.sums[0][0] + p.n / 2);
    std::fill_n(&p.sums[0][0], p.n / 2, std::numeric_limits<float>::quiet_NaN());
  }
  p.group = me.committed;
  const bool now = __shfl_sync(FULL_WARP, int(early()), 0);
  if (now) compute(p, p.result);
  me.products.push_back(std::move(p));
}

inline void commit() {
  Hopper::Thread& me = this_thread();
  const std::pair<int, int> which = {state().current->index / WARPGROUP, me.committed++};
  if (hopper().digests.emplace(which, me.digest).first->second != me.digest)
    fail("threads of a warpgroup disagree on their products");
  me.digest = 0;
}

inline void finish(int pending_groups) {
  fall_behind();
  Hopper::Thread& me = this_thread();
  me.fenced = false;
  std::vector<Product> rest;
  for (Product& p : me.products) {
    if (p.group >= me.committed - pending_groups) {
      rest.push_back(std::move(p));
      continue;
    }
    if (p.result.empty()) compute(p, p.result);
    std::vector<float>& sums = me.sums[p.sums];
    for (int i = 0; i < p.n / 2; ++i) sums[i] = (p.accumulate ? sums[i] : 0) + p.result[i];
  }
  me.products = std::move(rest);
  for (auto sums = me.sums.begin(); sums != me.sums.end();) {
    const auto same = [&](const Product& p) { return p.sums == sums->first; };
    if (std::any_of(me.products.begin(), me.products.end(), same)) {
      ++sums;
      continue;
    }
    std::copy(sums->second.begin(), sums->second.end(), &sums->first[0][0]);
    sums = me.sums.erase(sums);
  }
  __syncwarp();  // the instruction is one of the whole warp
}

}  // namespace emulation
