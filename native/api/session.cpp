// SPDX-License-Identifier: Apache-2.0
#include "model/session.h"

#include "api/devices.h"
#include "api/guard.h"

using namespace mjl;
using namespace mjl::api;

struct mjl_session : Session {
  using Session::Session;
};

namespace {

Shape shape_from(const mjl_shape* from) {
  const mjl_shape s = read_struct(from, "shape");
  if (s.chunked_lm_head_v2 != 0 && s.chunked_lm_head_v2 != 1)
    throw Error(MJL_ERROR_ARGUMENT,
                "shape.chunked_lm_head_v2 is " + std::to_string(s.chunked_lm_head_v2) + "; it must be 0 or 1");
  Shape shape;
  shape.B = s.batch;
  shape.L = s.length;
  shape.D = s.d_model;
  shape.H = s.n_heads;
  shape.KV = s.n_kv;
  shape.HD = s.head_dim;
  shape.F = s.intermediate;
  shape.layers = s.n_layers;
  shape.V = s.vocab_size;
  shape.chunked_head = s.chunked_lm_head_v2 != 0;
  if (const std::string problem = shape.problem(); !problem.empty())
    throw Error(MJL_ERROR_ARGUMENT, "shape: " + problem);
  return shape;
}

AdamW adamw_from(const mjl_adamw* from) {
  const mjl_adamw h = read_struct(from, "adamw");
  return {h.lr, h.beta1, h.beta2, h.eps, h.weight_decay};
}

HostState state_from(const mjl_state* from) {
  const mjl_state s = read_struct(from, "state");
  if (s.reserved != 0) throw Error(MJL_ERROR_ARGUMENT, "state.reserved must be 0");
  return {s.parameters, s.m, s.v, s.count, s.completed_steps};
}

}  // namespace

mjl_status mjl_session_open(const mjl_session_options* options, const mjl_shape* shape, const mjl_adamw* adamw,
                            const mjl_state* state, mjl_session** out_session) {
  return guard([&] {
    require(out_session, "out_session");
    const mjl_session_options o = options ? read_struct(options, "options") : mjl_session_options{};
    const Shape s = shape_from(shape);
    const AdamW h = adamw_from(adamw);
    const HostState start = state_from(state);
    *out_session = new mjl_session(open_backend(o), s, h, start);
  });
}

mjl_status mjl_session_step(mjl_session* session, const int32_t* ids, uint64_t ids_count, mjl_step_result* out_result) {
  return guard([&] {
    require(session, "session");
    check_out_struct(out_result, "out_result");
    write_struct(out_result, session->step(ids, ids_count));
  });
}

mjl_status mjl_session_evaluate(mjl_session* session, const int32_t* ids, uint64_t ids_count, float* out_loss) {
  return guard([&] {
    require(session, "session");
    require(out_loss, "out_loss");
    *out_loss = session->evaluate(ids, ids_count);
  });
}

mjl_status mjl_session_logits(mjl_session* session, const int32_t* ids, int32_t rows, int32_t length,
                              const int32_t* lengths, float* out_logits, uint64_t out_count) {
  return guard([&] {
    require(session, "session");
    session->logits(ids, rows, length, lengths, out_logits, out_count);
  });
}

mjl_status mjl_session_next_tokens(mjl_session* session, const int32_t* ids, int32_t rows, int32_t length,
                                   const int32_t* lengths, int32_t* out_tokens) {
  return guard([&] {
    require(session, "session");
    session->next_tokens(ids, rows, length, lengths, out_tokens);
  });
}

mjl_status mjl_session_export_state(mjl_session* session, float* out_parameters, float* out_m, float* out_v,
                                    uint64_t count, int64_t* out_completed_steps) {
  return guard([&] {
    require(session, "session");
    session->export_state(out_parameters, out_m, out_v, count, out_completed_steps);
  });
}

mjl_status mjl_session_export_gradients(mjl_session* session, float* out_gradients, uint64_t count) {
  return guard([&] {
    require(session, "session");
    session->export_gradients(out_gradients, count);
  });
}

mjl_status mjl_session_load_state(mjl_session* session, const mjl_adamw* adamw, const mjl_state* state) {
  return guard([&] {
    require(session, "session");
    AdamW h;
    if (adamw) h = adamw_from(adamw);
    session->load_state(adamw ? &h : nullptr, state_from(state));
  });
}

mjl_status mjl_session_describe(mjl_session* session, mjl_session_info* out_info) {
  return guard([&] {
    require(session, "session");
    check_out_struct(out_info, "out_info");
    write_struct(out_info, session->describe());
  });
}

void mjl_session_close(mjl_session* session) { delete session; }
