// SPDX-License-Identifier: Apache-2.0
#include "kernels/arguments.h"
#include "kernels/arithmetic.h"

namespace mjl::gpu {

using A = Arithmetic;

MJL_KERNEL silu_product(const __grid_constant__ SiluArguments a) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= a.gate.size()) return;
  const float g = load(a.gate.data + i);
  a.gated.data[i] = A::mul(A::div(g, silu_denominator(g)), load(a.up.data + i));
}

MJL_KERNEL silu_product_backward(const __grid_constant__ SiluArguments a) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= a.gate.size()) return;
  const float g = load(a.gate.data + i), d_gated = load(a.d_gated.data + i), denominator = silu_denominator(g);
  const float d_silu = A::mul(d_gated, load(a.up.data + i));
  a.d_up.data[i] = A::mul(d_gated, A::div(g, denominator));
  const float sg = A::div(1.0f, denominator);
  a.d_gate.data[i] = A::mul(d_silu, A::mul(sg, A::add(1.0f, A::mul(g, A::add(1.0f, A::negate(sg))))));
}

}  // namespace mjl::gpu
