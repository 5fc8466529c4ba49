// SPDX-License-Identifier: Apache-2.0
//
// Causal attention, forward. A CTA takes 64 queries of one head.
//
// Order of summation: a score is a contraction over the head's dimensions; the denominator is a serial sum over
// ascending keys (a thread a query) and starts only when the largest score is known; an output is one chain of fma over
// ascending keys. Rescaling sums as the maximum grows would need one pass less, and give other bits.
#include "kernels/attention.h"

namespace mjl::gpu {

using A = Arithmetic;

// Extents, which are cleared beforehand. A block has kSurveyPositions positions of a row of the batch and one head, of
// q, k, v or d_context.
MJL_KERNEL attention_survey(const __grid_constant__ AttentionArguments a) {
  __shared__ uint32_t greatest_of[8], not_least_of[8];
  const int heads_in_all = a.H + 2 * a.KV + (a.d_context.data ? a.H : 0), place = blockIdx.x / heads_in_all;
  int head = blockIdx.x % heads_in_all;
  Tensor t = a.q;
  Extent* extents = a.extent_q;
  int heads = a.H;
  const auto skip_to = [&](const Tensor& next, Extent* next_extents, int next_heads) {
    if (head < heads) return false;
    head -= heads;
    t = next, extents = next_extents, heads = next_heads;
    return true;
  };
  skip_to(a.k, a.extent_k, a.KV) && skip_to(a.v, a.extent_v, a.KV) && skip_to(a.d_context, a.extent_d_context, a.H);
  const int L = int(a.tokens.length), HD = a.HD, chunks = (L + kSurveyPositions - 1) / kSurveyPositions;
  const int b = place / chunks, first = place % chunks * kSurveyPositions;
  const int positions = min(kSurveyPositions, L - first);
  const float* const from = t.data + (int64_t(b) * L + first) * t.cols + int64_t(head) * HD;
  uint32_t greatest = 0, not_least = 0;
  // A thread keeps to its dimensions: `side` of them, a power of two, are next to each other.
  const int side = HD > 128 ? 256 : HD > 64 ? 128 : HD > 32 ? 64 : 32, rows = 256 / side;
  for (int d = threadIdx.x % side; d < HD; d += side)
#pragma unroll 8
    for (int i = threadIdx.x / side; i < positions; i += rows) {
      const uint32_t bits = __float_as_uint(from[i * t.cols + d]) & 0x7fffffffu;
      greatest = max(greatest, bits);
      not_least = max(not_least, bits < 0x00800000u ? 0 : ~bits);
    }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    greatest = max(greatest, __shfl_xor_sync(~0u, greatest, lanes));
    not_least = max(not_least, __shfl_xor_sync(~0u, not_least, lanes));
  }
  if (threadIdx.x % 32 == 0) greatest_of[threadIdx.x / 32] = greatest, not_least_of[threadIdx.x / 32] = not_least;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 0; w < 8; ++w) greatest = max(greatest, greatest_of[w]), not_least = max(not_least, not_least_of[w]);
  atomicMax(&extents[b * heads + head].greatest, greatest);
  atomicMax(&extents[b * heads + head].not_least, not_least);
}

namespace {

// An output of -0 after masked keys' p = +0 times v. Not inlined, like all that is rare.
__device__ __noinline__ float repaired_output(const Rows values, int d, int key, int length) {
  for (; key < length; ++key)
    if (!sign_of(values.data[key * values.stride + d])) return 0.0f;
  return -0.0f;
}

template <int kBlocks>
MJL_DEVICE void forward(const AttentionArguments& a) {
  extern __shared__ __align__(16) float shared[];
  const auto tile = [&](int i) { return shared + i * kAttentionTileFloats; };
  float *const q_tile = tile(0), *const p_tile = tile(1), *const x_tile = tile(2);  // x_tile: kBlocks of them
  __shared__ float max_of[kTile][17], largest[kTile], denominator[kTile];
  const int tid = threadIdx.x, row = thread_row(), col = thread_col();
  const int L = int(a.tokens.length), H = a.H, KV = a.KV, HD = a.HD, pairs = int(a.tokens.batch) * H;
  const int tiles = (L + kTile - 1) / kTile;
  const int64_t D = a.q.cols, KD = a.k.cols;
  float* const panel = a.p_panels + blockIdx.x * a.panel_floats;
  bool bad = false;

#pragma unroll 1
  for (int unit = blockIdx.x; unit < tiles * pairs; unit += gridDim.x) {  // the longest first: they end last
    const int first = (tiles - 1 - unit / pairs) * kTile, b = unit % pairs / H, h = unit % pairs % H, kv = h / (H / KV);
    const int length = length_of(a.tokens, b), count = min(kTile, length - first);
    const int64_t token = int64_t(b) * L;
    float* const context = a.context.data + (token + first) * D + int64_t(h) * HD;
    for (int i = tid; i < kTile * HD; i += kThreads)  // padding
      if (i / HD >= count && first + i / HD < L) context[i / HD * D + i % HD] = 0.0f;
    if (count <= 0) continue;
    const Rows queries = {a.q.data + (token + first) * D + int64_t(h) * HD, D, count};
    const Rows keys = {a.k.data + token * KD + int64_t(kv) * HD, KD, length};
    const Rows values = {a.v.data + token * KD + int64_t(kv) * HD, KD, length};
    const Extent &extent_q = a.extent_q[b * H + h], &extent_k = a.extent_k[b * KV + kv];
    const int key_end = is_bounded(extent_q, extent_k, HD) ? min(length, first + kTile) : length;
    const bool plain = is_plain(extent_q, extent_k);
    Block block;

    // Scores and their maximum.
    float m[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll 1
    for (int key = 0; key < key_end; key += kTile) {
      dot_tiles(plain, a.aligned, queries, keys.from(key, length), HD, key == 0, q_tile, x_tile, block);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bool visible = key + col + j <= first + row + i;
          block[i][j] = score(block[i][j], a.scale, visible);
          if (key + col + j >= key_end || row + i >= count) continue;
          bad |= visible && non_finite(block[i][j]);
          m[i] = fmaxf(m[i], block[i][j]);
        }
      store_panel(block, panel, key);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) max_of[row + i][col / 4] = m[i];
    __syncthreads();
    if (tid < kTile) {
      float all = max_of[tid][0];
      for (int i = 1; i < 16; ++i) all = fmaxf(all, max_of[tid][i]);
      largest[tid] = all;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = A::negate(largest[row + i]);

    // Exponentials and their sum.
    float den = 0.0f;
#pragma unroll 1
    for (int key = 0; key < key_end; key += kTile) {
      load_panel(panel, key, block);
#pragma unroll
      for (int i = 0; i < 16; ++i) block[i / 4][i % 4] = exp_of(A::add(block[i / 4][i % 4], m[i / 4]));
      store_panel(block, panel, key);
      __syncthreads();
      store_transposed(block, p_tile);
      __syncthreads();
      const int count_here = min(kTile, key_end - key);
      if (tid < kTile)
#pragma unroll 8
        for (int j = 0; j < count_here; ++j) den = A::add(den, p_tile[j * kStride + tid]);
    }
    if (tid < kTile) denominator[tid] = den;
    if (tid < count) {
      a.score_max.data[(token + first + tid) * H + h] = largest[tid];
      a.denominator.data[(token + first + tid) * H + h] = den;
    }
    __syncthreads();

    // Outputs, 64 kBlocks dimensions at a time.
    const uint32_t limit = plain_limit(a.extent_v[b * KV + kv]);
#pragma unroll 1
    for (int d0 = 0; d0 < HD; d0 += kBlocks * kTile) {
      Block sum[kBlocks];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) clear(sum[n]);
#pragma unroll 1
      for (int key = 0; key < key_end; key += kTile) {
        bool careful = false;
        load_panel(panel, key, block);
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
          load_rows(a.aligned, values.data + key * KD + d0 + n * kTile, KD, min(kTile, length - key),
                    HD - d0 - n * kTile, x_tile + n * kAttentionTileFloats);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float& p = block[i / 4][i % 4];
          p = row + i / 4 < count ? A::div(p, denominator[row + i / 4]) : 0.0f;
          careful |= is_below(p, limit);
        }
        store_transposed(block, p_tile);
        careful = __syncthreads_or(careful);
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
          multiply(!careful, p_tile, x_tile + n * kAttentionTileFloats, min(kTile, key_end - key), sum[n]);
        __syncthreads();
      }
#pragma unroll
      for (int e = 0; e < 16 * kBlocks; ++e) {
        const int i = e / 4 % 4, j = e % 4, d = d0 + e / 16 * kTile + col + j;
        if (row + i >= count || d >= HD) continue;
        float x = sum[e / 16][i][j];
        if (is_negative_zero(x)) x = repaired_output(values, d, key_end, length);
        context[(row + i) * D + d] = x;
      }
    }
  }
  if (bad) atomicOr(&a.result->faults, uint32_t(kFaultScores));
}

}  // namespace

MJL_KERNEL __launch_bounds__(kThreads, kForwardCtas) attention_forward(const __grid_constant__ AttentionArguments a) {
  forward<1>(a);
}
MJL_KERNEL __launch_bounds__(kThreads, kForwardWideCtas)
    attention_forward_wide(const __grid_constant__ AttentionArguments a) {
  forward<2>(a);
}

}  // namespace mjl::gpu
