// SPDX-License-Identifier: Apache-2.0
//
// The training step, in the order in which a paper would tell it. ops.h says what each stage computes.
#include "model/model.h"

namespace mjl {
namespace {

// The same tensor with only its first rows, for calls with fewer tokens than a training batch.
Tensor first(Tensor t, int64_t rows) { return {t.data, rows, t.cols, t.min_exponent}; }

}  // namespace

void forward(Backend& b, const Model& m, const Tokens& tokens) {
  const Weights& w = m.now().weights;
  const Heads heads = m.shape.heads();
  const int64_t M = tokens.count();
  const auto rows = [M](const Tensor& t) { return first(t, M); };

  b.embed(tokens, w.embed, rows(m.layers[0].x));
  for (size_t i = 0; i < m.layers.size(); ++i) {
    const LayerWeights& l = w.layers[i];
    const LayerActivations& a = m.layers[i];
    const Tensor out = i + 1 < m.layers.size() ? m.layers[i + 1].x : m.x_out;
    b.norm_qkv_rotary(tokens, heads, rows(a.x), l.norm1, l.q, l.k, l.v, m.cos, m.sin, rows(a.rstd1), rows(a.y1),
                      rows(a.q), rows(a.k), rows(a.v));
    b.attention(tokens, heads, rows(a.q), rows(a.k), rows(a.v), rows(a.score_max), rows(a.denominator),
                rows(a.context));
    b.project_residual(rows(a.context), l.o, rows(a.x), rows(a.h));
    b.norm_gate_up(rows(a.h), l.norm2, l.gate, l.up, rows(a.rstd2), rows(a.y2), rows(a.gate), rows(a.up),
                   rows(a.gated));
    b.project_residual(rows(a.gated), l.down, rows(a.h), rows(out));
  }
}

void loss_only(Backend& b, const Model& m) {
  forward(b, m, m.tokens);
  b.head_loss(m.tokens, m.x_out, m.now().weights.lm_head, m.shape.head_rule());
}

void train_step(Backend& b, const Model& m) {
  const Weights& w = m.now().weights;
  const Weights& g = m.gradients;
  const Heads heads = m.shape.heads();

  forward(b, m, m.tokens);
  b.head_loss_backward(m.tokens, m.x_out, w.lm_head, m.shape.head_rule(), m.d_x, g.lm_head);
  for (size_t i = m.layers.size(); i-- > 0;) {
    const LayerWeights& l = w.layers[i];
    const LayerWeights& d = g.layers[i];
    const LayerActivations& a = m.layers[i];
    b.project_backward(m.d_x, a.gated, l.down, m.d_gated, d.down);
    b.gate_up_norm_backward(m.d_gated, a.gate, a.up, a.y2, a.rstd2, a.h, l.norm2, l.gate, l.up, m.d_x, m.d_gate, m.d_up,
                            m.d_y, d.gate, d.up, d.norm2, m.d_h);
    b.project_backward(m.d_h, a.context, l.o, m.d_context, d.o);
    b.attention_backward(m.tokens, heads, a.q, a.k, a.v, a.score_max, a.denominator, m.d_context, m.zz, m.d_q, m.d_k,
                         m.d_v);
    b.qkv_norm_backward(m.tokens, heads, m.d_q, m.d_k, m.d_v, m.cos, m.sin, a.y1, a.rstd1, a.x, l.norm1, l.q, l.k, l.v,
                        m.d_h, m.d_y, d.q, d.k, d.v, d.norm1, m.d_x);
  }
  b.embed_backward(m.tokens, m.d_x, g.embed);
  b.update(m.scalars, g.flat, w.flat, m.now().m, m.now().v, m.next().weights.flat, m.next().m, m.next().v);
}

void Backend::train_step(const Model& model) { mjl::train_step(*this, model); }

Backend::~Backend() = default;

}  // namespace mjl
