// Shared by the kernels of tree attention: arguments, visible slots of a row, the online softmax, and the
// merge of a cache's parts.
//
// A row is a pair (node, query head of the group), so a group shares its keys and values. The parts (splits) of one
// tile of rows are merged in the same launch: splits form a tree of RADIX children; the last child to finish reads
// its siblings' results and goes on upwards.
//
// A sequence's cache is the context, which all its nodes see, and the tail, of which each node sees the
// slots that its mask names.
//
// A shape S of a kernel says: ROWS of a block, in warps of WARP_ROWS, which are ROW_TILES of 16; KEYS of a tile;
// THREADS that hold results, of which the warps of the same rows, KEY_WARPS, keep KEPT_COLUMNS times 8 columns
// each; RADIX. Fragments lie as in tensor_core.cuh: lane l holds rows l / 4 and l / 4 + 8 of 16, and of 8 columns
// 2 * (l % 4) and the next.
#pragma once

#include "tensor_core.cuh"

constexpr int MIN_TILES = 2;  // per split, as in Python
constexpr float MINUS_INFINITY = -__builtin_huge_valf();

struct Arguments {
  const void *query, *keys, *values;
  const int *mask_bits, *context_lens;
  const int* tail_lens;  // or null: all of a sequence's nodes
  void* out;
  float4* part_sums;   // [tile of rows and head and sequence, split, fragment, thread]
  float2* part_stats;  // [tile of rows and head and sequence, split, row]: maximum, total weight
  unsigned* arrived;   // [tile of rows and head and sequence, split], 0 before and after
  int nodes, words, group, dim, capacity, splits, row_tiles;
  float scale;
  int64_t query_batch, query_head, query_node;
  int64_t key_batch, key_head, key_slot;
  int64_t value_batch, value_head, value_slot;
};

// Data of a block's sequence.
struct Sequence {
  int context, end;  // the tail lies between
};

__device__ __forceinline__ Sequence sequence_of(const Arguments& a, int64_t batch) {
  const int context = a.context_lens[batch], tail = a.tail_lens ? a.tail_lens[batch] : a.nodes;
  return {context, min(context + tail, a.capacity)};
}

// Which of the 32 slots whose first is `node` slots behind the context a row sees, lowest bit first.
__device__ __forceinline__ unsigned seen_slots(const int* bits, int words, int node, int used) {
  const int index = node >> 5;
  const auto word = [&](int i) { return i < 0 ? ~0u : i < words ? unsigned(bits[i]) : 0u; };
  const unsigned long long both = (unsigned long long)(word(index + 1)) << 32 | word(index);
  const unsigned seen = unsigned(both >> (node & 31));
  return used >= 32 ? seen : used > 0 ? seen & ((1u << used) - 1) : 0;
}

// Maximum to subtract before exp2: any finite number where nothing has been seen.
__device__ __forceinline__ float finite_shift(float maximum) { return maximum == MINUS_INFINITY ? 0.f : maximum; }

// Work of a block: a tile of rows of one head of the cache and one sequence, over a part of the cache.
struct Work {
  Sequence of;
  int64_t batch;
  int kv_head, row_tile, split;
  int rows, first_row;  // rows of all nodes; the block's first one
  int used_splits;      // others have nothing to do
  int first, last;      // tiles of slots
};

template <typename S>
__device__ __forceinline__ Work work_of(const Arguments& a) {
  Work w = {sequence_of(a, blockIdx.z), blockIdx.z, int(blockIdx.y)};
  w.row_tile = blockIdx.x % a.row_tiles, w.split = blockIdx.x / a.row_tiles;
  w.rows = a.nodes * a.group, w.first_row = w.row_tile * S::ROWS;
  const int tiles = (w.of.end + S::KEYS - 1) / S::KEYS;
  const int per_split = max((tiles + a.splits - 1) / a.splits, MIN_TILES);
  w.used_splits = max((tiles + per_split - 1) / per_split, 1);
  w.first = w.split * per_split, w.last = min(w.first + per_split, tiles);
  return w;
}

// Starts copying 8 columns of a row of the query; columns behind the head are 0, rows behind the last one its copies.
__device__ __forceinline__ void load_query(const Arguments& a, const Work& w, unsigned char* to, int local_row,
                                           int chunk) {
  const int row = min(w.first_row + local_row, w.rows - 1);
  const int64_t at = w.batch * a.query_batch + (w.kv_head * a.group + row % a.group) * a.query_head +
                     (row / a.group) * a.query_node;
  copy_async_16(to, static_cast<const char*>(a.query) + 2 * at + chunk * 16, chunk * 8 < a.dim ? 16 : 0);
}

// Which rows and columns of a fragment a thread holds.
template <typename S>
struct Place {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_warp = warp / S::KEY_WARPS, key_warp = warp % S::KEY_WARPS;
  const int quad_row = lane / 4, quad_lane = lane % 4;

  // Of the block, in the lower or upper half of the warp's tile m.
  __device__ __forceinline__ int row(int m, int upper) const {
    return row_warp * S::WARP_ROWS + m * 16 + upper * 8 + quad_row;
  }
};

// Scores of what a row does not see become minus infinity. slot: of the first of N times 8 scores
template <typename S, int N>
__device__ __forceinline__ void hide_unseen(const Arguments& a, const Work& w, const Place<S>& place, int slot,
                                            float (&scores)[S::ROW_TILES][N][4]) {
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = w.first_row + place.row(m, upper);
      const int node = min(row, w.rows - 1) / a.group;
      const int* bits = a.mask_bits + (w.batch * a.nodes + node) * a.words;
#pragma unroll
      for (int first = 0; first < N; first += 4) {  // 32 slots at a time
        const int from = slot + 8 * first;
        const unsigned seen =
            seen_slots(bits, a.words, from - w.of.context, w.of.end - from) >> (2 * place.quad_lane);
#pragma unroll
        for (int n = first; n < N && n < first + 4; ++n) {
          if (!(seen >> (8 * (n - first)) & 1)) scores[m][n][2 * upper] = MINUS_INFINITY;
          if (!(seen >> (8 * (n - first)) & 2)) scores[m][n][2 * upper + 1] = MINUS_INFINITY;
        }
      }
    }
  }
}

// Maximum, in units of log 2, and sum of the weights of each row that a thread holds; the sum of its columns alone.
template <typename S>
struct Softmax {
  float highest[S::ROW_TILES][2], total[S::ROW_TILES][2];

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; ++m) {
      highest[m][0] = highest[m][1] = MINUS_INFINITY;
      total[m][0] = total[m][1] = 0;
    }
  }

  // Turns scores into weights. rescale: what older sums are to be multiplied with; whether that is other than 1
  template <int N>
  __device__ __forceinline__ bool add(float scale, float (&scores)[S::ROW_TILES][N][4],
                                      float (&rescale)[S::ROW_TILES][2]) {
    int moved = 0;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        float found = MINUS_INFINITY;
#pragma unroll
        for (int n = 0; n < N; ++n)
          found = fmaxf(found, fmaxf(scores[m][n][2 * upper], scores[m][n][2 * upper + 1]));
        found = fmaxf(found, __shfl_xor_sync(0xffffffffu, found, 1));
        found = fmaxf(found, __shfl_xor_sync(0xffffffffu, found, 2));
        const float before = highest[m][upper], now = fmaxf(before, found * scale);
        const float shift = finite_shift(now);
        rescale[m][upper] = fast_exp2(before - shift);
        moved |= now != before;
        highest[m][upper] = now;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int i = 2 * upper; i < 2 * upper + 2; ++i) {
            scores[m][n][i] = fast_exp2(scores[m][n][i] * scale - shift);
            sum += scores[m][n][i];
          }
        }
        total[m][upper] = total[m][upper] * rescale[m][upper] + sum;
      }
    }
    return __any_sync(0xffffffffu, moved);  // late in a long context maxima rarely move
  }

  // At the end: the sum of all columns.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; ++m)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        total[m][upper] += __shfl_xor_sync(0xffffffffu, total[m][upper], 1);
        total[m][upper] += __shfl_xor_sync(0xffffffffu, total[m][upper], 2);
      }
  }
};

template <typename S, int N>
__device__ __forceinline__ void multiply_rows(float (&sums)[S::ROW_TILES][N][4],
                                              const float (&factors)[S::ROW_TILES][2]) {
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] *= factors[m][i / 2];
}

// The weights of 16 columns from number 16 * step on as the operand of a product.
template <typename T, int N>
__device__ __forceinline__ void pack_operand(uint32_t (&to)[4], const float (&weights)[N][4], int step) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float* two = &weights[2 * step + r / 2][2 * (r % 2)];
    to[r] = pack<T>(two[0], two[1]);
  }
}

// Merges the block's part with those of its siblings; false if another block goes on with it.
template <typename S>
__device__ __forceinline__ bool merge_splits(const Arguments& a, const Work& w, const Place<S>& place,
                                             float4 (&kept)[S::ROW_TILES][S::KEPT_COLUMNS], Softmax<S>& softmax) {
  __shared__ int is_last;
  constexpr int KEPT = S::ROW_TILES * S::KEPT_COLUMNS;
  const int64_t at = ((w.batch * gridDim.y + w.kv_head) * a.row_tiles + w.row_tile) * a.splits;
  int base = w.split;  // first of the splits whose sum this block holds
  for (int level = 1; level < w.used_splits; level *= S::RADIX) {
    const int parent = base - base % (level * S::RADIX);
    const int children = min(S::RADIX, (w.used_splits - parent + level - 1) / level);
    if (children == 1) continue;
    const auto sums_of = [&](int child) {
      return a.part_sums + (at + parent + child * level) * KEPT * S::THREADS + threadIdx.x;
    };
    const auto stats_of = [&](int child) {
      return a.part_stats + (at + parent + child * level) * S::ROWS + place.row(0, 0);
    };
    const int mine = (base - parent) / level;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < S::KEPT_COLUMNS; ++n) sums_of(mine)[(m * S::KEPT_COLUMNS + n) * S::THREADS] = kept[m][n];
      if (place.key_warp == 0 && place.quad_lane == 0)
        for (int upper = 0; upper < 2; ++upper)
          stats_of(mine)[m * 16 + upper * 8] = float2{softmax.highest[m][upper], softmax.total[m][upper]};
    }
    __syncthreads();
    if (threadIdx.x == 0) {  // one thread speaks for the block: barrier, fence, atomic, fence, barrier
      unsigned* arrived = a.arrived + at + parent + level;
      __threadfence();
      is_last = atomicAdd(arrived, 1u) == unsigned(children - 1);
      if (is_last) *arrived = 0;  // as it was found
      __threadfence();
    }
    __syncthreads();
    if (!is_last) return false;

    // Always summed in the order of the splits: the result does not depend on who came last.
    float weights[S::ROW_TILES][2][S::RADIX];
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        float2 stats[S::RADIX];
        float highest = MINUS_INFINITY, total = 0;
#pragma unroll
        for (int child = 0; child < S::RADIX; ++child) {
          stats[child] = float2{MINUS_INFINITY, 0};
          if (child < children) stats[child] = stats_of(child)[m * 16 + upper * 8];
          highest = fmaxf(highest, stats[child].x);
        }
#pragma unroll
        for (int child = 0; child < S::RADIX; ++child) {
          weights[m][upper][child] = fast_exp2(stats[child].x - finite_shift(highest));
          total += stats[child].y * weights[m][upper][child];
        }
        softmax.highest[m][upper] = highest;
        softmax.total[m][upper] = total;
      }
    }
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < S::KEPT_COLUMNS; ++n) {
        float4 merged = {0, 0, 0, 0};
#pragma unroll
        for (int child = 0; child < S::RADIX; ++child) {
          float4 x = kept[m][n];  // of a missing child the weight is 0
          if (child != mine && child < children) x = sums_of(child)[(m * S::KEPT_COLUMNS + n) * S::THREADS];
          merged.x += x.x * weights[m][0][child];
          merged.y += x.y * weights[m][0][child];
          merged.z += x.z * weights[m][1][child];
          merged.w += x.w * weights[m][1][child];
        }
        kept[m][n] = merged;
      }
    }
    base = parent;
    __syncthreads();  // all have read the slot that the next level overwrites
  }
  return true;
}

// The results of the rows that a thread holds.
template <typename T, typename S>
__device__ __forceinline__ void write_rows(const Arguments& a, const Work& w, const Place<S>& place,
                                           const float4 (&kept)[S::ROW_TILES][S::KEPT_COLUMNS],
                                           const Softmax<S>& softmax) {
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = w.first_row + place.row(m, upper);
      if (row >= w.rows) continue;
      const float total = softmax.total[m][upper];
      const float factor = total > 0 ? 1 / total : 0;  // what has seen nothing is 0
      const int64_t at =
          (w.batch * a.nodes + row / a.group) * gridDim.y * a.group + w.kv_head * a.group + row % a.group;
      const int first_column = (place.key_warp * S::KEPT_COLUMNS * 4 + place.quad_lane) * 2;
      uint32_t* to = static_cast<uint32_t*>(a.out) + (at * a.dim + first_column) / 2;
#pragma unroll
      for (int n = 0; n < S::KEPT_COLUMNS; ++n) {
        if (first_column + n * 8 >= a.dim) break;
        const float4 x = kept[m][n];
        to[n * 4] = upper ? pack<T>(x.z * factor, x.w * factor) : pack<T>(x.x * factor, x.y * factor);
      }
    }
  }
}

enum Type { HALF = 0, BFLOAT16 = 1, FLOAT = 2, DOUBLE = 3 };

// sizes: nodes, words, group, dim, capacity; then in elements the strides of query (batch, head, node), keys and values
// (batch, head, slot). A list in host memory.
constexpr int SIZES = 14;

static Arguments arguments_of(const void* query, const void* keys, const void* values, const int* mask_bits,
                              const int* context_lens, const int* tail_lens, void* out, const int64_t* sizes) {
  Arguments a = {query, keys, values, mask_bits, context_lens, tail_lens, out};
  int* counts[] = {&a.nodes, &a.words, &a.group, &a.dim, &a.capacity};
  int64_t* strides[] = {&a.query_batch, &a.query_head, &a.query_node,  &a.key_batch, &a.key_head,
                        &a.key_slot,    &a.value_batch, &a.value_head, &a.value_slot};
  for (int* count : counts) *count = int(*sizes++);
  for (int64_t* stride : strides) *stride = *sizes++;
  static_assert(sizeof(counts) / sizeof(*counts) + sizeof(strides) / sizeof(*strides) == SIZES);
  return a;
}

static void set_splits(Arguments& a, void* part_sums, void* part_stats, void* arrived, int64_t splits,
                       int64_t block_rows, double scale) {
  a.part_sums = static_cast<float4*>(part_sums);
  a.part_stats = static_cast<float2*>(part_stats);
  a.arrived = static_cast<unsigned*>(arrived);
  a.splits = int(splits);
  a.row_tiles = int(ceil_div(int64_t(a.nodes) * a.group, block_rows));
  a.scale = float(scale * 1.4426950408889634);  // log2(e)
}
