// SPDX-License-Identifier: Apache-2.0
//
// How long each stage of a step takes: a backend that hands every call on to another one and looks at the clock.
#ifndef MOJOLEARN_STAGES_HPP
#define MOJOLEARN_STAGES_HPP

#include <chrono>
#include <map>
#include <string>

#include "model/model.h"
#include "ops.h"

namespace mjl {

class Stopwatch final : public Backend {
 public:
  explicit Stopwatch(Backend& inner) : inner_(inner) {}
  const std::map<std::string, double>& seconds() const { return seconds_; }

  void* allocate(uint64_t bytes) override { return inner_.allocate(bytes); }
  void release(void* memory) override { inner_.release(memory); }
  void upload(void* to, const void* from, uint64_t bytes) override { inner_.upload(to, from, bytes); }
  void download(void* to, const void* from, uint64_t bytes) override { inner_.download(to, from, bytes); }
  Outcome finish() override { return inner_.finish(); }
  DeviceFacts facts() const override { return inner_.facts(); }
  void abandon() override { inner_.abandon(); }
  uint64_t scratch_bytes(const Shape& shape) const override { return inner_.scratch_bytes(shape); }
  void bind_scratch(void* scratch, const Shape& shape) override { inner_.bind_scratch(scratch, shape); }

#define STAGE(name, parameters, arguments)                                                              \
  void name parameters override {                                                                       \
    const auto start = std::chrono::steady_clock::now();                                                \
    inner_.name arguments;                                                                              \
    seconds_[#name] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); \
  }
  STAGE(rotary_table, (Heads a, Tensor b, Tensor c), (a, b, c))
  STAGE(embed, (Tokens a, Tensor b, Tensor c), (a, b, c))
  STAGE(norm_qkv_rotary,
        (Tokens a, Heads b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g, Tensor h, Tensor i, Tensor j, Tensor k,
         Tensor l, Tensor m, Tensor n),
        (a, b, c, d, e, f, g, h, i, j, k, l, m, n))
  STAGE(attention, (Tokens a, Heads b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g, Tensor h),
        (a, b, c, d, e, f, g, h))
  STAGE(project_residual, (Tensor a, Tensor b, Tensor c, Tensor d), (a, b, c, d))
  STAGE(norm_gate_up, (Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g, Tensor h, Tensor i),
        (a, b, c, d, e, f, g, h, i))
  STAGE(logits, (Tensor a, Tensor b, Tensor c), (a, b, c))
  STAGE(head_loss, (Tokens a, Tensor b, Tensor c, Contraction d), (a, b, c, d))
  STAGE(head_loss_backward, (Tokens a, Tensor b, Tensor c, Contraction d, Tensor e, Tensor f), (a, b, c, d, e, f))
  STAGE(project_backward, (Tensor a, Tensor b, Tensor c, Tensor d, Tensor e), (a, b, c, d, e))
  STAGE(gate_up_norm_backward,
        (Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g, Tensor h, Tensor i, Tensor j, Tensor k,
         Tensor l, Tensor m, Tensor n, Tensor o, Tensor p, Tensor q),
        (a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q))
  STAGE(attention_backward,
        (Tokens a, Heads b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g, Tensor h, Tensor i, Tensor j, Tensor k,
         Tensor l),
        (a, b, c, d, e, f, g, h, i, j, k, l))
  STAGE(qkv_norm_backward,
        (Tokens a, Heads b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g, Tensor h, Tensor i, Tensor j, Tensor k,
         Tensor l, Tensor m, Tensor n, Tensor o, Tensor p, Tensor q, Tensor r, Tensor s, Tensor t, Tensor u),
        (a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u))
  STAGE(embed_backward, (Tokens a, Tensor b, Tensor c), (a, b, c))
  STAGE(update, (const UpdateScalars* a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g, Tensor h),
        (a, b, c, d, e, f, g, h))
#undef STAGE

 private:
  Backend& inner_;
  std::map<std::string, double> seconds_;
};

}  // namespace mjl

#endif
