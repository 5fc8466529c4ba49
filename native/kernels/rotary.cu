// SPDX-License-Identifier: Apache-2.0
//
// Rotary position embedding over half-split pairs (j, j + HD/2). Two rounded products and one rounded sum: a fused
// multiply-add would be faster and give other bits.
#include "kernels/arguments.h"
#include "kernels/arithmetic.h"

namespace mjl::gpu {

using A = Arithmetic;

MJL_KERNEL rotary_table(const __grid_constant__ RotaryTableArguments a) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, half = uint32_t(a.cos.cols);
  if (i >= a.cos.size()) return;
  const float exponent = A::div(float(2 * (i % half)), float(a.heads.head_dim));
  const float frequency = A::div(1.0f, math::pow<A>(10000.0f, exponent));
  math::sincos<A>(A::mul(float(i / half), frequency), a.sin.data[i], a.cos.data[i]);
}

// A thread a pair, of q and then of k.
MJL_KERNEL rotate(const __grid_constant__ RotateArguments a) {
  const uint32_t q_pairs = uint32_t(a.q.size() / 2), k_pairs = uint32_t(a.k.size() / 2);
  uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= q_pairs + k_pairs) return;
  const bool is_q = i < q_pairs;
  if (!is_q) i -= q_pairs;
  const uint32_t half = uint32_t(a.half), pairs_a_row = uint32_t(is_q ? a.q_heads : a.k_heads) * half;
  const uint32_t row = i / pairs_a_row, in_row = i % pairs_a_row, j = in_row % half, t = row % uint32_t(a.length);
  float* const low = (is_q ? a.q.data : a.k.data) + int64_t(row) * pairs_a_row * 2 + in_row / half * 2 * half + j;
  const float c = load(a.cos.data + t * half + j), s = load(a.sin.data + t * half + j);
  const float x = load(low), y = load(low + half), xs = A::mul(x, s), ys = A::mul(y, s);
  low[0] = A::add(A::mul(x, c), a.backward ? ys : A::negate(ys));
  low[half] = A::add(A::mul(y, c), a.backward ? A::negate(xs) : xs);
}

}  // namespace mjl::gpu
