// SPDX-License-Identifier: Apache-2.0
//
// Causal attention. Every sum here is a chain that belongs to one query or to one key, so the vector runs across kLanes
// of those: "columns" are arrays [n][kLanes] with one of them in each lane.
//
// Forward and the first backward pass take blocks of queries, the second backward pass blocks of keys; scores and
// probabilities are recomputed in each, from the same bits, and never stored beyond one block.
//
// Masked keys belong to the chains. They can be left out when no subnormal was met, because then no accumulator is ever
// -0 (a chain starts at +0, and +0 + -0 = x + -x = +0), and when the scores are so far from the largest float that a
// masked one cannot matter. A block for which either fails is computed again as the contract is written: over all keys,
// mask added, everything flushed.
#include "cpu/unit/backend.h"
#include "math/elementary.h"

namespace mjl::cpu::MJL_UNIT {
namespace {

constexpr int kRun = 8;  // independent sums kept in registers at a time

// out[i] = contraction over depth of column x with rows[i], for N rows. x: [depth][kLanes]
template <class A, int N>
MJL_INLINE void dot_run(const float* x, const float* rows, int64_t stride, int64_t depth, float* out) {
  const int64_t leaf = leaf_length(depth);
  Floats stack[kLevels][N];
  for (int64_t n = 0, d = 0;; ++n) {
    const int64_t end = smaller(d + leaf, depth);
    Floats sum[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) sum[i] = Floats{};
    for (; d < end; ++d) {
      const Floats xd = A::load(x + d * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) sum[i] = A::fma(xd, A::value(rows[i * stride + d]), sum[i]);
    }
    const bool last = d == depth;
    int level = 0;
    for (int64_t rest = n; last ? rest != 0 : (rest & 1) != 0; rest >>= 1, ++level)
      if (rest & 1)
        for (int i = 0; i < N; ++i) sum[i] = A::add(stack[level][i], sum[i]);
    for (int i = 0; i < N; ++i) last ? A::store(out + i * kLanes, sum[i]) : void(stack[level][i] = sum[i]);
    if (last) return;
  }
}

template <class A>
MJL_INLINE void dots(const float* x, const float* rows, int64_t stride, int64_t depth, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kRun <= count; i += kRun) dot_run<A, kRun>(x, rows + i * stride, stride, depth, out + i * kLanes);
  for (; i < count; ++i) dot_run<A, 1>(x, rows + i * stride, stride, depth, out + i * kLanes);
}

// out[d] = chain over i of fma(w[i], rows[i][d], out[d]), from +0 unless `resume`. w: [count][kLanes], out:
// [depth][kLanes]
template <class A, int N>
MJL_INLINE void chain_run(const float* w, const float* rows, int64_t stride, int64_t count, bool resume, float* out) {
  Floats sum[N];
#pragma GCC unroll 16
  for (int d = 0; d < N; ++d) sum[d] = resume ? raw_load(out + d * kLanes) : Floats{};
  for (int64_t i = 0; i < count; ++i) {
    const Floats wi = A::load(w + i * kLanes);
#pragma GCC unroll 16
    for (int d = 0; d < N; ++d) sum[d] = A::fma(wi, A::value(rows[i * stride + d]), sum[d]);
  }
#pragma GCC unroll 16
  for (int d = 0; d < N; ++d) A::store(out + d * kLanes, sum[d]);
}

template <class A>
MJL_INLINE void chains(const float* w, const float* rows, int64_t stride, int64_t count, int64_t depth, bool resume,
                       float* out) {
  int64_t d = 0;
  for (; d + 2 * kRun <= depth; d += 2 * kRun)  // whole cache lines of the rows, where vectors are wide
    chain_run<A, 2 * kRun>(w, rows + d, stride, count, resume, out + d * kLanes);
  for (; d + 2 <= depth; d += 2) chain_run<A, 2>(w, rows + d, stride, count, resume, out + d * kLanes);
}

// Which lanes may see a key (or which keys a query may see): a mask, or all of them.
struct All {};

// body(j, visible) for j in [begin, end), where all lanes see each other below `all_end` or from `all_begin` on.
template <class Mask, class Body>
MJL_INLINE void over(int64_t begin, int64_t end, int64_t all_end, int64_t all_begin, Mask&& mask, Body&& body) {
  int64_t j = begin;
  for (; j < smaller(all_end, end); ++j) body(j, All{});
  for (; j < smaller(all_begin, end); ++j) body(j, mask(j));
  for (; j < end; ++j) body(j, All{});
}

// s = add(mul(dot, rsqrt(HD)), mask). In a careful pass hidden keys get -FLT_MAX added; in a plain one hide() removes
// their effect. (Adding +0 to a visible score can only turn -0 into +0, which neither max nor exp tells apart.)
template <class A>
MJL_INLINE Floats score(Floats dot, Ints visible, Floats scale) {
  return A::add(A::mul(dot, scale), A::select(visible, A::value(0.0f), A::value(-FLT_MAX)));
}
template <class A>
MJL_INLINE Floats score(Floats dot, All, Floats scale) {
  return A::mul(dot, scale);
}

// Masked keys have p = +0: in a careful pass that comes out of exp, in a plain one it is put there.
template <class A>
MJL_INLINE Floats hide(Floats x, Ints visible) {
  if constexpr (A::flushes) return x;
  return A::select(visible, x, Floats{});
}
template <class A>
MJL_INLINE Floats hide(Floats x, All) {
  return x;
}

MJL_INLINE Ints visible_to(Ints lanes, Ints visible) { return lanes & visible; }
MJL_INLINE Ints visible_to(Ints lanes, All) { return lanes; }

// Writes a column block back to rows: to[lane][d] = from[d][lane].
void spread(const float* from, int64_t lanes, int64_t depth, float* to, int64_t stride) {
  for (int64_t i = 0; i < lanes; ++i)
    for (int64_t d = 0; d < depth; ++d) to[i * stride + d] = from[d * kLanes + i];
}

MJL_INLINE int64_t length_of(const Tokens& tokens, int64_t row) {
  return tokens.lengths ? tokens.lengths[row] : tokens.length;
}

MJL_INLINE float inverse_root(int64_t n) { return Arith<true>::rsqrt(broadcast(float(n)))[0]; }

// What a pass with so many products over all pairs of a query and a key it may see costs, roughly.
MJL_INLINE int64_t cycles(const Tokens& tokens, const Heads& heads, int64_t products) {
  return tokens.count() * tokens.length * heads.n_heads * (products * heads.head_dim / 2 + 20) / (2 * kLanes);
}

// One piece of a thread's scratch after another.
struct Columns {
  float* next;
  float* take(int64_t n) {
    float* const at = next;
    next += n * kLanes;
    return at;
  }
};

}  // namespace

int64_t attention_thread_floats(int64_t length, int64_t head_dim) { return (2 * length + 4 * head_dim + 1) * kLanes; }

// bounded_[row, h] = 1 if no score of the head can come near the largest float: |q| |k| HD < 2^126, else 0.
void CpuBackend::find_bounded(Tokens tokens, Heads heads, Tensor q, Tensor k) {
  const int64_t L = tokens.length, H = heads.n_heads, HD = heads.head_dim, group = H / heads.n_kv;
  parallel(tokens.batch * H, (q.size() + group * k.size()) / kLanes, [&](int64_t task, int) {
    const int64_t b = task / H, h = task % H, length = length_of(tokens, b);
    const auto largest = [&](const Tensor& t, int64_t head) {
      Floats result = {};
      for (int64_t i = 0; i < length; ++i) {
        const float* const row = t.data + (b * L + i) * t.cols + head * HD;
        for_lanes(0, HD, [&](int64_t d, int lanes) {
          const Floats x = Arith<false>::load(row + d, lanes);
          result = Arith<false>::max((Floats)((Ints)x & INT32_MAX), result);
        });
      }
      double found = 0;
      for (int i = 0; i < kLanes; ++i) found = double(result[i]) > found ? double(result[i]) : found;
      return found;
    };
    bounded_[task] = largest(q, h) * largest(k, h / group) * double(HD) < 0x1p126 ? 1.0f : 0.0f;
  });
}

void CpuBackend::attention(Tokens tokens, Heads heads, Tensor q, Tensor k, Tensor v, Tensor score_max,
                           Tensor denominator, Tensor context) {
  const int64_t L = tokens.length, H = heads.n_heads, HD = heads.head_dim, KD = k.cols, group = H / heads.n_kv;
  const int64_t blocks = ceil_div(L, kLanes);
  const float root = inverse_root(HD);
  find_bounded(tokens, heads, q, k);
  // The longest blocks first: they end last.
  parallel(tokens.batch * H * blocks, cycles(tokens, heads, 2), [&](int64_t task, int thread) {
    const int64_t block = blocks - 1 - task / (tokens.batch * H), b = task / H % tokens.batch, h = task % H;
    const int64_t length = length_of(tokens, b), first = block * kLanes, count = smaller(kLanes, length - first);
    const int64_t row = b * L + first;
    float* const context_rows = context.data + row * context.cols + h * HD;
    for (int64_t i = larger(0, count); i < smaller(kLanes, L - first); ++i)  // padding
      for (int64_t d = 0; d < HD; ++d) context_rows[i * context.cols + d] = 0.0f;
    if (count <= 0) return;

    Columns space = {of_thread(thread)};
    float* const queries = space.take(HD);
    float* const weights = space.take(length);
    float* const out = space.take(HD);
    pack<kLanes>(q.data + row * q.cols + h * HD, q.cols, 1, count, HD, queries);
    const float* const keys = k.data + b * L * KD + h / group * HD;
    const float* const values = v.data + b * L * KD + h / group * HD;
    const auto sees = [query = lane_numbers() + int32_t(first)](int64_t j) { return query >= int32_t(j); };
    const Ints present = lane_numbers() < int32_t(count);
    float statistics[2 * kLanes];
    uint32_t faults = 0;

    const auto run = [&](auto arithmetic, int64_t key_count) {
      using A = decltype(arithmetic);
      const Floats scale = A::value(root);
      dots<A>(queries, keys, KD, HD, key_count, weights);
      Floats m = A::value(-__builtin_inff());
      Ints bad = {};
      over(0, key_count, first + 1, key_count, sees, [&](int64_t j, auto visible) {
        const Floats s = score<A>(raw_load(weights + j * kLanes), visible, scale);
        bad |= visible_to(non_finite(s) & present, visible);
        raw_store(weights + j * kLanes, s);
        m = A::max(m, s);
      });
      Floats den = {};
      over(0, key_count, first + 1, key_count, sees, [&](int64_t j, auto visible) {
        const Floats e = hide<A>(math::exp<A>(A::add(raw_load(weights + j * kLanes), A::negate(m))), visible);
        raw_store(weights + j * kLanes, e);
        den = A::add(den, e);
      });
      for (int64_t j = 0; j < key_count; ++j)
        A::store(weights + j * kLanes, A::div(raw_load(weights + j * kLanes), den));
      chains<A>(weights, values, KD, key_count, HD, false, out);
      A::store(statistics, m);
      A::store(statistics + kLanes, den);
      faults = any(bad) ? uint32_t(kFaultScores) : 0u;
    };
    if (bounded_[b * H + h] != 0.0f)
      exact([&](auto arithmetic) { run(arithmetic, decltype(arithmetic)::flushes ? length : first + count); });
    else
      run(Arith<true>{}, length);

    fault(faults);
    for (int64_t i = 0; i < count; ++i) {
      score_max.data[(row + i) * H + h] = statistics[i];
      denominator.data[(row + i) * H + h] = statistics[kLanes + i];
    }
    spread(out, count, HD, context_rows, context.cols);
  });
}

void CpuBackend::attention_backward(Tokens tokens, Heads heads, Tensor q, Tensor k, Tensor v, Tensor score_max,
                                    Tensor denominator, Tensor d_context, Tensor zz, Tensor d_q, Tensor d_k,
                                    Tensor d_v) {
  const int64_t L = tokens.length, H = heads.n_heads, KV = heads.n_kv, HD = heads.head_dim, KD = k.cols, D = q.cols,
                group = H / KV;
  const int64_t blocks = ceil_div(L, kLanes);
  const float root = inverse_root(HD);
  find_bounded(tokens, heads, q, k);

  // p and ds of one block, given the columns of q . k in `weights` and of d_context . v in `slopes`.
  const auto probability = [](auto arithmetic, float* weight, auto visible, Floats scale, Floats m, Floats den) {
    using A = decltype(arithmetic);
    const Floats s = score<A>(raw_load(weight), visible, scale);
    const Floats p = A::div(hide<A>(math::exp<A>(A::add(s, A::negate(m))), visible), den);
    A::store(weight, p);
    return p;
  };

  // d_q and zz, a block of queries at a time.
  parallel(tokens.batch * H * blocks, cycles(tokens, heads, 3), [&](int64_t task, int thread) {
    const int64_t block = blocks - 1 - task / (tokens.batch * H), b = task / H % tokens.batch, h = task % H;
    const int64_t first = block * kLanes, count = smaller(kLanes, L - first), row = b * L + first;
    Columns space = {of_thread(thread)};
    float* const queries = space.take(HD);
    float* const contexts = space.take(HD);
    float* const weights = space.take(L);
    float* const slopes = space.take(L);
    float* const out = space.take(HD);
    float* const sums = space.take(1);
    pack<kLanes>(q.data + row * D + h * HD, D, 1, count, HD, queries);
    pack<kLanes>(d_context.data + row * D + h * HD, D, 1, count, HD, contexts);
    const float* const keys = k.data + b * L * KD + h / group * HD;
    const float* const values = v.data + b * L * KD + h / group * HD;
    const auto sees = [query = lane_numbers() + int32_t(first)](int64_t j) { return query >= int32_t(j); };
    Floats m = {}, den = broadcast(1.0f);
    for (int64_t i = 0; i < count; ++i) {
      m[i] = score_max.data[(row + i) * H + h];
      den[i] = denominator.data[(row + i) * H + h];
    }

    const auto run = [&](auto arithmetic, int64_t key_count) {
      using A = decltype(arithmetic);
      const Floats scale = A::value(root);
      dots<A>(queries, keys, KD, HD, key_count, weights);
      dots<A>(contexts, values, KD, HD, key_count, slopes);
      Floats sum = {};
      over(0, key_count, first + 1, key_count, sees, [&](int64_t j, auto visible) {
        const Floats p = probability(arithmetic, weights + j * kLanes, visible, scale, m, den);
        sum = A::fma(raw_load(slopes + j * kLanes), p, sum);
      });
      for (int64_t j = 0; j < key_count; ++j) {
        const Floats ds = A::mul(raw_load(weights + j * kLanes), A::add(raw_load(slopes + j * kLanes), A::negate(sum)));
        A::store(slopes + j * kLanes, A::mul(ds, scale));
      }
      chains<A>(slopes, keys, KD, key_count, HD, false, out);
      A::store(sums, sum);
    };
    if (bounded_[b * H + h] != 0.0f)
      exact([&](auto arithmetic) { run(arithmetic, decltype(arithmetic)::flushes ? L : first + count); });
    else
      run(Arith<true>{}, L);

    for (int64_t i = 0; i < count; ++i) zz.data[(row + i) * H + h] = sums[i];
    spread(out, count, HD, d_q.data + row * D + h * HD, D);
  });

  // d_k and d_v, a block of keys at a time: heads of the group ascending, queries ascending.
  parallel(tokens.batch * KV * blocks, cycles(tokens, heads, 4), [&](int64_t task, int thread) {
    const int64_t block = task / (tokens.batch * KV), b = task / KV % tokens.batch, kv = task % KV;
    const int64_t first = block * kLanes, count = smaller(kLanes, L - first), row = b * L + first;
    Columns space = {of_thread(thread)};
    float* const keys = space.take(HD);
    float* const values = space.take(HD);
    float* const weights = space.take(L);
    float* const slopes = space.take(L);
    float* const out_k = space.take(HD);
    float* const out_v = space.take(HD);
    pack<kLanes>(k.data + row * KD + kv * HD, KD, 1, count, HD, keys);
    pack<kLanes>(v.data + row * KD + kv * HD, KD, 1, count, HD, values);
    const auto seen = [key = lane_numbers() + int32_t(first)](int64_t l) { return key <= int32_t(l); };
    bool bounded = true;
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) bounded = bounded && bounded_[b * H + h] != 0.0f;

    const auto run = [&](auto arithmetic, int64_t first_query) {
      using A = decltype(arithmetic);
      const Floats scale = A::value(root);
      const int64_t queries = L - first_query;
      for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        const int64_t from = b * L + first_query;
        const float* const q_rows = q.data + from * D + h * HD;
        const float* const d_context_rows = d_context.data + from * D + h * HD;
        dots<A>(keys, q_rows, D, HD, queries, weights);
        dots<A>(values, d_context_rows, D, HD, queries, slopes);
        over(first_query, L, 0, first + kLanes, seen, [&](int64_t l, auto visible) {
          const int64_t at = (b * L + l) * H + h;
          float* const weight = weights + (l - first_query) * kLanes;
          float* const slope = slopes + (l - first_query) * kLanes;
          const Floats p = probability(arithmetic, weight, visible, scale, A::value(score_max.data[at]),
                                       A::value(denominator.data[at]));
          const Floats ds = A::mul(p, A::add(raw_load(slope), A::negate(A::value(zz.data[at]))));
          A::store(slope, A::mul(ds, scale));
        });
        chains<A>(slopes, q_rows, D, queries, HD, h > kv * group, out_k);
        chains<A>(weights, d_context_rows, D, queries, HD, h > kv * group, out_v);
      }
    };
    if (bounded)
      exact([&](auto arithmetic) { run(arithmetic, decltype(arithmetic)::flushes ? 0 : first); });
    else
      run(Arith<true>{}, 0);

    spread(out_k, count, HD, d_k.data + row * KD + kv * HD, KD);
    spread(out_v, count, HD, d_v.data + row * KD + kv * HD, KD);
  });
}

}  // namespace mjl::cpu::MJL_UNIT
