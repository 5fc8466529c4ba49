// SPDX-License-Identifier: Apache-2.0
//
// The dimensions of a model, named as in docs/numerics.md, and the flat parameter vector they imply.
#ifndef MJL_MODEL_SHAPE_H
#define MJL_MODEL_SHAPE_H

#include <cstdint>
#include <string>

#include "ops.h"

namespace mjl {

struct Shape {
  int64_t B = 0;   // batch
  int64_t L = 0;   // length
  int64_t D = 0;   // d_model
  int64_t H = 0;   // n_heads
  int64_t KV = 0;  // n_kv
  int64_t HD = 0;  // head_dim
  int64_t F = 0;   // intermediate
  int64_t layers = 0;
  int64_t V = 0;  // vocab_size
  bool chunked_head = false;

  int64_t M() const { return B * L; }
  int64_t KD() const { return KV * HD; }
  int64_t layer_size() const { return 2 * D + 2 * D * D + 2 * KD() * D + 3 * F * D; }
  int64_t parameter_count() const { return 2 * V * D + layers * layer_size(); }
  Heads heads() const { return {H, KV, HD}; }
  Contraction head_rule() const { return chunked_head ? Contraction::chain : Contraction::leaf_tree; }

  // "" if the shape can be trained, else what is wrong with it.
  std::string problem() const;
};

}  // namespace mjl

#endif
