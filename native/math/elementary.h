// SPDX-License-Identifier: Apache-2.0
//
// exp, log, pow, sin and cos: one definition for scalars, vectors and devices. `A` is the arithmetic (float type A::F,
// integer type A::I and the operations used below); every operation of A is one correctly rounded operation followed by
// z. Polynomials by Horner's rule with fma; constants are the decimal literals rounded to float32. Measured errors:
// docs/numerics.md.
#ifndef MJL_MATH_ELEMENTARY_H
#define MJL_MATH_ELEMENTARY_H

#include <cstdint>

#include "math/inline.h"

namespace mjl::math {

template <class A>
MJL_INLINE typename A::F exp(typename A::F x) {
  using F = typename A::F;
  const F low = A::value(-87.33655f), high = A::value(88.722835f);
  const F c = A::min(A::max(x, low), high);  // keeps the lanes that are replaced below out of trouble
  const F t = A::fma(c, A::value(1.4426950408889634f), A::value(0.5f));
  const F k = A::floor(t);
  F r = A::fma(k, A::value(-0.693359375f), c);
  r = A::fma(k, A::value(2.12194440e-4f), r);
  F q = A::fma(A::value(1.9875691500e-4f), r, A::value(1.3981999507e-3f));
  q = A::fma(q, r, A::value(8.3334519073e-3f));
  q = A::fma(q, r, A::value(4.1665795894e-2f));
  q = A::fma(q, r, A::value(1.6666665459e-1f));
  q = A::fma(q, r, A::value(5.0000001201e-1f));
  F y = A::add(A::fma(q, A::mul(r, r), r), A::value(1.0f));
  // Two factors, because 2^k alone leaves the range of float32 at both ends.
  const typename A::I n = A::to_int(k), half = n >> 1;
  y = A::mul(A::mul(y, A::power_of_two(half)), A::power_of_two(n - half));
  y = A::select(x < low, A::value(0.0f), y);
  return A::select(x > high, A::value(__builtin_inff()), y);
}

// x > 0 and normal.
template <class A>
MJL_INLINE typename A::F log(typename A::F x) {
  using F = typename A::F;
  const typename A::I bits = A::bits(x);
  const F m0 = A::from_bits((bits & 0x007fffff) | 0x3f000000);  // in [0.5, 1)
  const F e0 = A::to_float(((bits >> 23) & 0xff) - 126);
  const auto small = m0 < A::value(0.7071067811865476f);
  const F e = A::select(small, A::add(e0, A::value(-1.0f)), e0);
  const F m = A::select(small, A::add(m0, m0), m0);
  const F t = A::add(m, A::value(-1.0f)), s = A::mul(t, t);
  F p = A::fma(A::value(7.0376836292e-2f), t, A::value(-1.1514610310e-1f));
  p = A::fma(p, t, A::value(1.1676998740e-1f));
  p = A::fma(p, t, A::value(-1.2420140846e-1f));
  p = A::fma(p, t, A::value(1.4249322787e-1f));
  p = A::fma(p, t, A::value(-1.6668057665e-1f));
  p = A::fma(p, t, A::value(2.0000714765e-1f));
  p = A::fma(p, t, A::value(-2.4999993993e-1f));
  p = A::fma(p, t, A::value(3.3333331174e-1f));
  F y = A::mul(A::mul(t, s), p);
  y = A::fma(e, A::value(-2.12194440e-4f), y);
  y = A::fma(A::value(-0.5f), s, y);
  return A::fma(e, A::value(0.693359375f), A::add(t, y));
}

template <class A>
MJL_INLINE typename A::F pow(typename A::F base, typename A::F exponent) {
  return A::select(exponent == A::value(0.0f), A::value(1.0f), exp<A>(A::mul(exponent, log<A>(base))));
}

// Sine and cosine of x >= 0, far below 2^24 * pi/4.
template <class A>
MJL_INLINE void sincos(typename A::F x, typename A::F& sine, typename A::F& cosine) {
  using F = typename A::F;
  using I = typename A::I;
  const F j0 = A::floor(A::mul(x, A::value(1.27323954473516f)));
  const I i0 = A::to_int(j0), odd = i0 & 1;
  const F y = A::add(j0, A::to_float(odd));
  I j = (i0 + odd) & 7;
  F r = A::fma(y, A::value(-0.78515625f), x);
  r = A::fma(y, A::value(-2.4187564849853515625e-4f), r);
  r = A::fma(y, A::value(-3.77489497744594108e-8f), r);
  const I flip = (j >> 2) & 1;  // j > 3
  j = j & 3;
  const F w = A::mul(r, r);
  F p = A::fma(A::value(-1.9515295891e-4f), w, A::value(8.3321608736e-3f));
  p = A::fma(p, w, A::value(-1.6666654611e-1f));
  p = A::fma(A::mul(r, w), p, r);
  F c = A::fma(A::value(2.443315711809948e-5f), w, A::value(-1.388731625493765e-3f));
  c = A::fma(c, w, A::value(4.166664568298827e-2f));
  c = A::fma(A::mul(w, w), c, A::fma(A::value(-0.5f), w, A::value(1.0f)));
  const I swapped =
      (j ^ (j >> 1)) & 1;  // j is 1 or 2: the sine comes from the cosine's polynomial and the other way round
  const auto swap = swapped != 0;
  sine = A::from_bits(A::bits(A::select(swap, c, p)) ^ (flip * INT32_MIN));
  cosine = A::from_bits(A::bits(A::select(swap, p, c)) ^ ((flip ^ (j >> 1)) * INT32_MIN));
}

}  // namespace mjl::math

#endif
