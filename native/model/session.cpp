// SPDX-License-Identifier: Apache-2.0
#include "model/session.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "math/scalar.h"

namespace mjl {
namespace {

[[noreturn]] void refuse(mjl_status status, const std::string& what) { throw Error(status, what); }

std::string text(int64_t n) { return std::to_string(n); }

// Throws if a value is not acceptable in a state.
void check_values(const char* name, const float* values, uint64_t count, bool negative_allowed) {
  for (uint64_t i = 0; i < count; ++i) {
    if (!scalar::is_finite(values[i]))
      refuse(MJL_ERROR_ARGUMENT, std::string(name) + "[" + std::to_string(i) + "] is not finite");
    if (!negative_allowed && values[i] < 0)
      refuse(MJL_ERROR_ARGUMENT,
             std::string(name) + "[" + std::to_string(i) + "] is negative; a second moment is at least 0");
  }
}

void check_state(const Shape& shape, const HostState& state) {
  const uint64_t expected = uint64_t(shape.parameter_count());
  if (state.count != expected)
    refuse(MJL_ERROR_ARGUMENT, "state.count is " + std::to_string(state.count) + "; this shape has " +
                                   std::to_string(expected) + " parameters");
  if (state.completed_steps < 0) refuse(MJL_ERROR_ARGUMENT, "state.completed_steps is negative");
  if (state.parameters == nullptr) refuse(MJL_ERROR_ARGUMENT, "state.parameters is NULL");
  if ((state.m == nullptr || state.v == nullptr) &&
      !(state.m == nullptr && state.v == nullptr && state.completed_steps == 0))
    refuse(MJL_ERROR_ARGUMENT, "state.m and state.v may be NULL only together, and only when completed_steps is 0");
  check_values("parameters", state.parameters, state.count, true);
  if (state.m == nullptr) return;
  check_values("m", state.m, state.count, true);
  check_values("v", state.v, state.count, false);
}

std::string fault_text(uint32_t faults) {
  static const struct {
    Fault fault;
    const char* name;
  } kNames[] = {{kFaultScores, "the attention scores"},
                {kFaultLogits, "the logits"},
                {kFaultLoss, "the loss"},
                {kFaultGradient, "the gradient"},
                {kFaultParameters, "the updated parameters"},
                {kFaultFirstMoment, "the updated first moment"},
                {kFaultSecondMoment, "the updated second moment"}};
  for (const auto& entry : kNames)  // in the order of a step: the first is where it began
    if (faults & entry.fault) return entry.name;
  return "the results";
}

}  // namespace

Session::Session(std::unique_ptr<Backend> backend, const Shape& shape, const AdamW& adamw, const HostState& state)
    : backend_(std::move(backend)), adamw_(adamw), process_(getpid()) {
  if (const std::string problem = shape.problem(); !problem.empty()) refuse(MJL_ERROR_ARGUMENT, "shape: " + problem);
  if (const std::string problem = adamw.problem(); !problem.empty()) refuse(MJL_ERROR_ARGUMENT, "adamw: " + problem);
  check_state(shape, state);

  ids_.reserve(size_t(shape.B * (shape.L + 1)));
  model_.shape = shape;
  const uint64_t planned = plan(model_, nullptr);
  memory_bytes_ = planned + backend_->scratch_bytes(shape);
  const DeviceFacts facts = backend_->facts();
  const std::string needs = "this shape needs " + std::to_string(memory_bytes_) + " bytes on " + facts.name;
  if (memory_bytes_ > facts.memory_bytes)
    refuse(MJL_ERROR_MEMORY, needs + ", which has " + std::to_string(facts.memory_bytes) + " in all");
  memory_ = backend_->allocate(memory_bytes_);
  if (memory_ == nullptr) refuse(MJL_ERROR_MEMORY, needs + ", and they could not be allocated");
  try {
    plan(model_, memory_);
    backend_->bind_scratch(static_cast<char*>(memory_) + planned, shape);
    backend_->rotary_table(shape.heads(), model_.cos, model_.sin);
    finish("opening the session");
    upload_state(model_.current, state);
    completed_steps_ = state.completed_steps;
  } catch (...) {
    backend_->release(memory_);
    throw;
  }
  model_.tokens = {model_.ids, shape.L + 1, shape.B, shape.L, nullptr};
}

Session::~Session() {
  if (process_ != getpid()) backend_->abandon();
  backend_->release(memory_);
}

std::unique_lock<std::mutex> Session::enter() {
  if (process_ != getpid())
    refuse(MJL_ERROR_STATE,
           "this session was opened in another process; a session cannot be used after fork(): open a new one in the "
           "child");
  return std::unique_lock<std::mutex>(mutex_);
}

// Waits for the device. Cancelling is an error of every call, non-finite numbers are the caller's to judge.
Outcome Session::settle() {
  const Outcome outcome = backend_->finish();
  if (outcome.faults & kFaultCancelled) refuse(MJL_ERROR_CANCELLED, "the call was cancelled; nothing was changed");
  return outcome;
}

void Session::finish(const char* what) {
  const uint32_t faults = settle().faults;
  if (faults)
    refuse(MJL_ERROR_NON_FINITE,
           std::string(what) + ": a NaN or infinity in " + fault_text(faults) + "; nothing was changed");
}

// ids_, [rows, length].
void Session::check_ids(int64_t rows, int64_t length, const int32_t* lengths) const {
  const int64_t V = model_.shape.V;
  for (int64_t b = 0; b < rows; ++b)
    for (int64_t t = 0; t < (lengths ? lengths[b] : length); ++t)
      if (const int32_t id = ids_[size_t(b * length + t)]; id < 0 || id >= V)
        refuse(MJL_ERROR_ARGUMENT,
               "ids[" + text(b) + ", " + text(t) + "] is " + text(id) + "; ids must be from 0 to " + text(V - 1));
}

void Session::upload_batch(const int32_t* ids, uint64_t count) {
  const Shape& s = model_.shape;
  const uint64_t expected = uint64_t(s.B * (s.L + 1));
  if (ids == nullptr) refuse(MJL_ERROR_ARGUMENT, "ids is NULL");
  if (count != expected)
    refuse(MJL_ERROR_ARGUMENT,
           "ids has " + std::to_string(count) + " elements; batch * (length + 1) = " + std::to_string(expected));
  ids_.assign(ids, ids + count);
  check_ids(s.B, s.L + 1, nullptr);
  backend_->upload(model_.ids, ids_.data(), count * sizeof *ids);
}

mjl_step_result Session::step(const int32_t* ids, uint64_t count) {
  const auto lock = enter();
  upload_batch(ids, count);
  has_gradients_ = false;
  const UpdateScalars scalars = scalars_of(adamw_, uint64_t(completed_steps_) + 1);
  backend_->upload(model_.scalars, &scalars, sizeof scalars);
  backend_->train_step(model_);
  const Outcome outcome = settle();
  if (outcome.faults)
    refuse(MJL_ERROR_NON_FINITE, "step " + text(completed_steps_ + 1) + " was refused: a NaN or infinity in " +
                                     fault_text(outcome.faults) + "; parameters, moments and counters are unchanged");
  // The update becomes the state. Nothing from here on can fail.
  model_.current = 1 - model_.current;
  ++completed_steps_;
  has_gradients_ = true;
  return {uint32_t(sizeof(mjl_step_result)), outcome.loss, completed_steps_};
}

float Session::evaluate(const int32_t* ids, uint64_t count) {
  const auto lock = enter();
  upload_batch(ids, count);
  loss_only(*backend_, model_);
  const Outcome outcome = settle();
  if (outcome.faults) refuse(MJL_ERROR_NON_FINITE, "evaluation: a NaN or infinity in " + fault_text(outcome.faults));
  return outcome.loss;
}

// Takes a copy of the request into ids_ and lengths_ and checks it; returns the copied lengths, or null.
const int32_t* Session::take_request(const int32_t* ids, int64_t rows, int64_t length, const int32_t* lengths) {
  if (ids == nullptr) refuse(MJL_ERROR_ARGUMENT, "ids is NULL");
  if (rows < 1) refuse(MJL_ERROR_ARGUMENT, "rows is " + text(rows) + "; it must be at least 1");
  if (length < 1 || length > model_.shape.L)
    refuse(MJL_ERROR_ARGUMENT, "length is " + text(length) + "; it must be from 1 to " + text(model_.shape.L));
  ids_.assign(ids, ids + rows * length);
  lengths_.assign(lengths, lengths + (lengths ? rows : 0));
  for (size_t b = 0; b < lengths_.size(); ++b)
    if (lengths_[b] < 1 || lengths_[b] > length)
      refuse(MJL_ERROR_ARGUMENT,
             "lengths[" + std::to_string(b) + "] is " + text(lengths_[b]) + "; it must be from 1 to " + text(length));
  const int32_t* const taken = lengths ? lengths_.data() : nullptr;
  check_ids(rows, length, taken);
  return taken;
}

// Runs the forward pass over as many rows at a time as fit where a training batch has its ids, B * (L + 1) of them: the
// ids of the block and then its lengths. They are never more tokens than a training batch has. use(first row, rows).
template <class Use>
void Session::for_row_blocks(int64_t rows, int64_t length, const int32_t* lengths, Use&& use) {
  const int64_t block = std::min(rows, model_.shape.B * (model_.shape.L + 1) / (length + 1));
  for (int64_t first = 0; first < rows; first += block) {
    const int64_t count = std::min(block, rows - first);
    int32_t* const block_lengths = lengths ? model_.ids + count * length : nullptr;
    backend_->upload(model_.ids, ids_.data() + first * length, uint64_t(count * length) * sizeof(int32_t));
    if (lengths) backend_->upload(block_lengths, lengths + first, uint64_t(count) * sizeof *lengths);
    forward(*backend_, model_, {model_.ids, length, count, length, block_lengths});
    use(first, count);
  }
}

void Session::logits(const int32_t* ids, int64_t rows, int64_t length, const int32_t* lengths, float* out,
                     uint64_t count) {
  const auto lock = enter();
  const int64_t V = model_.shape.V, D = model_.shape.D;
  lengths = take_request(ids, rows, length, lengths);
  if (out == nullptr) refuse(MJL_ERROR_ARGUMENT, "out_logits is NULL");
  if (count != uint64_t(rows) * uint64_t(length) * uint64_t(V))
    refuse(MJL_ERROR_ARGUMENT, "out_count is " + std::to_string(count) + "; rows * length * vocab_size = " +
                                   std::to_string(uint64_t(rows) * uint64_t(length) * uint64_t(V)));
  // Between steps the state that the next update will write is free; it has room for several tokens' logits.
  const Tensor room = model_.next().weights.flat;
  const int64_t tokens_at_once = std::max<int64_t>(1, room.size() / V);
  for_row_blocks(rows, length, lengths, [&](int64_t first, int64_t block) {
    for (int64_t token = 0; token < block * length; token += tokens_at_once) {
      const int64_t tokens = std::min(tokens_at_once, block * length - token);
      backend_->logits({model_.x_out.data + token * D, tokens, D}, model_.now().weights.lm_head,
                       {room.data, tokens, V});
      finish("logits");
      backend_->download(out + (first * length + token) * V, room.data, uint64_t(tokens * V) * sizeof *out);
    }
  });
  for (int64_t b = 0; b < rows; ++b) {
    float* const row = out + b * length * V;
    const int64_t real = (lengths ? lengths[b] : length) * V;
    uint32_t bad = 0;
    for (int64_t i = 0; i < real; ++i) bad |= !scalar::is_finite(row[i]);
    if (bad) refuse(MJL_ERROR_NON_FINITE, "logits: a NaN or infinity in the logits of row " + text(b));
    std::fill(row + real, row + length * V, 0.0f);
  }
}

void Session::next_tokens(const int32_t* ids, int64_t rows, int64_t length, const int32_t* lengths, int32_t* out) {
  const auto lock = enter();
  const int64_t V = model_.shape.V, D = model_.shape.D;
  lengths = take_request(ids, rows, length, lengths);
  if (out == nullptr) refuse(MJL_ERROR_ARGUMENT, "out_tokens is NULL");
  const Tensor room = model_.next().weights.flat;
  tokens_.resize(size_t(rows));
  row_.resize(size_t(V));
  for_row_blocks(rows, length, lengths, [&](int64_t first, int64_t block) {
    for (int64_t b = 0; b < block; ++b) {
      const int64_t last = b * length + (lengths ? lengths[first + b] : length) - 1;
      backend_->logits({model_.x_out.data + last * D, 1, D}, model_.now().weights.lm_head, {room.data, 1, V});
      finish("next_tokens");
      backend_->download(row_.data(), room.data, uint64_t(V) * sizeof(float));
      for (const float logit : row_)
        if (!scalar::is_finite(logit))
          refuse(MJL_ERROR_NON_FINITE, "next_tokens: a NaN or infinity in the logits of row " + text(first + b));
      tokens_[size_t(first + b)] =
          int32_t(std::max_element(row_.begin(), row_.end()) - row_.begin());  // the first of equals
    }
  });
  std::copy(tokens_.begin(), tokens_.end(), out);
}

void Session::export_state(float* parameters, float* m, float* v, uint64_t count, int64_t* completed_steps) {
  const auto lock = enter();
  const State& state = model_.now();
  if (count != uint64_t(state.m.size()))
    refuse(MJL_ERROR_ARGUMENT,
           "count is " + std::to_string(count) + "; this session has " + text(state.m.size()) + " parameters");
  settle();
  if (parameters) backend_->download(parameters, state.weights.flat.data, count * sizeof(float));
  if (m) backend_->download(m, state.m.data, count * sizeof(float));
  if (v) backend_->download(v, state.v.data, count * sizeof(float));
  if (completed_steps) *completed_steps = completed_steps_;
}

void Session::export_gradients(float* out, uint64_t count) {
  const auto lock = enter();
  if (!has_gradients_)
    refuse(MJL_ERROR_STATE,
           "there is no gradient: no step has completed since the session was opened, loaded or rolled back");
  if (out == nullptr) refuse(MJL_ERROR_ARGUMENT, "out_gradients is NULL");
  if (count != uint64_t(model_.gradients.flat.size()))
    refuse(MJL_ERROR_ARGUMENT, "count is " + std::to_string(count) + "; this session has " +
                                   text(model_.gradients.flat.size()) + " parameters");
  backend_->download(out, model_.gradients.flat.data, count * sizeof(float));
}

void Session::upload_state(int which, const HostState& host) {
  static const float kZeros[4096] = {};
  const State& state = model_.state[which];
  const auto upload = [&](float* to, const float* from) {
    if (from) return backend_->upload(to, from, host.count * sizeof(float));
    for (uint64_t i = 0; i < host.count; i += std::size(kZeros))
      backend_->upload(to + i, kZeros, std::min<uint64_t>(std::size(kZeros), host.count - i) * sizeof(float));
  };
  upload(state.weights.flat.data, host.parameters);
  upload(state.m.data, host.m);
  upload(state.v.data, host.v);
}

void Session::load_state(const AdamW* adamw, const HostState& state) {
  const auto lock = enter();
  if (adamw)
    if (const std::string problem = adamw->problem(); !problem.empty()) refuse(MJL_ERROR_ARGUMENT, "adamw: " + problem);
  check_state(model_.shape, state);
  upload_state(1 - model_.current, state);
  model_.current = 1 - model_.current;
  if (adamw) adamw_ = *adamw;
  completed_steps_ = state.completed_steps;
  has_gradients_ = false;
}

mjl_session_info Session::describe() {
  const auto lock = enter();
  const DeviceFacts facts = backend_->facts();
  mjl_session_info info = {};
  info.struct_size = sizeof info;
  info.vendor = facts.vendor;
  info.device = facts.device;
  info.threads = facts.threads;
  info.memory_bytes = memory_bytes_;
  for (const LayerActivations& a : model_.layers)
    info.attention_bytes += uint64_t(a.score_max.size() + a.denominator.size()) * sizeof(float);
  info.scratch_bytes = facts.attention_scratch_bytes;
  std::memcpy(info.device_name, facts.name, sizeof info.device_name);
  std::memcpy(info.vector_unit, facts.unit, sizeof info.vector_unit);
  return info;
}

}  // namespace mjl
