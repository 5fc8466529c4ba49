// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of docs/numerics.md on single floats, for the few scalars that the host computes once a step.
#ifndef MJL_MATH_SCALAR_H
#define MJL_MATH_SCALAR_H

#include <cmath>
#include <cstdint>
#include <cstring>

namespace mjl::scalar {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

inline float z(float x) { return (bits_of(x) & 0x7f800000u) == 0 ? std::copysign(0.0f, x) : x; }
inline float add(float a, float b) { return z(z(a) + z(b)); }
inline float mul(float a, float b) { return z(z(a) * z(b)); }
inline float div(float a, float b) { return z(z(a) / z(b)); }
inline float sqrt(float x) { return z(x) <= 0.0f ? 0.0f : std::sqrt(x); }

}  // namespace mjl::scalar

#endif
