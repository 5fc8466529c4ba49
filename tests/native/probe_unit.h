// SPDX-License-Identifier: Apache-2.0
//
// What probe.cpp asks of the code compiled for one vector unit.
#ifndef MOJOLEARN_PROBE_UNIT_H
#define MOJOLEARN_PROBE_UNIT_H

#include <cstdint>

#include "ops.h"

namespace mjl::cpu {

enum class Elementary { exp, log, sin, cos, pow };

struct ProbeUnit {
  void (*elementary)(Elementary function, int64_t count, const float* x, const float* y, float* out);
  void (*contract)(Backend& backend, Contraction rule, bool a_transposed, bool b_transposed, int64_t m, int64_t n,
                   int64_t k, const float* a, const float* b, float* out);
  void (*norm_forward)(Backend& backend, Tensor x, Tensor w, Tensor rstd, Tensor y);
  void (*norm_backward)(Backend& backend, Tensor d_y, Tensor x, Tensor w, Tensor rstd, Tensor d_residual, Tensor d_w,
                        Tensor d_x);
  void (*rotate)(Backend& backend, Tokens tokens, Heads heads, Tensor x, Tensor cos, Tensor sin, bool backward);
  void (*silu_product)(Backend& backend, Tensor gate, Tensor up, Tensor gated);
  void (*silu_product_backward)(Backend& backend, Tensor d_gated, Tensor gate, Tensor up, Tensor d_gate, Tensor d_up);
};

}  // namespace mjl::cpu

#endif
