// Attention mask bits, positions and links of draft trees, from their parent arrays.
#include "platform.cuh"

constexpr int MAX_NODES = 1024;

// One block per tree, one thread per node. Mask bits are gathered by walking up to the root.
__global__ void tree_metadata_kernel(const int* __restrict__ parents, const int* __restrict__ context_lens, int nodes,
                                     int words, int* __restrict__ mask_bits, int64_t* __restrict__ positions,
                                     int* __restrict__ first_child, int* __restrict__ next_sibling) {
  __shared__ int parent_of[MAX_NODES];
  const int64_t tree = blockIdx.x;
  const int node = threadIdx.x;
  const bool inside = node < nodes;
  if (inside) parent_of[node] = parents[tree * nodes + node];
  __syncthreads();
  if (!inside) return;

  const int parent = parent_of[node];
  const bool used = node == 0 || parent >= 0;
  int* bits = mask_bits + (tree * nodes + node) * words;
  for (int word = 0; word < words; ++word) bits[word] = 0;
  int depth = 0, ancestor = node;
  while (true) {
    bits[ancestor / 32] |= 1u << (ancestor % 32);
    const int above = parent_of[ancestor];
    if (ancestor == 0 || above < 0 || above >= ancestor) break;  // the last would be no tree, and endless
    ancestor = above;
    ++depth;
  }
  positions[tree * nodes + node] = int64_t(context_lens[tree]) + depth;

  int child = -1, sibling = -1;
  for (int other = nodes - 1; other > node; --other) {
    if (used && parent_of[other] == node) child = other;
    if (parent >= 0 && parent_of[other] == parent) sibling = other;
  }
  first_child[tree * nodes + node] = child;
  next_sibling[tree * nodes + node] = sibling;
}

EXPORT int tree_metadata(const int* parents, const int* context_lens, int64_t trees, int64_t nodes, int* mask_bits,
                         int64_t* positions, int* first_child, int* next_sibling, void* stream) {
  if (trees == 0) return cudaSuccess;
  if (nodes < 1 || nodes > MAX_NODES) return cudaErrorInvalidValue;
  const unsigned threads = unsigned(ceil_div(nodes, 32) * 32);
  return LAUNCH(tree_metadata_kernel, dim3(unsigned(trees)), dim3(threads), 0, stream, parents, context_lens,
                int(nodes), int(ceil_div(nodes, 32)), mask_bits, positions, first_child, next_sibling);
}
