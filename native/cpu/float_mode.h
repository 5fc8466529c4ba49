// SPDX-License-Identifier: Apache-2.0
//
// The floating-point mode of the calling thread: other packages leave flush-to-zero switched on, and it changes
// results.
#ifndef MJL_CPU_FLOAT_MODE_H
#define MJL_CPU_FLOAT_MODE_H

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace mjl::cpu {

// Round to nearest, subnormals kept, no traps; the caller's mode and flags come back at the end of the scope.
class FloatMode {
 public:
  FloatMode() : saved_(get()) { set(kPlain); }
  ~FloatMode() { set(saved_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kPlain = 0x1f80;
  static uint64_t get() { return _mm_getcsr(); }
  static void set(uint64_t mode) { _mm_setcsr(uint32_t(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kPlain = 0;
  static uint64_t get() {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#endif
  uint64_t saved_;
};

}  // namespace mjl::cpu

#endif
