// SPDX-License-Identifier: Apache-2.0
#ifndef MJL_MATH_INLINE_H
#define MJL_MATH_INLINE_H

#if defined(__CUDACC__) || defined(__HIPCC__)
#define MJL_INLINE __host__ __device__ __forceinline__
#else
#define MJL_INLINE inline __attribute__((always_inline))
#endif

#endif
