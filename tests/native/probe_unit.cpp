// SPDX-License-Identifier: Apache-2.0
//
// Compiled once for each vector unit, like the code it reaches into.
#include "probe_unit.h"

#include "cpu/unit/backend.h"
#include "math/elementary.h"

namespace mjl::cpu::MJL_UNIT {
namespace {

void elementary(Elementary function, int64_t count, const float* x, const float* y, float* out) {
  exact([&](auto arithmetic) {
    using A = decltype(arithmetic);
    for (int64_t i = 0; i < count; i += kLanes) {
      const int lanes = int(smaller(kLanes, count - i));
      const Floats a = A::load(x + i, lanes);
      Floats result = {}, other = {};
      switch (function) {
        case Elementary::exp:
          result = math::exp<A>(a);
          break;
        case Elementary::log:
          result = math::log<A>(a);
          break;
        case Elementary::sin:
          math::sincos<A>(a, result, other);
          break;
        case Elementary::cos:
          math::sincos<A>(a, other, result);
          break;
        case Elementary::pow:
          result = math::pow<A>(a, A::load(y + i, lanes));
          break;
      }
      A::store(out + i, result, lanes);
    }
  });
}

CpuBackend& cpu(Backend& backend) { return static_cast<CpuBackend&>(backend); }

void contract(Backend& backend, Contraction rule, bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
              const float* a, const float* b, float* out) {
  const Matrix left = a_transposed ? Matrix{a, 1, m} : Matrix{a, k, 1};
  const Matrix right = b_transposed ? Matrix{b, 1, k} : Matrix{b, n, 1};
  const Product product = {m, n, {{left, right, k}}, 1, rule, nullptr, false, out};
  cpu(backend).multiply(&product, 1);
}

void norm_forward(Backend& backend, Tensor x, Tensor w, Tensor rstd, Tensor y) {
  cpu(backend).norm_rows(x, w, rstd, y, {0, x.rows, 0});
}

void norm_backward(Backend& backend, Tensor d_y, Tensor x, Tensor w, Tensor rstd, Tensor d_residual, Tensor d_w,
                   Tensor d_x) {
  cpu(backend).norm_backward_rows(d_y, x, w, rstd, d_residual, d_x, {0, x.rows, 0});
  cpu(backend).norm_weight_gradient(d_y, x, rstd, d_w);
}

void rotate(Backend& backend, Tokens tokens, Heads heads, Tensor x, Tensor cos, Tensor sin, bool backward) {
  cpu(backend).rotate_rows(tokens, heads, x, heads.n_heads, cos, sin, backward, {0, x.rows, 0});
}

void silu_product(Backend& backend, Tensor gate, Tensor up, Tensor gated) {
  cpu(backend).silu_product_rows(gate, up, gated, {0, gate.rows, 0});
}

void silu_product_backward(Backend& backend, Tensor d_gated, Tensor gate, Tensor up, Tensor d_gate, Tensor d_up) {
  cpu(backend).silu_product_backward_rows(d_gated, gate, up, d_gate, d_up, {0, gate.rows, 0});
}

}  // namespace

extern const ProbeUnit probe_unit;
const ProbeUnit probe_unit = {elementary, contract,     norm_forward,         norm_backward,
                              rotate,     silu_product, silu_product_backward};

}  // namespace mjl::cpu::MJL_UNIT
