// SPDX-License-Identifier: Apache-2.0
//
// Vectors of floats for the unit this file is compiled for (MJL_UNIT), and the contract's arithmetic on them.
//
// Everything in cpu/unit lives in a namespace named after its unit and uses no inline function of the standard library:
// a copy of such a function compiled for AVX-512 could otherwise be the one that the linker keeps for everybody.
#ifndef MJL_CPU_UNIT_SIMD_H
#define MJL_CPU_UNIT_SIMD_H

#include <cfloat>
#include <cstdint>

#include "math/inline.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace mjl::cpu::MJL_UNIT {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16, kTileRows = 8;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8, kTileRows = 6;
#else
inline constexpr int kLanes = 4, kTileRows = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef float FloatsUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

// ---- One rounding of a*b+c ----

#if defined(__AVX512F__)
MJL_INLINE Floats fused(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
MJL_INLINE Floats root(Floats x) { return (Floats)_mm512_maskz_sqrt_ps(0xffff, (__m512)x); }
MJL_INLINE Floats floor(Floats x) {
  return (Floats)_mm512_maskz_roundscale_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
#elif defined(__AVX2__)
MJL_INLINE Floats fused(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
MJL_INLINE Floats root(Floats x) { return (Floats)_mm256_sqrt_ps((__m256)x); }
MJL_INLINE Floats floor(Floats x) { return (Floats)_mm256_floor_ps((__m256)x); }
#elif defined(__x86_64__)
// Without fma instructions: in double the product is exact, and its sum with c is rounded to odd (the last bit set if
// anything was lost), which makes the second rounding, to float, as if it were the only one.
MJL_INLINE Floats fused(Floats a, Floats b, Floats c) {
  typedef double Doubles __attribute__((vector_size(kLanes * 8)));
  typedef int64_t Longs __attribute__((vector_size(kLanes * 8)));
  const Doubles product = __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles);
  const Doubles addend = __builtin_convertvector(c, Doubles);
  const Doubles sum = product + addend;
  const Doubles part = sum - product;
  const Doubles lost = (product - (sum - part)) + (addend - part);
  const Longs even = (((Longs)sum & 1) == 0) & (lost != 0.0);  // -1 where the last bit must become odd
  // One step towards the lost part: up if it has the sum's sign (adding 1 to the representation enlarges the
  // magnitude).
  const Longs away = ((Longs)lost ^ (Longs)sum) >= 0;  // -1 where the signs agree
  const Longs odd = (Longs)sum + (even & (-away + ~away));
  // Infinite and NaN sums carry no lost part worth having.
  const Longs finite = ((Longs)sum & 0x7ff0000000000000LL) != 0x7ff0000000000000LL;
  return __builtin_convertvector((Doubles)((odd & finite) | ((Longs)sum & ~finite)), Floats);
}
MJL_INLINE Floats root(Floats x) { return (Floats)_mm_sqrt_ps((__m128)x); }
MJL_INLINE Floats floor(Floats x) {
  const Floats whole = __builtin_convertvector(__builtin_convertvector(x, Ints), Floats);  // towards zero; |x| < 2^31
  return whole - (Floats)((Ints)(1.0f - Floats{}) & (whole > x));
}
#elif defined(__aarch64__)
MJL_INLINE Floats fused(Floats a, Floats b, Floats c) {
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
MJL_INLINE Floats root(Floats x) { return (Floats)vsqrtq_f32((float32x4_t)x); }
MJL_INLINE Floats floor(Floats x) { return (Floats)vrndmq_f32((float32x4_t)x); }
#else
#error "this processor has no vector unit here yet: see CONTRIBUTING.md"
#endif

// ---- Loads, stores, lanes ----

MJL_INLINE Floats broadcast(float x) { return x - Floats{}; }  // not `x + Floats{}`, which would make +0 of -0
MJL_INLINE Floats raw_load(const float* p) { return *(const FloatsUnaligned*)p; }
MJL_INLINE void raw_store(float* p, Floats x) { *(FloatsUnaligned*)p = x; }
// The first `count` lanes, the others zero; the memory beyond is not touched.
#if defined(__AVX512F__)
MJL_INLINE Floats raw_load(const float* p, int count) {
  return (Floats)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
}
MJL_INLINE void raw_store(float* p, Floats x, int count) {
  _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), (__m512)x);
}
#else
MJL_INLINE Floats raw_load(const float* p, int count) {
  Floats x = {};
  for (int i = 0; i < count; ++i) x[i] = p[i];
  return x;
}
MJL_INLINE void raw_store(float* p, Floats x, int count) {
  for (int i = 0; i < count; ++i) p[i] = x[i];
}
#endif
MJL_INLINE Floats lanes_from(float first, float step) {
  Floats x = {};
  for (int i = 0; i < kLanes; ++i) x[i] = first + float(i) * step;
  return x;
}

MJL_INLINE Ints lane_numbers() {
  Ints x = {};
  for (int i = 0; i < kLanes; ++i) x[i] = i;
  return x;
}
MJL_INLINE Floats shuffle(Floats a, Floats b, Ints lanes) {  // lane n of a, or n - kLanes of b
#if defined(__clang__)
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = lanes[i] < kLanes ? a[lanes[i]] : b[lanes[i] - kLanes];
  return x;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// Lane j of x[i] becomes lane i of x[j].
MJL_INLINE void transpose(Floats (&x)[kLanes]) {
  const Ints lane = lane_numbers();
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
    const Ints upper = (lane & step) != 0;
    const Ints low = upper ? lane - step + kLanes : lane, high = upper ? lane + kLanes : lane + step;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & step) continue;
      const Floats a = x[i], b = x[i + step];
      x[i] = shuffle(a, b, low);
      x[i + step] = shuffle(a, b, high);
    }
  }
}

// ---- The contract's arithmetic ----

// Arith<true> flushes after every operation and is always right. Arith<false> leaves the flushing out; exact() below
// runs it first and falls back to Arith<true> when the processor's flags say that a subnormal was met or made. Stores
// flush in both: the comparison in flush() also makes a subnormal that is only stored show in the flags.
template <bool kFlush>
struct Arith {
  using F = Floats;
  using I = Ints;
  static constexpr bool flushes = kFlush;

  static MJL_INLINE F flush(F x) {
    const F magnitude = (F)((I)x & 0x7fffffff);
    return (F)((I)x & ~((magnitude < FLT_MIN) & 0x7fffffff));
  }
  static MJL_INLINE F z(F x) {
    if constexpr (kFlush) return flush(x);
    return x;
  }
  static MJL_INLINE F load(const float* p) { return z(raw_load(p)); }
  static MJL_INLINE F load(const float* p, int count) { return z(count == kLanes ? raw_load(p) : raw_load(p, count)); }
  static MJL_INLINE void store(float* p, F x) { raw_store(p, flush(x)); }
  static MJL_INLINE void store(float* p, F x, int count) {
    count == kLanes ? raw_store(p, flush(x)) : raw_store(p, flush(x), count);
  }
  static MJL_INLINE F value(float x) { return z(broadcast(x)); }

  static MJL_INLINE F add(F a, F b) { return z(a + b); }
  static MJL_INLINE F mul(F a, F b) { return z(a * b); }
  static MJL_INLINE F div(F a, F b) { return z(a / b); }
  static MJL_INLINE F fma(F a, F b, F c) { return z(fused(a, b, c)); }
  static MJL_INLINE F sqrt(F x) { return root(select(x <= F{}, F{}, x)); }
  static MJL_INLINE F rsqrt(F x) { return div(broadcast(1.0f), sqrt(x)); }
  static MJL_INLINE F negate(F x) { return (F)((I)x ^ INT32_MIN); }

  static MJL_INLINE F max(F a, F b) { return a > b ? a : b; }
  static MJL_INLINE F min(F a, F b) { return a < b ? a : b; }
  static MJL_INLINE F floor(F x) { return MJL_UNIT::floor(x); }
  static MJL_INLINE F select(I mask, F a, F b) { return mask ? a : b; }
  static MJL_INLINE I to_int(F x) { return __builtin_convertvector(x, I); }
  static MJL_INLINE F to_float(I x) { return __builtin_convertvector(x, F); }
  static MJL_INLINE I bits(F x) { return (I)x; }
  static MJL_INLINE F from_bits(I x) { return (F)x; }
  static MJL_INLINE F power_of_two(I n) { return (F)((n + 127) << 23); }
};

MJL_INLINE Ints non_finite(Floats x) { return ((Ints)x & 0x7f800000) == 0x7f800000; }
MJL_INLINE bool any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= mask[i];
  return found != 0;
#endif
}

// ---- Plain arithmetic while the flags stay clear, flushed arithmetic otherwise ----

// x86 raises "denormal operand" for every subnormal that enters an operation and "underflow" for every result that was
// tiny and rounded; an exact subnormal result is an operand of whatever comes next, flush() included. Arm raises "input
// denormal" only while it flushes, and "underflow" then for every result that it flushes, so there the plain pass runs
// in flush-to-zero mode. On both: no flag, no subnormal anywhere, and nothing that was flushed.
#if defined(__x86_64__)
MJL_INLINE void begin_plain() { _mm_setcsr(0x1f80); }
MJL_INLINE bool end_plain() { return (_mm_getcsr() & 0x12) == 0; }
#elif defined(__aarch64__)
MJL_INLINE void begin_plain() {
  __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, xzr" : : "r"(uint64_t(1) << 24) : "memory");
}
MJL_INLINE bool end_plain() {
  uint64_t status;
  __asm__ volatile("mrs %0, fpsr\n\tmsr fpcr, xzr" : "=r"(status) : : "memory");
  return (status & 0x88) == 0;
}
#endif

// Out of line and behind memory barriers, so that no operation of the body moves to the wrong side of reading the
// flags.
template <class A, class Body>
__attribute__((noinline)) void run_body(Body& body) {
  body(A{});
}

// Runs body(arithmetic), which must compute the same when it runs a second time: it may read what it wrote, but not
// replace what it read.
template <class Body>
MJL_INLINE void exact(Body&& body) {
  begin_plain();
  __asm__ volatile("" ::: "memory");
  run_body<Arith<false>>(body);
  __asm__ volatile("" ::: "memory");
  if (__builtin_expect(!end_plain(), 0)) run_body<Arith<true>>(body);
}

// ---- Small helpers ----

// body(offset, lanes) for the vectors that cover [begin, end).
template <class Body>
MJL_INLINE void for_lanes(int64_t begin, int64_t end, Body&& body) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) body(i, kLanes);
  if (i < end) body(i, int(end - i));
}

MJL_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
MJL_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
MJL_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MJL_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace mjl::cpu::MJL_UNIT

#endif
