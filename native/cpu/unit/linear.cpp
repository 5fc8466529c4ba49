// SPDX-License-Identifier: Apache-2.0
//
// The stages that are matrix products with something before or after them. For y = x times the transposed w: d_x
// contracts over w's rows, d_w over tokens.
#include "cpu/unit/backend.h"
#include "math/elementary.h"

namespace mjl::cpu::MJL_UNIT {
namespace {

Product forward_product(Tensor x, Tensor w, Tensor y, const float* residual = nullptr) {
  return {x.rows, w.rows, {{plain(x), transposed(w), x.cols}}, 1, Contraction::leaf_tree, residual, false, y.data};
}

Product weight_gradient(Tensor d_y, Tensor x, Tensor d_w) {
  return {d_y.cols, x.cols, {{transposed(d_y), plain(x), x.rows}}, 1, Contraction::leaf_tree, nullptr, false, d_w.data};
}

// body(arithmetic, offset, lanes) over the elements of some rows, a few at a time: a subnormal costs a repetition.
template <class Body>
MJL_INLINE void elementwise(const Tensor& t, Rows rows, Body&& body) {
  constexpr int64_t kChunk = 2048;
  const int64_t end = (rows.first + rows.count) * t.cols;
  for (int64_t i = rows.first * t.cols; i < end; i += kChunk)
    exact([&](auto arithmetic) {
      for_lanes(i, smaller(i + kChunk, end), [&](int64_t at, int lanes) { body(arithmetic, at, lanes); });
    });
}

}  // namespace

void CpuBackend::norm_qkv_rotary(Tokens tokens, Heads heads, Tensor x, Tensor norm_w, Tensor w_q, Tensor w_k,
                                 Tensor w_v, Tensor cos, Tensor sin, Tensor rstd, Tensor y, Tensor q, Tensor k,
                                 Tensor v) {
  const Product products[] = {forward_product(y, w_q, q), forward_product(y, w_k, k), forward_product(y, w_v, v)};
  const auto norm = [&](Rows rows) { norm_rows(x, norm_w, rstd, y, rows); };
  const auto rotate = [&](Rows rows) {
    rotate_rows(tokens, heads, q, heads.n_heads, cos, sin, false, rows);
    rotate_rows(tokens, heads, k, heads.n_kv, cos, sin, false, rows);
  };
  multiply(products, 3, row_hook(norm), row_hook(rotate));
}

void CpuBackend::project_residual(Tensor x, Tensor w, Tensor residual, Tensor out) {
  const Product product = forward_product(x, w, out, residual.data);
  multiply(&product, 1);
}

void CpuBackend::silu_product_rows(Tensor gate, Tensor up, Tensor gated, Rows rows) {
  elementwise(gate, rows, [&](auto arithmetic, int64_t i, int lanes) {
    using A = decltype(arithmetic);
    const Floats g = A::load(gate.data + i, lanes);
    const Floats silu = A::div(g, A::add(math::exp<A>(A::negate(g)), A::value(1.0f)));
    A::store(gated.data + i, A::mul(silu, A::load(up.data + i, lanes)), lanes);
  });
}

void CpuBackend::silu_product_backward_rows(Tensor d_gated, Tensor gate, Tensor up, Tensor d_gate, Tensor d_up,
                                            Rows rows) {
  elementwise(gate, rows, [&](auto arithmetic, int64_t i, int lanes) {
    using A = decltype(arithmetic);
    const Floats g = A::load(gate.data + i, lanes), one = A::value(1.0f), dg = A::load(d_gated.data + i, lanes);
    const Floats denominator = A::add(math::exp<A>(A::negate(g)), one);
    const Floats d_silu = A::mul(dg, A::load(up.data + i, lanes));
    A::store(d_up.data + i, A::mul(dg, A::div(g, denominator)), lanes);
    const Floats sg = A::div(one, denominator);
    const Floats slope = A::mul(sg, A::add(one, A::mul(g, A::add(one, A::negate(sg)))));
    A::store(d_gate.data + i, A::mul(d_silu, slope), lanes);
  });
}

void CpuBackend::norm_gate_up(Tensor x, Tensor norm_w, Tensor w_gate, Tensor w_up, Tensor rstd, Tensor y, Tensor gate,
                              Tensor up, Tensor gated) {
  const Product products[] = {forward_product(y, w_gate, gate), forward_product(y, w_up, up)};
  const auto norm = [&](Rows rows) { norm_rows(x, norm_w, rstd, y, rows); };
  const auto silu = [&](Rows rows) { silu_product_rows(gate, up, gated, rows); };
  multiply(products, 2, row_hook(norm), row_hook(silu));
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
  const Product to_y = {d_y.rows,
                        d_y.cols,
                        {{plain(d_gate), plain(w_gate), w_gate.rows}, {plain(d_up), plain(w_up), w_up.rows}},
                        2,
                        Contraction::leaf_tree,
                        nullptr,
                        false,
                        d_y.data};
  const auto silu = [&](Rows rows) { silu_product_backward_rows(d_gated, gate, up, d_gate, d_up, rows); };
  const auto norm = [&](Rows rows) { norm_backward_rows(d_y, x, norm_w, rstd, d_residual, d_x, rows); };
  multiply(&to_y, 1, row_hook(silu), row_hook(norm));
  const Product weights[] = {weight_gradient(d_gate, y, d_w_gate), weight_gradient(d_up, y, d_w_up)};
  multiply(weights, 2);
  norm_weight_gradient(d_y, x, rstd, d_norm_w);
}

void CpuBackend::qkv_norm_backward(Tokens tokens, Heads heads, Tensor d_q, Tensor d_k, Tensor d_v, Tensor cos,
                                   Tensor sin, Tensor y, Tensor rstd, Tensor x, Tensor norm_w, Tensor w_q, Tensor w_k,
                                   Tensor w_v, Tensor d_residual, Tensor d_y, Tensor d_w_q, Tensor d_w_k, Tensor d_w_v,
                                   Tensor d_norm_w, Tensor d_x) {
  const Product to_y = {
      d_y.rows,
      d_y.cols,
      {{plain(d_q), plain(w_q), w_q.rows}, {plain(d_k), plain(w_k), w_k.rows}, {plain(d_v), plain(w_v), w_v.rows}},
      3,
      Contraction::leaf_tree,
      nullptr,
      false,
      d_y.data};
  const auto rotate_back = [&](Rows rows) {
    rotate_rows(tokens, heads, d_q, heads.n_heads, cos, sin, true, rows);
    rotate_rows(tokens, heads, d_k, heads.n_kv, cos, sin, true, rows);
  };
  const auto norm = [&](Rows rows) { norm_backward_rows(d_y, x, norm_w, rstd, d_residual, d_x, rows); };
  multiply(&to_y, 1, row_hook(rotate_back), row_hook(norm));
  const Product weights[] = {weight_gradient(d_q, y, d_w_q), weight_gradient(d_k, y, d_w_k),
                             weight_gradient(d_v, y, d_w_v)};
  multiply(weights, 3);
  norm_weight_gradient(d_y, x, rstd, d_norm_w);
}

}  // namespace mjl::cpu::MJL_UNIT
