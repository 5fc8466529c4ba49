// SPDX-License-Identifier: Apache-2.0
//
// Causal attention, backward. Probabilities are recomputed, to the same bits.
//
// Order of summation: zz and d_q are one chain of fma a query, over ascending keys; d_k and d_v one chain a key/value
// head and key, over the heads of the group and within a head over the queries, ascending. Summing d_k over heads that
// were computed apart would give other bits.
#include "kernels/attention.h"

namespace mjl::gpu {
namespace {

using A = Arithmetic;

MJL_DEVICE float probability(float dot, float scale, bool visible, float m, float den) {
  return A::div(exp_of(A::add(score(dot, scale, visible), A::negate(m))), den);
}
MJL_DEVICE float slope(float p, float dp, float zz, float scale) {
  return A::mul(A::mul(p, A::add(dp, A::negate(zz))), scale);
}

// Repairs. They are not inlined, because they are rare.

// A sum of -0 after +-0 = slope(+0, dp_n, zz_n) times factor_n, for n from `begin` to `end`, where dp_n is the
// contraction of context n with value n.
__device__ __noinline__ float repaired_slope(const float* contexts, int64_t context_stride, const float* values,
                                             int64_t value_stride, const float* factors, int64_t factor_stride,
                                             const float* zz, int64_t zz_stride, int HD, int begin, int end) {
  for (int n = begin; n < end; ++n) {
    const float dp = dot(contexts + n * context_stride, values + n * value_stride, HD);
    const float ds = slope(0.0f, dp, flush(zz[n * zz_stride]), 1.0f);
    if (sign_of(ds) == sign_of(factors[n * factor_stride])) return 0.0f;
  }
  return -0.0f;
}

// A sum of -0 after p = +0 times what lies at contexts + n * stride, for n < end.
__device__ __noinline__ float repaired_value(const float* contexts, int64_t stride, int end) {
  for (int n = 0; n < end; ++n)
    if (!sign_of(contexts[n * stride])) return 0.0f;
  return -0.0f;
}

// A zz of -0 after dp of the keys from `key` on, times p = +0.
__device__ __noinline__ float repaired_zz(const float* context, const Rows values, int HD, int key, int L) {
  for (; key < L; ++key)
    if (!sign_of(dot(context, values.data + key * values.stride, HD))) return 0.0f;
  return -0.0f;
}

// zz and d_q of 64 queries of one head, 64 kBlocks dimensions at a time. Leaves p and ds in the panels.
template <int kBlocks>
MJL_DEVICE void backward_query(const AttentionArguments& a) {
  extern __shared__ __align__(16) float shared[];
  const auto tile = [&](int i) { return shared + i * kAttentionTileFloats; };
  float *const q_tile = tile(0), *const c_tile = tile(1), *const p_tile = tile(2), *const x_tile = tile(3),
               *const s_tile = tile(4);
  __shared__ float zz_of[kTile];
  const int tid = threadIdx.x, row = thread_row(), col = thread_col();
  const int L = int(a.tokens.length), H = a.H, KV = a.KV, HD = a.HD, pairs = int(a.tokens.batch) * KV * a.heads;
  const int64_t D = a.q.cols, KD = a.k.cols;

  // The longest first: they end last.
  const int in_chunk = a.tiles - 1 - int(blockIdx.x) / pairs, pair = int(blockIdx.x) % pairs;
  const int first = (a.first_tile + in_chunk) * kTile, kv = pair / a.heads % KV, b = pair / a.heads / KV;
  const int h = kv * (H / KV) + a.first_head + pair % a.heads;
  float* const p_panel = a.p_panels + (int64_t(pair) * a.tiles + in_chunk) * a.panel_floats;
  float* const ds_panel = a.ds_panels + (int64_t(pair) * a.tiles + in_chunk) * a.panel_floats;
  const int count = min(kTile, L - first);
  const int64_t token = int64_t(b) * L, query = (token + first) * D + int64_t(h) * HD;
  const Rows queries = {a.q.data + query, D, count}, contexts = {a.d_context.data + query, D, count};
  const Rows keys = {a.k.data + token * KD + int64_t(kv) * HD, KD, L};
  const Rows values = {a.v.data + token * KD + int64_t(kv) * HD, KD, L};
  const Extent &extent_q = a.extent_q[b * H + h], &extent_k = a.extent_k[b * KV + kv];
  // A head of a group goes over all keys when one of the group must: d_k's chain does, and needs the panels.
  bool bounded = true;
  for (int i = kv * (H / KV); i < (kv + 1) * (H / KV); ++i)
    bounded = bounded && is_bounded(a.extent_q[b * H + i], extent_k, HD);
  const int key_end = bounded ? min(L, first + kTile) : L;
  const bool plain_scores = is_plain(extent_q, extent_k);
  const bool plain_slopes = is_plain(a.extent_d_context[b * H + h], a.extent_v[b * KV + kv]);
  Block block;

  float zz = 0.0f;
  {
    float m[4], den[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = (token + first + min(row + i, count - 1)) * H + h;
      m[i] = load(a.score_max.data + at);
      den[i] = load(a.denominator.data + at);
    }
#pragma unroll 1
    for (int key = 0; key < key_end; key += kTile) {
      dot_tiles(plain_scores, a.aligned, queries, keys.from(key, L), HD, key == 0, q_tile, x_tile, block);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          block[i][j] = probability(block[i][j], a.scale, key + col + j <= first + row + i, m[i], den[i]);
      store_transposed(block, p_tile);
      store_panel(block, p_panel, key);
      dot_tiles(plain_slopes, a.aligned, contexts, values.from(key, L), HD, key == 0, c_tile, x_tile, block);
      store_transposed(block, s_tile);
      store_panel(block, ds_panel, key);  // dp, until zz is known
      __syncthreads();
      const int count_here = min(kTile, key_end - key);
      if (tid < kTile)
#pragma unroll 8
        for (int j = 0; j < count_here; ++j) zz = A::fma(s_tile[j * kStride + tid], p_tile[j * kStride + tid], zz);
    }
  }
  if (tid < count) {
    if (is_negative_zero(zz)) zz = repaired_zz(contexts.data + tid * D, values, HD, key_end, L);
    a.zz.data[(token + first + tid) * H + h] = zz;
  }
  if (tid < kTile) zz_of[tid] = zz;
  __syncthreads();

  const uint32_t limit = plain_limit(extent_k);
#pragma unroll 1
  for (int d0 = 0; d0 < HD; d0 += kBlocks * kTile) {
    Block sum[kBlocks];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) clear(sum[n]);
#pragma unroll 1
    for (int key = 0; key < key_end; key += kTile) {
      bool careful = false;
      load_panel(ds_panel, key, block);
      if (d0 == 0) {
        Block p;
        load_panel(p_panel, key, p);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float& ds = block[i / 4][i % 4];
          ds = row + i / 4 < count ? slope(p[i / 4][i % 4], ds, zz_of[row + i / 4], a.scale) : 0.0f;
        }
        store_panel(block, ds_panel, key);
      }
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
        load_rows(a.aligned, keys.data + key * KD + d0 + n * kTile, KD, min(kTile, L - key), HD - d0 - n * kTile,
                  x_tile + n * kAttentionTileFloats);
#pragma unroll
      for (int i = 0; i < 16; ++i) careful |= is_below(block[i / 4][i % 4], limit);
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
      if (is_negative_zero(x))  // after masked keys
        x = repaired_slope(contexts.data + (row + i) * D, 0, values.data, KD, keys.data + d, KD, &zz_of[row + i], 0, HD,
                           key_end, L);
      a.d_q.data[query + (row + i) * D + d] = x;
    }
  }
}

// d_k and d_v of 64 keys of one key/value head, 64 kBlocks of its dimensions, from the chunk of panels at hand; they go
// on from what earlier chunks left.
template <int kBlocks>
MJL_DEVICE void backward_key(const AttentionArguments& a) {
  extern __shared__ __align__(16) float shared[];
  const auto tile = [&](int i) { return shared + i * kAttentionTileFloats; };
  float *const p_tile = tile(0), *const s_tile = tile(1), *const c_tile = tile(2), *const q_tile = tile(2 + kBlocks);
  const int row = thread_row(), col = thread_col();
  const int L = int(a.tokens.length), H = a.H, KV = a.KV, HD = a.HD, group = H / KV;
  const int pairs = int(a.tokens.batch) * KV;
  const int64_t D = a.q.cols, KD = a.k.cols;

  const int first = int(blockIdx.x) / pairs * kTile, pair = int(blockIdx.x) % pairs, b = pair / KV, kv = pair % KV;
  const int count = min(kTile, L - first), d0 = int(blockIdx.y) * kBlocks * kTile;
  const int64_t token = int64_t(b) * L, at_key = (token + first) * KD + int64_t(kv) * HD;
  const float* const values = a.v.data + at_key;
  const Extent& extent_k = a.extent_k[b * KV + kv];
  bool bounded = true;
  for (int h = kv * group; h < (kv + 1) * group; ++h)
    bounded = bounded && is_bounded(a.extent_q[b * H + h], extent_k, HD);
  const int query_begin = bounded ? first : 0;

  Block d_k[kBlocks], d_v[kBlocks];
  const bool resume = a.first_head > 0 || a.first_tile > 0;
#pragma unroll
  for (int e = 0; e < 16 * kBlocks; ++e) {
    const int i = e / 4 % 4, j = e % 4, d = d0 + e / 16 * kTile + col + j;
    const bool there = resume && row + i < count && d < HD;
    d_k[e / 16][i][j] = there ? a.d_k.data[at_key + (row + i) * KD + d] : 0.0f;
    d_v[e / 16][i][j] = there ? a.d_v.data[at_key + (row + i) * KD + d] : 0.0f;
  }
#pragma unroll 1
  for (int g = a.first_head; g < a.first_head + a.heads; ++g) {
    const int h = kv * group + g;
    const float* const queries = a.q.data + token * D + int64_t(h) * HD;
    const float* const contexts = a.d_context.data + token * D + int64_t(h) * HD;
    const uint32_t limit_q = plain_limit(a.extent_q[b * H + h]), limit_c = plain_limit(a.extent_d_context[b * H + h]);

    // Queries before the tile's keys have p = +0 and ds = +-0. (For the first head the sums are +0, and stay.)
    if (a.first_tile == 0 && g > 0)
#pragma unroll
      for (int e = 0; e < 16 * kBlocks; ++e) {
        const int i = e / 4 % 4, j = e % 4, d = d0 + e / 16 * kTile + col + j;
        if (row + i >= count || d >= HD) continue;
        float &x = d_k[e / 16][i][j], &y = d_v[e / 16][i][j];
        if (is_negative_zero(y)) y = repaired_value(contexts + d, D, query_begin);
        if (is_negative_zero(x))
          x = repaired_slope(contexts, D, values + (row + i) * KD, 0, queries + d, D, a.zz.data + token * H + h, H, HD,
                             0, query_begin);
      }

    const int64_t panels = (int64_t(pair) * a.heads + g - a.first_head) * a.tiles;
    const int end = min(L, (a.first_tile + a.tiles) * kTile);
#pragma unroll 1
    for (int query = max(query_begin, a.first_tile * kTile); query < end; query += kTile) {
      const int count_here = min(kTile, L - query);
      const int64_t panel = (panels + query / kTile - a.first_tile) * a.panel_floats;
      Block p, ds;
      load_panel(a.p_panels + panel, first, p);
      load_panel(a.ds_panels + panel, first, ds);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const int d = d0 + n * kTile, offset = n * kAttentionTileFloats;
        load_rows(a.aligned, contexts + query * D + d, D, count_here, HD - d, c_tile + offset);
        load_rows(a.aligned, queries + query * D + d, D, count_here, HD - d, q_tile + offset);
      }
      bool careful_p = false, careful_ds = false;
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        careful_p |= is_below(p[e / 4][e % 4], limit_c);
        careful_ds |= is_below(ds[e / 4][e % 4], limit_q);
      }
      store_rows(p, p_tile);
      store_rows(ds, s_tile);
      careful_p = __syncthreads_or(careful_p);
      careful_ds = __syncthreads_or(careful_ds);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        multiply(!careful_p, p_tile, c_tile + n * kAttentionTileFloats, count_here, d_v[n]);
        multiply(!careful_ds, s_tile, q_tile + n * kAttentionTileFloats, count_here, d_k[n]);
      }
      __syncthreads();
    }
  }
#pragma unroll
  for (int e = 0; e < 16 * kBlocks; ++e) {
    const int i = e / 4 % 4, j = e % 4, d = d0 + e / 16 * kTile + col + j;
    if (row + i >= count || d >= HD) continue;
    a.d_k.data[at_key + (row + i) * KD + d] = d_k[e / 16][i][j];
    a.d_v.data[at_key + (row + i) * KD + d] = d_v[e / 16][i][j];
  }
}

}  // namespace

#define MJL_BACKWARD(name, function, blocks)                                                                         \
  MJL_KERNEL __launch_bounds__(kThreads, kBackwardCtas) name(const __grid_constant__ AttentionArguments arguments) { \
    function<blocks>(arguments);                                                                                     \
  }
MJL_BACKWARD(attention_backward_query, backward_query, 1)
MJL_BACKWARD(attention_backward_query_wide, backward_query, 2)
MJL_BACKWARD(attention_backward_key, backward_key, 1)
MJL_BACKWARD(attention_backward_key_wide, backward_key, 2)

}  // namespace mjl::gpu
