// SPDX-License-Identifier: Apache-2.0
//
// Where everything lies: one block, planned from the shape alone.
#include "model/model.h"

namespace mjl {
namespace {

class Layout {
 public:
  explicit Layout(void* memory) : base_(static_cast<char*>(memory)) {}

  void* bytes(uint64_t count) {
    void* const at = base_ ? base_ + used_ : nullptr;
    used_ += (count + 63) / 64 * 64;
    return at;
  }
  Tensor tensor(int64_t rows, int64_t cols = 1) {
    return {static_cast<float*>(bytes(uint64_t(rows) * uint64_t(cols) * sizeof(float))), rows, cols};
  }
  uint64_t used() const { return used_; }

 private:
  char* base_;
  uint64_t used_ = 0;
};

Weights weights_in(const Shape& s, Tensor flat) {
  Weights w;
  w.flat = flat;
  int64_t offset = 0;
  const auto next = [&](int64_t rows, int64_t cols) {
    const Tensor t = {flat.data ? flat.data + offset : nullptr, rows, cols};
    offset += rows * cols;
    return t;
  };
  w.embed = next(s.V, s.D);
  w.layers.resize(size_t(s.layers));
  for (LayerWeights& l : w.layers) {
    l.norm1 = next(s.D, 1);
    l.q = next(s.D, s.D);
    l.k = next(s.KD(), s.D);
    l.v = next(s.KD(), s.D);
    l.o = next(s.D, s.D);
    l.norm2 = next(s.D, 1);
    l.gate = next(s.F, s.D);
    l.up = next(s.F, s.D);
    l.down = next(s.D, s.F);
  }
  w.lm_head = next(s.V, s.D);
  return w;
}

}  // namespace

uint64_t plan(Model& model, void* memory) {
  const Shape& s = model.shape;
  const int64_t M = s.M(), P = s.parameter_count();
  Layout at(memory);

  for (State& state : model.state) {
    state.weights = weights_in(s, at.tensor(P));
    state.m = at.tensor(P);
    state.v = at.tensor(P);
  }
  model.gradients = weights_in(s, at.tensor(P));
  model.cos = at.tensor(s.L, s.HD / 2);
  model.sin = at.tensor(s.L, s.HD / 2);

  model.layers.resize(size_t(s.layers));
  for (LayerActivations& a : model.layers) {
    a.x = at.tensor(M, s.D);
    a.rstd1 = at.tensor(M);
    a.y1 = at.tensor(M, s.D);
    a.q = at.tensor(M, s.D);
    a.k = at.tensor(M, s.KD());
    a.v = at.tensor(M, s.KD());
    a.score_max = at.tensor(M, s.H);
    a.denominator = at.tensor(M, s.H);
    a.context = at.tensor(M, s.D);
    a.h = at.tensor(M, s.D);
    a.rstd2 = at.tensor(M);
    a.y2 = at.tensor(M, s.D);
    a.gate = at.tensor(M, s.F);
    a.up = at.tensor(M, s.F);
    a.gated = at.tensor(M, s.F);
  }
  model.x_out = at.tensor(M, s.D);

  model.d_x = at.tensor(M, s.D);
  model.d_h = at.tensor(M, s.D);
  model.d_y = at.tensor(M, s.D);
  model.d_q = at.tensor(M, s.D);
  model.d_context = at.tensor(M, s.D);
  model.d_k = at.tensor(M, s.KD());
  model.d_v = at.tensor(M, s.KD());
  model.zz = at.tensor(M, s.H);
  model.d_gated = at.tensor(M, s.F);
  model.d_gate = at.tensor(M, s.F);
  model.d_up = at.tensor(M, s.F);

  model.ids = static_cast<int32_t*>(at.bytes(uint64_t(s.B * (s.L + 1)) * sizeof(int32_t)));
  model.scalars = static_cast<UpdateScalars*>(at.bytes(sizeof(UpdateScalars)));
  return at.used();
}

}  // namespace mjl
