// SPDX-License-Identifier: Apache-2.0
//
// The reference's operations on whole arrays, one loop for each index of docs/numerics.md. Arrays are dense and
// row-major; M = batch * length rows, D = d_model, H = n_heads, KV = n_kv, HD = head_dim, V = vocab_size.
#pragma once

#include <algorithm>

#include "reference_math.hpp"

namespace reference {

using Floats = std::vector<float>;

inline bool all_finite(const Floats& x) { return std::all_of(x.begin(), x.end(), is_finite); }

// ---- Matrix product: out [m,n]; a [m,k] or, transposed, [k,m]; b [k,n] or, transposed, [n,k] ----

inline Floats matmul(Rule rule, bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k, const float* a,
                     const float* b) {
  const int64_t a_row = a_transposed ? 1 : k, a_step = a_transposed ? m : 1;
  const int64_t b_column = b_transposed ? k : 1, b_step = b_transposed ? 1 : n;
  Floats out(m * n);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      const float *x = a + i * a_row, *y = b + j * b_column;
      out[i * n + j] =
          contract(rule, k, [&](int64_t t) { return x[t * a_step]; }, [&](int64_t t) { return y[t * b_step]; });
    }
  return out;
}

// y [m,out] = x [m,in] * w [out,in]^T, and its two gradients.
inline Floats linear(int64_t m, int64_t in, int64_t out, const float* x, const float* w) {
  return matmul(Rule::tree, false, true, m, out, in, x, w);
}
inline Floats linear_dx(int64_t m, int64_t in, int64_t out, const float* dy, const float* w, Rule rule = Rule::tree) {
  return matmul(rule, false, false, m, in, out, dy, w);
}
inline Floats linear_dw(int64_t m, int64_t in, int64_t out, const float* dy, const float* x, Rule rule = Rule::tree) {
  return matmul(rule, true, false, out, in, m, dy, x);
}

inline Floats add_all(const Floats& a, const Floats& b) {
  Floats out(a.size());
  for (size_t i = 0; i < a.size(); ++i) out[i] = add(z(a[i]), z(b[i]));
  return out;
}

// ---- RMSNorm: x, y, dx [rows,D]; w, dw [D]; rstd [rows] ----

struct Norm {
  Floats y, rstd;
};

inline Norm norm_forward(int64_t rows, int64_t width, const float* x, const float* w) {
  Norm out{Floats(rows * width), Floats(rows)};
  for (int64_t i = 0; i < rows; ++i) {
    const auto row = [&](int64_t d) { return z(x[i * width + d]); };
    const float ss = chain(0, width, row, row);
    out.rstd[i] = rsqrt(add(div(ss, float(width)), 1e-6f));
    for (int64_t d = 0; d < width; ++d) out.y[i * width + d] = mul(z(w[d]), mul(row(d), out.rstd[i]));
  }
  return out;
}

struct NormGradient {
  Floats dx, dw;
};

inline NormGradient norm_backward(int64_t rows, int64_t width, const float* x, const float* rstd, const float* w,
                                  const float* dy) {
  NormGradient out{Floats(rows * width), Floats(width)};
  for (int64_t i = 0; i < rows; ++i) {
    const auto row = [&](int64_t d) { return z(x[i * width + d]); };
    const auto dh = [&](int64_t d) { return mul(z(dy[i * width + d]), z(w[d])); };
    const float r = z(rstd[i]), c = chain(0, width, dh, row);
    const float r3 = mul(mul(r, r), r);
    const float dv = div(mul(-0.5f, mul(c, r3)), float(width));
    for (int64_t d = 0; d < width; ++d) out.dx[i * width + d] = add(mul(dh(d), r), mul(dv, mul(2.0f, row(d))));
  }
  for (int64_t d = 0; d < width; ++d)
    out.dw[d] =
        tree(rows, [&](int64_t i) { return mul(z(dy[i * width + d]), mul(z(x[i * width + d]), z(rstd[i]))); }, one);
  return out;
}

// ---- Rotary embedding: x, out [batch*length, heads*HD] ----

inline Floats rotary(bool backward, int64_t batch, int64_t length, int64_t heads, int64_t head_dim, const float* x) {
  const int64_t half = head_dim / 2;
  Floats out(batch * length * heads * head_dim);
  for (int64_t row = 0; row < batch * length; ++row)
    for (int64_t i = 0; i < half; ++i) {
      const float inv_freq = div(1.0f, pow(10000.0f, div(float(2 * i), float(head_dim))));
      const float angle = mul(float(row % length), inv_freq), c = cos(angle), s = sin(angle);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t low = (row * heads + h) * head_dim + i, high = low + half;
        const float x_low = z(x[low]), x_high = z(x[high]);
        const auto turn = [&](float own, float paired) {
          return variant == Variant::rotary_fused ? fma(own, c, mul(paired, s)) : add(mul(own, c), mul(paired, s));
        };
        out[low] = turn(x_low, backward ? x_high : -x_high);
        out[high] = turn(x_high, backward ? -x_low : x_low);
      }
    }
  return out;
}

// ---- Attention over all keys: q, ctx, dq [M, H*HD]; k, v, dk, dv [M, KV*HD] ----

struct AttentionShape {
  int64_t batch, length, heads, kv_heads, head_dim;
  int64_t group() const { return heads / kv_heads; }
  int64_t q_at(int64_t b, int64_t h, int64_t l) const { return ((b * length + l) * heads + h) * head_dim; }
  int64_t kv_at(int64_t b, int64_t h, int64_t l) const { return ((b * length + l) * kv_heads + h) * head_dim; }
  // One past the last key that a query's chains visit; and the first query of a key's chains.
  int64_t keys(int64_t query) const { return variant == Variant::masked_dropped ? query + 1 : length; }
  int64_t first_query(int64_t key) const { return variant == Variant::masked_dropped ? key : 0; }
};

// The probabilities [length] of one query. *ok turns false if an unmasked score is not finite.
inline Floats attention_probabilities(const AttentionShape& a, int64_t b, int64_t h, int64_t l, const float* q,
                                      const float* k, bool* ok) {
  const float scale = rsqrt(float(a.head_dim));
  Floats s(a.length), p(a.length);
  for (int64_t j = 0; j < a.length; ++j) {
    const float *query = q + a.q_at(b, h, l), *key = k + a.kv_at(b, h / a.group(), j);
    const float score =
        mul(tree(a.head_dim, [&](int64_t d) { return query[d]; }, [&](int64_t d) { return key[d]; }), scale);
    s[j] = add(score, j <= l ? 0.0f : -std::numeric_limits<float>::max());
    if (j <= l && !is_finite(s[j])) *ok = false;
  }
  float m = s[0];
  for (float x : s) m = max(m, x);
  float den = 0.0f;
  for (int64_t j = 0; j < a.length; ++j) den = add(den, p[j] = exp(add(s[j], -m)));
  for (float& x : p) x = div(x, den);
  return p;
}

inline Floats attention_forward(const AttentionShape& a, const float* q, const float* k, const float* v, bool* ok) {
  Floats ctx(a.batch * a.length * a.heads * a.head_dim);
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t h = 0; h < a.heads; ++h)
      for (int64_t l = 0; l < a.length; ++l) {
        const Floats p = attention_probabilities(a, b, h, l, q, k, ok);
        for (int64_t d = 0; d < a.head_dim; ++d)
          ctx[a.q_at(b, h, l) + d] = chain(
              0, a.keys(l), [&](int64_t j) { return p[j]; },
              [&](int64_t j) { return v[a.kv_at(b, h / a.group(), j) + d]; });
      }
  return ctx;
}

struct AttentionGradient {
  Floats dq, dk, dv;
};

inline AttentionGradient attention_backward(const AttentionShape& a, const float* q, const float* k, const float* v,
                                            const float* dctx, bool* ok) {
  const int64_t length = a.length, group = a.group();
  const float scale = rsqrt(float(a.head_dim));
  AttentionGradient out{
      Floats(a.batch * length * a.heads * a.head_dim), Floats(a.batch * length * a.kv_heads * a.head_dim), {}};
  out.dv = out.dk;
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t kv = 0; kv < a.kv_heads; ++kv) {
      std::vector<Floats> p(group * length), ds(group * length);  // [head of the group, query][key]
      for (int64_t g = 0; g < group; ++g)
        for (int64_t l = 0; l < length; ++l) {
          const int64_t h = kv * group + g;
          const Floats& pl = p[g * length + l] = attention_probabilities(a, b, h, l, q, k, ok);
          Floats dp(length), &dsl = ds[g * length + l] = Floats(length);
          for (int64_t j = 0; j < length; ++j)
            dp[j] = tree(
                a.head_dim, [&](int64_t d) { return dctx[a.q_at(b, h, l) + d]; },
                [&](int64_t d) { return v[a.kv_at(b, kv, j) + d]; });
          const float zz = chain(0, a.keys(l), [&](int64_t j) { return dp[j]; }, [&](int64_t j) { return pl[j]; });
          for (int64_t j = 0; j < length; ++j) dsl[j] = mul(mul(pl[j], add(dp[j], -zz)), scale);
          for (int64_t d = 0; d < a.head_dim; ++d)
            out.dq[a.q_at(b, h, l) + d] = chain(
                0, a.keys(l), [&](int64_t j) { return dsl[j]; }, [&](int64_t j) { return k[a.kv_at(b, kv, j) + d]; });
        }
      for (int64_t j = 0; j < length; ++j)
        for (int64_t d = 0; d < a.head_dim; ++d) {
          const int64_t first = a.first_query(j), queries = length - first;
          const auto order = [&](int64_t i) {  // the i-th link of the chain: index into p and ds
            int64_t g = i / queries, l = i % queries;
            if (variant == Variant::heads_descending) g = group - 1 - g;
            if (variant == Variant::queries_descending) l = queries - 1 - l;
            return g * length + first + l;
          };
          const auto from = [&](const float* x, int64_t n) {
            return x[a.q_at(b, kv * group + n / length, n % length) + d];
          };
          out.dk[a.kv_at(b, kv, j) + d] = chain(
              0, group * queries, [&](int64_t i) { return ds[order(i)][j]; },
              [&](int64_t i) { return from(q, order(i)); });
          out.dv[a.kv_at(b, kv, j) + d] = chain(
              0, group * queries, [&](int64_t i) { return p[order(i)][j]; },
              [&](int64_t i) { return from(dctx, order(i)); });
        }
    }
  return out;
}

// ---- SwiGLU ----

inline float silu(float g) { return div(g, add(exp(-g), 1.0f)); }

inline float swiglu(float g, float u) { return mul(silu(z(g)), z(u)); }

inline void swiglu_backward(float g, float u, float dgated, float* dg, float* du) {
  g = z(g), u = z(u), dgated = z(dgated);
  const float dsilu = mul(dgated, u), sg = div(1.0f, add(exp(-g), 1.0f));
  *du = mul(dgated, silu(g));
  *dg = mul(dsilu, mul(sg, add(1.0f, mul(g, add(1.0f, -sg)))));
}

// ---- Head and loss: hidden, dhidden [M,D]; head, dhead [V,D]; targets [M] ----

struct HeadLoss {
  float loss;
  Floats dhidden, dhead;
};

inline HeadLoss head_loss(bool chunked, int64_t rows, int64_t width, int64_t vocab, const float* hidden,
                          const float* head, const int32_t* targets, bool with_gradients, bool* ok) {
  const Floats logits = linear(rows, width, vocab, hidden, head);
  *ok = *ok && all_finite(logits);
  Floats losses(rows), dlogits(with_gradients ? rows * vocab : 0);
  for (int64_t i = 0; i < rows; ++i) {
    const float* x = &logits[i * vocab];
    float m = x[0];
    for (int64_t j = 0; j < vocab; ++j) m = max(m, x[j]);
    Floats e(vocab);
    for (int64_t j = 0; j < vocab; ++j) e[j] = exp(add(x[j], -m));
    const float den = contract(chunked ? Rule::chain : Rule::tree, vocab, [&](int64_t j) { return e[j]; }, one);
    losses[i] = -add(add(x[targets[i]], -m), -log(den));
    if (with_gradients)
      for (int64_t j = 0; j < vocab; ++j)
        dlogits[i * vocab + j] = div(add(div(e[j], den), j == targets[i] ? -1.0f : -0.0f), float(rows));
  }
  HeadLoss out;
  if (chunked) {
    Floats blocks;
    for (int64_t first = 0; first < rows; first += 256)
      blocks.push_back(chain(first, std::min(first + 256, rows), [&](int64_t i) { return losses[i]; }, one));
    out.loss = div(fold(blocks), float(rows));
  } else {
    out.loss = div(tree(rows, [&](int64_t i) { return losses[i]; }, one), float(rows));
  }
  *ok = *ok && is_finite(out.loss);
  if (with_gradients) {
    const Rule rule = chunked ? Rule::chain : Rule::tree;
    out.dhidden = linear_dx(rows, width, vocab, dlogits.data(), head, rule);
    out.dhead = linear_dw(rows, width, vocab, dlogits.data(), hidden, rule);
  }
  return out;
}

// ---- Embedding gradient: ids [rows]; dx [rows,D]; out [V,D] ----

inline Floats embed_backward(int64_t rows, int64_t width, int64_t vocab, const int32_t* ids, const float* dx) {
  Floats out(vocab * width, 0.0f);
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t i = variant == Variant::positions_descending ? rows - 1 - n : n;
    for (int64_t d = 0; d < width; ++d) {
      float& acc = out[ids[i] * width + d];
      acc = add(acc, z(dx[i * width + d]));
    }
  }
  return out;
}

// ---- AdamW: g, p, m, v [count]; p, m, v are replaced ----

struct AdamW {
  float lr, beta1, beta2, eps, weight_decay;
};

inline float integer_power(float base, int64_t exponent) {
  float result = 1.0f;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result = mul(result, base);
    base = mul(base, base);
  }
  return result;
}

inline void adamw(const AdamW& a, int64_t step, int64_t count, const float* g, float* p, float* m, float* v) {
  const float c1 = add(1.0f, -a.beta1), c2 = add(1.0f, -a.beta2);
  const float bc1 = add(1.0f, -integer_power(a.beta1, step)), bc2 = add(1.0f, -integer_power(a.beta2, step));
  const float size = div(a.lr, bc1), rb = sqrt(bc2), decay = add(1.0f, -mul(a.lr, a.weight_decay));
  for (int64_t i = 0; i < count; ++i) {
    const float gi = z(g[i]);
    float pi = z(p[i]);
    if (a.weight_decay != 0.0f) pi = mul(decay, pi);
    m[i] = fma(c1, gi, mul(a.beta1, z(m[i])));
    v[i] = fma(c2, mul(gi, gi), mul(a.beta2, z(v[i])));
    p[i] = fma(-size, div(m[i], add(div(sqrt(v[i]), rb), a.eps)), pi);
  }
}

}  // namespace reference
