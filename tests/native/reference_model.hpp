// SPDX-License-Identifier: Apache-2.0
//
// The reference's model: forward pass, loss, gradients, in the order of docs/numerics.md.
#pragma once

#include "reference.h"
#include "reference_operations.hpp"

namespace reference {

struct Model {
  int64_t batch, length, width, heads, kv_heads, head_dim, intermediate, layers, vocab;
  bool chunked;

  explicit Model(const reference_shape& s)
      : batch(s.batch),
        length(s.length),
        width(s.d_model),
        heads(s.n_heads),
        kv_heads(s.n_kv),
        head_dim(s.head_dim),
        intermediate(s.intermediate),
        layers(s.n_layers),
        vocab(s.vocab_size),
        chunked(s.chunked_lm_head_v2 != 0) {}

  int64_t rows() const { return batch * length; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  AttentionShape attention() const { return {batch, length, heads, kv_heads, head_dim}; }

  // Where each tensor starts in the flat vector of parameters.
  struct Layer {
    int64_t norm1, q, k, v, o, norm2, gate, up, down;
  };
  int64_t layer_size() const {
    return 2 * width + 2 * width * width + 2 * kv_width() * width + 3 * intermediate * width;
  }
  int64_t head() const { return vocab * width + layers * layer_size(); }
  int64_t parameter_count() const { return head() + vocab * width; }
  Layer layer(int64_t index) const {
    Layer at{};
    int64_t next = vocab * width + index * layer_size();
    const auto take = [&next](int64_t size) { return (next += size) - size; };
    at.norm1 = take(width);
    at.q = take(width * width);
    at.k = take(kv_width() * width);
    at.v = take(kv_width() * width);
    at.o = take(width * width);
    at.norm2 = take(width);
    at.gate = take(intermediate * width);
    at.up = take(intermediate * width);
    at.down = take(width * intermediate);
    return at;
  }
};

// What a layer's backward pass reads again.
struct Activations {
  Floats x, q, k, v, ctx, h, gate, up, gated;
  Norm norm1, norm2;
};

// The hidden state after the last layer. ids [M]; *ok turns false if a score is not finite.
inline Floats forward(const Model& s, const float* w, const int32_t* ids, std::vector<Activations>* kept, bool* ok) {
  const int64_t m = s.rows();
  Floats x(m * s.width);
  for (int64_t i = 0; i < m * s.width; ++i) x[i] = z(w[ids[i / s.width] * s.width + i % s.width]);
  for (int64_t index = 0; index < s.layers; ++index) {
    const Model::Layer at = s.layer(index);
    Activations a;
    a.x = x;
    a.norm1 = norm_forward(m, s.width, x.data(), w + at.norm1);
    a.q = linear(m, s.width, s.width, a.norm1.y.data(), w + at.q);
    a.k = linear(m, s.width, s.kv_width(), a.norm1.y.data(), w + at.k);
    a.v = linear(m, s.width, s.kv_width(), a.norm1.y.data(), w + at.v);
    a.q = rotary(false, s.batch, s.length, s.heads, s.head_dim, a.q.data());
    a.k = rotary(false, s.batch, s.length, s.kv_heads, s.head_dim, a.k.data());
    a.ctx = attention_forward(s.attention(), a.q.data(), a.k.data(), a.v.data(), ok);
    a.h = add_all(x, linear(m, s.width, s.width, a.ctx.data(), w + at.o));
    a.norm2 = norm_forward(m, s.width, a.h.data(), w + at.norm2);
    a.gate = linear(m, s.width, s.intermediate, a.norm2.y.data(), w + at.gate);
    a.up = linear(m, s.width, s.intermediate, a.norm2.y.data(), w + at.up);
    a.gated.resize(a.gate.size());
    for (size_t i = 0; i < a.gated.size(); ++i) a.gated[i] = swiglu(a.gate[i], a.up[i]);
    x = add_all(a.h, linear(m, s.intermediate, s.width, a.gated.data(), w + at.down));
    if (kept != nullptr) kept->push_back(std::move(a));
  }
  return x;
}

// The gradient of every parameter; false if a score, logit, the loss or a gradient is not finite.
inline bool gradients(const Model& s, const float* w, const int32_t* inputs, const int32_t* targets, float* loss,
                      Floats* out) {
  const int64_t m = s.rows(), d = s.width, kv = s.kv_width(), f = s.intermediate;
  bool ok = true;
  std::vector<Activations> kept;
  const Floats hidden = forward(s, w, inputs, &kept, &ok);
  HeadLoss head = head_loss(s.chunked, m, d, s.vocab, hidden.data(), w + s.head(), targets, true, &ok);
  *loss = head.loss;
  out->assign(s.parameter_count(), 0.0f);
  const auto store = [out](int64_t at, const Floats& gradient) {
    std::copy(gradient.begin(), gradient.end(), out->begin() + at);
  };
  store(s.head(), head.dhead);
  Floats dx = std::move(head.dhidden);
  for (int64_t index = s.layers - 1; index >= 0; --index) {
    const Model::Layer at = s.layer(index);
    const Activations& a = kept[index];

    store(at.down, linear_dw(m, f, d, dx.data(), a.gated.data()));
    const Floats dgated = linear_dx(m, f, d, dx.data(), w + at.down);
    Floats dgate(m * f), dup(m * f);
    for (int64_t i = 0; i < m * f; ++i) swiglu_backward(a.gate[i], a.up[i], dgated[i], &dgate[i], &dup[i]);
    store(at.gate, linear_dw(m, d, f, dgate.data(), a.norm2.y.data()));
    store(at.up, linear_dw(m, d, f, dup.data(), a.norm2.y.data()));
    const Floats dnorm2 =
        add_all(linear_dx(m, d, f, dgate.data(), w + at.gate), linear_dx(m, d, f, dup.data(), w + at.up));
    const NormGradient norm2 = norm_backward(m, d, a.h.data(), a.norm2.rstd.data(), w + at.norm2, dnorm2.data());
    store(at.norm2, norm2.dw);
    const Floats dh = add_all(norm2.dx, dx);

    store(at.o, linear_dw(m, d, d, dh.data(), a.ctx.data()));
    const Floats dctx = linear_dx(m, d, d, dh.data(), w + at.o);
    AttentionGradient da = attention_backward(s.attention(), a.q.data(), a.k.data(), a.v.data(), dctx.data(), &ok);
    da.dq = rotary(true, s.batch, s.length, s.heads, s.head_dim, da.dq.data());
    da.dk = rotary(true, s.batch, s.length, s.kv_heads, s.head_dim, da.dk.data());
    store(at.q, linear_dw(m, d, d, da.dq.data(), a.norm1.y.data()));
    store(at.k, linear_dw(m, d, kv, da.dk.data(), a.norm1.y.data()));
    store(at.v, linear_dw(m, d, kv, da.dv.data(), a.norm1.y.data()));
    const Floats dnorm1 =
        add_all(add_all(linear_dx(m, d, d, da.dq.data(), w + at.q), linear_dx(m, d, kv, da.dk.data(), w + at.k)),
                linear_dx(m, d, kv, da.dv.data(), w + at.v));
    const NormGradient norm1 = norm_backward(m, d, a.x.data(), a.norm1.rstd.data(), w + at.norm1, dnorm1.data());
    store(at.norm1, norm1.dw);
    dx = add_all(norm1.dx, dh);
  }
  store(0, embed_backward(m, d, s.vocab, inputs, dx.data()));
  return ok && all_finite(*out);
}

}  // namespace reference
