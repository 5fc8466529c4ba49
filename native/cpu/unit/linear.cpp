// SPDX-License-Identifier: Apache-2.0
//
// The stages that are matrix products with something before or after them. For y = x times the transposed w: d_x
// contracts over w's rows, d_w over tokens.
#include "cpu/unit/backend.h"
#include "math/elementary.h"

namespace mjl::cpu::MJL_UNIT {
namespace {

constexpr int64_t kChunk = 2048;  // elements of one task of an elementwise loop

Product forward_product(Tensor x, Tensor w, Tensor y, const float* residual = nullptr) {
  return {x.rows, w.rows, {{plain(x), transposed(w), x.cols}}, 1, Contraction::leaf_tree, residual, false, y.data};
}

Product weight_gradient(Tensor d_y, Tensor x, Tensor d_w) {
  return {d_y.cols, x.cols, {{transposed(d_y), plain(x), x.rows}}, 1, Contraction::leaf_tree, nullptr, false, d_w.data};
}

// body(arithmetic, offset, lanes) over the vectors of one chunk.
template <class Body>
MJL_INLINE void chunk(int64_t task, int64_t size, Body&& body) {
  exact([&](auto arithmetic) {
    for_lanes(task * kChunk, smaller((task + 1) * kChunk, size),
              [&](int64_t i, int lanes) { body(arithmetic, i, lanes); });
  });
}

}  // namespace

void CpuBackend::norm_qkv_rotary(Tokens tokens, Heads heads, Tensor x, Tensor norm_w, Tensor w_q, Tensor w_k,
                                 Tensor w_v, Tensor cos, Tensor sin, Tensor rstd, Tensor y, Tensor q, Tensor k,
                                 Tensor v) {
  norm_forward(x, norm_w, rstd, y);
  const Product products[] = {forward_product(y, w_q, q), forward_product(y, w_k, k), forward_product(y, w_v, v)};
  multiply(products, 3);
  rotate(tokens, heads, q, heads.n_heads, cos, sin, false);
  rotate(tokens, heads, k, heads.n_kv, cos, sin, false);
}

void CpuBackend::project_residual(Tensor x, Tensor w, Tensor residual, Tensor out) {
  const Product product = forward_product(x, w, out, residual.data);
  multiply(&product, 1);
}

void CpuBackend::silu_product(Tensor gate, Tensor up, Tensor gated) {
  parallel(ceil_div(gate.size(), kChunk), 3 * gate.size(), [&](int64_t task, int) {
    chunk(task, gate.size(), [&](auto arithmetic, int64_t i, int lanes) {
      using A = decltype(arithmetic);
      const Floats g = A::load(gate.data + i, lanes);
      const Floats silu = A::div(g, A::add(math::exp<A>(A::negate(g)), A::value(1.0f)));
      A::store(gated.data + i, A::mul(silu, A::load(up.data + i, lanes)), lanes);
    });
  });
}

void CpuBackend::silu_product_backward(Tensor d_gated, Tensor gate, Tensor up, Tensor d_gate, Tensor d_up) {
  parallel(ceil_div(gate.size(), kChunk), 3 * gate.size(), [&](int64_t task, int) {
    chunk(task, gate.size(), [&](auto arithmetic, int64_t i, int lanes) {
      using A = decltype(arithmetic);
      const Floats g = A::load(gate.data + i, lanes), one = A::value(1.0f), dg = A::load(d_gated.data + i, lanes);
      const Floats denominator = A::add(math::exp<A>(A::negate(g)), one);
      const Floats d_silu = A::mul(dg, A::load(up.data + i, lanes));
      A::store(d_up.data + i, A::mul(dg, A::div(g, denominator)), lanes);
      const Floats sg = A::div(one, denominator);
      const Floats slope = A::mul(sg, A::add(one, A::mul(g, A::add(one, A::negate(sg)))));
      A::store(d_gate.data + i, A::mul(d_silu, slope), lanes);
    });
  });
}

void CpuBackend::norm_gate_up(Tensor x, Tensor norm_w, Tensor w_gate, Tensor w_up, Tensor rstd, Tensor y, Tensor gate,
                              Tensor up, Tensor gated) {
  norm_forward(x, norm_w, rstd, y);
  const Product products[] = {forward_product(y, w_gate, gate), forward_product(y, w_up, up)};
  multiply(products, 2);
  silu_product(gate, up, gated);
}

void CpuBackend::logits(Tensor x, Tensor lm_head, Tensor logits) {
  const Product product = forward_product(x, lm_head, logits);
  multiply(&product, 1);
}

void CpuBackend::project_backward(Tensor d_out, Tensor x, Tensor w, Tensor d_x, Tensor d_w) {
  const Product products[] = {
      {d_out.rows, w.cols, {{plain(d_out), plain(w), w.rows}}, 1, Contraction::leaf_tree, nullptr, false, d_x.data},
      weight_gradient(d_out, x, d_w)};
  multiply(products, 2);
}

void CpuBackend::gate_up_norm_backward(Tensor d_gated, Tensor gate, Tensor up, Tensor y, Tensor rstd, Tensor x,
                                       Tensor norm_w, Tensor w_gate, Tensor w_up, Tensor d_residual, Tensor d_gate,
                                       Tensor d_up, Tensor d_y, Tensor d_w_gate, Tensor d_w_up, Tensor d_norm_w,
                                       Tensor d_x) {
  silu_product_backward(d_gated, gate, up, d_gate, d_up);
  const Product products[] = {{d_y.rows,
                               d_y.cols,
                               {{plain(d_gate), plain(w_gate), w_gate.rows}, {plain(d_up), plain(w_up), w_up.rows}},
                               2,
                               Contraction::leaf_tree,
                               nullptr,
                               false,
                               d_y.data},
                              weight_gradient(d_gate, y, d_w_gate),
                              weight_gradient(d_up, y, d_w_up)};
  multiply(products, 3);
  norm_backward(d_y, x, norm_w, rstd, d_residual, d_norm_w, d_x);
}

void CpuBackend::qkv_norm_backward(Tokens tokens, Heads heads, Tensor d_q, Tensor d_k, Tensor d_v, Tensor cos,
                                   Tensor sin, Tensor y, Tensor rstd, Tensor x, Tensor norm_w, Tensor w_q, Tensor w_k,
                                   Tensor w_v, Tensor d_residual, Tensor d_y, Tensor d_w_q, Tensor d_w_k, Tensor d_w_v,
                                   Tensor d_norm_w, Tensor d_x) {
  rotate(tokens, heads, d_q, heads.n_heads, cos, sin, true);
  rotate(tokens, heads, d_k, heads.n_kv, cos, sin, true);
  const Product products[] = {
      {d_y.rows,
       d_y.cols,
       {{plain(d_q), plain(w_q), w_q.rows}, {plain(d_k), plain(w_k), w_k.rows}, {plain(d_v), plain(w_v), w_v.rows}},
       3,
       Contraction::leaf_tree,
       nullptr,
       false,
       d_y.data},
      weight_gradient(d_q, y, d_w_q),
      weight_gradient(d_k, y, d_w_k),
      weight_gradient(d_v, y, d_w_v)};
  multiply(products, 4);
  norm_backward(d_y, x, norm_w, rstd, d_residual, d_norm_w, d_x);
}

}  // namespace mjl::cpu::MJL_UNIT
