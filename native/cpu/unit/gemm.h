// SPDX-License-Identifier: Apache-2.0
//
// Matrix products under the contraction rules of ops.h.
#ifndef MJL_CPU_UNIT_GEMM_H
#define MJL_CPU_UNIT_GEMM_H

#include <cstdint>

#include "cpu/pool.h"
#include "cpu/unit/simd.h"
#include "ops.h"

namespace mjl::cpu::MJL_UNIT {

// Element (i, j) is data[i * row_stride + j * col_stride].
struct Matrix {
  const float* data;
  int64_t row_stride, col_stride;
};
MJL_INLINE Matrix plain(const Tensor& t) { return {t.data, t.cols, 1}; }
MJL_INLINE Matrix transposed(const Tensor& t) { return {t.data, 1, t.cols}; }

struct Term {
  Matrix a;  // [m, k]
  Matrix b;  // [k, n]
  int64_t k;
};

// c[m, n] = add(residual, add(add(term 0, term 1), term 2)), each term one contraction.
struct Product {
  int64_t m, n;
  Term terms[3];
  int term_count;
  Contraction rule;
  const float* residual;  // row-major like c, or null
  bool resume;            // chain only: the chain goes on from what c holds
  float* c;               // [m, n]
};

struct GemmSpace {
  Pool& pool;
  float* shared;  // packed right-hand sides
  int64_t shared_floats;
  float* thread;  // `thread_floats` for each thread
  int64_t thread_floats;
};

// A block of rows in the hands of one thread.
struct Rows {
  int64_t first, count;
  int thread;
};

// What to do with a block of rows before or after it is multiplied, while it is in the thread's cache.
struct RowHook {
  void (*run)(const void* context, Rows rows) = nullptr;
  const void* context = nullptr;
};

// body(rows)
template <class Body>
MJL_INLINE RowHook row_hook(const Body& body) {
  return {[](const void* context, Rows rows) { (*static_cast<const Body*>(context))(rows); }, &body};
}

// The products must not depend on each other. With hooks, all have the same rows; `before` prepares rows of their
// left-hand sides, `after` finds the rows of all results complete.
void multiply(const GemmSpace& space, const Product* products, int count, RowHook before = {}, RowHook after = {});

// Space for contractions of at most k; `longest_terms` is the largest sum of k over the terms of one product.
int64_t gemm_shared_floats(int64_t longest_terms);
int64_t gemm_thread_floats(int64_t k);

// to[k][kWidth] = from[i * stride_i + k * stride_k] for i < count, zeros for count <= i < kWidth.
template <int64_t kWidth>
void pack(const float* from, int64_t stride_i, int64_t stride_k, int64_t count, int64_t depth, float* to) {
  if (stride_i == 1 && count == kWidth) {
    for (int64_t k = 0; k < depth; ++k, from += stride_k, to += kWidth)
      __builtin_memcpy(to, from, kWidth * sizeof(float));
    return;
  }
  if constexpr (kWidth % kLanes == 0) {
    if (stride_k == 1) {  // a square of kLanes at a time
      for (int64_t first = 0; first < kWidth; first += kLanes)
        for (int64_t k = 0; k < depth; k += kLanes) {
          const int64_t rest = smaller(kLanes, depth - k);
          Floats square[kLanes];
          for (int i = 0; i < kLanes; ++i) {
            const float* const row = from + (first + i) * stride_i + k;
            square[i] = first + i >= count ? Floats{} : Arith<false>::load(row, int(rest));
          }
          transpose(square);
          for (int64_t i = 0; i < rest; ++i) raw_store(to + (k + i) * kWidth + first, square[i]);
        }
      return;
    }
  }
  for (int64_t i = 0; i < kWidth; ++i)
    for (int64_t k = 0; k < depth; ++k) to[k * kWidth + i] = i < count ? from[i * stride_i + k * stride_k] : 0.0f;
}

// The leaf length of a contraction over k.
MJL_INLINE int64_t leaf_length(int64_t k) {
  if (k <= 128) return k;
  return ceil_div(k, 128) <= 1024 ? 128 : ceil_div(k, 1024);
}

inline constexpr int kLevels = 11;  // log2 of the 1024 leaves a contraction has at most, and one

// The contraction of value(0), ..., value(k - 1) with ones.
template <class A, class Value>
MJL_INLINE Floats sum_with_ones(int64_t k, Value&& value) {
  const int64_t leaf = leaf_length(k);
  Floats stack[kLevels];
  Floats sum = {};
  for (int64_t n = 0, i = 0; i < k; ++n) {
    const int64_t end = smaller(i + leaf, k);
    sum = Floats{};
    for (; i < end; ++i) sum = A::add(sum, value(i));
    int level = 0;
    for (int64_t rest = n; end == k ? rest != 0 : (rest & 1) != 0; rest >>= 1, ++level)
      if (rest & 1) sum = A::add(stack[level], sum);
    stack[level] = sum;
  }
  return sum;
}

}  // namespace mjl::cpu::MJL_UNIT

#endif
