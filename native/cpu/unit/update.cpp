// SPDX-License-Identifier: Apache-2.0
#include "cpu/unit/backend.h"

namespace mjl::cpu::MJL_UNIT {

void CpuBackend::update(const UpdateScalars* scalars, Tensor g, Tensor p, Tensor m, Tensor v, Tensor next_p,
                        Tensor next_m, Tensor next_v) {
  constexpr int64_t kChunk = 2048;
  const UpdateScalars& u = *scalars;
  parallel(ceil_div(p.size(), kChunk), 4 * p.size(), [&](int64_t task, int) {
    const int64_t begin = task * kChunk, end = smaller(begin + kChunk, p.size());
    uint32_t faults = 0;
    exact([&](auto arithmetic) {
      using A = decltype(arithmetic);
      const Floats beta1 = A::value(u.beta1), beta2 = A::value(u.beta2), c1 = A::value(u.c1), c2 = A::value(u.c2);
      const Floats step = A::negate(A::value(u.step)), root = A::value(u.root_bias2), decay = A::value(u.decay),
                   eps = A::value(u.eps);
      Ints bad_g = {}, bad_p = {}, bad_m = {}, bad_v = {};
      for_lanes(begin, end, [&](int64_t i, int lanes) {
        const Floats grad = A::load(g.data + i, lanes);
        Floats param = A::load(p.data + i, lanes);
        if (u.has_decay) param = A::mul(decay, param);
        const Floats first = A::fma(c1, grad, A::mul(beta1, A::load(m.data + i, lanes)));
        const Floats second = A::fma(c2, A::mul(grad, grad), A::mul(beta2, A::load(v.data + i, lanes)));
        const Floats scaled = A::div(first, A::add(A::div(A::sqrt(second), root), eps));
        param = A::fma(step, scaled, param);
        A::store(next_p.data + i, param, lanes);
        A::store(next_m.data + i, first, lanes);
        A::store(next_v.data + i, second, lanes);
        bad_g |= non_finite(grad);
        bad_m |= non_finite(first);
        bad_v |= non_finite(second) | (second < Floats{});
        bad_p |= non_finite(param);
      });
      faults = (any(bad_g) ? uint32_t(kFaultGradient) : 0u) | (any(bad_p) ? uint32_t(kFaultParameters) : 0u) |
               (any(bad_m) ? uint32_t(kFaultFirstMoment) : 0u) | (any(bad_v) ? uint32_t(kFaultSecondMoment) : 0u);
    });
    fault(faults);
  });
}

}  // namespace mjl::cpu::MJL_UNIT
