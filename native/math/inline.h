// SPDX-License-Identifier: Apache-2.0
#ifndef MJL_MATH_INLINE_H
#define MJL_MATH_INLINE_H

#define MJL_INLINE inline __attribute__((always_inline))

#endif
