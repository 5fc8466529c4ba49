// SPDX-License-Identifier: Apache-2.0
//
// The scalars of an AdamW step. All in float32, like everything else: float64 here would give other bits.
#ifndef MJL_OPTIM_ADAMW_H
#define MJL_OPTIM_ADAMW_H

#include <cstdint>
#include <string>

#include "math/scalar.h"
#include "ops.h"

namespace mjl {

struct AdamW {
  float lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;

  // "" if acceptable, else what is wrong.
  std::string problem() const {
    const auto wrong = [](const char* name, float value, const char* range) {
      return std::string(name) + " is " + std::to_string(value) + "; it must be " + range;
    };
    if (!(scalar::is_finite(lr) && lr > 0)) return wrong("lr", lr, "finite and above 0");
    if (!(beta1 >= 0 && beta1 < 1)) return wrong("beta1", beta1, "in [0, 1)");
    if (!(beta2 >= 0 && beta2 < 1)) return wrong("beta2", beta2, "in [0, 1)");
    if (!(scalar::is_finite(eps) && eps > 0)) return wrong("eps", eps, "finite and above 0");
    if (!(scalar::is_finite(weight_decay) && weight_decay >= 0))
      return wrong("weight_decay", weight_decay, "finite and at least 0");
    return "";
  }
};

// base^t by squaring, from the least significant bit of t.
inline float power(float base, uint64_t t) {
  float result = 1.0f;
  for (; t != 0; t >>= 1) {
    if (t & 1) result = scalar::mul(result, base);
    base = scalar::mul(base, base);
  }
  return result;
}

// Of step t >= 1.
inline UpdateScalars scalars_of(const AdamW& h, uint64_t t) {
  using namespace scalar;
  UpdateScalars s;
  s.beta1 = h.beta1;
  s.beta2 = h.beta2;
  s.c1 = add(1.0f, -h.beta1);
  s.c2 = add(1.0f, -h.beta2);
  s.step = div(h.lr, add(1.0f, -power(h.beta1, t)));
  s.root_bias2 = scalar::sqrt(add(1.0f, -power(h.beta2, t)));
  s.decay = add(1.0f, -mul(h.lr, h.weight_decay));
  s.eps = h.eps;
  s.has_decay = h.weight_decay != 0.0f;
  return s;
}

}  // namespace mjl

#endif
