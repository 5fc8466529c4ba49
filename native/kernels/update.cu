// SPDX-License-Identifier: Apache-2.0
#include "kernels/arguments.h"
#include "kernels/arithmetic.h"

namespace mjl::gpu {

using A = Arithmetic;

MJL_KERNEL __launch_bounds__(256) update(const __grid_constant__ UpdateArguments a) {
  const UpdateScalars u = *a.scalars;
  const float beta1 = A::value(u.beta1), beta2 = A::value(u.beta2), c1 = A::value(u.c1), c2 = A::value(u.c2);
  const float step = A::negate(A::value(u.step)), root = A::value(u.root_bias2), decay = A::value(u.decay),
              eps = A::value(u.eps);
  uint32_t faults = 0;
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
#pragma unroll 4
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < a.count; i += stride) {
    const float g = load(a.g + i);
    float p = load(a.p + i);
    if (u.has_decay) p = A::mul(decay, p);
    const float m = A::fma(c1, g, A::mul(beta1, load(a.m + i)));
    const float v = A::fma(c2, A::mul(g, g), A::mul(beta2, load(a.v + i)));
    p = A::fma(step, A::div(m, A::add(A::div(A::sqrt(v), root), eps)), p);
    a.next_p[i] = p;
    a.next_m[i] = m;
    a.next_v[i] = v;
    faults |= (non_finite(g) ? kFaultGradient : 0) | (non_finite(p) ? kFaultParameters : 0) |
              (non_finite(m) ? kFaultFirstMoment : 0) | (non_finite(v) || v < 0.0f ? kFaultSecondMoment : 0);
  }
  if (faults != 0) atomicOr(&a.result->faults, faults);
}

}  // namespace mjl::gpu
