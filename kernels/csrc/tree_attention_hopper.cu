// Tree attention on Hopper, for 64 rows and more of heads up to 128: one thread fetches tiles of the cache, one or two
// warpgroups compute. Written against the PTX ISA and proven on emulated threads; no GPU has run it yet.
//
// Tiles of keys and of values take turns in a ring of slots. A slot has two barriers: `full`, at which computing warps
// wait for its bytes, and `empty`, at which the fetching thread waits for all of them to have finished with it. The
// scores of a tile are computed while the values of the one before are still being summed up.
#include "hopper.cuh"
#include "tree_attention.cuh"

constexpr int TILE_KEYS = 128;

// D head size, or the next larger one there is a shape for; warpgroups that compute 64 rows each.
template <int D_, int WARPGROUPS_>
struct Shape {
  static constexpr int D = D_, KEYS = TILE_KEYS, RADIX = 4;
  static constexpr int WARPGROUPS = WARPGROUPS_, WARPS = 4 * WARPGROUPS, THREADS = 32 * WARPS;
  // A warpgroup of which one thread fetches; its registers go to the others, where 168 for each are too few.
  static constexpr int ALL_THREADS = THREADS + 128;
  static constexpr bool MOVES_REGISTERS = WARPGROUPS == 2;
  static constexpr int ROW_TILES = 1, WARP_ROWS = 16, ROWS = 64 * WARPGROUPS;
  static constexpr int KEY_WARPS = 1, KEPT_COLUMNS = D / 8;
  // A tile of 64 columns is one of rows of 128 bytes; a head of 128 is two of them.
  static constexpr int HALVES = D / 64, HALF_BYTES = KEYS * 128, TILE_BYTES = HALVES * HALF_BYTES;
  static constexpr int QUERY_HALF_BYTES = ROWS * 128, QUERY_BYTES = HALVES * QUERY_HALF_BYTES;
  static constexpr int SLOTS = D == 64 ? 8 : 6;  // of which three are in use while the others fill
  static constexpr int SHARED_BYTES = QUERY_BYTES + SLOTS * TILE_BYTES + 2 * SLOTS * int(sizeof(uint64_t));
  static_assert(D % 64 == 0 && SLOTS >= 4 && SLOTS % 2 == 0 && SHARED_BYTES <= 226 * 1024);
};

// The ring of slots. Tile number i of the part, keys for even and values for odd i, goes to slot i % SLOTS.
template <typename S>
struct Ring {
  unsigned char* tiles;
  uint64_t *full, *empty;

  __device__ __forceinline__ unsigned char* tile(int i) const { return tiles + i % S::SLOTS * S::TILE_BYTES; }
  __device__ __forceinline__ void wait_full(int i) const { barrier_wait(full + i % S::SLOTS, i / S::SLOTS & 1); }
  __device__ __forceinline__ void wait_empty(int i) const {
    if (i >= S::SLOTS) barrier_wait(empty + i % S::SLOTS, (i / S::SLOTS - 1) & 1);
  }
  __device__ __forceinline__ void release(int i) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + i % S::SLOTS);
  }
};

// One thread fetches the part's tiles into the ring, keys and values in turn. A tile is one box.
template <typename S>
__device__ __forceinline__ void fetch(const Arguments& a, const Work& w, const Ring<S>& ring, const CUtensorMap* keys,
                                      const CUtensorMap* values) {
  for (int i = 0; i < 2 * (w.last - w.first); ++i) {
    const int first_slot = (w.first + i / 2) * S::KEYS;
    uint64_t* full = ring.full + i % S::SLOTS;
    ring.wait_empty(i);
    barrier_expect(full, S::TILE_BYTES);
#pragma unroll
    for (int half = 0; half < S::HALVES; ++half)
      copy_box_async(ring.tile(i) + half * S::HALF_BYTES, i % 2 ? values : keys, full, half * 64, first_slot,
                     w.kv_head, int(w.batch));
  }
}

template <typename T, typename S>
__global__ void __launch_bounds__(S::ALL_THREADS, 1)
    tree_attention_hopper_kernel(const __grid_constant__ Arguments a, const __grid_constant__ CUtensorMap keys,
                                 const __grid_constant__ CUtensorMap values) {
#ifdef HOPPER
  SHARED_MEMORY(shared, 1024);
  const Place<S> place;
  const Work w = work_of<S>(a);
  if (w.split >= w.used_splits) return;
  Ring<S> ring = {shared + S::QUERY_BYTES};
  ring.full = reinterpret_cast<uint64_t*>(ring.tiles + S::SLOTS * S::TILE_BYTES);
  ring.empty = ring.full + S::SLOTS;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < S::SLOTS; ++slot) {
      barrier_init(ring.full + slot, 1);
      barrier_init(ring.empty + slot, S::WARPS);
    }
    barriers_ready();
  }
  __syncthreads();
  if (place.warp >= S::WARPS) {
    if constexpr (S::MOVES_REGISTERS) registers_down_to<24>();
    if (threadIdx.x == S::THREADS) fetch(a, w, ring, &keys, &values);
    return;
  }
  if constexpr (S::MOVES_REGISTERS) registers_up_to<240>();

  for (int index = threadIdx.x; index < S::ROWS * S::D / 8; index += S::THREADS) {
    const int local = index / (S::D / 8), chunk = index % (S::D / 8);
    load_query(a, w, shared + chunk / 8 * S::QUERY_HALF_BYTES + local * 128 + (chunk % 8 ^ local % 8) * 16, local,
               chunk);
  }
  copy_async_commit();
  copy_async_wait<0>();
  async_proxy_fence();
  named_barrier<S::THREADS>();

  const unsigned char* query = shared + place.warp / 4 * 64 * 128;
  float sums[1][S::D / 8][4] = {}, scores[1][S::KEYS / 8][4], rescale[1][2];
  uint32_t weights[S::KEYS / 16][4];
  Softmax<S> softmax;
  const auto multiply_keys = [&](int i) {
#pragma unroll
    for (int step = 0; step < S::D / 16; ++step) {
      const int half = step / 4, within = step % 4 * 32;
      multiply_add_async<T>(scores[0], matrix_in_shared(query + half * S::QUERY_HALF_BYTES + within, 1024),
                            matrix_in_shared(ring.tile(i) + half * S::HALF_BYTES + within, 1024), step > 0);
    }
    warpgroup_commit();
  };
  const auto multiply_values = [&](int i) {
#pragma unroll
    for (int step = 0; step < S::KEYS / 16; ++step)
      multiply_add_async<T>(sums[0], weights[step],
                            matrix_in_shared(ring.tile(i) + step * 16 * 128, 1024, S::HALF_BYTES));
    warpgroup_commit();
  };
  const auto weigh = [&](int tile) {
    if ((tile + 1) * S::KEYS > w.of.context)  // tiles within the context need no mask
      hide_unseen<S>(a, w, place, tile * S::KEYS, scores);
    return softmax.add(a.scale, scores, rescale);
  };
  const auto pack_weights = [&] {
#pragma unroll
    for (int step = 0; step < S::KEYS / 16; ++step) pack_operand<T>(weights[step], scores[0], step);
  };

  const int tiles = w.last - w.first;
  if (tiles > 0) {
    ring.wait_full(0);
    warpgroup_fence(scores[0]);
    multiply_keys(0);
    warpgroup_wait<0>(scores[0]);
    ring.release(0);
    weigh(w.first);
    pack_weights();
    for (int tile = 1; tile < tiles; ++tile) {
      ring.wait_full(2 * tile - 1);
      ring.wait_full(2 * tile);
      warpgroup_fence(scores[0], weights, sums[0]);
      multiply_keys(2 * tile);
      multiply_values(2 * tile - 1);
      warpgroup_wait<1>(scores[0]);  // the scores are here, the sums are under way
      ring.release(2 * tile);
      const bool moved = weigh(w.first + tile);
      warpgroup_wait<0>(sums[0]);
      ring.release(2 * tile - 1);
      if (moved) multiply_rows<S>(sums, rescale);
      pack_weights();
    }
    const int last = 2 * tiles - 1, used = w.of.end - (w.last - 1) * S::KEYS;
    ring.wait_full(last);
    if (used < S::KEYS) {  // what lies behind the tail may be NaN, and 0 * NaN is NaN
#pragma unroll
      for (int half = 0; half < S::HALVES; ++half)
        for (int at = used * 128 + threadIdx.x * 16; at < S::HALF_BYTES; at += S::THREADS * 16)
          *reinterpret_cast<uint4*>(ring.tile(last) + half * S::HALF_BYTES + at) = uint4{0, 0, 0, 0};
      async_proxy_fence();
      named_barrier<S::THREADS>();
    }
    warpgroup_fence(weights, sums[0]);
    multiply_values(last);
    warpgroup_wait<0>(sums[0]);
  }
  softmax.finish();

  float4 kept[1][S::KEPT_COLUMNS];
#pragma unroll
  for (int n = 0; n < S::KEPT_COLUMNS; ++n)
    kept[0][n] = float4{sums[0][n][0], sums[0][n][1], sums[0][n][2], sums[0][n][3]};
  // All tiles have come, so the fetching thread is done: barriers of the block are those of the others.
  if (merge_splits<S>(a, w, place, kept, softmax)) write_rows<T, S>(a, w, place, kept, softmax);
#endif
}

// Use of a shape: to count the blocks per multiprocessor, or to launch.
struct Occupancy {
  template <typename T, typename S>
  int use() const {
    return resident_blocks(tree_attention_hopper_kernel<T, S>, S::ALL_THREADS, S::SHARED_BYTES, 1);
  }
};

struct Launch {
  const Arguments& a;
  const CUtensorMap &keys, &values;
  dim3 grid;
  void* stream;

  template <typename T, typename S>
  int use() const {
    const cudaError_t allowed = ALLOW_SHARED_MEMORY((tree_attention_hopper_kernel<T, S>), S::SHARED_BYTES);
    if (allowed != cudaSuccess) return allowed;
    return LAUNCH((tree_attention_hopper_kernel<T, S>), grid, dim3(S::ALL_THREADS), S::SHARED_BYTES, stream, a, keys,
                  values);
  }
};

template <typename T, typename Task>
int with_shape(const Task& task, int64_t block_dim, int64_t block_rows) {
  if (block_dim == 64 && block_rows == 64) return task.template use<T, Shape<64, 1>>();
  if (block_dim == 64 && block_rows == 128) return task.template use<T, Shape<64, 2>>();
  if (block_dim == 128 && block_rows == 64) return task.template use<T, Shape<128, 1>>();
  if (block_dim == 128 && block_rows == 128) return task.template use<T, Shape<128, 2>>();
  return cudaErrorInvalidValue;
}

// As tree_attention, of the same arguments but for the last.
EXPORT int tree_attention_hopper(const void* query, const void* keys, const void* values, const int* mask_bits,
                                 const int* context_lens, const int* tail_lens, void* out, void* part_sums,
                                 void* part_stats, void* arrived, const int64_t* sizes, int64_t type, int64_t batch,
                                 int64_t kv_heads, int64_t splits, int64_t block_dim, int64_t block_rows, double scale,
                                 void* stream) {
  Arguments a = arguments_of(query, keys, values, mask_bits, context_lens, tail_lens, out, sizes);
  set_splits(a, part_sums, part_stats, arrived, splits, block_rows, scale);
  if (a.dim % 8 || a.dim > block_dim) return cudaErrorInvalidValue;
  // Columns, slots, heads, sequences. In a dimension of one any stride does, so it gets one that is allowed.
  const uint64_t extents[] = {uint64_t(a.dim), uint64_t(a.capacity), uint64_t(kv_heads), uint64_t(batch)};
  const auto map_of = [&](CUtensorMap* map, const void* base, int64_t slot, int64_t head, int64_t sequence) {
    uint64_t strides[] = {uint64_t(slot), uint64_t(head), uint64_t(sequence)};
    for (int d = 0; d < 3; ++d) strides[d] = 2 * (extents[d + 1] > 1 ? strides[d] : extents[0]);
    return make_tensor_map(map, type == BFLOAT16, base, extents, strides, unsigned(TILE_KEYS));
  };
  CUtensorMap key_map, value_map;
  for (cudaError_t code : {map_of(&key_map, keys, a.key_slot, a.key_head, a.key_batch),
                           map_of(&value_map, values, a.value_slot, a.value_head, a.value_batch)})
    if (code != cudaSuccess) return code;
  const dim3 grid(unsigned(a.row_tiles * splits), unsigned(kv_heads), unsigned(batch));
  const Launch task = {a, key_map, value_map, grid, stream};
  if (type == HALF) return with_shape<__half>(task, block_dim, block_rows);
  if (type == BFLOAT16) return with_shape<__nv_bfloat16>(task, block_dim, block_rows);
  return cudaErrorInvalidValue;
}

// Blocks that a multiprocessor holds at once, of either type.
EXPORT int tree_attention_hopper_occupancy(int64_t block_dim, int64_t block_rows) {
  return with_shape<__nv_bfloat16>(Occupancy(), block_dim, block_rows);
}
