// SPDX-License-Identifier: Apache-2.0
//
// Cross-entropy over rows of logits, a block a row.
//
// Order of summation: the denominator is the contraction with ones over the vocabulary (a thread a leaf, then the tree
// of adjacent pairs), or by the chain rule one ascending sum. The mean of the row losses likewise, where the chain
// rule sums blocks of 256 rows.
#include "kernels/arguments.h"
#include "kernels/arithmetic.h"

namespace mjl::gpu {
namespace {

using A = Arithmetic;

constexpr int kThreads = 512, kLeaves = 32, kColumns = 128;  // kLeaves leaves, kColumns of each, are staged at a time

// sums[0] = the tree of adjacent pairs over sums[0 .. n - 1]; an odd tail is carried up unchanged.
MJL_DEVICE void sum_tree(float* sums, int n) {
  for (; n > 1; n = (n + 1) / 2)
    for (int first = 0; first < (n + 1) / 2; first += int(blockDim.x)) {  // in place: reads run ahead of writes
      const int i = first + int(threadIdx.x);
      float sum = 0.0f;
      if (i < (n + 1) / 2) sum = 2 * i + 1 < n ? A::add(sums[2 * i], sums[2 * i + 1]) : sums[2 * i];
      __syncthreads();
      if (i < (n + 1) / 2) sums[i] = sum;
      __syncthreads();
    }
}

}  // namespace

MJL_KERNEL __launch_bounds__(kThreads) head_rows(const __grid_constant__ HeadArguments a) {
  __shared__ float staged[kLeaves][kColumns + 1], leaf_sums[1024], warp_max[kThreads / 32];
  const int tid = threadIdx.x, V = a.V;
  const int64_t token = a.first + blockIdx.x;
  float* const x = a.logits + int64_t(blockIdx.x) * V;
  const int target = a.tokens.ids[token / a.tokens.length * a.tokens.stride + token % a.tokens.length + 1];

  float m = -INFINITY;
  bool bad = false;
#pragma unroll 4
  for (int v = tid; v < V; v += kThreads) {
    const float logit = x[v];
    bad |= non_finite(logit);
    m = fmaxf(m, logit);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, lanes));
  if (tid % 32 == 0) warp_max[tid / 32] = m;
  if (__syncthreads_or(bad) && tid == 0) atomicOr(&a.result->faults, uint32_t(kFaultLogits));
  for (int w = 0; w < kThreads / 32; ++w) m = fmaxf(m, warp_max[w]);
  const float minus_m = A::negate(m), target_shifted = A::add(x[target], minus_m);
  __syncthreads();  // before exponentials replace the logits

  const bool chain = a.rule == Contraction::chain;
  const int leaf = chain ? kColumns : int(leaf_length(V)), leaves = int(ceil_div(V, leaf));
  float den = 0.0f;
  for (int first = 0; first < leaves; first += kLeaves) {
    float sum = 0.0f;
    for (int column = 0; column < leaf; column += kColumns) {
      const int columns = min(kColumns, leaf - column);
#pragma unroll 4
      for (int i = tid; i < kLeaves * kColumns; i += kThreads) {
        const int r = i / kColumns, c = i % kColumns;
        const int64_t v = int64_t(first + r) * leaf + column + c;
        if (c >= columns || v >= V) continue;
        const float e = exp_of(A::add(x[v], minus_m));
        x[v] = e;
        staged[r][c] = e;
      }
      __syncthreads();
      if (chain) {
        if (tid == 0)
          for (int r = 0; r < kLeaves; ++r) {
            const int count = int(smaller(columns, V - int64_t(first + r) * leaf));
#pragma unroll 16
            for (int c = 0; c < count; ++c) den = A::add(den, staged[r][c]);
          }
      } else if (tid < kLeaves) {
        const int count = int(smaller(columns, V - int64_t(first + tid) * leaf - column));
#pragma unroll 16
        for (int c = 0; c < count; ++c) sum = A::add(sum, staged[tid][c]);
      }
      __syncthreads();
    }
    if (!chain && tid < kLeaves && first + tid < leaves) leaf_sums[first + tid] = sum;
  }
  if (chain && tid == 0) leaf_sums[0] = den;
  __syncthreads();
  if (!chain) sum_tree(leaf_sums, leaves);
  den = leaf_sums[0];
  if (tid == 0) a.row_loss[token] = A::negate(A::add(target_shifted, A::negate(math::log<A>(den))));
  if (!a.gradient) return;

  const float count = float(a.tokens.count());
#pragma unroll 4
  for (int v = tid; v < V; v += kThreads) {
    float p = A::div(x[v], den);
    if (v == target) p = A::add(p, -1.0f);
    x[v] = A::div(p, count);
  }
}

MJL_KERNEL __launch_bounds__(1024) mean_loss(const __grid_constant__ MeanLossArguments a) {
  const int leaves = int(ceil_div(a.count, a.leaf));
  for (int n = threadIdx.x; n < leaves; n += int(blockDim.x)) {
    const int begin = n * a.leaf, end = int(smaller(int64_t(begin) + a.leaf, a.count));
    float sum = 0.0f;
#pragma unroll 8
    for (int i = begin; i < end; ++i) sum = A::add(sum, a.row_loss[i]);
    a.leaf_sums[n] = sum;
  }
  __syncthreads();
  sum_tree(a.leaf_sums, leaves);
  if (threadIdx.x != 0) return;
  const float loss = A::div(a.leaf_sums[0], float(a.count));
  a.result->loss = loss;
  if (non_finite(loss)) atomicOr(&a.result->faults, uint32_t(kFaultLoss));
}

}  // namespace mjl::gpu
