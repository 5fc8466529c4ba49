// SPDX-License-Identifier: Apache-2.0
//
// What the attention kernels share: tiles of 64 x 64 in shared memory, [k][64] with four floats after each row. A CTA's
// 16 x 16 threads own 4 x 4 elements of a tile each.
//
// Two conditions are looked at once per head and row of the batch, by attention_survey:
//
//   plain     the exponents of two operands are such that every product is a multiple of 2^-149. Then the processor's
//             flushed fma equals z(RN(fma)), see gemm.cu.
//   bounded   no score comes near the largest float, so that a masked key has p = +0 whatever its score. Then keys
//   beyond           a tile's last query need no visit: adding +-0 to a sum changes it only where it is -0, which is
//   looked for           at the end (the "repairs"). Otherwise all keys are visited, as the contract is written.
#ifndef MJL_KERNELS_ATTENTION_H
#define MJL_KERNELS_ATTENTION_H

#include "kernels/arguments.h"
#include "kernels/arithmetic.h"

namespace mjl::gpu {

inline constexpr int kTile = kAttentionTile, kThreads = kAttentionThreads, kStride = kTile + 4;

using Block = float[4][4];  // of one thread

// The thread's first row and column of a tile; a warp covers 8 x 4 threads, so that neighbours share addresses.
MJL_DEVICE int thread_row() { return (threadIdx.x / 32 % 2 * 8 + threadIdx.x % 32 / 4) * 4; }
MJL_DEVICE int thread_col() { return (threadIdx.x / 64 * 4 + threadIdx.x % 4) * 4; }

MJL_DEVICE void clear(Block& block) {
#pragma unroll
  for (int i = 0; i < 16; ++i) block[i / 4][i % 4] = 0.0f;
}

// tile[d][row] = rows[row * stride + d], z'd, for row < count and d < depth, zeros for other rows. `aligned`: rows
// start at 16-byte boundaries, and depth is a multiple of four.
MJL_DEVICE void load_transposed(bool aligned, const float* rows, int64_t stride, int count, int depth, float* tile) {
  if (aligned) {  // a warp has 16 rows by 8 dimensions: whole sectors of memory, and 32 different banks
    const int d = threadIdx.x / 32 * 8 + threadIdx.x % 2 * 4, first = threadIdx.x % 32 / 2;
    if (d >= depth) return;
    float4 x[kTile / 16];
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i) {
      const int row = i * 16 + first;
      x[i] = row < count ? *(const float4*)(rows + row * stride + d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i) {
      float* const to = tile + d * kStride + i * 16 + first;
      to[0] = flush(x[i].x), to[kStride] = flush(x[i].y), to[2 * kStride] = flush(x[i].z),
      to[3 * kStride] = flush(x[i].w);
    }
    return;
  }
  const int d = threadIdx.x / 32 * 8 + threadIdx.x % 8, first = threadIdx.x % 32 / 8;
  if (d >= depth) return;
#pragma unroll 4
  for (int i = 0; i < kTile / 4; ++i) {
    const int row = i * 4 + first;
    tile[d * kStride + row] = row < count ? load(rows + row * stride + d) : 0.0f;
  }
}

// tile[row][d] = rows[row * stride + d], z'd, for row < count and d < width, zeros for other d.
MJL_DEVICE void load_rows(bool aligned, const float* rows, int64_t stride, int count, int width, float* tile) {
  if (aligned) {
    const int d = threadIdx.x % 16 * 4, first = threadIdx.x / 16;
    float4 x[kTile / 16];
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i) {
      const int row = i * 16 + first;
      x[i] = row < count && d < width ? *(const float4*)(rows + row * stride + d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i)
      *(float4*)(tile + (i * 16 + first) * kStride + d) =
          make_float4(flush(x[i].x), flush(x[i].y), flush(x[i].z), flush(x[i].w));
    return;
  }
  const int d = threadIdx.x % kTile;
#pragma unroll 4
  for (int i = 0; i < kTile / 4; ++i) {
    const int row = i * 4 + threadIdx.x / kTile;
    if (row < count) tile[row * kStride + d] = d < width ? load(rows + row * stride + d) : 0.0f;
  }
}

// block[i][j] goes on as a chain of fma over k: a[k][row i], b[k][column j].
template <bool kPlain>
MJL_DEVICE void multiply(const float* a, const float* b, int depth, Block& block) {
  a += thread_row();
  b += thread_col();
#pragma unroll 4
  for (int k = 0; k < depth; ++k) {
    const float4 x4 = *(const float4*)(a + k * kStride), y4 = *(const float4*)(b + k * kStride);
    const float x[4] = {x4.x, x4.y, x4.z, x4.w}, y[4] = {y4.x, y4.y, y4.z, y4.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        block[i][j] = kPlain ? fma_flushed(x[i], y[j], block[i][j]) : Arithmetic::fma(x[i], y[j], block[i][j]);
  }
}
MJL_DEVICE void multiply(bool plain, const float* a, const float* b, int depth, Block& block) {
  plain ? multiply<true>(a, b, depth, block) : multiply<false>(a, b, depth, block);
}

// 64 rows of one head, of which `count` are there.
struct Rows {
  const float* data;
  int64_t stride;
  int count;
  MJL_DEVICE Rows from(int row, int limit) const { return {data + row * stride, stride, min(kTile, limit - row)}; }
};

// For contractions of more than one leaf. Not inlined: its stack of sums would cost the others.
__device__ __noinline__ void dot_tiles_deep(bool plain, bool aligned, const Rows& a, const Rows& b, int depth,
                                            float* a_tile, float* b_tile, Block& result) {
  const int leaf = int(leaf_length(depth));
  float stack[16][kLevels];
  Block block;
  clear(block);
  for (int d = 0, n = 0, leaf_end = min(leaf, depth); d < depth;) {
    const int step = min(kTile, leaf_end - d);
    __syncthreads();
    load_transposed(aligned && d % 4 == 0 && step % 4 == 0, a.data + d, a.stride, a.count, step, a_tile);
    load_transposed(aligned && d % 4 == 0 && step % 4 == 0, b.data + d, b.stride, b.count, step, b_tile);
    __syncthreads();
    multiply(plain, a_tile, b_tile, step, block);
    d += step;
    if (d != leaf_end) continue;
    const bool last = d == depth;
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      float& sum = block[e / 4][e % 4];
      sum = push_leaf(stack[e], n, last, sum);
      if (last) result[e / 4][e % 4] = sum;
      sum = 0.0f;
    }
    ++n;
    leaf_end = min(leaf_end + leaf, depth);
  }
}

// block[i][j] = contraction over `depth` of row i of `a` with row j of `b`. When depth <= 64 the tile of `a` is loaded
// only if `load_a`: it stays there between calls.
MJL_DEVICE void dot_tiles(bool plain, bool aligned, const Rows& a, const Rows& b, int depth, bool load_a, float* a_tile,
                          float* b_tile, Block& block) {
  if (depth > 128) {
    Block deep;
    dot_tiles_deep(plain, aligned, a, b, depth, a_tile, b_tile, deep);
#pragma unroll
    for (int e = 0; e < 16; ++e) block[e / 4][e % 4] = deep[e / 4][e % 4];
    return;
  }
  clear(block);
#pragma unroll 1
  for (int d = 0; d < depth; d += kTile) {
    const int step = min(kTile, depth - d);
    __syncthreads();
    if (load_a || depth > kTile) load_transposed(aligned, a.data + d, a.stride, a.count, step, a_tile);
    load_transposed(aligned, b.data + d, b.stride, b.count, step, b_tile);
    __syncthreads();
    multiply(plain, a_tile, b_tile, step, block);
  }
}

// The same for one pair of rows, by one thread: for repairs.
__device__ __noinline__ float dot(const float* a, const float* b, int depth) {
  const int leaf = int(leaf_length(depth));
  float stack[kLevels], sum = 0.0f;
  for (int d = 0, n = 0; d < depth; ++n) {
    const int end = min(d + leaf, depth);
    sum = 0.0f;
    for (; d < end; ++d) sum = Arithmetic::fma(load(a + d), load(b + d), sum);
    sum = push_leaf(stack, n, d == depth, sum);
  }
  return sum;
}

// tile[column][row] = block: transposed, so that rows of the product become columns of the next one's factor.
MJL_DEVICE void store_transposed(const Block& block, float* tile) {
  float* const to = tile + thread_col() * kStride + thread_row();
#pragma unroll
  for (int j = 0; j < 4; ++j)
    *(float4*)(to + j * kStride) = make_float4(block[0][j], block[1][j], block[2][j], block[3][j]);
}

// tile[row][column] = block.
MJL_DEVICE void store_rows(const Block& block, float* tile) {
  float* const to = tile + thread_row() * kStride + thread_col();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    *(float4*)(to + i * kStride) = make_float4(block[i][0], block[i][1], block[i][2], block[i][3]);
}

// A panel in global memory, [key][64 queries]: in one kernel, each thread meets only what it wrote itself.
MJL_DEVICE void store_panel(const Block& block, float* panel, int key) {
  float* const to = panel + int64_t(key + thread_col()) * kTile + thread_row();
#pragma unroll
  for (int j = 0; j < 4; ++j)
    *(float4*)(to + j * kTile) = make_float4(block[0][j], block[1][j], block[2][j], block[3][j]);
}
MJL_DEVICE void load_panel(const float* panel, int key, Block& block) {
  const float* const from = panel + int64_t(key + thread_col()) * kTile + thread_row();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float4 x = *(const float4*)(from + j * kTile);
    block[0][j] = x.x, block[1][j] = x.y, block[2][j] = x.z, block[3][j] = x.w;
  }
}

// add(mul(dot, rsqrt(HD)), mask)
MJL_DEVICE float score(float dot, float scale, bool visible) {
  return Arithmetic::add(Arithmetic::mul(dot, scale), visible ? 0.0f : -FLT_MAX);
}

MJL_DEVICE int length_of(const Tokens& tokens, int b) {
  return tokens.lengths ? tokens.lengths[b] : int(tokens.length);
}

MJL_DEVICE bool is_plain(const Extent& a, const Extent& b) {
  return (~a.not_least >> 23) + (~b.not_least >> 23) >= 254 - 103;
}
// |a| |b| HD < 2^126
MJL_DEVICE bool is_bounded(const Extent& a, const Extent& b, int HD) {
  return int(a.greatest >> 23) - 126 + int(b.greatest >> 23) - 126 + (32 - __clz(HD)) < 126;
}
// The smallest |x|, as bits, that is plain with everything in `a`.
MJL_DEVICE uint32_t plain_limit(const Extent& a) {
  const int exponent = 254 - 103 - int(~a.not_least >> 23);
  return uint32_t(max(exponent, 1)) << 23;
}
MJL_DEVICE bool is_below(float x, uint32_t limit) {
  const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
  return bits != 0 && bits < limit;
}

}  // namespace mjl::gpu

#endif
