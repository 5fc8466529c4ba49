// SPDX-License-Identifier: Apache-2.0
#include "probe.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "api/guard.h"
#include "cpu/cpu.h"
#include "cpu/float_mode.h"
#include "model/shape.h"
#include "optim/adamw.h"
#include "probe_unit.h"
#include "stages.hpp"

#define X(unit)                      \
  namespace mjl::cpu::unit {         \
  extern const ProbeUnit probe_unit; \
  }
MJL_UNIT_LIST
#undef X

namespace {

using namespace mjl;

struct {
  std::string unit = cpu::available_units().substr(0, cpu::available_units().find(' '));
  int32_t threads = 0;
} selected;

const cpu::ProbeUnit& functions() {
#define X(name) \
  if (selected.unit == #name) return cpu::name::probe_unit;
  MJL_UNIT_LIST
#undef X
  throw Error(MJL_ERROR_INTERNAL, "no such unit");
}

// The backend of the selected unit with scratch for a shape.
class Probe {
 public:
  explicit Probe(int64_t batch, int64_t length, int64_t width, int64_t heads, int64_t kv, int64_t head_dim, int64_t f,
                 int64_t vocab, bool chunked = false) {
    std::string problem;
    const int threads = selected.threads ? selected.threads : cpu::default_threads(&problem);
    backend_ = cpu::open(selected.unit, threads, nullptr, nullptr, &problem);
    if (!backend_) throw Error(MJL_ERROR_MEMORY, problem);
    Shape shape;
    shape.B = batch;
    shape.L = length;
    shape.D = width;
    shape.H = heads;
    shape.KV = kv;
    shape.HD = head_dim;
    shape.F = f;
    shape.layers = 1;
    shape.V = vocab;
    shape.chunked_head = chunked;
    scratch_.resize(backend_->scratch_bytes(shape) / sizeof(float) + 16);
    backend_->bind_scratch(scratch_.data(), shape);
  }
  Backend& operator*() { return *backend_; }
  Backend* operator->() { return backend_.get(); }
  void finish() {
    if (backend_->finish().faults != 0) throw Error(MJL_ERROR_NON_FINITE, "non-finite");
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::vector<float> scratch_;
};

Tensor tensor(const float* data, int64_t rows, int64_t cols = 1) { return {const_cast<float*>(data), rows, cols}; }
Tensor tensor(std::vector<float>& data, int64_t rows, int64_t cols = 1) {
  data.assign(size_t(rows * cols), 0.0f);
  return {data.data(), rows, cols};
}

int32_t elementary(cpu::Elementary function, int64_t count, const float* x, const float* y, float* out) {
  return api::guard([&] { functions().elementary(function, count, x, y, out); });
}

}  // namespace

const char* probe_units(void) {
  static const std::string units = [] {
    std::string text = cpu::available_units();
    std::replace(text.begin(), text.end(), ' ', ',');
    return text;
  }();
  return units.c_str();
}

int32_t probe_select(const char* unit, int32_t threads) {
  const std::string available = " " + cpu::available_units() + " ";
  const std::string name = unit ? unit : available.substr(1, available.find(' ', 1) - 1);
  if (available.find(" " + name + " ") == std::string::npos) return MJL_ERROR_UNSUPPORTED;
  selected.unit = name;
  selected.threads = threads;
  return MJL_OK;
}

int32_t probe_exp(int64_t count, const float* x, float* out) {
  return elementary(cpu::Elementary::exp, count, x, nullptr, out);
}
int32_t probe_log(int64_t count, const float* x, float* out) {
  return elementary(cpu::Elementary::log, count, x, nullptr, out);
}
int32_t probe_sin(int64_t count, const float* x, float* out) {
  return elementary(cpu::Elementary::sin, count, x, nullptr, out);
}
int32_t probe_cos(int64_t count, const float* x, float* out) {
  return elementary(cpu::Elementary::cos, count, x, nullptr, out);
}
int32_t probe_pow(int64_t count, const float* base, const float* exponent, float* out) {
  return elementary(cpu::Elementary::pow, count, base, exponent, out);
}

int32_t probe_contract(int32_t rule, int32_t a_transposed, int32_t b_transposed, int64_t m, int64_t n, int64_t k,
                       const float* a, const float* b, float* out) {
  return api::guard([&] {
    Probe probe(1, k, 1, 1, 1, 2, 1, 1);  // k tokens: room for contractions over k
    functions().contract(*probe, rule == PROBE_RULE_CHAIN ? Contraction::chain : Contraction::leaf_tree,
                         a_transposed != 0, b_transposed != 0, m, n, k, a, b, out);
  });
}

int32_t probe_norm_forward(int64_t rows, int64_t width, const float* x, const float* w, float* y, float* rstd) {
  return api::guard([&] {
    Probe probe(1, rows, width, 1, 1, 2, 1, 1);
    functions().norm_forward(*probe, tensor(x, rows, width), tensor(w, width), tensor(rstd, rows),
                             tensor(y, rows, width));
  });
}

int32_t probe_norm_backward(int64_t rows, int64_t width, const float* x, const float* rstd, const float* w,
                            const float* dy, const float* d_residual, float* dx, float* dw) {
  return api::guard([&] {
    Probe probe(1, rows, width, 1, 1, 2, 1, 1);
    functions().norm_backward(*probe, tensor(dy, rows, width), tensor(x, rows, width), tensor(w, width),
                              tensor(rstd, rows), tensor(d_residual, rows, width), tensor(dw, width),
                              tensor(dx, rows, width));
  });
}

int32_t probe_rotary(int32_t backward, int64_t batch, int64_t length, int64_t heads, int64_t head_dim, const float* x,
                     float* out) {
  return api::guard([&] {
    const Heads shape = {heads, heads, head_dim};
    Probe probe(batch, length, heads * head_dim, heads, heads, head_dim, 1, 1);
    std::vector<float> cos_data, sin_data;
    const Tensor cos = tensor(cos_data, length, head_dim / 2), sin = tensor(sin_data, length, head_dim / 2);
    probe->rotary_table(shape, cos, sin);
    std::copy(x, x + batch * length * heads * head_dim, out);
    functions().rotate(*probe, {nullptr, length, batch, length, nullptr}, shape,
                       tensor(out, batch * length, heads * head_dim), cos, sin, backward != 0);
  });
}

namespace {

// Attention's forward pass with what it leaves for the backward pass.
struct Attention {
  Attention(int64_t batch, int64_t length, int64_t n_heads, int64_t n_kv, int64_t head_dim, const float* q_data,
            const float* k_data, const float* v_data, float* context_data)
      : heads{n_heads, n_kv, head_dim},
        tokens{nullptr, length, batch, length, nullptr},
        M(batch * length),
        D(n_heads * head_dim),
        KD(n_kv * head_dim),
        probe(batch, length, D, n_heads, n_kv, head_dim, 1, 1),
        q(tensor(q_data, M, D)),
        k(tensor(k_data, M, KD)),
        v(tensor(v_data, M, KD)),
        max(tensor(max_data, M, n_heads)),
        den(tensor(den_data, M, n_heads)) {
    probe->attention(tokens, heads, q, k, v, max, den, tensor(context_data, M, D));
    probe.finish();
  }

  Heads heads;
  Tokens tokens;
  int64_t M, D, KD;
  Probe probe;
  std::vector<float> max_data, den_data, zz_data;
  Tensor q, k, v, max, den;
};

}  // namespace

int32_t probe_attention_forward(int64_t batch, int64_t length, int64_t n_heads, int64_t n_kv, int64_t head_dim,
                                const float* q, const float* k, const float* v, float* ctx) {
  return api::guard([&] { Attention(batch, length, n_heads, n_kv, head_dim, q, k, v, ctx); });
}

int32_t probe_attention_backward(int64_t batch, int64_t length, int64_t n_heads, int64_t n_kv, int64_t head_dim,
                                 const float* q, const float* k, const float* v, const float* dctx, float* dq,
                                 float* dk, float* dv) {
  return api::guard([&] {
    std::vector<float> context(size_t(batch * length * n_heads * head_dim));
    Attention a(batch, length, n_heads, n_kv, head_dim, q, k, v, context.data());
    a.probe->attention_backward(a.tokens, a.heads, a.q, a.k, a.v, a.max, a.den, tensor(dctx, a.M, a.D),
                                tensor(a.zz_data, a.M, n_heads), tensor(dq, a.M, a.D), tensor(dk, a.M, a.KD),
                                tensor(dv, a.M, a.KD));
    a.probe.finish();
  });
}

int32_t probe_swiglu_forward(int64_t count, const float* gate, const float* up, float* gated) {
  return api::guard([&] {
    Probe probe(1, 1, 2, 1, 1, 2, 1, 1);
    functions().silu_product(*probe, tensor(gate, count), tensor(up, count), tensor(gated, count));
  });
}

int32_t probe_swiglu_backward(int64_t count, const float* gate, const float* up, const float* dgated, float* dgate,
                              float* dup) {
  return api::guard([&] {
    Probe probe(1, 1, 2, 1, 1, 2, 1, 1);
    functions().silu_product_backward(*probe, tensor(dgated, count), tensor(gate, count), tensor(up, count),
                                      tensor(dgate, count), tensor(dup, count));
  });
}

int32_t probe_head_loss(int32_t chunked, int64_t rows, int64_t width, int64_t vocab, const float* hidden,
                        const float* head, const int32_t* targets, float* loss, float* dhidden, float* dhead) {
  return api::guard([&] {
    Probe probe(1, rows, width, 1, 1, 2, 1, vocab, chunked != 0);
    std::vector<int32_t> ids(size_t(rows) + 1);
    std::copy(targets, targets + rows, ids.begin() + 1);
    const Contraction rule = chunked ? Contraction::chain : Contraction::leaf_tree;
    probe->head_loss_backward({ids.data(), rows + 1, 1, rows, nullptr}, tensor(hidden, rows, width),
                              tensor(head, vocab, width), rule, tensor(dhidden, rows, width),
                              tensor(dhead, vocab, width));
    const Outcome outcome = probe->finish();
    if (outcome.faults != 0) throw Error(MJL_ERROR_NON_FINITE, "non-finite");
    *loss = outcome.loss;
  });
}

int32_t probe_embed_backward(int64_t rows, int64_t width, int64_t vocab, const int32_t* ids, const float* dx,
                             float* dembed) {
  return api::guard([&] {
    Probe probe(1, rows, width, 1, 1, 2, 1, vocab);
    probe->embed_backward({ids, rows, 1, rows, nullptr}, tensor(dx, rows, width), tensor(dembed, vocab, width));
  });
}

int32_t probe_adamw(int64_t count, int64_t step, float lr, float beta1, float beta2, float eps, float weight_decay,
                    const float* g, float* p, float* m, float* v) {
  return api::guard([&] {
    Probe probe(1, 1, 2, 1, 1, 2, 1, 1);
    const UpdateScalars scalars = scalars_of({lr, beta1, beta2, eps, weight_decay}, uint64_t(step));
    std::vector<float> next_p, next_m, next_v;
    probe->update(&scalars, tensor(g, count), tensor(p, count), tensor(m, count), tensor(v, count),
                  tensor(next_p, count), tensor(next_m, count), tensor(next_v, count));
    probe.finish();
    std::copy(next_p.begin(), next_p.end(), p);
    std::copy(next_m.begin(), next_m.end(), m);
    std::copy(next_v.begin(), next_v.end(), v);
  });
}

// For benchmarks/stages.py: seconds of `steps` training steps, stage by stage, as lines "name seconds". dims: the nine
// dimensions of mjl_shape in their order.
extern "C" PROBE_API int32_t probe_stage_seconds(const int32_t* dims, const float* parameters, const int32_t* ids,
                                                 int32_t steps, char* out, uint64_t out_bytes) {
  return api::guard([&] {
    Model model;
    model.shape = {dims[0], dims[1], dims[2], dims[3], dims[4], dims[5], dims[6], dims[7], dims[8], false};
    std::string problem;
    const int threads = selected.threads ? selected.threads : cpu::default_threads(&problem);
    const std::unique_ptr<Backend> backend = cpu::open(selected.unit, threads, nullptr, nullptr, &problem);
    if (!backend) throw Error(MJL_ERROR_MEMORY, problem);
    std::vector<float> memory(plan(model, nullptr) / sizeof(float) + 16),
        scratch(backend->scratch_bytes(model.shape) / sizeof(float) + 16);
    plan(model, memory.data());
    backend->bind_scratch(scratch.data(), model.shape);
    model.tokens = {model.ids, model.shape.L + 1, model.shape.B, model.shape.L, nullptr};
    std::copy(parameters, parameters + model.shape.parameter_count(), model.now().weights.flat.data);
    std::copy(ids, ids + model.shape.B * (model.shape.L + 1), model.ids);
    *model.scalars = scalars_of({1e-3f, 0.9f, 0.999f, 1e-8f, 0.01f}, 1);
    Stopwatch watch(*backend);
    watch.rotary_table(model.shape.heads(), model.cos, model.sin);
    train_step(*backend, model);
    for (int32_t i = 0; i < steps; ++i) train_step(watch, model);
    std::string text;
    for (const auto& [name, seconds] : watch.seconds()) text += name + " " + std::to_string(seconds) + "\n";
    if (text.size() >= out_bytes) throw Error(MJL_ERROR_ARGUMENT, "out is too small");
    std::copy(text.c_str(), text.c_str() + text.size() + 1, out);
  });
}
