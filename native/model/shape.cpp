// SPDX-License-Identifier: Apache-2.0
#include "model/shape.h"

namespace mjl {

std::string Shape::problem() const {
  const struct {
    const char* name;
    int64_t value;
  } dimensions[] = {{"batch", B},     {"length", L},       {"d_model", D},       {"n_heads", H},   {"n_kv", KV},
                    {"head_dim", HD}, {"intermediate", F}, {"n_layers", layers}, {"vocab_size", V}};
  for (const auto& d : dimensions)
    if (d.value < 1 || d.value > (1 << 20))
      return std::string(d.name) + " is " + std::to_string(d.value) + "; it must be from 1 to 1048576";
  if (L > 8192) return "length is " + std::to_string(L) + "; it must be at most 8192";
  if (D != H * HD)
    return "d_model is " + std::to_string(D) + "; it must be n_heads * head_dim = " + std::to_string(H * HD);
  if (H % KV != 0) return "n_heads (" + std::to_string(H) + ") must be divisible by n_kv (" + std::to_string(KV) + ")";
  if (HD % 2 != 0) return "head_dim is " + std::to_string(HD) + "; it must be even";
  if (chunked_head && V < 2) return "the chunked head needs a vocab_size of at least 2";
  // Spans that 32-bit indices must reach, beyond which the profile is not defined. Products stay below 2^63 because
  // each factor is at most 2^20, but for the scores, whose four factors are checked in two steps.
  const int64_t limit = 2147483647;
  const int64_t spans[] = {parameter_count(), M() * V, M() * D, M() * F, B * KV * L * HD, B * (L + 1)};
  for (const int64_t span : spans)
    if (span > limit)
      return "the shape needs " + std::to_string(span) + " elements in one array; at most 2147483647 can be indexed";
  if (L * L > limit / B || B * L * L > limit / H)
    return "batch * n_heads * length^2 is over 2147483647, the limit of what can be indexed";
  return "";
}

}  // namespace mjl
