// KV compaction: move the accepted tokens' rows to the end of the context, all layers in one launch.
#include "platform.cuh"

constexpr int MAX_TENSORS = 512;
constexpr int TOGETHER = 8;  // rows in flight per thread, to hide the latency of memory
constexpr int MAX_THREADS = 128;

// Travels by value among the kernel's arguments: no table in device memory to keep alive.
struct Addresses {
  void* of[MAX_TENSORS];
};

// One block per tensor, sequence and head. A thread owns columns: it moves their words of all rows in ascending order,
// and as path[j] >= j no row is overwritten before it is read. Within a group of rows all are read first, which changes
// nothing for the same reason.
template <typename Word>
__global__ void __launch_bounds__(MAX_THREADS)
    compact_kv_kernel(const __grid_constant__ Addresses addresses, const int* __restrict__ path,
                      const int* __restrict__ context_lens, int steps, int64_t slots, int64_t columns,
                      int64_t sequence_stride, int64_t head_stride, int64_t slot_stride) {
  const int64_t sequence = blockIdx.y;
  Word* words_of_head = static_cast<Word*>(addresses.of[blockIdx.x]) + blockIdx.z * head_stride;
  const int64_t context = context_lens[sequence];
  path += sequence * steps;

  const auto row_of = [&](int64_t slot) { return sequence * sequence_stride + slot * slot_stride; };
  bool going = true;
  for (int begin = 0; begin < steps && going; begin += TOGETHER) {
    int64_t source[TOGETHER], target[TOGETHER];  // where rows begin; source is -1 where nothing moves
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j) {
      const int node = begin + j < steps ? path[begin + j] : -1;
      going = going && node >= 0;
      const bool moves = going && node != begin + j && context + node < slots;
      source[j] = moves ? row_of(context + node) : -1;
      target[j] = moves ? row_of(context + begin + j) : -1;
    }
    for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
      Word words[TOGETHER];
#pragma unroll
      for (int j = 0; j < TOGETHER; ++j)
        if (source[j] >= 0) words[j] = words_of_head[source[j] + column];
#pragma unroll
      for (int j = 0; j < TOGETHER; ++j)
        if (source[j] >= 0) words_of_head[target[j] + column] = words[j];
    }
  }
}

// addresses: in host memory. columns and strides count words of word_bytes; a sequence has `slots` slots.
EXPORT int compact_kv(const int* path, const int* context_lens, int64_t steps, const int64_t* addresses,
                      int64_t tensors, int64_t word_bytes, int64_t batch, int64_t heads, int64_t slots,
                      int64_t columns, int64_t sequence_stride, int64_t head_stride, int64_t slot_stride,
                      void* stream) {
  if (tensors < 1 || tensors > MAX_TENSORS) return cudaErrorInvalidValue;
  if (batch == 0 || heads == 0 || slots == 0 || columns == 0 || steps == 0) return cudaSuccess;
  Addresses all = {};
  for (int i = 0; i < tensors; ++i) all.of[i] = reinterpret_cast<void*>(addresses[i]);
  const unsigned threads = unsigned(columns >= MAX_THREADS ? MAX_THREADS : ceil_div(columns, 32) * 32);
  const dim3 grid(static_cast<unsigned>(tensors), unsigned(batch), unsigned(heads));
  const auto run = [&](auto word) {
    return LAUNCH(compact_kv_kernel<decltype(word)>, grid, dim3(threads), 0, stream, all, path, context_lens,
                  int(steps), slots, columns, sequence_stride, head_stride, slot_stride);
  };
  switch (word_bytes) {
    case 16:
      return run(uint4());
    case 8:
      return run(int2());
    case 4:
      return run(int32_t());
    case 2:
      return run(int16_t());
    default:
      return cudaErrorInvalidValue;
  }
}
