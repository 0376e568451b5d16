// Tree attention over a long cache: each block takes a tile of rows and a part of the cache.
//
// A row is a pair (node, query head of the group), so a group shares its keys and values. The
// parts (splits) of one tile of rows are merged in the same launch: splits form a tree of
// RADIX children; the last child to finish reads its siblings' results and goes on upwards.
//
// A sequence's cache is the context, which all its nodes see, and the tail, of which each node sees the
// slots that its mask names. The cache lies in one piece, or in pages that a block table names.
#include "tensor_core.cuh"

constexpr int MIN_TILES = 2;  // per split, as in splits.py
constexpr float MINUS_INFINITY = -__builtin_huge_valf(), LN_2 = 0.693147181f;

struct Arguments {
  const void *query, *keys, *values;
  const int *mask_bits, *context_lens;
  const int *tail_lens, *node_lens;  // or null: all of a sequence's nodes
  const int* block_table;            // [sequence, page], or null: the cache is in one piece
  void* out;
  void* lse;           // or null; [sequence, node, head], float or, of double, double
  float4* part_sums;   // [tile of rows and head and sequence, split, fragment, thread]
  float2* part_stats;  // [tile of rows and head and sequence, split, row]: maximum, total weight
  unsigned* arrived;   // [tile of rows and head and sequence, split], 0 before and after
  int nodes, words, group, dim, capacity, pages, page_bits, splits, row_tiles;
  float scale;
  int64_t query_batch, query_head, query_node;
  int64_t key_batch, key_head, key_slot;  // with pages, "batch" is the page
  int64_t value_batch, value_head, value_slot;
};

// What a block needs to know of its sequence.
struct Sequence {
  int context, end;  // the tail lies between
  int nodes;         // in use
  const int* pages;  // of this sequence, or null
};

__device__ __forceinline__ Sequence sequence_of(const Arguments& a, int64_t batch) {
  const int context = a.context_lens[batch], tail = a.tail_lens ? a.tail_lens[batch] : a.nodes;
  const int nodes = a.node_lens ? max(0, min(a.node_lens[batch], a.nodes)) : a.nodes;
  return {context, min(context + tail, a.capacity), nodes, a.block_table ? a.block_table + batch * a.pages : nullptr};
}

// D head size, or the next larger one there is a shape for; warps by rows and by keys; 16-row tiles per warp; keys per tile; tiles in
// flight, plus one; children that are merged at once.
template <int D_, int ROW_WARPS_, int KEY_WARPS_, int ROW_TILES_, int KEYS_, int STAGES_, int RADIX_>
struct Shape {
  static constexpr int D = D_, ROW_WARPS = ROW_WARPS_, KEY_WARPS = KEY_WARPS_, ROW_TILES = ROW_TILES_, KEYS = KEYS_,
                       STAGES = STAGES_, RADIX = RADIX_;
  static constexpr int WARPS = ROW_WARPS * KEY_WARPS, THREADS = 32 * WARPS;
  static constexpr int WARP_ROWS = 16 * ROW_TILES, ROWS = WARP_ROWS * ROW_WARPS;
  static constexpr int WARP_KEYS = KEYS / KEY_WARPS;
  static constexpr int CHUNKS = D / 8;  // 16 bytes each
  // An odd number of 16-byte chunks per row: eight rows of a matrix fall into different banks.
  static constexpr int ROW_BYTES = 2 * D + 16;
  static constexpr int QUERY_BYTES = ROWS * ROW_BYTES, TILE_BYTES = KEYS * ROW_BYTES;
  static constexpr int FRAGMENTS = ROW_TILES * D / 8, KEPT = FRAGMENTS / KEY_WARPS;
  static constexpr int LOAD_BYTES = QUERY_BYTES + 2 * STAGES * TILE_BYTES;
  static constexpr int MERGE_BYTES = THREADS * FRAGMENTS * 16 + WARPS * WARP_ROWS * 8;
  static constexpr int SHARED_BYTES = LOAD_BYTES > MERGE_BYTES ? LOAD_BYTES : MERGE_BYTES;
  // Of a multiprocessor, if each thread takes all the registers that it may.
  static constexpr int BY_REGISTERS = 65536 / (256 * THREADS), BY_MEMORY = 228 * 1024 / (SHARED_BYTES + 1024);
  static constexpr int MIN_BLOCKS = BY_REGISTERS < BY_MEMORY ? BY_REGISTERS : BY_MEMORY;
  static constexpr bool QUERY_IN_REGISTERS = ROW_TILES * D <= 128;
  static_assert(D % 16 == 0 && D / 8 % KEY_WARPS == 0 && WARP_KEYS % 16 == 0 && WARP_KEYS <= 32);
  static_assert(KEYS * CHUNKS % THREADS == 0 && STAGES >= 2 && SHARED_BYTES < 163 * 1024);
};

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

// Where the cache of one sequence and head begins; with pages, that head in page 0.
struct Cache {
  const char *keys, *values;
};

// Start copying a tile of keys and the values behind it.
template <typename S>
__device__ __forceinline__ void load_tile(const Arguments& a, const Cache& cache, const Sequence& of,
                                          unsigned char* key_tile, int first_slot) {
#pragma unroll 4
  for (int i = 0; i < S::KEYS * S::CHUNKS / S::THREADS; ++i) {
    const int index = threadIdx.x + i * S::THREADS;
    const int row = index / S::CHUNKS, chunk = index % S::CHUNKS;
    const int slot = first_slot + row;
    // Slots behind the tail are not read, but zero: they may hold NaN, and 0 * NaN is NaN.
    const int bytes = slot < of.end && chunk * 8 < a.dim ? 16 : 0;
    int64_t key_at = slot * a.key_slot, value_at = slot * a.value_slot;
    if (of.pages) {
      const int64_t page = bytes ? of.pages[slot >> a.page_bits] : 0;
      const int within = slot & ((1 << a.page_bits) - 1);
      key_at = page * a.key_batch + within * a.key_slot;
      value_at = page * a.value_batch + within * a.value_slot;
    }
    unsigned char* to = key_tile + row * S::ROW_BYTES + chunk * 16;
    copy_async_16(to, cache.keys + 2 * key_at + chunk * 16, bytes);
    copy_async_16(to + S::TILE_BYTES, cache.values + 2 * value_at + chunk * 16, bytes);
  }
}

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS) tree_attention_kernel(const __grid_constant__ Arguments a) {
  SHARED_MEMORY(shared);
  __shared__ int is_last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_warp = warp / S::KEY_WARPS, key_warp = warp % S::KEY_WARPS;
  const int quad_row = lane / 4, quad_lane = lane % 4;
  const int row_tile = blockIdx.x % a.row_tiles, split = blockIdx.x / a.row_tiles;
  const int kv_head = blockIdx.y;
  const int64_t batch = blockIdx.z;

  const Sequence of = sequence_of(a, batch);
  const int rows = of.nodes * a.group, first_row = row_tile * S::ROWS;
  // Rows of nodes that are not in use see nothing; their result is 0.
  const int tiles = first_row < rows ? (of.end + S::KEYS - 1) / S::KEYS : 0;
  const int per_split = max((tiles + a.splits - 1) / a.splits, MIN_TILES);
  const int used_splits = max((tiles + per_split - 1) / per_split, 1);
  if (split >= used_splits) return;
  const int first = split * per_split, last = min(first + per_split, tiles);

  const int64_t whole = of.pages ? 0 : batch;
  const Cache cache = {
      static_cast<const char*>(a.keys) + (whole * a.key_batch + kv_head * a.key_head) * 2,
      static_cast<const char*>(a.values) + (whole * a.value_batch + kv_head * a.value_head) * 2};
  unsigned char* stages = shared + S::QUERY_BYTES;

  for (int index = threadIdx.x; index < S::ROWS * S::CHUNKS; index += S::THREADS) {
    const int local = index / S::CHUNKS, chunk = index % S::CHUNKS;
    const int row = max(min(first_row + local, rows - 1), 0);
    const int64_t at = batch * a.query_batch + (kv_head * a.group + row % a.group) * a.query_head +
                       (row / a.group) * a.query_node;
    copy_async_16(shared + local * S::ROW_BYTES + chunk * 16,
                  static_cast<const char*>(a.query) + 2 * at + chunk * 16, chunk * 8 < a.dim ? 16 : 0);
  }
  copy_async_commit();
#pragma unroll
  for (int stage = 0; stage < S::STAGES - 1; ++stage) {
    if (first + stage < last)
      load_tile<S>(a, cache, of, stages + stage * 2 * S::TILE_BYTES, (first + stage) * S::KEYS);
    copy_async_commit();
  }

  // Where this lane's addresses for ldmatrix begin: rows 0-7, 8-15 and columns 0-7, 8-15 of a
  // 16 x 16 block, in the order in which the operand wants its registers.
  const unsigned char* query_rows =
      shared + (row_warp * S::WARP_ROWS + lane % 16) * S::ROW_BYTES + lane / 16 * 16;
  const int key_offset = (key_warp * S::WARP_KEYS + lane % 8 + lane / 16 * 8) * S::ROW_BYTES + lane / 8 % 2 * 16;
  const int value_offset = (key_warp * S::WARP_KEYS + lane % 16) * S::ROW_BYTES + lane / 16 * 16;

  [[maybe_unused]] uint32_t query[S::ROW_TILES][S::D / 16][4];
  if constexpr (S::QUERY_IN_REGISTERS) {
    copy_async_wait<S::STAGES - 1>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; ++m)
#pragma unroll
      for (int step = 0; step < S::D / 16; ++step)
        load_matrices(query[m][step], query_rows + m * 16 * S::ROW_BYTES + step * 32);
  }

  float sums[S::ROW_TILES][S::D / 8][4] = {};
  float row_max[S::ROW_TILES][2], row_sum[S::ROW_TILES][2];  // maxima in units of log 2
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; ++m) {
    row_max[m][0] = row_max[m][1] = MINUS_INFINITY;
    row_sum[m][0] = row_sum[m][1] = 0;
  }

  for (int tile = first; tile < last; ++tile) {
    copy_async_wait<S::STAGES - 2>();
    __syncthreads();  // this tile is here, and all have finished with the one before
    if (tile + S::STAGES - 1 < last) {
      const int next = tile + S::STAGES - 1;
      load_tile<S>(a, cache, of, stages + (next - first) % S::STAGES * 2 * S::TILE_BYTES, next * S::KEYS);
    }
    copy_async_commit();
    const unsigned char* key_tile = stages + (tile - first) % S::STAGES * 2 * S::TILE_BYTES;
    const unsigned char* value_tile = key_tile + S::TILE_BYTES;

    float scores[S::ROW_TILES][S::WARP_KEYS / 8][4] = {};
#pragma unroll
    for (int step = 0; step < S::D / 16; ++step) {
      if constexpr (!S::QUERY_IN_REGISTERS) {
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; ++m)
          load_matrices(query[m][step], query_rows + m * 16 * S::ROW_BYTES + step * 32);
      }
#pragma unroll
      for (int pair = 0; pair < S::WARP_KEYS / 16; ++pair) {
        uint32_t key[4];
        load_matrices(key, key_tile + key_offset + pair * 16 * S::ROW_BYTES + step * 32);
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; ++m) {
          multiply_add<T>(scores[m][2 * pair], query[m][step], key[0], key[1]);
          multiply_add<T>(scores[m][2 * pair + 1], query[m][step], key[2], key[3]);
        }
      }
    }

    if ((tile + 1) * S::KEYS > of.context) {  // tiles within the context need no mask
      const int slot = tile * S::KEYS + key_warp * S::WARP_KEYS;
#pragma unroll
      for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          const int row = first_row + row_warp * S::WARP_ROWS + m * 16 + upper * 8 + quad_row;
          const int node = min(row, rows - 1) / a.group;  // there is one, as there is a tile
          const int* bits = a.mask_bits + (batch * a.nodes + node) * a.words;
          const unsigned seen = seen_slots(bits, a.words, slot - of.context, of.end - slot) >> (2 * quad_lane);
#pragma unroll
          for (int n = 0; n < S::WARP_KEYS / 8; ++n) {
            if (!(seen >> (8 * n) & 1)) scores[m][n][2 * upper] = MINUS_INFINITY;
            if (!(seen >> (8 * n) & 2)) scores[m][n][2 * upper + 1] = MINUS_INFINITY;
          }
        }
      }
    }

    float rescale[S::ROW_TILES][2];
    int moved = 0;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        float highest = MINUS_INFINITY;
#pragma unroll
        for (int n = 0; n < S::WARP_KEYS / 8; ++n)
          highest = fmaxf(highest, fmaxf(scores[m][n][2 * upper], scores[m][n][2 * upper + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
        const float before = row_max[m][upper], now = fmaxf(before, highest * a.scale);
        const float shift = finite_shift(now);
        rescale[m][upper] = fast_exp2(before - shift);
        moved |= now != before;
        row_max[m][upper] = now;
        float total = 0;
#pragma unroll
        for (int n = 0; n < S::WARP_KEYS / 8; ++n) {
#pragma unroll
          for (int i = 2 * upper; i < 2 * upper + 2; ++i) {
            scores[m][n][i] = fast_exp2(scores[m][n][i] * a.scale - shift);
            total += scores[m][n][i];
          }
        }
        row_sum[m][upper] = row_sum[m][upper] * rescale[m][upper] + total;
      }
    }
    if (__any_sync(0xffffffffu, moved)) {  // late in a long context maxima rarely move
#pragma unroll
      for (int m = 0; m < S::ROW_TILES; ++m)
#pragma unroll
        for (int n = 0; n < S::D / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[m][n][i] *= rescale[m][i / 2];
    }

#pragma unroll
    for (int step = 0; step < S::WARP_KEYS / 16; ++step) {
      uint32_t weights[S::ROW_TILES][4];
#pragma unroll
      for (int m = 0; m < S::ROW_TILES; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float* two = &scores[m][2 * step + r / 2][2 * (r % 2)];
          weights[m][r] = pack<T>(two[0], two[1]);
        }
#pragma unroll
      for (int pair = 0; pair < S::D / 16; ++pair) {
        uint32_t value[4];
        load_matrices_transposed(value, value_tile + value_offset + step * 16 * S::ROW_BYTES + pair * 32);
#pragma unroll
        for (int m = 0; m < S::ROW_TILES; ++m) {
          multiply_add<T>(sums[m][2 * pair], weights[m], value[0], value[1]);
          multiply_add<T>(sums[m][2 * pair + 1], weights[m], value[2], value[3]);
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < S::ROW_TILES; ++m)
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      row_sum[m][upper] += __shfl_xor_sync(0xffffffffu, row_sum[m][upper], 1);
      row_sum[m][upper] += __shfl_xor_sync(0xffffffffu, row_sum[m][upper], 2);
    }

  // From here on a warp keeps the columns of its share of the head only, for all keys.
  constexpr int KEPT_COLUMNS = S::D / 8 / S::KEY_WARPS;
  float4 kept[S::ROW_TILES][KEPT_COLUMNS];
  float4* all_sums = reinterpret_cast<float4*>(shared);  // [warp, fragment, lane]
  float2* all_stats = reinterpret_cast<float2*>(all_sums + S::THREADS * S::FRAGMENTS);  // [warp, row]
  __syncthreads();  // all have finished with the tiles
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < S::D / 8; ++n)
      all_sums[(warp * S::FRAGMENTS + m * (S::D / 8) + n) * 32 + lane] =
          float4{sums[m][n][0], sums[m][n][1], sums[m][n][2], sums[m][n][3]};
    if (quad_lane == 0)
      for (int upper = 0; upper < 2; ++upper)
        all_stats[warp * S::WARP_ROWS + m * 16 + upper * 8 + quad_row] =
            float2{row_max[m][upper], row_sum[m][upper]};
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; ++m) {
    float weights[S::KEY_WARPS][2];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float2 stats[S::KEY_WARPS];
      row_max[m][upper] = MINUS_INFINITY;
      row_sum[m][upper] = 0;
#pragma unroll
      for (int w = 0; w < S::KEY_WARPS; ++w) {
        stats[w] = all_stats[(row_warp * S::KEY_WARPS + w) * S::WARP_ROWS + m * 16 + upper * 8 + quad_row];
        row_max[m][upper] = fmaxf(row_max[m][upper], stats[w].x);
      }
#pragma unroll
      for (int w = 0; w < S::KEY_WARPS; ++w) {
        weights[w][upper] = fast_exp2(stats[w].x - finite_shift(row_max[m][upper]));
        row_sum[m][upper] += stats[w].y * weights[w][upper];
      }
    }
#pragma unroll
    for (int n = 0; n < KEPT_COLUMNS; ++n) {
      kept[m][n] = float4{0, 0, 0, 0};
#pragma unroll
      for (int w = 0; w < S::KEY_WARPS; ++w) {
        const int fragment = m * (S::D / 8) + key_warp * KEPT_COLUMNS + n;
        const float4 x = all_sums[((row_warp * S::KEY_WARPS + w) * S::FRAGMENTS + fragment) * 32 + lane];
        kept[m][n].x += x.x * weights[w][0];
        kept[m][n].y += x.y * weights[w][0];
        kept[m][n].z += x.z * weights[w][1];
        kept[m][n].w += x.w * weights[w][1];
      }
    }
  }

  const int64_t place = ((batch * gridDim.y + kv_head) * a.row_tiles + row_tile) * a.splits;
  int base = split;  // first of the splits whose sum this block holds
  for (int level = 1; level < used_splits; level *= S::RADIX) {
    const int parent = base - base % (level * S::RADIX);
    const int children = min(S::RADIX, (used_splits - parent + level - 1) / level);
    if (children == 1) continue;
    const auto sums_of = [&](int child) {
      return a.part_sums + (place + parent + child * level) * S::KEPT * S::THREADS + threadIdx.x;
    };
    const auto stats_of = [&](int child) {
      return a.part_stats + (place + parent + child * level) * S::ROWS + row_warp * S::WARP_ROWS + quad_row;
    };
    const int mine = (base - parent) / level;
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < KEPT_COLUMNS; ++n) sums_of(mine)[(m * KEPT_COLUMNS + n) * S::THREADS] = kept[m][n];
      if (key_warp == 0 && quad_lane == 0)
        for (int upper = 0; upper < 2; ++upper)
          stats_of(mine)[m * 16 + upper * 8] = float2{row_max[m][upper], row_sum[m][upper]};
    }
    __syncthreads();
    if (threadIdx.x == 0) {  // one thread speaks for the block: barrier, fence, atomic, fence, barrier
      unsigned* arrived = a.arrived + place + parent + level;
      __threadfence();
      is_last = atomicAdd(arrived, 1u) == unsigned(children - 1);
      if (is_last) *arrived = 0;  // as it was found
      __threadfence();
    }
    __syncthreads();
    if (!is_last) return;

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
        row_max[m][upper] = highest;
        row_sum[m][upper] = total;
      }
    }
#pragma unroll
    for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < KEPT_COLUMNS; ++n) {
        float4 merged = {0, 0, 0, 0};
#pragma unroll
        for (int child = 0; child < S::RADIX; ++child) {
          float4 x = kept[m][n];  // of a missing child the weight is 0
          if (child != mine && child < children) x = sums_of(child)[(m * KEPT_COLUMNS + n) * S::THREADS];
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

#pragma unroll
  for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = first_row + row_warp * S::WARP_ROWS + m * 16 + upper * 8 + quad_row;
      if (row >= a.nodes * a.group) continue;
      const float total = row < rows ? row_sum[m][upper] : 0;
      const float factor = total > 0 ? 1 / total : 0;  // what has seen nothing is 0
      const int64_t at = (batch * a.nodes + row / a.group) * gridDim.y * a.group + kv_head * a.group + row % a.group;
      if (a.lse && key_warp == 0 && quad_lane == 0)
        static_cast<float*>(a.lse)[at] = total > 0 ? (row_max[m][upper] + log2f(total)) * LN_2 : MINUS_INFINITY;
      const int first_column = (key_warp * KEPT_COLUMNS * 4 + quad_lane) * 2;
      uint32_t* to = static_cast<uint32_t*>(a.out) + (at * a.dim + first_column) / 2;
#pragma unroll
      for (int n = 0; n < KEPT_COLUMNS; ++n) {
        if (first_column + n * 8 >= a.dim) break;
        const float4 x = kept[m][n];
        to[n * 4] = upper ? pack<T>(x.z * factor, x.w * factor) : pack<T>(x.x * factor, x.y * factor);
      }
    }
  }
}

// What a shape is wanted for: the blocks that a multiprocessor holds of it, or a launch.
struct Occupancy {
  template <typename T, typename S>
  int use() const {
    return resident_blocks(tree_attention_kernel<T, S>, S::THREADS, S::SHARED_BYTES, S::MIN_BLOCKS);
  }
};

struct Launch {
  const Arguments& a;
  dim3 grid;
  void* stream;

  template <typename T, typename S>
  int use() const;
};

template <typename T, typename S>
int Launch::use() const {
  const cudaError_t allowed = ALLOW_SHARED_MEMORY((tree_attention_kernel<T, S>), S::SHARED_BYTES);
  if (allowed != cudaSuccess) return allowed;
  return LAUNCH((tree_attention_kernel<T, S>), grid, dim3(S::THREADS), S::SHARED_BYTES, stream, a);
}

// Few rows: the warps share the keys and three tiles are on their way, for bandwidth. Many rows:
// 32 per warp where registers allow it, since each key that a warp loads then serves twice as
// many products. Most shapes take a multiprocessor to themselves. Where a block has no more than 99 KiB of shared memory, heads above 64 take fewer stages.
template <typename T, int D, typename Task>
int with_rows(const Task& task, int64_t block_rows, bool tight) {
  if constexpr (D > 64) {
    using Few = Shape<D, 1, 4, 1, 64, 2, 16>;
    using Many = Shape<D, 4, 2, 1, 64, 2, 4>;
    static_assert(Few::SHARED_BYTES < 99 * 1024 && Many::SHARED_BYTES < 99 * 1024);
    if (tight && block_rows == 16) return task.template use<T, Few>();
    if (tight && block_rows == 64) return task.template use<T, Many>();
  } else {
    static_assert(Shape<D, 4, 2, 2, 64, 3, 4>::SHARED_BYTES < 99 * 1024);
  }
  if (block_rows == 16) return task.template use<T, Shape<D, 1, 4, 1, 64, 4, 16>>();
  if (block_rows == 64) return task.template use<T, Shape<D, 4, 2, 1, 64, 3, 4>>();
  if (block_rows == 128) return task.template use<T, Shape<D, 4, 2, 2, 64, 3, 4>>();
  return cudaErrorInvalidValue;
}

// block_dim: the shape's head size, as cuda.py chooses it; heads of other sizes are filled up with zeros
// in shared memory, which costs no bandwidth.
template <typename T, typename Task>
int with_dim(const Task& task, int64_t block_dim, int64_t block_rows, bool tight) {
  if (block_dim == 32) return with_rows<T, 32>(task, block_rows, tight);
  if (block_dim == 64) return with_rows<T, 64>(task, block_rows, tight);
  if (block_dim == 96) return with_rows<T, 96>(task, block_rows, tight);
  if (block_dim == 128) return with_rows<T, 128>(task, block_rows, tight);
  // Other tiles of rows would not fit into the registers.
  if (block_dim == 192 && block_rows == 64) return task.template use<T, Shape<192, 4, 2, 1, 32, 3, 4>>();
  if (block_dim == 256 && block_rows == 64) return task.template use<T, Shape<256, 4, 2, 1, 32, 3, 4>>();
  return cudaErrorInvalidValue;
}

enum Type { HALF = 0, BFLOAT16 = 1, FLOAT = 2, DOUBLE = 3 };

// sizes: nodes, words, group, dim, capacity, pages, page_bits; then in elements the strides of query (batch,
// head, node), keys and values (batch or page, head, slot). A list in host memory.
constexpr int SIZES = 16;

static Arguments arguments_of(const void* query, const void* keys, const void* values, const int* mask_bits,
                              const int* context_lens, const int* tail_lens, const int* node_lens,
                              const int* block_table, void* out, void* lse, const int64_t* sizes) {
  Arguments a = {query,     keys,        values, mask_bits, context_lens, tail_lens,
                 node_lens, block_table, out,    lse};
  int* counts[] = {&a.nodes, &a.words, &a.group, &a.dim, &a.capacity, &a.pages, &a.page_bits};
  int64_t* strides[] = {&a.query_batch, &a.query_head, &a.query_node,  &a.key_batch, &a.key_head,
                        &a.key_slot,    &a.value_batch, &a.value_head, &a.value_slot};
  for (int* count : counts) *count = int(*sizes++);
  for (int64_t* stride : strides) *stride = *sizes++;
  static_assert(sizeof(counts) / sizeof(*counts) + sizeof(strides) / sizeof(*strides) == SIZES);
  return a;
}

// Addresses and strides are multiples of 16 bytes.
EXPORT int tree_attention(const void* query, const void* keys, const void* values, const int* mask_bits,
                          const int* context_lens, const int* tail_lens, const int* node_lens, const int* block_table,
                          void* out, void* lse, void* part_sums, void* part_stats, void* arrived,
                          const int64_t* sizes, int64_t type, int64_t batch, int64_t kv_heads, int64_t splits,
                          int64_t block_dim, int64_t block_rows, int64_t tight, double scale, void* stream) {
  Arguments a = arguments_of(query, keys, values, mask_bits, context_lens, tail_lens, node_lens, block_table, out, lse,
                             sizes);
  a.part_sums = static_cast<float4*>(part_sums);
  a.part_stats = static_cast<float2*>(part_stats);
  a.arrived = static_cast<unsigned*>(arrived);
  a.splits = int(splits);
  a.row_tiles = int(ceil_div(int64_t(a.nodes) * a.group, block_rows));
  a.scale = float(scale * 1.4426950408889634);  // log2(e)
  if (a.dim % 8 || a.dim > block_dim) return cudaErrorInvalidValue;
  const Launch task = {a, dim3(unsigned(a.row_tiles * splits), unsigned(kv_heads), unsigned(batch)), stream};
  if (type == HALF) return with_dim<__half>(task, block_dim, block_rows, tight);
  if (type == BFLOAT16) return with_dim<__nv_bfloat16>(task, block_dim, block_rows, tight);
  return cudaErrorInvalidValue;
}

// Blocks that a multiprocessor holds at once, of either 16-bit type.
EXPORT int tree_attention_occupancy(int64_t block_dim, int64_t block_rows, int64_t tight) {
  return with_dim<__nv_bfloat16>(Occupancy(), block_dim, block_rows, tight);
}

// The same for any type and alignment, without tensor cores: a block per query row, whose warps
// take 32 slots in turn.
constexpr int SIMPLE_WARPS = 4, MAX_DIM = 256;

template <typename T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ void narrow(float x, __half* to) { *to = __float2half(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16* to) { *to = __float2bfloat16(x); }
__device__ __forceinline__ void narrow(float x, float* to) { *to = x; }
__device__ __forceinline__ void narrow(double x, double* to) { *to = x; }
__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }

template <typename T>
__global__ void __launch_bounds__(32 * SIMPLE_WARPS)
    tree_attention_simple_kernel(const __grid_constant__ Arguments a, double scale_of_scores) {
  using W = typename Wide<T>::type;
  __shared__ W query[MAX_DIM], weights[SIMPLE_WARPS][32], sums[SIMPLE_WARPS][MAX_DIM], stats[SIMPLE_WARPS][2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int node = blockIdx.x, head = blockIdx.y, kv_head = head / a.group;
  const int64_t batch = blockIdx.z;
  const int dim = a.dim;
  const Sequence of = sequence_of(a, batch);
  const int end = node < of.nodes ? of.end : 0;  // a node that is not in use sees nothing
  const T* keys = static_cast<const T*>(a.keys) + kv_head * a.key_head;
  const T* values = static_cast<const T*>(a.values) + kv_head * a.value_head;
  const auto page_of = [&](int slot) { return of.pages ? int64_t(of.pages[slot >> a.page_bits]) : batch; };
  const auto within = [&](int slot) { return of.pages ? slot & ((1 << a.page_bits) - 1) : slot; };
  const int* bits = a.mask_bits + (batch * a.nodes + node) * a.words;
  const T* from = static_cast<const T*>(a.query) + batch * a.query_batch + head * a.query_head + node * a.query_node;
  for (int d = threadIdx.x; d < dim; d += blockDim.x) query[d] = widen(from[d]);
  __syncthreads();

  const W lowest = -W(__builtin_huge_val());
  W highest = lowest, total = 0, sum[MAX_DIM / 32] = {};
  for (int first = 32 * warp; first < end; first += 32 * SIMPLE_WARPS) {
    const int slot = first + lane, other = slot - of.context;
    W score = lowest;
    if (slot < end && (other < 0 || (other < 32 * a.words && (bits[other / 32] >> other % 32 & 1)))) {
      score = 0;
      const T* key = keys + page_of(slot) * a.key_batch + within(slot) * a.key_slot;
      for (int d = 0; d < dim; ++d) score += query[d] * widen(key[d]);
      score *= W(scale_of_scores);
    }
    weights[warp][lane] = score;
    __syncwarp();
    W now = highest;
    for (int i = 0; i < 32; ++i) now = max(now, weights[warp][i]);
    __syncwarp();
    if (now == lowest) continue;  // for the whole warp: nothing seen yet
    weights[warp][lane] = exponential(score - now);
    __syncwarp();
    const W rescale = exponential(highest - now);
    highest = now;
    total *= rescale;
#pragma unroll
    for (int i = 0; i < MAX_DIM / 32; ++i) sum[i] *= rescale;
    for (int j = 0; j < 32; ++j) {
      const W weight = weights[warp][j];
      if (weight == 0) continue;  // slots behind the tail are never read
      total += weight;
      const T* value = values + page_of(first + j) * a.value_batch + within(first + j) * a.value_slot;
#pragma unroll
      for (int i = 0; i < MAX_DIM / 32; ++i)
        if (lane + 32 * i < dim) sum[i] += weight * widen(value[lane + 32 * i]);
    }
    __syncwarp();
  }

#pragma unroll
  for (int i = 0; i < MAX_DIM / 32; ++i) sums[warp][lane + 32 * i] = sum[i];
  if (lane == 0) {
    stats[warp][0] = highest;
    stats[warp][1] = total;
  }
  __syncthreads();
  W all_highest = lowest, all_total = 0, factors[SIMPLE_WARPS];
  for (int w = 0; w < SIMPLE_WARPS; ++w) all_highest = max(all_highest, stats[w][0]);
#pragma unroll
  for (int w = 0; w < SIMPLE_WARPS; ++w) {
    factors[w] = all_highest == lowest ? W(0) : exponential(stats[w][0] - all_highest);
    all_total += stats[w][1] * factors[w];
  }
  const int64_t at = (batch * a.nodes + node) * gridDim.y + head;
  if (a.lse && threadIdx.x == 0)
    static_cast<W*>(a.lse)[at] = all_total > 0 ? all_highest + logarithm(all_total) : lowest;
  T* to = static_cast<T*>(a.out) + at * dim;
  for (int d = threadIdx.x; d < dim; d += blockDim.x) {
    W x = 0;
#pragma unroll
    for (int w = 0; w < SIMPLE_WARPS; ++w) x += sums[w][d] * factors[w];
    narrow(all_total > 0 ? x / all_total : W(0), &to[d]);
  }
}

EXPORT int tree_attention_simple(const void* query, const void* keys, const void* values, const int* mask_bits,
                                 const int* context_lens, const int* tail_lens, const int* node_lens,
                                 const int* block_table, void* out, void* lse, const int64_t* sizes, int64_t type,
                                 int64_t batch, int64_t kv_heads, double scale, void* stream) {
  const Arguments a = arguments_of(query, keys, values, mask_bits, context_lens, tail_lens, node_lens, block_table,
                                   out, lse, sizes);
  if (a.dim < 1 || a.dim > MAX_DIM) return cudaErrorInvalidValue;
  const dim3 grid(unsigned(a.nodes), unsigned(kv_heads * a.group), unsigned(batch)), block(32 * SIMPLE_WARPS);
  if (type == HALF) return LAUNCH(tree_attention_simple_kernel<__half>, grid, block, 0, stream, a, scale);
  if (type == BFLOAT16) return LAUNCH(tree_attention_simple_kernel<__nv_bfloat16>, grid, block, 0, stream, a, scale);
  if (type == FLOAT) return LAUNCH(tree_attention_simple_kernel<float>, grid, block, 0, stream, a, scale);
  if (type == DOUBLE) return LAUNCH(tree_attention_simple_kernel<double>, grid, block, 0, stream, a, scale);
  return cudaErrorInvalidValue;
}

// Attention over two parts of a cache as one over both: a warp per row of out, [rows, dim].
template <typename T>
__global__ void __launch_bounds__(32 * SIMPLE_WARPS)
    merge_attention_kernel(const T* __restrict__ out_a, const void* lse_a, const T* __restrict__ out_b,
                           const void* lse_b, int64_t rows, int dim, T* __restrict__ out, void* lse) {
  using W = typename Wide<T>::type;
  const int64_t row = int64_t(blockIdx.x) * SIMPLE_WARPS + threadIdx.x / 32;
  if (row >= rows) return;
  const W lowest = -W(__builtin_huge_val());
  const W a = static_cast<const W*>(lse_a)[row], b = static_cast<const W*>(lse_b)[row], highest = max(a, b);
  // NaN where neither part was seen, which no comparison below takes for more than 0.
  const W weight_a = exponential(a - highest), weight_b = exponential(b - highest), total = weight_a + weight_b;
  const W share_a = total > 0 ? weight_a / total : W(0), share_b = total > 0 ? weight_b / total : W(0);
  for (int d = threadIdx.x % 32; d < dim; d += 32)
    narrow(share_a * widen(out_a[row * dim + d]) + share_b * widen(out_b[row * dim + d]), &out[row * dim + d]);
  if (threadIdx.x % 32 == 0) static_cast<W*>(lse)[row] = total > 0 ? highest + logarithm(total) : lowest;
}

EXPORT int merge_attention(const void* out_a, const void* lse_a, const void* out_b, const void* lse_b, void* out,
                           void* lse, int64_t type, int64_t rows, int64_t dim, void* stream) {
  const dim3 grid(unsigned(ceil_div(rows, SIMPLE_WARPS))), block(32 * SIMPLE_WARPS);
  const auto run = [&](auto number) {
    using T = decltype(number);
    return LAUNCH(merge_attention_kernel<T>, grid, block, 0, stream, static_cast<const T*>(out_a), lse_a,
                  static_cast<const T*>(out_b), lse_b, rows, int(dim), static_cast<T*>(out), lse);
  };
  if (type == HALF) return run(__half());
  if (type == BFLOAT16) return run(__nv_bfloat16());
  if (type == FLOAT) return run(float());
  if (type == DOUBLE) return run(double());
  return cudaErrorInvalidValue;
}
