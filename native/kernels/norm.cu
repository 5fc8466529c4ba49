// SPDX-License-Identifier: Apache-2.0
//
// RMSNorm. Order of summation: the sums along a row are serial chains over ascending columns, one thread a row, fed
// through shared memory; the weight's gradient is a contraction over tokens, one thread a leaf and column.
#include "kernels/arguments.h"
#include "kernels/arithmetic.h"

namespace mjl::gpu {
namespace {

using A = Arithmetic;

constexpr int kThreads = 256, kChunk = 512;

using Chunk = float[kNormRows][kChunk + 1];  // the odd stride keeps the rows of a chain in different banks

}  // namespace

MJL_KERNEL __launch_bounds__(kThreads) norm_forward(const __grid_constant__ NormArguments a) {
  __shared__ Chunk chunk;
  __shared__ float scale[kNormRows];
  const int tid = threadIdx.x, D = int(a.x.cols);
  const int64_t row = int64_t(blockIdx.x) * kNormRows;
  const int rows = int(smaller(kNormRows, a.x.rows - row));
  const float* const x = a.x.data + row * D;
  float ss = 0.0f;
  for (int first = 0; first < D; first += kChunk) {
    const int columns = min(kChunk, D - first);
    for (int i = tid; i < rows * kChunk; i += kThreads)
      if (i % kChunk < columns) chunk[i / kChunk][i % kChunk] = load(x + int64_t(i / kChunk) * D + first + i % kChunk);
    __syncthreads();
    if (tid < rows)
#pragma unroll 8
      for (int d = 0; d < columns; ++d) ss = A::fma(chunk[tid][d], chunk[tid][d], ss);
    __syncthreads();
  }
  if (tid < rows) a.rstd.data[row + tid] = scale[tid] = A::rsqrt(A::add(A::div(ss, float(D)), 1e-6f));
  __syncthreads();
  for (int r = 0; r < rows; ++r)
    for (int d = tid; d < D; d += kThreads)
      a.y.data[(row + r) * D + d] = A::mul(load(a.w.data + d), A::mul(load(x + int64_t(r) * D + d), scale[r]));
}

// d_x. (The weight's gradient is norm_weight_gradient and sum_leaves.)
MJL_KERNEL __launch_bounds__(kThreads) norm_backward(const __grid_constant__ NormArguments a) {
  __shared__ Chunk chunk_dh, chunk_x;
  __shared__ float scale[kNormRows], d_variance[kNormRows];
  const int tid = threadIdx.x, D = int(a.x.cols);
  const int64_t row = int64_t(blockIdx.x) * kNormRows;
  const int rows = int(smaller(kNormRows, a.x.rows - row));
  const float *const x = a.x.data + row * D, *const d_y = a.d_y.data + row * D;
  float c = 0.0f;
  for (int first = 0; first < D; first += kChunk) {
    const int columns = min(kChunk, D - first);
    for (int i = tid; i < rows * kChunk; i += kThreads) {
      const int r = i / kChunk, d = i % kChunk;
      if (d >= columns) continue;
      const int64_t at = int64_t(r) * D + first + d;
      chunk_dh[r][d] = A::mul(load(d_y + at), load(a.w.data + first + d));
      chunk_x[r][d] = load(x + at);
    }
    __syncthreads();
    if (tid < rows)
#pragma unroll 8
      for (int d = 0; d < columns; ++d) c = A::fma(chunk_dh[tid][d], chunk_x[tid][d], c);
    __syncthreads();
  }
  if (tid < rows) {
    const float s = load(a.rstd.data + row + tid), r3 = A::mul(A::mul(s, s), s);
    scale[tid] = s;
    d_variance[tid] = A::div(A::mul(-0.5f, A::mul(c, r3)), float(D));
  }
  __syncthreads();
  for (int r = 0; r < rows; ++r)
    for (int d = tid; d < D; d += kThreads) {
      const int64_t at = int64_t(r) * D + d;
      const float dh = A::mul(load(d_y + at), load(a.w.data + d)), twice = A::mul(2.0f, load(x + at));
      const float dx = A::add(A::mul(dh, scale[r]), A::mul(d_variance[r], twice));
      a.d_x.data[row * D + at] = A::add(dx, a.d_residual.data[row * D + at]);
    }
}

// Leaf sums over tokens of mul(d_y, mul(x, rstd)): block (columns, leaf).
MJL_KERNEL norm_weight_gradient(const __grid_constant__ NormArguments a) {
  const int64_t D = a.x.cols, d = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t begin = int64_t(blockIdx.y) * a.leaf, end = smaller(begin + a.leaf, a.x.rows);
  if (d >= D) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t i = begin; i < end; ++i)
    sum = A::add(sum, A::mul(load(a.d_y.data + i * D + d), A::mul(load(a.x.data + i * D + d), load(a.rstd.data + i))));
  a.leaf_sums[blockIdx.y * D + d] = sum;
}

// A thread a column. Eight leaves at a time, which are a subtree of their own, so that their loads overlap.
MJL_KERNEL sum_leaves(const __grid_constant__ SumLeavesArguments a) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= a.columns) return;
  const float* const from = a.leaf_sums + column;
  const int64_t stride = a.columns;
  float stack[kLevels], result = 0.0f;
  for (int first = 0; first < a.leaves; first += 8) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = from[min(first + i, a.leaves - 1) * stride];
    int n = min(8, a.leaves - first);  // an odd tail is carried up unchanged
#pragma unroll
    for (int width = 4; width > 0; width /= 2) {
#pragma unroll
      for (int i = 0; i < width; ++i) x[i] = 2 * i + 1 < n ? A::add(x[2 * i], x[2 * i + 1]) : x[2 * i];
      n = (n + 1) / 2;
    }
    result = push_leaf(stack, first / 8, first + 8 >= a.leaves, x[0]);
  }
  a.out[column] = result;
}

}  // namespace mjl::gpu
