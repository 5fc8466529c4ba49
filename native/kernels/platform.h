// SPDX-License-Identifier: Apache-2.0
//
// All that differs between the vendors' device languages.
#ifndef MJL_KERNELS_PLATFORM_H
#define MJL_KERNELS_PLATFORM_H

#include <cstdint>

#define MJL_KERNEL extern "C" __global__ void
#define MJL_DEVICE __device__ __forceinline__

namespace mjl::gpu {

// One rounding of a * b + c, subnormals kept.
MJL_DEVICE float fma_ieee(float a, float b, float c) {
  float r;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}
// The processor's own flushing: of operands, and of results that were tiny before rounding. For sums that is z; for
// products it is not, except where kernels prove that it cannot matter.
MJL_DEVICE float fma_flushed(float a, float b, float c) {
  float r;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}
MJL_DEVICE float add_flushed(float a, float b) {
  float r;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// The lanes, of the 32 that this thread belongs to, for which `condition` holds.
MJL_DEVICE uint32_t ballot(bool condition) { return __ballot_sync(~0u, condition); }
MJL_DEVICE uint32_t warp_min(uint32_t x) { return __reduce_min_sync(~0u, x); }

// A load past the first-level cache, for what other blocks wrote.
MJL_DEVICE float4 load_shared_by_blocks(const float4* p) { return __ldcg(p); }

// Copies from global to shared memory that run while the thread goes on.
MJL_DEVICE unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }
template <int kBytes>
MJL_DEVICE void copy_async(unsigned to, const float* from) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
template <int kBytes>
MJL_DEVICE void copy_async_or_zero(unsigned to, const float* from, bool valid) {
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
MJL_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
MJL_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace mjl::gpu

#endif
