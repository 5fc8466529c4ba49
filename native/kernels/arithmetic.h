// SPDX-License-Identifier: Apache-2.0
//
// The contract's arithmetic (ops.h) on single floats of a thread: every operation is correctly rounded and followed by
// z. Operands are numbers that went through z: load() does that, and so does every operation.
#ifndef MJL_KERNELS_ARITHMETIC_H
#define MJL_KERNELS_ARITHMETIC_H

#include <cfloat>

#include "kernels/platform.h"
#include "math/elementary.h"

namespace mjl::gpu {

// z. Adding -0 changes nothing but what the processor flushes, and keeps the sign of a zero.
MJL_DEVICE float flush(float x) { return add_flushed(x, -0.0f); }

struct Arithmetic {
  using F = float;
  using I = int32_t;

  static MJL_DEVICE F value(F x) {  // spelled so that the compiler sees through it where x is a constant
    return (__float_as_uint(x) & 0x7f800000u) != 0 ? x : __uint_as_float(__float_as_uint(x) & 0x80000000u);
  }
  // A sum that is tiny is exact, so that flushing before or after rounding is the same.
  static MJL_DEVICE F add(F a, F b) { return add_flushed(a, b); }
  static MJL_DEVICE F mul(F a, F b) { return flush(__fmul_rn(a, b)); }
  static MJL_DEVICE F div(F a, F b) { return flush(__fdiv_rn(a, b)); }
  static MJL_DEVICE F fma(F a, F b, F c) { return flush(fma_ieee(a, b, c)); }
  static MJL_DEVICE F sqrt(F x) { return x <= 0.0f ? 0.0f : __fsqrt_rn(x); }
  static MJL_DEVICE F rsqrt(F x) { return div(1.0f, sqrt(x)); }
  static MJL_DEVICE F negate(F x) { return __uint_as_float(__float_as_uint(x) ^ 0x80000000u); }

  static MJL_DEVICE F max(F a, F b) { return a > b ? a : b; }
  static MJL_DEVICE F min(F a, F b) { return a < b ? a : b; }
  static MJL_DEVICE F floor(F x) { return floorf(x); }
  static MJL_DEVICE F select(bool mask, F a, F b) { return mask ? a : b; }
  static MJL_DEVICE I to_int(F x) { return int32_t(x); }
  static MJL_DEVICE F to_float(I x) { return float(x); }
  static MJL_DEVICE I bits(F x) { return __float_as_int(x); }
  static MJL_DEVICE F from_bits(I x) { return __int_as_float(x); }
  static MJL_DEVICE F power_of_two(I n) { return __int_as_float((n + 127) << 23); }
};

MJL_DEVICE float load(const float* p) { return flush(*p); }
MJL_DEVICE bool non_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u; }
MJL_DEVICE bool is_negative_zero(float x) { return __float_as_uint(x) == 0x80000000u; }
MJL_DEVICE bool sign_of(float x) { return (__float_as_uint(x) >> 31) != 0; }

// exp without z on the way. The only intermediate value that can be subnormal is r * r, and then it is less than half
// of the last place of the r that it is added to: no bit of the sum depends on it. So one z at the end is enough.
struct ExpArithmetic : Arithmetic {
  static MJL_DEVICE F add(F a, F b) { return __fadd_rn(a, b); }
  static MJL_DEVICE F mul(F a, F b) { return __fmul_rn(a, b); }
  static MJL_DEVICE F fma(F a, F b, F c) { return fma_ieee(a, b, c); }
};
MJL_DEVICE float exp_of(float x) { return flush(math::exp<ExpArithmetic>(x)); }

// silu(g) = div(g, silu_denominator(g))
MJL_DEVICE float silu_denominator(float g) { return Arithmetic::add(exp_of(Arithmetic::negate(g)), 1.0f); }

// One more leaf sum, number n from 0, for the balanced tree of adjacent pairs, kept as a binary counter: stack[l] holds
// the sum of 2^l leaves wherever bit l of n is set. When `last`, all that is left is added up, smallest run first (an
// odd tail is carried up unchanged), and the result is the contraction.
template <int kLevels>
MJL_DEVICE float push_leaf(float (&stack)[kLevels], int n, bool last, float sum) {
  int level = 0;
  for (; last ? n != 0 : (n & 1) != 0; n >>= 1, ++level)
    if (n & 1) sum = Arithmetic::add(stack[level], sum);
  if (!last) stack[level] = sum;
  return sum;
}

}  // namespace mjl::gpu

#endif
