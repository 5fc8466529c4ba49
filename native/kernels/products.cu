// SPDX-License-Identifier: Apache-2.0
//
// Small matrix products of any layout, several in one launch, by either rule.
//
// Order of summation: a thread owns four outputs and takes k in ascending order; leaf sums meet on its binary counter.
#include "kernels/arguments.h"
#include "kernels/arithmetic.h"

namespace mjl::gpu {
namespace {

using A = Arithmetic;

constexpr int kTile = kProductTile, kDepth = 64, kThreads = 256, kStride = kTile + 2;

// One stage of an operand on its way to shared memory: to[k][row] = element (row, k) of a matrix whose rows are
// `row_stride` and whose columns are `k_stride` apart.
struct Stage {
  float x[kTile * kDepth / kThreads];

  static MJL_DEVICE void place(int64_t k_stride, int i, int& row, int& k) {
    const int e = i * kThreads + threadIdx.x;
    const bool along_k = k_stride == 1;  // neighbouring threads read neighbouring addresses
    row = along_k ? e / kDepth : e % kTile;
    k = along_k ? e % kDepth : e / kTile;
  }
  MJL_DEVICE void read(const float* from, int64_t row_stride, int64_t k_stride, int rows, int depth) {
#pragma unroll
    for (int i = 0; i < kTile * kDepth / kThreads; ++i) {
      int row, k;
      place(k_stride, i, row, k);
      x[i] = row < rows && k < depth ? from[row * row_stride + k * k_stride] : 0.0f;
    }
  }
  MJL_DEVICE void write(float* to, int64_t k_stride) const {
#pragma unroll
    for (int i = 0; i < kTile * kDepth / kThreads; ++i) {
      int row, k;
      place(k_stride, i, row, k);
      to[k * kStride + row] = flush(x[i]);
    }
  }
};

struct Sums {
  float at[2][2];
};

// The contraction of one term, or its continuation from `start`.
MJL_DEVICE Sums contract(const Term& term, Contraction rule, int row, int rows, int col, int cols, const Sums& start) {
  __shared__ __align__(16) float a_tile[kDepth * kStride], b_tile[kDepth * kStride];
  const int i = threadIdx.x / 16 * 2, j = threadIdx.x % 16 * 2;
  const int leaf = rule == Contraction::chain ? term.k : int(leaf_length(term.k));
  float stack[4][kLevels];
  Sums sums = start;
  Stage a_stage, b_stage;
  const float* const a = term.a.data + row * term.a.row_stride;
  const float* const b = term.b.data + col * term.b.col_stride;
  int leaf_end = min(leaf, term.k), n = 0, depth = min(kDepth, leaf_end);
  a_stage.read(a, term.a.row_stride, term.a.col_stride, rows, depth);
  b_stage.read(b, term.b.col_stride, term.b.row_stride, cols, depth);
  for (int k = 0; k < term.k;) {
    __syncthreads();
    a_stage.write(a_tile, term.a.col_stride);
    b_stage.write(b_tile, term.b.row_stride);
    __syncthreads();
    const int next = k + depth, next_end = next == leaf_end ? min(leaf_end + leaf, term.k) : leaf_end;
    const int next_depth = min(kDepth, next_end - next);
    if (next < term.k) {  // while this stage is multiplied
      a_stage.read(a + next * term.a.col_stride, term.a.row_stride, term.a.col_stride, rows, next_depth);
      b_stage.read(b + next * term.b.row_stride, term.b.col_stride, term.b.row_stride, cols, next_depth);
    }
#pragma unroll 8
    for (int q = 0; q < depth; ++q) {
      const float2 x = *(const float2*)&a_tile[q * kStride + i], y = *(const float2*)&b_tile[q * kStride + j];
      sums.at[0][0] = A::fma(x.x, y.x, sums.at[0][0]);
      sums.at[0][1] = A::fma(x.x, y.y, sums.at[0][1]);
      sums.at[1][0] = A::fma(x.y, y.x, sums.at[1][0]);
      sums.at[1][1] = A::fma(x.y, y.y, sums.at[1][1]);
    }
    k = next;
    if (k == leaf_end && leaf < term.k) {
      const bool last = k == term.k;
      for (int e = 0; e < 4; ++e) {
        float& sum = sums.at[e / 2][e % 2];
        sum = push_leaf(stack[e], n, last, sum);
        if (!last) sum = 0.0f;
      }
      ++n;
    }
    leaf_end = next_end;
    depth = next_depth;
  }
  return sums;
}

}  // namespace

MJL_KERNEL __launch_bounds__(kThreads) products(const __grid_constant__ ProductsArguments a) {
  int which = 0;
  while (which + 1 < kProducts && int(blockIdx.x) >= a.first_tile[which + 1]) ++which;
  const Product& p = a.product[which];
  const int tile = int(blockIdx.x) - a.first_tile[which], tiles_n = (p.n + kTile - 1) / kTile;
  const int row = tile / tiles_n * kTile, col = tile % tiles_n * kTile;
  const int rows = min(kTile, p.m - row), cols = min(kTile, p.n - col);
  const int i = threadIdx.x / 16 * 2, j = threadIdx.x % 16 * 2;

  Sums total = {};
  if (p.resume)
    for (int e = 0; e < 4; ++e)
      if (i + e / 2 < rows && j + e % 2 < cols)
        total.at[e / 2][e % 2] = load(p.c + int64_t(row + i + e / 2) * p.n + col + j + e % 2);
  total = contract(p.terms[0], p.rule, row, rows, col, cols, total);
  for (int t = 1; t < p.term_count; ++t) {
    const Sums more = contract(p.terms[t], p.rule, row, rows, col, cols, Sums{});
    for (int e = 0; e < 4; ++e) total.at[e / 2][e % 2] = A::add(total.at[e / 2][e % 2], more.at[e / 2][e % 2]);
  }
  for (int e = 0; e < 4; ++e) {
    if (i + e / 2 >= rows || j + e % 2 >= cols) continue;
    const int64_t at = int64_t(row + i + e / 2) * p.n + col + j + e % 2;
    p.c[at] = p.residual ? A::add(p.residual[at], total.at[e / 2][e % 2]) : total.at[e / 2][e % 2];
  }
}

}  // namespace mjl::gpu
