// SPDX-License-Identifier: Apache-2.0
#ifndef MJL_GPU_GEMM_H
#define MJL_GPU_GEMM_H

#include "kernels/arguments.h"

namespace mjl::gpu {

// What the kernels of kernels/gemm.cu need beside the operands, in elements.
struct GemmSpace {
  float* stack;
  float* nodes;
  uint32_t* flags;  // zero between products
  int64_t stack_floats, node_floats, flag_count;
};

// One product cut into units, by one of the two tiles.
struct GemmPlan {
  bool large_tile;
  int32_t tiles_m, tiles_n, leaf, leaves, whole, splits, split_leaves, units, grid, levels;
  int64_t stack_floats, node_floats, flag_count;
  double cost;
};

// Whether a product of this size is worth the large kernels.
bool is_large(int64_t m, int64_t n, int64_t k);

// The cheapest plan that fits into `space`.
GemmPlan plan_gemm(int64_t m, int64_t n, int64_t k, Contraction rule, int multiprocessors, const GemmSpace& space);

// The sizes that any product m' x n x k with m' <= m may need (the pointers are null).
GemmSpace gemm_space(int64_t m, int64_t n, int64_t k, Contraction rule, int multiprocessors);

}  // namespace mjl::gpu

#endif
