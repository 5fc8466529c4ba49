// SPDX-License-Identifier: Apache-2.0
//
// Rotary position embedding over half-split pairs (j, j + HD/2). Two rounded products and one rounded sum: a fused
// multiply-add would be faster and give other bits.
#include "cpu/unit/backend.h"
#include "math/elementary.h"

namespace mjl::cpu::MJL_UNIT {

void CpuBackend::rotary_table(Heads heads, Tensor cos, Tensor sin) {
  using A = Arith<true>;
  const int64_t half = heads.head_dim / 2;
  parallel(cos.rows, 100 * cos.size(), [&](int64_t t, int) {
    for (int64_t i = 0; i < half; i += kLanes) {
      const int lanes = int(smaller(kLanes, half - i));
      const Floats exponent = A::div(lanes_from(float(2 * i), 2.0f), A::value(float(heads.head_dim)));
      const Floats frequency = A::div(A::value(1.0f), math::pow<A>(A::value(10000.0f), exponent));
      Floats s, c;
      math::sincos<A>(A::mul(A::value(float(t)), frequency), s, c);
      A::store(cos.data + t * half + i, c, lanes);
      A::store(sin.data + t * half + i, s, lanes);
    }
  });
}

// In place, on `x` of `heads` heads.
void CpuBackend::rotate_rows(Tokens tokens, Heads shape, Tensor x, int64_t heads, Tensor cos, Tensor sin, bool backward,
                             Rows rows) {
  using A = Arith<true>;
  const int64_t HD = shape.head_dim, half = HD / 2;
  // Where a vector holds whole heads, the other halves of all its pairs are one shuffle away.
  const bool whole_heads = kLanes % HD == 0;
  Ints within = {}, partner = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    within[lane] = int32_t(lane % half);
    partner[lane] = int32_t(lane % HD < half ? lane + half : lane - half);
  }
  const Ints negative = (partner > lane_numbers() ? INT32_MIN : 0) ^ (backward ? INT32_MIN : 0);

  for (int64_t row = rows.first; row < rows.first + rows.count; ++row) {
    float* const values = x.data + row * x.cols;
    const float* const c_row = cos.data + row % tokens.length * half;
    const float* const s_row = sin.data + row % tokens.length * half;
    if (whole_heads) {
      const Floats c_half = A::load(c_row, int(half)), s_half = A::load(s_row, int(half));
      const Floats c = shuffle(c_half, c_half, within);
      const Floats s = (Floats)((Ints)shuffle(s_half, s_half, within) ^ negative);
      for_lanes(0, heads * HD, [&](int64_t i, int lanes) {
        const Floats own = A::load(values + i, lanes), other = shuffle(own, own, partner);
        A::store(values + i, A::add(A::mul(own, c), A::mul(other, s)), lanes);
      });
      continue;
    }
    for (int64_t h = 0; h < heads; ++h) {
      float* const low = values + h * HD;
      float* const high = low + half;
      for_lanes(0, half, [&](int64_t i, int lanes) {
        const Floats c = A::load(c_row + i, lanes), s = A::load(s_row + i, lanes);
        const Floats a = A::load(low + i, lanes), b = A::load(high + i, lanes);
        const Floats as = A::mul(a, s), bs = A::mul(b, s);
        A::store(low + i, A::add(A::mul(a, c), backward ? bs : A::negate(bs)), lanes);
        A::store(high + i, A::add(A::mul(b, c), backward ? A::negate(as) : as), lanes);
      });
    }
  }
}

}  // namespace mjl::cpu::MJL_UNIT
