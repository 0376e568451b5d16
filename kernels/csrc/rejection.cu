// Rejection sampling of drafted tokens, along chains and down trees, without loss.
//
// Probabilities become integers in units of 2^-40 before they are compared, subtracted and
// summed. Integer sums do not depend on their order, so any split of the work over threads and
// blocks draws the same token as the reference.
#include "platform.cuh"

constexpr int WARP_SIZE = 32;
constexpr int SECTIONS = 32;
constexpr int SUMMING_WARPS = 8;
constexpr int MAX_THREADS = 512;  // more would leave each too few registers
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr double SCALE = 1099511627776.0;                    // 2^40
constexpr double BELOW_ONE = 1.0 - 1.0 / 9007199254740992.0;  // 1 - 2^-53

// A probability in units of 2^-40, rounded down; NaN and negative ones count as 0.
__device__ __forceinline__ int64_t weight(float prob) {
  return prob > 0 ? int64_t((prob < 1 ? prob : 1.0f) * float(SCALE)) : 0;
}

// A uniform in [0, 1), whatever was given.
__device__ __forceinline__ double in_unit_interval(double u) {
  return u > 0 ? (u < BELOW_ONE ? u : BELOW_ONE) : 0;
}

// The position in weights of this total at which a token is drawn.
__device__ __forceinline__ int64_t drawn_at(double uniform, int64_t total) {
  return int64_t(__dmul_rn(in_unit_interval(uniform), double(total)));
}

// Width of the sections of a range: of long ones a multiple of 4, so that a row's are read 16 bytes at a time.
__device__ __forceinline__ int64_t section_width(int64_t count) {
  const int64_t width = ceil_div(count, SECTIONS);
  return count > SECTIONS * SECTIONS ? ceil_div(width, 4) * 4 : width;
}

// Sum the weights of [low, high), by sections of equal width, one warp at a section: sums
// [SECTIONS] is shared, and all threads get the total. Calls weight_at once per index and waits
// for the block before and after, so weight_at may write what others read outside.
template <typename WeightAt>
__device__ int64_t sum_sections(WeightAt weight_at, int64_t low, int64_t high, int64_t* sums) {
  const int64_t width = section_width(high - low);
  const int lane = threadIdx.x % WARP_SIZE;
  __syncthreads();
  for (int section = threadIdx.x / WARP_SIZE; section < SECTIONS; section += blockDim.x / WARP_SIZE) {
    const int64_t begin = low + section * width;
    const int64_t end = begin + width < high ? begin + width : high;
    int64_t sum = 0;
    for (int64_t i = begin + lane; i < end; i += WARP_SIZE) sum += weight_at(i);
    if (begin < end)  // not an empty section of a short range
      for (int bits = WARP_SIZE / 2; bits; bits /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, bits);
    if (lane == 0) sums[section] = sum;
  }
  __syncthreads();
  int64_t total = 0;
  for (int section = 0; section < SECTIONS; ++section) total += sums[section];
  return total;
}

// The smallest index in [low, high) whose cumulative weight exceeds `target`, which is below
// their total. sums holds the sections of this range, and is used up.
template <typename WeightAt>
__device__ int64_t find(WeightAt weight_at, int64_t low, int64_t high, int64_t target, int64_t* sums) {
  while (true) {
    const int64_t width = section_width(high - low);
    int section = 0;
    while (section < SECTIONS - 1 && target >= sums[section]) target -= sums[section++];
    low += section * width;
    if (width <= 1) return low;
    high = low + width < high ? low + width : high;
    sum_sections(weight_at, low, high, sums);
  }
}

// Weights for the last token of a chain: the target's row minus the draft's, if given.
struct Residual {
  const float* target;
  const float* draft;

  __device__ __forceinline__ int64_t operator()(int64_t token) const {
    const int64_t wanted = weight(target[token]);
    if (!draft) return wanted;
    const int64_t drafted = weight(draft[token]);
    return wanted > drafted ? wanted - drafted : 0;
  }
};

// Blocks (row, split): each sums its part of the row that the last token is drawn from; the last
// block to finish draws it. partial [rows, splits]; arrived [rows] holds zeros, and does again
// afterwards; both are unused for one split.
__global__ void __launch_bounds__(MAX_THREADS, 1)
    chain_kernel(const int64_t* __restrict__ draft_tokens, const float* __restrict__ draft_probs,
                 const float* __restrict__ target_probs, const double* __restrict__ uniforms, int drafts,
                 int64_t vocabulary, int64_t* partial, int* arrived, int* __restrict__ accepted,
                 int64_t* __restrict__ emitted) {
  __shared__ int64_t sums[SECTIONS];
  __shared__ int first_failure;
  __shared__ bool is_last;
  const int64_t row = blockIdx.x;
  const int splits = gridDim.y;
  draft_tokens += row * drafts;
  draft_probs += row * drafts * vocabulary;
  target_probs += row * (drafts + 1) * vocabulary;
  uniforms += row * (drafts + 1);

  if (threadIdx.x == 0) first_failure = drafts;
  __syncthreads();
  for (int step = threadIdx.x; step < drafts; step += blockDim.x) {
    const int64_t token = draft_tokens[step];
    const bool inside = token >= 0 && token < vocabulary;
    const int64_t drafted = inside ? weight(draft_probs[step * vocabulary + token]) : 0;
    const int64_t wanted = inside ? weight(target_probs[step * vocabulary + token]) : 0;
    const bool pass = drafted > 0 && __dmul_rn(in_unit_interval(uniforms[step]), double(drafted)) < double(wanted);
    if (!pass) atomicMin(&first_failure, step);
  }
  __syncthreads();
  const int stop = first_failure;

  // Only a token that the draft can have drawn says something about the others.
  Residual residual = {target_probs + stop * vocabulary, nullptr};
  if (stop < drafts) {
    const int64_t token = draft_tokens[stop];
    const float* row_of_draft = draft_probs + stop * vocabulary;
    if (token >= 0 && token < vocabulary && weight(row_of_draft[token]) > 0) residual.draft = row_of_draft;
  }
  const int64_t part = ceil_div(vocabulary, splits);
  int64_t low = blockIdx.y * part;
  int64_t high = low + part < vocabulary ? low + part : vocabulary;
  int64_t total = sum_sections(residual, low, high, sums);

  if (splits > 1) {
    if (threadIdx.x == 0) {
      partial[row * splits + blockIdx.y] = total;
      __threadfence();
      is_last = atomicAdd(&arrived[row], 1) == splits - 1;
      if (is_last) arrived[row] = 0;  // for the next launch
      __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    total = 0;
    const volatile int64_t* parts = partial + row * splits;
    for (int split = 0; split < splits; ++split) total += parts[split];
  }

  int64_t last = -1;
  if (total == 0) {  // nothing is left: draw from the target's row
    residual.draft = nullptr;
    low = 0, high = vocabulary;
    total = sum_sections(residual, low, high, sums);
    if (total > 0) last = find(residual, low, high, drawn_at(uniforms[drafts], total), sums);
  } else {
    int64_t target = drawn_at(uniforms[drafts], total);
    if (splits > 1) {
      const volatile int64_t* parts = partial + row * splits;
      int split = 0;
      for (; split < splits - 1 && target >= parts[split]; ++split) target -= parts[split];
      low = split * part;
      high = low + part < vocabulary ? low + part : vocabulary;
      sum_sections(residual, low, high, sums);
    }
    last = find(residual, low, high, target, sums);
  }
  if (threadIdx.x == 0) accepted[row] = stop;
  for (int step = threadIdx.x; step <= drafts; step += blockDim.x)
    emitted[row * (drafts + 1) + step] = step < stop ? draft_tokens[step] : step == stop ? last : -1;
}

enum Kind { IID, WITHOUT_REPLACEMENT, TOP_K };

// Units of 2^-40 per unit of weight.
__device__ __forceinline__ double units(int64_t total) { return __ddiv_rn(SCALE, double(total > 0 ? total : 1)); }

// The sums of a row's sections.
struct RowSums {
  int64_t target[SECTIONS], draft[SECTIONS];
};

// Blocks (row, part): sums of the row's sections, a warp a section, of target and draft. Only what `tree_kernel` can
// ask for: no row of padding, and of the draft none whose node has no child.
__global__ void __launch_bounds__(MAX_THREADS)
    row_sums_kernel(const int* __restrict__ parents, const float* __restrict__ draft_probs,
                    const float* __restrict__ target_probs, int nodes, int64_t vocabulary,
                    RowSums* __restrict__ row_sums) {
  const int64_t row = blockIdx.x;
  const int node = int(row % nodes);
  const int* tree = parents + (row - node);
  if (node > 0 && tree[node] < 0) return;
  int is_parent = 0;
  for (int child = node + 1 + threadIdx.x; child < nodes; child += blockDim.x) is_parent |= tree[child] == node;
  const bool drafted = __syncthreads_or(is_parent) && draft_probs;

  const int64_t width = section_width(vocabulary);
  const int lane = threadIdx.x % WARP_SIZE, warps = blockDim.x / WARP_SIZE;
  const bool by_fours = width % 4 == 0 && vocabulary % 4 == 0;  // rows begin where four floats do
  for (int section = blockIdx.y * warps + threadIdx.x / WARP_SIZE; section < SECTIONS; section += gridDim.y * warps) {
    const int64_t begin = section * width, end = begin + width < vocabulary ? begin + width : vocabulary;
    for (int which = 0; which < 1 + drafted; ++which) {
      const float* probs = (which ? draft_probs : target_probs) + row * vocabulary;
      int64_t sum = 0;
      if (by_fours && reinterpret_cast<uintptr_t>(probs) % 16 == 0) {
#pragma unroll 4
        for (int64_t i = begin + 4 * lane; i < end; i += 4 * WARP_SIZE) {
          const float4 four = *reinterpret_cast<const float4*>(probs + i);
          sum += weight(four.x) + weight(four.y) + weight(four.z) + weight(four.w);
        }
      } else {
#pragma unroll 4
        for (int64_t i = begin + lane; i < end; i += WARP_SIZE) sum += weight(probs[i]);
      }
      for (int bits = WARP_SIZE / 2; bits; bits /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, bits);
      if (lane == 0) (which ? row_sums[row].draft : row_sums[row].target)[section] = sum;
    }
  }
}

// One block per tree, which walks down on the rows' sums and passes over a row only where a sibling was rejected and to
// draw the last token. left [trees, vocabulary]: what remains of the target's distribution at the
// current node after a rejection there; unused for top-k, where whole tokens are removed.
__global__ void __launch_bounds__(MAX_THREADS, 1)
    tree_kernel(const int64_t* __restrict__ tokens, const int* __restrict__ parents,
                const float* __restrict__ draft_probs, const float* __restrict__ target_probs,
                const double* __restrict__ uniforms, const RowSums* __restrict__ row_sums, int nodes,
                int64_t vocabulary, int kind, int64_t* left, int* __restrict__ path, int* __restrict__ accepted,
                int64_t* __restrict__ emitted) {
  __shared__ int64_t sums[SECTIONS];  // of what remains of the target's distribution
  const int64_t first = int64_t(blockIdx.x) * nodes;
  tokens += first;
  parents += first;
  path += first;
  emitted += first;
  row_sums += first;
  uniforms += int64_t(blockIdx.x) * (nodes + 1);
  left += int64_t(blockIdx.x) * vocabulary;

  // Each thread holds the same: the last accepted node, and how much remains there.
  int current = 0, depth = 0;
  bool subtracted = false;  // `left` is in use
  const float* target = target_probs + first * vocabulary;
  const float* draft = nullptr;  // null before the current node's first child
  int64_t draft_total = 0;
  const auto row_weight = [&](int64_t i) { return weight(target[i]); };
  const auto remaining_weight = [&](int64_t i) { return subtracted ? left[i] : weight(target[i]); };
  const auto is_child = [&](int64_t token, int end) {  // among the nodes before `end`
    for (int node = current + 1; node < end; ++node)
      if (parents[node] == current && tokens[node] == token) return true;
    return false;
  };
  const auto enter = [&] {  // all of the current node's row remains; returns its sum
    __syncthreads();        // all have read the sums of before
    if (threadIdx.x < SECTIONS) sums[threadIdx.x] = row_sums[current].target[threadIdx.x];
    __syncthreads();
    int64_t all = 0;
    for (int section = 0; section < SECTIONS; ++section) all += sums[section];
    return all;
  };
  int64_t total = enter();

  // Children follow their parent, so one pass meets those of each accepted node in order.
  for (int node = 1; node < nodes; ++node) {
    if (parents[node] != current) continue;
    const int64_t token = tokens[node];
    if (token < 0 || token >= vocabulary) continue;
    if (kind != IID && is_child(token, node)) continue;  // only one of them can have been drafted
    int64_t drafted = 0;
    double wanted = double(remaining_weight(token)), offered = double(total);
    double per_target = 1, per_draft = 1;
    if (kind != TOP_K) {
      if (!draft) {
        draft = draft_probs + (first + current) * vocabulary;
        draft_total = 0;
        for (int section = 0; section < SECTIONS; ++section) draft_total += row_sums[current].draft[section];
      }
      drafted = weight(draft[token]);
      if (drafted == 0) continue;  // the draft cannot have drawn it
      per_target = units(total), per_draft = units(draft_total);
      wanted = __dmul_rn(wanted, per_target);
      offered = __dmul_rn(double(drafted), per_draft);
    }

    if (__dmul_rn(in_unit_interval(uniforms[node]), offered) < wanted) {
      current = node;
      ++depth;
      if (threadIdx.x == 0) {
        path[depth] = node;
        emitted[depth - 1] = token;
      }
      subtracted = false;
      draft = nullptr;
      target = target_probs + (first + current) * vocabulary;
      total = enter();
    } else if (kind == TOP_K) {
      const int64_t removed = row_weight(token);
      __syncthreads();  // all have read the sums
      if (threadIdx.x == 0) sums[token / section_width(vocabulary)] -= removed;
      __syncthreads();
      total -= removed;
    } else {
      // Nothing remains of tokens rejected before, so their draft weights no longer matter here.
      const auto residual = [&](int64_t i) {
        const double rest = __dadd_rn(__dmul_rn(double(remaining_weight(i)), per_target),
                                      -__dmul_rn(double(weight(draft[i])), per_draft));
        return left[i] = rest > 0 ? int64_t(rest) : 0;
      };
      total = sum_sections(residual, 0, vocabulary, sums);
      subtracted = true;
      if (kind == WITHOUT_REPLACEMENT) draft_total -= drafted;
    }
  }

  bool removed_any = kind == TOP_K;
  if (total == 0) {  // nothing is left: draw from the target's row
    subtracted = removed_any = false;
    total = enter();
  }
  const auto last_weight = [&](int64_t i) { return removed_any && is_child(i, nodes) ? 0 : remaining_weight(i); };
  int64_t last = -1;
  if (total > 0) last = find(last_weight, 0, vocabulary, drawn_at(uniforms[nodes], total), sums);
  for (int node = depth + threadIdx.x; node < nodes; node += blockDim.x) {
    if (node > depth) path[node] = -1;
    emitted[node] = node == depth ? last : -1;
  }
  if (threadIdx.x == 0) {
    path[0] = 0;
    accepted[blockIdx.x] = depth;
  }
}

// A block has a thread for every 8 of its tokens, up to the limit.
static unsigned threads_for(int64_t tokens) {
  const int64_t threads = ceil_div(ceil_div(tokens, 8), WARP_SIZE) * WARP_SIZE;
  return unsigned(threads < MAX_THREADS ? threads : MAX_THREADS);
}

EXPORT int chain_rejection(const int64_t* draft_tokens, const float* draft_probs, const float* target_probs,
                           const double* uniforms, int64_t rows, int64_t drafts, int64_t vocabulary, int64_t splits,
                           int64_t* partial, int* arrived, int* accepted, int64_t* emitted, void* stream) {
  if (rows == 0) return cudaSuccess;
  if (splits < 1 || splits > vocabulary) return cudaErrorInvalidValue;
  const unsigned threads = threads_for(ceil_div(vocabulary, splits));
  return LAUNCH(chain_kernel, dim3(unsigned(rows), unsigned(splits)), dim3(threads), 0, stream, draft_tokens,
                draft_probs, target_probs, uniforms, int(drafts), vocabulary, partial, arrived, accepted, emitted);
}

EXPORT int tree_rejection(const int64_t* tokens, const int* parents, const float* draft_probs,
                          const float* target_probs, const double* uniforms, int64_t trees, int64_t nodes,
                          int64_t vocabulary, int64_t kind, void* row_sums, int64_t* left, int* path, int* accepted,
                          int64_t* emitted, void* stream) {
  if (trees == 0) return cudaSuccess;
  if (vocabulary < 1 || kind < IID || kind > TOP_K) return cudaErrorInvalidValue;
  RowSums* sums = static_cast<RowSums*>(row_sums);
  // A few warps a block, so that one tree's rows too fill a GPU.
  const dim3 parts(unsigned(trees * nodes), vocabulary > SECTIONS * SECTIONS ? SECTIONS / SUMMING_WARPS : 1);
  const int code = LAUNCH(row_sums_kernel, parts, dim3(SUMMING_WARPS * WARP_SIZE), 0, stream, parents, draft_probs,
                          target_probs, int(nodes), vocabulary, sums);
  if (code != cudaSuccess) return code;
  return LAUNCH(tree_kernel, dim3(unsigned(trees)), dim3(threads_for(vocabulary)), 0, stream, tokens, parents,
                draft_probs, target_probs, uniforms, sums, int(nodes), vocabulary, int(kind), left, path, accepted,
                emitted);
}
