// SPDX-License-Identifier: Apache-2.0
//
// What the host passes to the kernels: one struct a kernel, shared by both sides.
#ifndef MJL_KERNELS_ARGUMENTS_H
#define MJL_KERNELS_ARGUMENTS_H

#include <cstdint>

#include "math/inline.h"
#include "ops.h"

namespace mjl::gpu {

// Every kernel: (source file, function).
#define MJL_GPU_KERNELS(X)                             \
  X(embedding, embed)                                  \
  X(embedding, embed_backward)                         \
  X(norm, norm_forward)                                \
  X(norm, norm_backward)                               \
  X(norm, norm_weight_gradient)                        \
  X(norm, sum_leaves)                                  \
  X(products, products)                                \
  X(gemm, gemm_large_nt)                               \
  X(gemm, gemm_large_nn)                               \
  X(gemm, gemm_large_nn_unaligned)                     \
  X(gemm, gemm_large_tn)                               \
  X(gemm, gemm_large_tn_unaligned)                     \
  X(gemm, gemm_medium_nt)                              \
  X(gemm, gemm_medium_nn)                              \
  X(gemm, gemm_medium_nn_unaligned)                    \
  X(gemm, gemm_medium_tn)                              \
  X(gemm, gemm_medium_tn_unaligned)                    \
  X(silu, silu_product)                                \
  X(silu, silu_product_backward)                       \
  X(rotary, rotary_table)                              \
  X(rotary, rotate)                                    \
  X(head, head_rows)                                   \
  X(head, mean_loss)                                   \
  X(attention_forward, attention_survey)               \
  X(attention_forward, attention_forward)              \
  X(attention_forward, attention_forward_wide)         \
  X(attention_backward, attention_backward_query)      \
  X(attention_backward, attention_backward_query_wide) \
  X(attention_backward, attention_backward_key)        \
  X(attention_backward, attention_backward_key_wide)   \
  X(update, update)

enum class Kernel {
#define X(file, name) name,
  MJL_GPU_KERNELS(X)
#undef X
};

inline constexpr int kLevels = 11;  // log2 of the 1024 leaves a contraction has at most, and one

MJL_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MJL_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
MJL_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The leaf length of a contraction over k.
MJL_INLINE int64_t leaf_length(int64_t k) {
  if (k <= 128) return larger(k, 1);
  return ceil_div(k, 128) <= 1024 ? 128 : ceil_div(k, 1024);
}

// What a step leaves for the host.
struct Result {
  float loss;
  uint32_t faults;
};

struct EmbedArguments {
  Tokens tokens;
  Tensor table, x;  // [V, D], [M, D]; in the backward pass their gradients
};

inline constexpr int kNormRows = 8;

struct NormArguments {
  Tensor x, w, rstd, y;         // [M, D], [D], [M], [M, D]
  Tensor d_y, d_residual, d_x;  // [M, D]
  int32_t leaf;                 // of a contraction over M
  float* leaf_sums;             // [ceil(M / leaf), D]
};

// out[column] = the tree over `leaves` rows of leaf_sums.
struct SumLeavesArguments {
  const float* leaf_sums;  // [leaves, columns]
  int32_t leaves, columns;
  float* out;  // [columns]
};

// Element (i, j) is data[i * row_stride + j * col_stride].
struct Matrix {
  const float* data;
  int64_t row_stride, col_stride;
};

struct Term {
  Matrix a;  // [m, k]
  Matrix b;  // [k, n]
  int32_t k;
};

// c[m, n] = add(residual, add(add(term 0, term 1), term 2)), each term one contraction.
struct Product {
  int32_t m, n;
  Term terms[3];
  int32_t term_count;
  Contraction rule;
  const float* residual;  // row-major like c, or null; may be c
  bool resume;            // chain only: the chain goes on from what c holds
  float* c;               // [m, n]
};

inline constexpr int kProducts = 4, kProductTile = 32;

struct ProductsArguments {
  Product product[kProducts];
  int32_t first_tile[kProducts];  // of each product; INT32_MAX for those that are not there
};

// One term of a large product. A CTA takes units c, c + grid, ...; a unit is an output tile and a power-of-two run of
// leaves, or all of them.
struct GemmArguments {
  const float *a, *b;
  float* c;
  const float* residual;
  int64_t lda, ldb;
  int32_t m, n, k;
  int32_t resume;
  int32_t leaf, leaves;
  int32_t tiles_m, tiles_n;
  int32_t whole;  // tiles 0 .. whole - 1 are one unit each; every later tile is `splits` units
  int32_t splits, split_leaves;
  int32_t units;
  int32_t levels;   // of a CTA's stack
  float* stack;     // [grid][levels][tile]
  float* nodes;     // [split tile][2 * splits][tile]: sums waiting for their sibling
  uint32_t* flags;  // [split tile][2 * splits]: 0 nobody came, 1 the first is storing, 2 the first has stored
};

struct SiluArguments {
  Tensor gate, up, gated;        // [M, F]
  Tensor d_gated, d_gate, d_up;  // [M, F]
};

struct RotaryTableArguments {
  Heads heads;
  Tensor cos, sin;  // [L, HD/2]
};

struct RotateArguments {
  int32_t length, half;  // half = HD / 2
  int32_t q_heads, k_heads;
  int32_t backward;
  Tensor q, k;      // [M, heads * HD], in place
  Tensor cos, sin;  // [L, half]
};

struct HeadArguments {
  Tokens tokens;
  int64_t first;  // token of the first row of logits
  int32_t rows, V;
  Contraction rule;
  int32_t gradient;  // leave dlogits in place of the logits
  float* logits;     // [rows, V]
  float* row_loss;   // [M]
  Result* result;
};

inline constexpr int kLossBlock = 256;  // rows of one block of the chunked head's loss sum

struct MeanLossArguments {
  const float* row_loss;  // [count]
  int32_t count, leaf;
  float* leaf_sums;  // [ceil(count / leaf)]
  Result* result;
};

// Of |x| over one head in one row of the batch: the largest bit pattern, and the complement of the smallest pattern
// that is at least 2^-126. Both are at least 0, so that maxima start from cleared memory.
struct Extent {
  uint32_t greatest, not_least;
};

inline constexpr int kAttentionTile = 64, kAttentionThreads = 256;
inline constexpr int kAttentionTileFloats = kAttentionTile * (kAttentionTile + 4);
// CTAs a multiprocessor, and tiles in their shared memory. The wide kernels are for more than 64 dimensions a head.
inline constexpr int kForwardCtas = 3, kForwardWideCtas = 2, kBackwardCtas = 2;
inline constexpr int kForwardTiles = 3, kForwardWideTiles = 4, kQueryTiles = 5, kKeyTiles = 4, kKeyWideTiles = 6;

inline constexpr int kSurveyPositions = 128;  // of one block of the survey

struct AttentionArguments {
  Tokens tokens;
  int32_t H, KV, HD;
  bool aligned;                         // the rows of a head start at 16-byte boundaries
  float scale;                          // rsqrt(HD)
  Tensor q, k, v, context;              // [M, H*HD], [M, KV*HD] twice, [M, H*HD]
  Tensor score_max, denominator;        // [M, H]
  Tensor d_context, zz, d_q, d_k, d_v;  // null in the forward pass
  // Panels: [key][64 queries] each, of panel_floats. In the forward pass a CTA has one. In the backward pass every tile
  // of queries has one in p_panels and one in ds_panels, at [b][kv][head of the group - first_head][tile - first_tile].
  float *p_panels, *ds_panels;
  int64_t panel_floats;
  int32_t first_head, heads, first_tile, tiles;  // the chunk of a group's heads and of query tiles that is at hand
  Extent *extent_q, *extent_k, *extent_v, *extent_d_context;  // [B, heads]
  Result* result;
};

struct UpdateArguments {
  const UpdateScalars* scalars;
  int64_t count;
  const float *g, *p, *m, *v;
  float *next_p, *next_m, *next_v;
  Result* result;
};

}  // namespace mjl::gpu

#endif
