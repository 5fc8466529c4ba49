// SPDX-License-Identifier: Apache-2.0
//
// Order of summation of the backward pass: per id and column, a serial sum over the positions that hold the id,
// ascending. Atomic adds would be simpler, and add in the order of arrival.
#include "kernels/arguments.h"
#include "kernels/arithmetic.h"

namespace mjl::gpu {
namespace {

// The id at a position, or -1 at padding.
MJL_DEVICE int32_t id_at(const Tokens& tokens, uint32_t position) {
  const uint32_t length = uint32_t(tokens.length), b = position / length, t = position % length;
  return tokens.lengths && int32_t(t) >= tokens.lengths[b] ? -1 : tokens.ids[b * tokens.stride + t];
}

}  // namespace

// A thread an element of x.
MJL_KERNEL embed(const __grid_constant__ EmbedArguments a) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, D = uint32_t(a.x.cols);
  if (i >= a.x.size()) return;
  const int32_t id = id_at(a.tokens, i / D);
  a.x.data[i] = id < 0 ? 0.0f : load(a.table.data + int64_t(id) * D + i % D);
}

// A block a position (and 256 columns), which does the work if no earlier position holds the same id. The gradient is
// zero beforehand.
MJL_KERNEL embed_backward(const __grid_constant__ EmbedArguments a) {
  __shared__ uint32_t found[8];
  const uint32_t tid = threadIdx.x, position = blockIdx.x, M = uint32_t(a.x.rows), D = uint32_t(a.x.cols);
  const uint32_t d = blockIdx.y * 256 + tid;
  const int32_t id = id_at(a.tokens, position);
  bool earlier = false;
  for (uint32_t i = tid; i < position && !earlier; i += 256) earlier = id_at(a.tokens, i) == id;
  if (__syncthreads_or(earlier)) return;
  float sum = 0.0f;
  for (uint32_t first = position; first < M; first += 256) {
    const uint32_t hits = ballot(first + tid < M && id_at(a.tokens, first + tid) == id);
    if (tid % 32 == 0) found[tid / 32] = hits;
    __syncthreads();
    for (uint32_t w = 0; w < 8; ++w)
      for (uint32_t left = found[w]; left != 0; left &= left - 1) {
        const uint32_t row = first + w * 32 + uint32_t(__ffs(int(left))) - 1;
        if (d < D) sum = Arithmetic::add(sum, a.x.data[int64_t(row) * D + d]);
      }
    __syncthreads();
  }
  if (d < D) a.table.data[int64_t(id) * D + d] = sum;
}

}  // namespace mjl::gpu
