// Tree attention over a long cache: each block takes a tile of rows and a part of the cache.
#include "tree_attention.cuh"

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
  static constexpr int FRAGMENTS = ROW_TILES * D / 8, KEPT_COLUMNS = D / 8 / KEY_WARPS;
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

// Start of the cache of one sequence and head.
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
    const int64_t key_at = slot * a.key_slot, value_at = slot * a.value_slot;
    unsigned char* to = key_tile + row * S::ROW_BYTES + chunk * 16;
    copy_async_16(to, cache.keys + 2 * key_at + chunk * 16, bytes);
    copy_async_16(to + S::TILE_BYTES, cache.values + 2 * value_at + chunk * 16, bytes);
  }
}

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS) tree_attention_kernel(const __grid_constant__ Arguments a) {
  SHARED_MEMORY(shared, 16);
  const Place<S> place;
  const Work w = work_of<S>(a);
  if (w.split >= w.used_splits) return;
  const int lane = place.lane, row_warp = place.row_warp, key_warp = place.key_warp;

  const Cache cache = {
      static_cast<const char*>(a.keys) + (w.batch * a.key_batch + w.kv_head * a.key_head) * 2,
      static_cast<const char*>(a.values) + (w.batch * a.value_batch + w.kv_head * a.value_head) * 2};
  unsigned char* stages = shared + S::QUERY_BYTES;

  for (int index = threadIdx.x; index < S::ROWS * S::CHUNKS; index += S::THREADS) {
    const int local = index / S::CHUNKS, chunk = index % S::CHUNKS;
    load_query(a, w, shared + local * S::ROW_BYTES + chunk * 16, local, chunk);
  }
  copy_async_commit();
#pragma unroll
  for (int stage = 0; stage < S::STAGES - 1; ++stage) {
    if (w.first + stage < w.last)
      load_tile<S>(a, cache, w.of, stages + stage * 2 * S::TILE_BYTES, (w.first + stage) * S::KEYS);
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
  Softmax<S> softmax;

  for (int tile = w.first; tile < w.last; ++tile) {
    copy_async_wait<S::STAGES - 2>();
    __syncthreads();  // this tile is here, and all have finished with the one before
    if (tile + S::STAGES - 1 < w.last) {
      const int next = tile + S::STAGES - 1;
      load_tile<S>(a, cache, w.of, stages + (next - w.first) % S::STAGES * 2 * S::TILE_BYTES, next * S::KEYS);
    }
    copy_async_commit();
    const unsigned char* key_tile = stages + (tile - w.first) % S::STAGES * 2 * S::TILE_BYTES;
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

    if ((tile + 1) * S::KEYS > w.of.context)  // tiles within the context need no mask
      hide_unseen<S>(a, w, place, tile * S::KEYS + key_warp * S::WARP_KEYS, scores);
    float rescale[S::ROW_TILES][2];
    if (softmax.add(a.scale, scores, rescale)) multiply_rows<S>(sums, rescale);

#pragma unroll
    for (int step = 0; step < S::WARP_KEYS / 16; ++step) {
      uint32_t weights[S::ROW_TILES][4];
#pragma unroll
      for (int m = 0; m < S::ROW_TILES; ++m) pack_operand<T>(weights[m], scores[m], step);
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
  softmax.finish();

  // From here on a warp keeps the columns of its share of the head only, for all keys.
  float4 kept[S::ROW_TILES][S::KEPT_COLUMNS];
  float4* all_sums = reinterpret_cast<float4*>(shared);  // [warp, fragment, lane]
  float2* all_stats = reinterpret_cast<float2*>(all_sums + S::THREADS * S::FRAGMENTS);  // [warp, row]
  copy_async_wait<0>();  // without tiles the query's copies are under way still
  __syncthreads();  // all have finished with the tiles
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < S::D / 8; ++n)
      all_sums[(place.warp * S::FRAGMENTS + m * (S::D / 8) + n) * 32 + lane] =
          float4{sums[m][n][0], sums[m][n][1], sums[m][n][2], sums[m][n][3]};
    if (place.quad_lane == 0)
      for (int upper = 0; upper < 2; ++upper)
        all_stats[place.warp * S::WARP_ROWS + m * 16 + upper * 8 + place.quad_row] =
            float2{softmax.highest[m][upper], softmax.total[m][upper]};
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < S::ROW_TILES; ++m) {
    float weights[S::KEY_WARPS][2];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float2 stats[S::KEY_WARPS];
      float highest = MINUS_INFINITY, total = 0;
#pragma unroll
      for (int other = 0; other < S::KEY_WARPS; ++other) {
        stats[other] =
            all_stats[(row_warp * S::KEY_WARPS + other) * S::WARP_ROWS + m * 16 + upper * 8 + place.quad_row];
        highest = fmaxf(highest, stats[other].x);
      }
#pragma unroll
      for (int other = 0; other < S::KEY_WARPS; ++other) {
        weights[other][upper] = fast_exp2(stats[other].x - finite_shift(highest));
        total += stats[other].y * weights[other][upper];
      }
      softmax.highest[m][upper] = highest;
      softmax.total[m][upper] = total;
    }
#pragma unroll
    for (int n = 0; n < S::KEPT_COLUMNS; ++n) {
      kept[m][n] = float4{0, 0, 0, 0};
#pragma unroll
      for (int other = 0; other < S::KEY_WARPS; ++other) {
        const int fragment = m * (S::D / 8) + key_warp * S::KEPT_COLUMNS + n;
        const float4 x = all_sums[((row_warp * S::KEY_WARPS + other) * S::FRAGMENTS + fragment) * 32 + lane];
        kept[m][n].x += x.x * weights[other][0];
        kept[m][n].y += x.y * weights[other][0];
        kept[m][n].z += x.z * weights[other][1];
        kept[m][n].w += x.w * weights[other][1];
      }
    }
  }

  if (merge_splits<S>(a, w, place, kept, softmax)) write_rows<T, S>(a, w, place, kept, softmax);
}

// Use of a shape: to count the blocks per multiprocessor, or to launch.
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

// Addresses and strides are multiples of 16 bytes.
EXPORT int tree_attention(const void* query, const void* keys, const void* values, const int* mask_bits,
                          const int* context_lens, const int* tail_lens, void* out, void* part_sums, void* part_stats, void* arrived, const int64_t* sizes,
                          int64_t type, int64_t batch, int64_t kv_heads, int64_t splits,
                          int64_t block_dim, int64_t block_rows, int64_t tight, double scale, void* stream) {
  Arguments a = arguments_of(query, keys, values, mask_bits, context_lens, tail_lens, out, sizes);
  set_splits(a, part_sums, part_stats, arrived, splits, block_rows, scale);
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
  const T* keys = static_cast<const T*>(a.keys) + batch * a.key_batch + kv_head * a.key_head;
  const T* values = static_cast<const T*>(a.values) + batch * a.value_batch + kv_head * a.value_head;
  const int* bits = a.mask_bits + (batch * a.nodes + node) * a.words;
  const T* from = static_cast<const T*>(a.query) + batch * a.query_batch + head * a.query_head + node * a.query_node;
  for (int d = threadIdx.x; d < dim; d += blockDim.x) query[d] = widen(from[d]);
  __syncthreads();

  const W lowest = -W(__builtin_huge_val());
  W highest = lowest, total = 0, sum[MAX_DIM / 32] = {};
  for (int first = 32 * warp; first < of.end; first += 32 * SIMPLE_WARPS) {
    const int slot = first + lane, other = slot - of.context;
    W score = lowest;
    if (slot < of.end && (other < 0 || (other < 32 * a.words && (bits[other / 32] >> other % 32 & 1)))) {
      score = 0;
      const T* key = keys + slot * a.key_slot;
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
      const T* value = values + (first + j) * a.value_slot;
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
  T* to = static_cast<T*>(a.out) + at * dim;
  for (int d = threadIdx.x; d < dim; d += blockDim.x) {
    W x = 0;
#pragma unroll
    for (int w = 0; w < SIMPLE_WARPS; ++w) x += sums[w][d] * factors[w];
    narrow(all_total > 0 ? x / all_total : W(0), &to[d]);
  }
}

EXPORT int tree_attention_simple(const void* query, const void* keys, const void* values, const int* mask_bits,
                                 const int* context_lens, const int* tail_lens, void* out, const int64_t* sizes,
                                 int64_t type, int64_t batch, int64_t kv_heads, double scale, void* stream) {
  const Arguments a = arguments_of(query, keys, values, mask_bits, context_lens, tail_lens, out, sizes);
  if (a.dim < 1 || a.dim > MAX_DIM) return cudaErrorInvalidValue;
  const dim3 grid(unsigned(a.nodes), unsigned(kv_heads * a.group), unsigned(batch)), block(32 * SIMPLE_WARPS);
  if (type == HALF) return LAUNCH(tree_attention_simple_kernel<__half>, grid, block, 0, stream, a, scale);
  if (type == BFLOAT16) return LAUNCH(tree_attention_simple_kernel<__nv_bfloat16>, grid, block, 0, stream, a, scale);
  if (type == FLOAT) return LAUNCH(tree_attention_simple_kernel<float>, grid, block, 0, stream, a, scale);
  if (type == DOUBLE) return LAUNCH(tree_attention_simple_kernel<double>, grid, block, 0, stream, a, scale);
  return cudaErrorInvalidValue;
}
