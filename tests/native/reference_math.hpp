// SPDX-License-Identifier: Apache-2.0
//
// The reference's arithmetic: one rounding at a time, in the order in which docs/numerics.md states it. Nothing here is
// fast.
// A `Variant` other than right breaks exactly one rule, so that a test can show that its input would notice.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace reference {

enum class Variant {
  right,
  hardware_flush,  // a result that rounds up to 2^-126 from below becomes zero, as in the flush modes of x86 and NVIDIA
  no_flush,        // subnormals stay
  masked_dropped,  // masked keys left out of every chain
  fold_from_the_right,   // leaf sums added as 0 + (1 + (2 + 3))
  leaf_256,              // leaves of 256 terms
  wide_sums,             // sums kept in double, rounded once
  rotary_fused,          // x*cos + r*sin with one product inside an fma
  heads_descending,      // dk, dv: heads of the group from the last to the first
  queries_descending,    // dk, dv: queries from the last to the first
  positions_descending,  // embedding gradient: positions from the last to the first
};

inline Variant variant = Variant::right;

// ---- Single operations ----

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

constexpr float kSmallestNormal = std::numeric_limits<float>::min();  // 2^-126

inline bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

// A subnormal becomes a zero of the same sign.
inline float z(float x) {
  if ((bits_of(x) & 0x7f800000u) != 0 || variant == Variant::no_flush) return x;
  return float_of(bits_of(x) & 0x80000000u);
}

// Passes a rounded result through z. is_smaller() tells whether it was below 2^-126 before rounding, for a variant.
template <class IsSmaller>
float settle(float rounded, IsSmaller is_smaller) {
  if (variant == Variant::hardware_flush && std::fabs(rounded) == kSmallestNormal && is_smaller())
    return std::copysign(0.0f, rounded);
  return z(rounded);
}

// Whether |high + low| < 2^-126, where high is the rounded sum of the two.
inline bool is_below_normal(double high, double low) {
  const double size = std::fabs(high), tail = high < 0 ? -low : low;
  return size < kSmallestNormal || (size == kSmallestNormal && tail < 0);
}

inline float mul(float a, float b) {
  return settle(a * b, [&] { return is_below_normal(double(a) * double(b), 0.0); });
}

inline float add(float a, float b) { return z(a + b); }  // near 2^-126 every sum is exact

inline float fma(float a, float b, float c) {
  return settle(__builtin_fmaf(a, b, c), [&] {
    const double p = double(a) * double(b), s = p + double(c), t = s - p;  // p + c = s + error, exactly
    return is_below_normal(s, (p - (s - t)) + (double(c) - t));
  });
}

inline float div(float a, float b) {
  const float x = z(a), y = z(b);
  return settle(x / y, [&] { return std::fabs(double(x)) < std::fabs(double(y)) * double(kSmallestNormal); });
}

inline float sqrt(float x) { return z(x) == 0.0f ? 0.0f : std::sqrt(x); }

inline float rsqrt(float x) { return div(1.0f, sqrt(x)); }

// By value; +0 beats -0.
inline float max(float a, float b) {
  if (a == b) return bits_of(a) == 0x80000000u ? b : a;
  return a > b ? a : b;
}

// ---- Sums; a(i) and b(i) give the terms' factors ----

inline float one(int64_t) { return 1.0f; }

// acc = fma(a, b, acc), ascending from +0, over terms [first, last).
template <class A, class B>
float chain(int64_t first, int64_t last, A a, B b) {
  if (variant == Variant::wide_sums) {
    double acc = 0.0;
    for (int64_t i = first; i < last; ++i) acc += double(z(a(i))) * double(z(b(i)));
    return z(float(acc));
  }
  float acc = 0.0f;
  for (int64_t i = first; i < last; ++i) acc = fma(z(a(i)), z(b(i)), acc);
  return acc;
}

inline int64_t leaf_length(int64_t k) {
  const int64_t leaf = variant == Variant::leaf_256 ? 256 : 128;
  if (k <= leaf) return k;
  return (k + leaf - 1) / leaf <= 1024 ? leaf : (k + 1023) / 1024;
}

// Adjacent pairs, level by level; an odd last one goes up unchanged.
inline float fold(std::vector<float> sums) {
  if (sums.empty()) return 0.0f;
  if (variant == Variant::fold_from_the_right) {
    float acc = sums.back();
    for (size_t i = sums.size() - 1; i-- > 0;) acc = add(sums[i], acc);
    return acc;
  }
  while (sums.size() > 1) {
    std::vector<float> next;
    for (size_t i = 0; i + 1 < sums.size(); i += 2) next.push_back(add(sums[i], sums[i + 1]));
    if (sums.size() % 2 == 1) next.push_back(sums.back());
    sums.swap(next);
  }
  return sums[0];
}

// The contraction: leaves, then the fold.
template <class A, class B>
float tree(int64_t k, A a, B b) {
  const int64_t leaf = leaf_length(k);
  if (k <= leaf) return chain(0, k, a, b);
  std::vector<float> sums;
  for (int64_t first = 0; first < k; first += leaf)
    sums.push_back(chain(first, first + leaf < k ? first + leaf : k, a, b));
  return fold(sums);
}

enum class Rule { tree, chain };

template <class A, class B>
float contract(Rule rule, int64_t k, A a, B b) {
  return rule == Rule::tree ? tree(k, a, b) : chain(0, k, a, b);
}

// ---- Elementary functions ----

inline float power_of_two(int k) { return float_of(uint32_t(k + 127) << 23); }

inline float exp(float x) {
  if (std::isnan(x)) return x;
  if (x > 88.722835f) return std::numeric_limits<float>::infinity();
  if (x < -87.33655f) return 0.0f;
  x = z(x);
  const float k = std::floor(fma(x, 1.4426950408889634f, 0.5f));
  float r = fma(k, -0.693359375f, x);
  r = fma(k, 2.12194440e-4f, r);
  float q = 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    q = fma(q, r, c);
  const float y = add(fma(q, mul(r, r), r), 1.0f);
  const int n = int(k), half = n >> 1;
  return mul(mul(y, power_of_two(half)), power_of_two(n - half));
}

// x: positive, normal, finite.
inline float log(float x) {
  int exponent;
  float m = std::frexp(x, &exponent);
  if (m < 0.7071067811865476f) {
    exponent -= 1;
    m = add(m, m);
  }
  const float e = float(exponent), t = add(m, -1.0f), s = mul(t, t);
  float p = 7.0376836292e-2f;
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = fma(p, t, c);
  float y = mul(mul(t, s), p);
  y = fma(e, -2.12194440e-4f, y);
  y = fma(-0.5f, s, y);
  return fma(e, 0.693359375f, add(t, y));
}

inline float pow(float base, float exponent) { return exponent == 0.0f ? 1.0f : exp(mul(exponent, log(base))); }

// x: 0 <= x <= 8192.
inline float sin_or_cos(float x, bool cosine) {
  x = z(x);
  float y = std::floor(mul(x, 1.27323954473516f));
  int64_t j = int64_t(y);
  if (j % 2 == 1) {
    j += 1;
    y = add(y, 1.0f);
  }
  j %= 8;
  x = fma(y, -0.78515625f, x);
  x = fma(y, -2.4187564849853515625e-4f, x);
  x = fma(y, -3.77489497744594108e-8f, x);
  bool negative = false;
  if (j > 3) {
    j -= 4;
    negative = !negative;
  }
  if (cosine && j > 1) negative = !negative;
  const float w = mul(x, x);
  const bool sine_polynomial = cosine == (j == 1 || j == 2);
  float result;
  if (sine_polynomial) {
    float p = -1.9515295891e-4f;
    p = fma(p, w, 8.3321608736e-3f);
    p = fma(p, w, -1.6666654611e-1f);
    result = fma(mul(x, w), p, x);
  } else {
    float p = 2.443315711809948e-5f;
    p = fma(p, w, -1.388731625493765e-3f);
    p = fma(p, w, 4.166664568298827e-2f);
    result = fma(mul(w, w), p, fma(-0.5f, w, 1.0f));
  }
  return negative ? -result : result;
}

inline float sin(float x) { return sin_or_cos(x, false); }
inline float cos(float x) { return sin_or_cos(x, true); }

}  // namespace reference
