// SPDX-License-Identifier: Apache-2.0
#include "reference.h"

#include <map>
#include <string>

#include "probe.h"
#include "reference_model.hpp"

namespace {

constexpr int32_t kOk = 0, kArgument = 100, kNonFinite = 220;

using namespace reference;

int32_t put(const Floats& from, float* to, bool ok = true) {
  std::copy(from.begin(), from.end(), to);
  return ok ? kOk : kNonFinite;
}

template <class Function>
int32_t map_values(int64_t count, float* out, Function function) {
  for (int64_t i = 0; i < count; ++i) out[i] = function(i);
  return kOk;
}

std::vector<int32_t> columns(const Model& s, const int32_t* ids, int64_t first) {
  std::vector<int32_t> out;
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t t = 0; t < s.length; ++t) out.push_back(ids[b * (s.length + 1) + first + t]);
  return out;
}

struct Elementary {
  float (*value)(float);
  double (*exact)(double);  // wrong by at most 2^-28 of a float's last place
  double smallest;          // errors of results smaller than this are measured as if they were of this size
};

const std::map<std::string, Elementary> kElementary = {
    {"exp", {reference::exp, std::exp, 0.0}},
    {"log", {reference::log, std::log, 0.0}},
    {"sin", {reference::sin, std::sin, 0.5}},
    {"cos", {reference::cos, std::cos, 0.5}},
    {"pow", {[](float x) { return reference::pow(10000.0f, x); }, [](double x) { return std::pow(10000.0, x); }, 0.0}},
};

}  // namespace

// ---- probe.h ----

const char* probe_units(void) { return "reference"; }

int32_t probe_select(const char*, int32_t) { return kOk; }

int32_t probe_exp(int64_t count, const float* x, float* out) {
  return map_values(count, out, [x](int64_t i) { return reference::exp(x[i]); });
}

int32_t probe_log(int64_t count, const float* x, float* out) {
  return map_values(count, out, [x](int64_t i) { return reference::log(x[i]); });
}

int32_t probe_sin(int64_t count, const float* x, float* out) {
  return map_values(count, out, [x](int64_t i) { return reference::sin(x[i]); });
}

int32_t probe_cos(int64_t count, const float* x, float* out) {
  return map_values(count, out, [x](int64_t i) { return reference::cos(x[i]); });
}

int32_t probe_pow(int64_t count, const float* base, const float* exponent, float* out) {
  return map_values(count, out, [=](int64_t i) { return reference::pow(base[i], exponent[i]); });
}

int32_t probe_contract(int32_t rule, int32_t a_transposed, int32_t b_transposed, int64_t m, int64_t n, int64_t k,
                       const float* a, const float* b, float* out) {
  return put(
      matmul(rule == PROBE_RULE_CHAIN ? Rule::chain : Rule::tree, a_transposed != 0, b_transposed != 0, m, n, k, a, b),
      out);
}

int32_t probe_norm_forward(int64_t rows, int64_t width, const float* x, const float* w, float* y, float* rstd) {
  const Norm out = norm_forward(rows, width, x, w);
  put(out.rstd, rstd);
  return put(out.y, y);
}

int32_t probe_norm_backward(int64_t rows, int64_t width, const float* x, const float* rstd, const float* w,
                            const float* dy, const float* d_residual, float* dx, float* dw) {
  const NormGradient out = norm_backward(rows, width, x, rstd, w, dy);
  put(out.dw, dw);
  return put(add_all(out.dx, Floats(d_residual, d_residual + rows * width)), dx);
}

int32_t probe_rotary(int32_t backward, int64_t batch, int64_t length, int64_t heads, int64_t head_dim, const float* x,
                     float* out) {
  return put(rotary(backward != 0, batch, length, heads, head_dim, x), out);
}

int32_t probe_attention_forward(int64_t batch, int64_t length, int64_t n_heads, int64_t n_kv, int64_t head_dim,
                                const float* q, const float* k, const float* v, float* ctx) {
  bool ok = true;
  const Floats out = attention_forward({batch, length, n_heads, n_kv, head_dim}, q, k, v, &ok);
  return put(out, ctx, ok);
}

int32_t probe_attention_backward(int64_t batch, int64_t length, int64_t n_heads, int64_t n_kv, int64_t head_dim,
                                 const float* q, const float* k, const float* v, const float* dctx, float* dq,
                                 float* dk, float* dv) {
  bool ok = true;
  const AttentionGradient out = attention_backward({batch, length, n_heads, n_kv, head_dim}, q, k, v, dctx, &ok);
  put(out.dq, dq);
  put(out.dk, dk);
  return put(out.dv, dv, ok);
}

int32_t probe_swiglu_forward(int64_t count, const float* gate, const float* up, float* gated) {
  return map_values(count, gated, [=](int64_t i) { return swiglu(gate[i], up[i]); });
}

int32_t probe_swiglu_backward(int64_t count, const float* gate, const float* up, const float* dgated, float* dgate,
                              float* dup) {
  for (int64_t i = 0; i < count; ++i) swiglu_backward(gate[i], up[i], dgated[i], &dgate[i], &dup[i]);
  return kOk;
}

int32_t probe_head_loss(int32_t chunked, int64_t rows, int64_t width, int64_t vocab, const float* hidden,
                        const float* head, const int32_t* targets, float* loss, float* dhidden, float* dhead) {
  bool ok = true;
  const HeadLoss out = head_loss(chunked != 0, rows, width, vocab, hidden, head, targets, true, &ok);
  *loss = out.loss;
  put(out.dhidden, dhidden);
  return put(out.dhead, dhead, ok);
}

int32_t probe_embed_backward(int64_t rows, int64_t width, int64_t vocab, const int32_t* ids, const float* dx,
                             float* dembed) {
  return put(embed_backward(rows, width, vocab, ids, dx), dembed);
}

int32_t probe_adamw(int64_t count, int64_t step, float lr, float beta1, float beta2, float eps, float weight_decay,
                    const float* g, float* p, float* m, float* v) {
  adamw({lr, beta1, beta2, eps, weight_decay}, step, count, g, p, m, v);
  return kOk;
}

// ---- reference.h ----

int32_t reference_set_variant(const char* name) {
  const char* names[] = {
      "right",     "hardware_flush", "no_flush",         "masked_dropped",     "fold_from_the_right", "leaf_256",
      "wide_sums", "rotary_fused",   "heads_descending", "queries_descending", "positions_descending"};
  for (int i = 0; i < int(sizeof names / sizeof *names); ++i)
    if (std::string(name) == names[i]) {
      variant = Variant(i);
      return kOk;
    }
  return kArgument;
}

int64_t reference_parameter_count(const reference_shape* shape) { return Model(*shape).parameter_count(); }

int32_t reference_step(const reference_shape* shape, const reference_adamw* a, int64_t step, const int32_t* ids,
                       float* parameters, float* m, float* v, float* loss, float* out_gradients) {
  const Model s(*shape);
  const int64_t count = s.parameter_count();
  Floats g, next_p(parameters, parameters + count), next_m(m, m + count), next_v(v, v + count);
  bool ok = gradients(s, parameters, columns(s, ids, 0).data(), columns(s, ids, 1).data(), loss, &g);
  adamw({a->lr, a->beta1, a->beta2, a->eps, a->weight_decay}, step, count, g.data(), next_p.data(), next_m.data(),
        next_v.data());
  ok = ok && all_finite(next_p) && all_finite(next_m) && all_finite(next_v);
  if (!ok) return kNonFinite;
  put(g, out_gradients);
  put(next_p, parameters);
  put(next_m, m);
  return put(next_v, v);
}

int32_t reference_evaluate(const reference_shape* shape, const float* parameters, const int32_t* ids, float* loss) {
  const Model s(*shape);
  bool ok = true;
  const Floats hidden = forward(s, parameters, columns(s, ids, 0).data(), nullptr, &ok);
  *loss = head_loss(s.chunked, s.rows(), s.width, s.vocab, hidden.data(), parameters + s.head(),
                    columns(s, ids, 1).data(), false, &ok)
              .loss;
  return ok ? kOk : kNonFinite;
}

int32_t reference_logits(const reference_shape* shape, const float* parameters, const int32_t* ids, int32_t rows,
                         int32_t length, const int32_t* lengths, float* out) {
  Model s(*shape);
  s.batch = 1;
  bool ok = true;
  for (int64_t row = 0; row < rows; ++row) {
    s.length = lengths == nullptr ? length : lengths[row];
    const Floats hidden = forward(s, parameters, ids + row * length, nullptr, &ok);
    const Floats logits = linear(s.length, s.width, s.vocab, hidden.data(), parameters + s.head());
    float* to = out + row * length * s.vocab;
    std::fill(to, to + length * s.vocab, 0.0f);
    put(logits, to);
    ok = ok && all_finite(logits);
  }
  return ok ? kOk : kNonFinite;
}

int32_t reference_elementary(const char* name, uint32_t first_bits, int64_t count, float* out) {
  const auto found = kElementary.find(name);
  if (found == kElementary.end()) return kArgument;
  return map_values(count, out, [&](int64_t i) { return found->second.value(float_of(first_bits + uint32_t(i))); });
}

int32_t reference_largest_error(const char* name, uint32_t first_bits, int64_t count, const float* values,
                                double* error, uint32_t* at_bits) {
  const auto found = kElementary.find(name);
  if (found == kElementary.end()) return kArgument;
  *error = 0.0;
  *at_bits = first_bits;
  for (int64_t i = 0; i < count; ++i) {
    const float x = float_of(first_bits + uint32_t(i));
    const double exact = found->second.exact(x);
    if (values[i] == 0.0f || !is_finite(values[i]) || exact == 0.0) continue;
    const double size = std::max(std::fabs(exact), found->second.smallest);
    const double ulps = std::ldexp(std::fabs(double(values[i]) - exact), 23 - std::ilogb(size));
    if (ulps > *error) {
      *error = ulps;
      *at_bits = first_bits + uint32_t(i);
    }
  }
  return kOk;
}
