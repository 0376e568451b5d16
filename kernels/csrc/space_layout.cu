// The tree of one SPACE step: a pending token, k candidates, k + 1 groups of k mask tokens.
#include "platform.cuh"

constexpr int THREADS = 128;

__global__ void space_layout_kernel(int candidates, int nodes, int* __restrict__ parents, bool* __restrict__ is_mask,
                                    int* __restrict__ group) {
  const int node = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (node >= nodes) return;
  const bool mask = node > candidates;
  const int place = node - 1 - candidates;  // among the mask tokens, of which there are none without candidates
  const int its_group = mask ? place / candidates : -1;
  parents[node] = mask && place % candidates == 0 ? its_group : node - 1;
  is_mask[node] = mask;
  group[node] = its_group;
}

EXPORT int space_layout(int64_t candidates, int* parents, bool* is_mask, int* group, void* stream) {
  const int64_t nodes = 1 + candidates * (candidates + 2);
  return LAUNCH(space_layout_kernel, dim3(unsigned(ceil_div(nodes, THREADS))), dim3(THREADS), 0, stream,
                int(candidates), int(nodes), parents, is_mask, group);
}
