// Typical acceptance of draft trees: a node is verified by its parent's row, and the longest path of
// accepted nodes wins, the lowest node index among equals.
#include <type_traits>

#include "platform.cuh"

constexpr int MAX_NODES = 1024;

// A node's token is likely enough where the target is as unsure as its entropy says:
// log p > min(log epsilon, log delta - entropy). Sums only, so every backend decides alike.
template <typename T>
struct Typical {
  const T* logits;
  const float* logsumexp;
  const float* entropy_nats;
  int64_t nodes, vocabulary, tree_stride, node_stride, token_stride;
  double log_epsilon, log_delta;

  __device__ bool operator()(int64_t parent_row, int64_t token) const {
    if (token >= vocabulary) return false;
    const int64_t tree = parent_row / nodes, parent = parent_row % nodes;
    const double logit = to_double(logits[tree * tree_stride + parent * node_stride + token * token_stride]);
    const double log_prob = logit - double(logsumexp[parent_row]);
    const double unsure = log_delta - double(entropy_nats[parent_row]);
    // Above the smaller of both; written so that NaN anywhere rejects.
    return unsure == unsure && (log_prob > log_epsilon || log_prob > unsure);
  }

  static __device__ double to_double(double x) { return x; }
  static __device__ double to_double(float x) { return x; }
  static __device__ double to_double(__half x) { return __half2float(x); }
  static __device__ double to_double(__nv_bfloat16 x) { return __bfloat162float(x); }
};

// One block per tree, one thread per node.
template <typename T>
__global__ void verify_kernel(Typical<T> accepts, const int64_t* __restrict__ tokens, const int* __restrict__ parents,
                              const int64_t* __restrict__ choices, int nodes, int* __restrict__ path,
                              int* __restrict__ accepted, int64_t* __restrict__ emitted) {
  __shared__ int link[MAX_NODES];  // the parent if the node is accepted once that is, else -1
  __shared__ int on_path[MAX_NODES];
  __shared__ int best;
  const int64_t first = int64_t(blockIdx.x) * nodes;
  const int node = threadIdx.x;
  const bool inside = node < nodes;
  if (inside) {
    const int parent = parents[first + node];
    const int64_t token = tokens[first + node];
    const bool verified = parent >= 0 && parent < node && token >= 0;  // padding never is
    link[node] = verified && accepts(first + parent, token) ? parent : -1;
  }
  if (node == 0) best = 0;
  __syncthreads();

  if (inside) {
    int depth = 0, ancestor = node;
    for (; ancestor > 0; ++depth) ancestor = link[ancestor];
    // The deepest, and the lowest index among those.
    if (ancestor == 0) atomicMax(&best, depth * MAX_NODES + (MAX_NODES - 1 - node));
  }
  __syncthreads();

  const int length = best / MAX_NODES, last = MAX_NODES - 1 - best % MAX_NODES;
  if (node == 0) {
    for (int step = length, current = last; step >= 0; --step) {
      on_path[step] = current;
      current = link[current];
    }
    accepted[blockIdx.x] = length;
  }
  __syncthreads();
  if (!inside) return;
  path[first + node] = node <= length ? on_path[node] : -1;
  int64_t token = -1;
  if (node < length) token = tokens[first + on_path[node + 1]];
  if (node == length) token = choices[first + last];
  emitted[first + node] = token;
}

enum LogitsType { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };

EXPORT int typical_acceptance(const int64_t* tokens, const int* parents, const void* logits, int64_t logits_type,
                              const float* logsumexp, const float* entropy_nats, const int64_t* choices, int64_t trees,
                              int64_t nodes, int64_t vocabulary, int64_t tree_stride, int64_t node_stride,
                              int64_t token_stride, double log_epsilon, double log_delta, int* path, int* accepted,
                              int64_t* emitted, void* stream) {
  if (trees == 0) return cudaSuccess;
  if (nodes < 1 || nodes > MAX_NODES) return cudaErrorInvalidValue;
  const dim3 grid{unsigned(trees)}, block{unsigned(ceil_div(nodes, 32) * 32)};
  const auto run = [&](auto* typed) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
    const Typical<T> rule = {typed,       logsumexp,   entropy_nats, nodes,       vocabulary,
                             tree_stride, node_stride, token_stride, log_epsilon, log_delta};
    return LAUNCH(verify_kernel<T>, grid, block, 0, stream, rule, tokens, parents, choices, int(nodes), path,
                  accepted, emitted);
  };
  switch (logits_type) {
    case FLOAT16:
      return run(static_cast<const __half*>(logits));
    case BFLOAT16:
      return run(static_cast<const __nv_bfloat16*>(logits));
    case FLOAT32:
      return run(static_cast<const float*>(logits));
    case FLOAT64:
      return run(static_cast<const double*>(logits));
    default:
      return cudaErrorInvalidValue;
  }
}
