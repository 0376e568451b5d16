// Token, probability, confidence, entropy and logsumexp of rows of logits, in one pass and one launch.
//
// A row is cut into parts, one block each. A thread handles a group of 16-byte vectors at a time:
// it takes their maximum, then their exponentials relative to the running maximum. The block that
// is the last of its row to finish merges the parts.
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstring>

#include "platform.cuh"

constexpr int WARP_LANES = 32, THREADS = 256, WARPS = THREADS / WARP_LANES;
constexpr int MAX_TOP_K = WARP_LANES;   // lane i of a warp holds the i-th entry of its list
constexpr int MAX_SPLITS = WARP_LANES;  // lane i merges part i
constexpr unsigned ALL_LANES = 0xffffffffu;

// Traits of the type X of x, in which all sums are computed.
template <typename X>
struct Number;

template <>
struct Number<float> {
  static constexpr float LARGEST = FLT_MAX;
  static constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;
  static constexpr float FLOOR = -150.f;  // 2^FLOOR is 0
  static __device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
  static __device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }  // NaN loses
  static __device__ __forceinline__ float size(float a) { return fabsf(a); }
  static __device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
  static __device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
  static __device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
  static __device__ __forceinline__ float exp(float a) { return expf(a); }
  static __device__ __forceinline__ float log(float a) { return logf(a); }
  // 2^a for a <= 0, within 2 units of the last place, 1 at 0; too small becomes 0.
  static __device__ __forceinline__ float exp2(float a) {
#ifdef SPECKERNELS_HOST
    return exp2f(a);
#else
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(a));
    return power;
#endif
  }
};

template <>
struct Number<double> {
  static constexpr double LARGEST = DBL_MAX;
  static constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;
  static constexpr double FLOOR = -1100.0;
  static __device__ __forceinline__ double infinity() { return __longlong_as_double(0x7ff0000000000000LL); }
  static __device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }
  static __device__ __forceinline__ double size(double a) { return fabs(a); }
  static __device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }
  static __device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
  static __device__ __forceinline__ double divide(double a, double b) { return __ddiv_rn(a, b); }
  static __device__ __forceinline__ double exp(double a) { return ::exp(a); }
  static __device__ __forceinline__ double log(double a) { return ::log(a); }
  static __device__ __forceinline__ double exp2(double a) { return ::exp2(a); }
};

// The type of x, the conversion to it, and a word of -inf (of float64 the upper word; the lower one is 0).
template <typename T>
struct Logit;
template <>
struct Logit<float> {
  using X = float;
  static constexpr unsigned MINUS_INFINITY = 0xff800000u;
  static __device__ __forceinline__ float widen(float a) { return a; }
};
template <>
struct Logit<double> {
  using X = double;
  static constexpr unsigned MINUS_INFINITY = 0xfff00000u;
  static __device__ __forceinline__ double widen(double a) { return a; }
};
template <>
struct Logit<__half> {
  using X = float;
  static constexpr unsigned MINUS_INFINITY = 0xfc00fc00u;
  static __device__ __forceinline__ float widen(__half a) { return __half2float(a); }
};
template <>
struct Logit<__nv_bfloat16> {
  using X = float;
  static constexpr unsigned MINUS_INFINITY = 0xff80ff80u;
  static __device__ __forceinline__ float widen(__nv_bfloat16 a) { return __bfloat162float(a); }
};

// A logit of the top-k: larger values first, then lower indices.
template <typename X>
struct Entry {
  X value;
  int index;
};
template <typename X>
__device__ __forceinline__ Entry<X> no_entry() {
  return {-Number<X>::infinity(), INT_MAX};
}
template <typename X>
__device__ __forceinline__ bool before(Entry<X> a, Entry<X> b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// A part of a row, or what is known of it so far. With d = log2(e) (x - maximum):
// z = sum of 2^d, s = sum of d 2^d. `score` is the largest x + noise, `index` its token (INT_MAX: none).
template <typename X>
struct alignas(8 * sizeof(X)) Part {
  X maximum, z, s, score;
  int index;
};
static_assert(sizeof(Part<float>) == 32 && sizeof(Part<double>) == 64, "the workspace is 8 numbers per part");
static_assert(sizeof(Entry<float>) == 8 && sizeof(Entry<double>) == 16, "the workspace is 2 numbers per entry");

template <typename X>
__device__ __forceinline__ Part<X> empty_part() {
  return {-Number<X>::infinity(), X(0), X(0), -Number<X>::infinity(), INT_MAX};
}

// Type X of x everywhere; strides are in elements.
template <typename T, typename X = typename Logit<T>::X>
struct Arguments {
  const T* logits;
  const X* noise;  // or null
  const int64_t* token_ids;  // or null
  int64_t logits_stride, noise_stride;
  X temperature;
  int vocabulary, splits, chunk, top_k;
  Part<X>* parts;     // [rows, splits]
  Entry<X>* entries;  // [rows, splits, MAX_TOP_K]
  int* counters;      // [rows], 0 before and after
  X* values;          // [rows, 5]
  int64_t* top_ids;   // [rows, top_k]
  X* top_probs;       // [rows, top_k]
};

template <typename X>
__device__ __forceinline__ X warp_largest(X value) {
  for (int bits = 16; bits > 0; bits /= 2) value = Number<X>::larger(value, __shfl_xor_sync(ALL_LANES, value, bits));
  return value;
}

template <typename X>
__device__ __forceinline__ X warp_sum(X value) {
  for (int bits = 16; bits > 0; bits /= 2) value += __shfl_xor_sync(ALL_LANES, value, bits);
  return value;
}

__device__ __forceinline__ int warp_lowest(int value) {
  for (int bits = 16; bits > 0; bits /= 2) value = min(value, __shfl_xor_sync(ALL_LANES, value, bits));
  return value;
}

// log2(e) (x - maximum), finite for every x: -inf and NaN get the floor.
template <typename X>
__device__ __forceinline__ X distance(X x, X maximum) {
  return Number<X>::larger((x - maximum) * Number<X>::LOG2_E, Number<X>::FLOOR);
}

// Refer z and s to a maximum that is no smaller.
template <typename X>
__device__ __forceinline__ void raise(X& maximum, X& z, X& s, X to) {
  const X d = distance(maximum, to), factor = Number<X>::exp2(d);
  s = factor * (s + d * z);
  z *= factor;
  maximum = to;
}

// The parts of all lanes as one, in every lane.
template <typename X>
__device__ __forceinline__ Part<X> warp_merge(Part<X> part) {
  raise(part.maximum, part.z, part.s, warp_largest(part.maximum));
  part.z = warp_sum(part.z);
  part.s = warp_sum(part.s);
  const X score = warp_largest(part.score);
  part.index = warp_lowest(part.score == score ? part.index : INT_MAX);
  part.score = score;
  return part;
}

template <typename X>
__device__ __forceinline__ Entry<X> shuffle(Entry<X> entry, int lane) {
  return {__shfl_sync(ALL_LANES, entry.value, lane), __shfl_sync(ALL_LANES, entry.index, lane)};
}

// Two lists, ordered over the lanes, as one; the entries beyond the 32nd are dropped.
template <typename X>
__device__ Entry<X> merge_lists(Entry<X> a, Entry<X> b) {
  const int lane = threadIdx.x % WARP_LANES;
  b = shuffle(b, WARP_LANES - 1 - lane);
  if (before(b, a)) a = b;  // the best 32, rising then falling: half-cleaners order them
  for (int bits = 16; bits > 0; bits /= 2) {
    const Entry<X> other = shuffle(a, lane ^ bits);
    if ((lane & bits) == 0 ? before(other, a) : before(a, other)) a = other;
  }
  return a;
}

// The lanes' entries in order, the first in lane 0 (bitonic sort).
template <typename X>
__device__ Entry<X> sort_lanes(Entry<X> a) {
  const int lane = threadIdx.x % WARP_LANES;
  for (int size = 2; size <= WARP_LANES; size *= 2) {
    for (int bits = size / 2; bits > 0; bits /= 2) {
      const Entry<X> other = shuffle(a, lane ^ bits);
      const bool first_of_two = (lane & bits) == 0, rising = (lane & size) == 0;
      if (first_of_two == rising ? before(other, a) : before(a, other)) a = other;
    }
  }
  return a;
}

template <typename T, bool NOISY, bool TOP>
struct Scan {
  using X = typename Logit<T>::X;
  using N = Number<X>;
  static constexpr int WIDTH = 16 / sizeof(T);                      // elements of a vector
  static constexpr int VECTORS = NOISY && sizeof(T) == 2 ? 2 : 4;  // of a group; bounded by the registers
  static constexpr int SIZE = WIDTH * VECTORS;
  static constexpr X SMALL = 1.0 / (1 << 30);

  const T* logits;  // the row
  const X* noise;
  bool noise_aligned;
  X temperature, reciprocal;
  bool plain_temperature;  // its size is moderate
  int head;     // elements before the first 16-byte boundary
  int end;      // of this part's vectors
  int top_k;
  Part<X> part = empty_part<X>();
  int where = 0;  // group of the best score: its first vector, or ~index for a single element
  Entry<X> list = no_entry<X>();  // lane i: the i-th best of the warp

  // Index of a group's element, relative to its first.
  static __host__ __device__ constexpr int offset(int element) {
    return element / WIDTH * (THREADS * WIDTH) + element % WIDTH;
  }

  __device__ __forceinline__ X to_x(T logit) const {
    const X wide = Logit<T>::widen(logit);
    return temperature == X(1) ? wide : N::divide(wide, temperature);
  }

  // +inf becomes the largest number; NaN stays, and loses every comparison.
  static __device__ __forceinline__ X bounded(X x) { return x > N::LARGEST ? N::LARGEST : x; }

  __device__ __forceinline__ void load(int first, X (&x)[SIZE]) const {
    const uint4* vectors = reinterpret_cast<const uint4*>(logits + head);
    uint4 raw[VECTORS];
    if (first - int(threadIdx.x) + VECTORS * THREADS <= end) {  // the same for the whole block
#pragma unroll
      for (int u = 0; u < VECTORS; ++u) raw[u] = __ldg(vectors + first + u * THREADS);
    } else {
      constexpr unsigned last = Logit<T>::MINUS_INFINITY, other = sizeof(T) == 8 ? 0 : last;
#pragma unroll
      for (int u = 0; u < VECTORS; ++u) {
        raw[u] = uint4{other, last, other, last};
        if (first + u * THREADS < end) raw[u] = __ldg(vectors + first + u * THREADS);
      }
    }
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      T logit[WIDTH];
      memcpy(logit, &raw[u], sizeof(uint4));
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) x[u * WIDTH + e] = Logit<T>::widen(logit[e]);
    }
    if (temperature != X(1)) divide(x);
  }

  // IEEE division by the temperature. Two corrections of x * (1 / temperature) round correctly (Markstein 1990), at a
  // third of the cost, where nothing leaves the normal range. Few groups hold a 0 or an infinity.
  __device__ __forceinline__ void divide(X (&x)[SIZE]) const {
    X smallest = N::infinity(), largest = 0;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
      largest = N::larger(largest, N::size(x[i]));
      smallest = -N::larger(-smallest, -N::size(x[i]));
    }
    if (plain_temperature && smallest >= SMALL && largest <= 1 / SMALL) {
#pragma unroll
      for (int i = 0; i < SIZE; ++i) {
        X quotient = x[i] * reciprocal;
        quotient = N::multiply_add(N::multiply_add(-quotient, temperature, x[i]), reciprocal, quotient);
        x[i] = N::multiply_add(N::multiply_add(-quotient, temperature, x[i]), reciprocal, quotient);
      }
    } else {
#pragma unroll
      for (int i = 0; i < SIZE; ++i) x[i] = N::divide(x[i], temperature);
    }
  }

  __device__ __forceinline__ void load_noise(int first, X (&values)[SIZE]) const {
#pragma unroll
    for (int u = 0; u < VECTORS; ++u) {
      const int vector = first + u * THREADS;
      const X* source = noise + head + int64_t(vector) * WIDTH;
      if (vector >= end) {
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) values[u * WIDTH + e] = X(0);
      } else if (noise_aligned) {
        constexpr int STEP = 16 / sizeof(X);
#pragma unroll
        for (int e = 0; e < WIDTH; e += STEP) {
          const uint4 raw = __ldg(reinterpret_cast<const uint4*>(source + e));
          memcpy(&values[u * WIDTH + e], &raw, sizeof(raw));
        }
      } else {
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) values[u * WIDTH + e] = __ldg(source + e);
      }
    }
  }

  // Takes in the x of a group. `index`: of its first element.
  template <int COUNT>
  __device__ __forceinline__ void take(X (&x)[COUNT], const X (&noises)[COUNT], int group, int index) {
    X top = -N::infinity();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) top = N::larger(top, x[i]);
    if (top > N::LARGEST) {
      top = N::LARGEST;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) x[i] = bounded(x[i]);
    }
    X score = top;
    if constexpr (NOISY) {
      score = -N::infinity();
#pragma unroll
      for (int i = 0; i < COUNT; ++i) score = N::larger(score, N::add(x[i], noises[i]));
      score = bounded(score);
    }
    if (score > part.score) {
      part.score = score;
      where = group;
    }
    raise(part.maximum, part.z, part.s, N::larger(part.maximum, top));
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const X d = distance(x[i], part.maximum), weight = N::exp2(d);
      part.z += weight;
      part.s += d * weight;
    }
    if constexpr (TOP) select(x, top, index);
  }

  // Best entry of a group after `bound`; elements come in rising order of index.
  template <int COUNT>
  static __device__ __forceinline__ Entry<X> next(const X (&x)[COUNT], int index, Entry<X> bound) {
    Entry<X> best = no_entry<X>();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const Entry<X> entry = {x[i], index + offset(i)};
      if (entry.value > best.value && before(bound, entry)) best = entry;
    }
    return best;
  }

  // Takes the groups of all lanes into the warp's list: of each lane the best entry that is good enough, all at
  // once, until no lane has one. Few lanes hold more than one of a warp's best.
  template <int COUNT>
  __device__ __forceinline__ void select(const X (&x)[COUNT], X top, int index) {
    Entry<X> worst = shuffle(list, top_k - 1);
    if (!__any_sync(ALL_LANES, top >= worst.value && top >= -N::LARGEST)) return;
    Entry<X> mine = next(x, index, {N::infinity(), 0});
    while (true) {
      const bool good = before(mine, worst);
      if (!__any_sync(ALL_LANES, good)) return;
      list = merge_lists(list, sort_lanes(good ? mine : no_entry<X>()));
      worst = shuffle(list, top_k - 1);
      if (good) mine = next(x, index, mine);
    }
  }

  __device__ __forceinline__ X score_at(int index) const {
    X score = bounded(to_x(logits[index]));
    if constexpr (NOISY) score = bounded(N::add(score, noise[index]));
    return score;
  }

  // Lowest token of the warp with this score, which is its best, shared out over the lanes. The groups that hold it
  // are read once more, a lane per element: cheaper than keeping track of positions in the loop.
  __device__ int find(X score) const {
    static_assert(SIZE <= WARP_LANES, "a lane per element");
    const int lane = threadIdx.x % WARP_LANES;
    int found = INT_MAX;
    for (unsigned tied = __ballot_sync(ALL_LANES, part.score == score); tied != 0; tied &= tied - 1) {
      const int group = __shfl_sync(ALL_LANES, where, __ffs(int(tied)) - 1);
      const int index = group < 0 ? ~group : head + group * WIDTH + offset(lane);
      const bool inside = group < 0 || (lane < SIZE && group + lane / WIDTH * THREADS < end);
      if (inside && score_at(index) == score) found = min(found, index);
    }
    return found;
  }

  // One element, or none if index < 0.
  __device__ __forceinline__ void take_single(int index) {
    X x[1] = {-N::infinity()}, noises[1] = {X(0)};
    if (index >= 0) {
      x[0] = to_x(logits[index]);
      if constexpr (NOISY) noises[0] = noise[index];
    }
    take(x, noises, ~index, index);
  }
};

// Blocks of a multiprocessor that the registers must suffice for.
template <typename T>
__host__ __device__ constexpr int min_blocks(bool top) {
  return top && sizeof(T) == 8 ? 1 : top || sizeof(T) == 8 ? 2 : 4;
}

template <typename T, bool NOISY, bool TOP>
__global__ void __launch_bounds__(THREADS, min_blocks<T>(TOP))
    draft_statistics_kernel(const __grid_constant__ Arguments<T> args) {
  using S = Scan<T, NOISY, TOP>;
  using X = typename S::X;
  using N = Number<X>;
  __shared__ Part<X> parts[WARPS];
  __shared__ Entry<X> lists[TOP ? WARPS : 1][WARP_LANES];

  const int thread = threadIdx.x, lane = thread % WARP_LANES, warp = thread / WARP_LANES;
  const int64_t row = blockIdx.x / unsigned(args.splits);
  const int split = int(blockIdx.x % unsigned(args.splits));

  S scan;
  scan.logits = args.logits + row * args.logits_stride;
  scan.noise = NOISY ? args.noise + row * args.noise_stride : nullptr;
  scan.temperature = args.temperature;
  scan.reciprocal = N::divide(X(1), args.temperature);
  scan.plain_temperature = args.temperature >= S::SMALL && args.temperature <= 1 / S::SMALL;
  scan.top_k = args.top_k;
  scan.head = min(int((16 - reinterpret_cast<uintptr_t>(scan.logits) % 16) % 16 / sizeof(T)), args.vocabulary);
  scan.noise_aligned = NOISY && reinterpret_cast<uintptr_t>(scan.noise + scan.head) % 16 == 0;
  const int vectors = (args.vocabulary - scan.head) / S::WIDTH, chunk = args.chunk / S::WIDTH;
  scan.end = min(vectors, (split + 1) * chunk);

  // In rising order of index, so that the first of equal scores wins.
  if (split == 0 && scan.head > 0) scan.take_single(thread < scan.head ? thread : -1);
  for (int base = split * chunk; base < scan.end; base += S::VECTORS * THREADS) {
    X x[S::SIZE], noises[S::SIZE];
    scan.load(base + thread, x);
    if constexpr (NOISY) scan.load_noise(base + thread, noises);
    scan.take(x, noises, base + thread, scan.head + (base + thread) * S::WIDTH);
  }
  const int tail = scan.head + vectors * S::WIDTH;
  if (split == args.splits - 1 && tail < args.vocabulary)
    scan.take_single(thread < args.vocabulary - tail ? tail + thread : -1);

  const X score = warp_largest(scan.part.score);
  if (args.token_ids == nullptr && score >= -N::LARGEST) scan.part.index = scan.find(score);
  scan.part.score = score;
  const Part<X> of_warp = warp_merge(scan.part);
  if (lane == 0) parts[warp] = of_warp;
  if constexpr (TOP) lists[warp][lane] = scan.list;
  __syncthreads();
  if (warp > 0) return;

  const Part<X> of_block = warp_merge(lane < WARPS ? parts[lane] : empty_part<X>());
  const int64_t first_slot = row * args.splits;
  if (lane == 0) args.parts[first_slot + split] = of_block;
  if constexpr (TOP) {
    Entry<X> list = scan.list;
    for (int other = 1; other < WARPS; ++other) list = merge_lists(list, lists[other][lane]);
    args.entries[(first_slot + split) * MAX_TOP_K + lane] = list;
  }
  __syncwarp();
  int arrived = 0;
  if (lane == 0) {  // one lane speaks for the warp: barrier, fence, atomic, fence, barrier
    __threadfence();
    arrived = atomicAdd(args.counters + row, 1);
    __threadfence();
  }
  __syncwarp();
  if (__shfl_sync(ALL_LANES, arrived, 0) != args.splits - 1) return;

  // The last block of the row. Reads pass by the first-level cache, which may hold older values.
  Part<X> part = empty_part<X>();
  if (lane < args.splits) {
    const Part<X>* source = args.parts + first_slot + lane;
    part = {__ldcg(&source->maximum), __ldcg(&source->z), __ldcg(&source->s), __ldcg(&source->score),
            __ldcg(&source->index)};
  }
  part = warp_merge(part);
  const bool usable = part.maximum >= -N::LARGEST;
  if (lane == 0) {
    args.counters[row] = 0;
    int64_t token = part.index == INT_MAX ? -1 : part.index;
    if (args.token_ids != nullptr) token = args.token_ids[row];
    if (!usable) token = -1;
    X prob = 0;
    if (token >= 0 && token < args.vocabulary) {
      const X x = S::bounded(scan.to_x(scan.logits[token]));
      if (x >= -N::LARGEST) prob = N::exp(x - part.maximum) / part.z;
    }
    const X log_z = N::log(part.z);
    X* out = args.values + row * 5;
    out[0] = X(token);
    out[1] = prob;
    out[2] = usable ? 1 / part.z : X(0);
    out[3] = usable ? N::larger(log_z - N::LN_2 * (part.s / part.z), X(0)) : X(0);
    out[4] = usable ? part.maximum + log_z : -N::infinity();
  }
  if constexpr (TOP) {
    Entry<X> list = no_entry<X>();
    for (int other = 0; other < args.splits; ++other) {
      const Entry<X>* source = args.entries + (first_slot + other) * MAX_TOP_K + lane;
      list = merge_lists(list, Entry<X>{__ldcg(&source->value), __ldcg(&source->index)});
    }
    if (lane < args.top_k) {
      const bool found = list.index != INT_MAX;
      args.top_ids[row * args.top_k + lane] = found ? list.index : -1;
      args.top_probs[row * args.top_k + lane] = found ? N::exp(list.value - part.maximum) / part.z : X(0);
    }
  }
}

template <typename T, bool NOISY, bool TOP>
cudaError_t launch(const Arguments<T>& args, int64_t rows, void* stream) {
  const auto kernel = draft_statistics_kernel<T, NOISY, TOP>;
  return LAUNCH(kernel, dim3(unsigned(rows * args.splits)), dim3(THREADS), 0, stream, args);
}

// logits_type: 0 float16, 1 bfloat16, 2 float32, 3 float64. workspace: per row and split 8 numbers
// of the type of x, then, if top_k > 0, 2 * MAX_TOP_K more for all of them.
template <typename T>
cudaError_t run(const void* logits, int64_t logits_stride, const void* noise, int64_t noise_stride, double temperature,
                const int64_t* token_ids, int64_t top_k, int64_t rows, int64_t vocabulary, int64_t splits,
                int64_t chunk, void* workspace, int* counters, void* values, int64_t* top_ids, void* top_probs,
                void* stream) {
  using X = typename Logit<T>::X;
  const auto parts = static_cast<Part<X>*>(workspace);
  const Arguments<T> args = {static_cast<const T*>(logits),
                             static_cast<const X*>(noise),
                             token_ids,
                             logits_stride,
                             noise_stride,
                             X(temperature),
                             int(vocabulary),
                             int(splits),
                             int(chunk),
                             int(top_k),
                             parts,
                             reinterpret_cast<Entry<X>*>(parts + rows * splits),
                             counters,
                             static_cast<X*>(values),
                             top_ids,
                             static_cast<X*>(top_probs)};
  if (noise != nullptr) {
    return top_k > 0 ? launch<T, true, true>(args, rows, stream) : launch<T, true, false>(args, rows, stream);
  }
  return top_k > 0 ? launch<T, false, true>(args, rows, stream) : launch<T, false, false>(args, rows, stream);
}

EXPORT int draft_statistics(const void* logits, int64_t logits_type, int64_t logits_stride, const void* noise,
                            int64_t noise_stride, double temperature, const int64_t* token_ids, int64_t top_k,
                            int64_t rows, int64_t vocabulary, int64_t splits, int64_t chunk, void* workspace,
                            int* counters, void* values, int64_t* top_ids, void* top_probs, void* stream) {
  if (vocabulary < 1 || vocabulary > 1 << 24 || splits < 1 || splits > MAX_SPLITS || chunk % 16 != 0 ||
      splits * chunk < vocabulary || top_k < 0 || top_k > MAX_TOP_K || rows < 1 || rows * splits > INT_MAX)
    return cudaErrorInvalidValue;
  const auto run_typed = logits_type == 0   ? run<__half>
                         : logits_type == 1 ? run<__nv_bfloat16>
                         : logits_type == 2 ? run<float>
                                            : run<double>;
  return run_typed(logits, logits_stride, noise, noise_stride, temperature, token_ids, top_k, rows, vocabulary, splits,
                   chunk, workspace, counters, values, top_ids, top_probs, stream);
}

// Blocks that a multiprocessor holds at once.
EXPORT int draft_statistics_occupancy(int64_t logits_type, int64_t noisy, int64_t top) {
  const auto of = [&](auto logit) {
    using T = decltype(logit);
    const auto kernel = noisy ? top ? draft_statistics_kernel<T, true, true> : draft_statistics_kernel<T, true, false>
                        : top ? draft_statistics_kernel<T, false, true>
                              : draft_statistics_kernel<T, false, false>;
    return resident_blocks(kernel, THREADS, 0, min_blocks<T>(top));
  };
  return logits_type == 0   ? of(__half())
         : logits_type == 1 ? of(__nv_bfloat16())
         : logits_type == 2 ? of(float())
                            : of(double());
}
