// SPDX-License-Identifier: Apache-2.0
#include "gpu/backend.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "error.h"
#include "model/model.h"

namespace mjl::gpu {
namespace {

constexpr uint64_t kStagingBytes = 1 << 20, kStagedAtMost = 1 << 18;  // larger uploads go straight from the caller
constexpr int kStreamNonBlocking = 1, kCaptureRelaxed = 2;            // the same numbers for all vendors
constexpr int64_t kLogitsFloats = 32 << 20;                           // of a panel of the chunked head
constexpr int64_t kPanelsFloats = 64 << 20;                           // of attention's panels

}  // namespace

GpuBackend::GpuBackend(std::shared_ptr<Context> context, mjl_poll_fn poll, void* poll_context)
    : context_(std::move(context)), driver_(context_->driver), poll_(poll), poll_context_(poll_context) {
  const Context::Current current(*context_);
  int result = driver_.stream_create(&stream_, kStreamNonBlocking);
  if (!result) result = driver_.memory_allocate(reinterpret_cast<void**>(&result_), sizeof(Result));
  if (!result) result = driver_.host_allocate(reinterpret_cast<void**>(&staging_), kStagingBytes, 0);
  if (!result) result = driver_.set_words(result_, 0, sizeof(Result) / 4, stream_);
  if (result) {
    if (staging_) driver_.host_free(staging_);
    if (result_) driver_.memory_free(result_);
    if (stream_) driver_.stream_destroy(stream_);
    throw Error(MJL_ERROR_DEVICE, error_text(driver_, "opening a session", result));
  }
}

GpuBackend::~GpuBackend() {
  if (abandoned_) return;
  try {
    const Context::Current current(*context_);
    driver_.stream_synchronize(stream_);
    for (const Handle graph : recorded_)
      if (graph) driver_.graph_executable_destroy(graph);
    driver_.host_free(staging_);
    driver_.memory_free(result_);
    driver_.stream_destroy(stream_);
  } catch (const Error&) {  // the context is gone, and all of this with it
  }
}

// An error of the stream that stays is one from which the device does not recover.
void GpuBackend::fail(const char* what, int result) {
  const int now = driver_.stream_query(stream_);
  const std::string text = error_text(driver_, what, result);
  if (now == 0 || now == driver_.not_ready) throw Error(MJL_ERROR_DEVICE, text);
  lost_ = text;
  context_->poison();
  throw Error(MJL_ERROR_LOST, lost_);
}

void GpuBackend::check(const char* what, int result) {
  if (result != 0) fail(what, result);
}

void GpuBackend::require_live() const {
  if (!lost_.empty()) throw Error(MJL_ERROR_LOST, lost_);
}

void* GpuBackend::allocate(uint64_t bytes) {
  require_live();
  const Context::Current current(*context_);
  void* memory = nullptr;
  const int result = driver_.memory_allocate(&memory, bytes);
  if (result == driver_.out_of_memory) return nullptr;
  check("allocating memory", result);
  return memory;
}

void GpuBackend::release(void* memory) {
  if (abandoned_ || memory == nullptr) return;
  try {
    const Context::Current current(*context_);
    driver_.stream_synchronize(stream_);
    driver_.memory_free(memory);
  } catch (const Error&) {
  }
}

void GpuBackend::upload(void* device, const void* host, uint64_t bytes) {
  require_live();
  const Context::Current current(*context_);
  if (bytes > kStagedAtMost) {
    check("copying to it", driver_.copy_to_device(device, host, bytes, stream_));
    check("copying to it", driver_.stream_synchronize(stream_));
    return;
  }
  if (sizeof(Result) + staged_ + bytes > kStagingBytes) {
    check("copying to it", driver_.stream_synchronize(stream_));
    staged_ = 0;
  }
  char* const staged = staging_ + sizeof(Result) + staged_;
  staged_ += (bytes + 63) / 64 * 64;
  std::memcpy(staged, host, bytes);
  check("copying to it", driver_.copy_to_device(device, staged, bytes, stream_));
}

void GpuBackend::download(void* host, const void* device, uint64_t bytes) {
  require_live();
  const Context::Current current(*context_);
  check("copying from it", driver_.copy_to_host(host, device, bytes, stream_));
  check("copying from it", driver_.stream_synchronize(stream_));
}

Outcome GpuBackend::finish() {
  using Clock = std::chrono::steady_clock;
  require_live();
  const Context::Current current(*context_);
  check("fetching the result", driver_.copy_to_host(staging_, result_, sizeof(Result), stream_));
  check("clearing the result", driver_.set_words(result_, 0, sizeof(Result) / 4, stream_));
  uint32_t cancelled = 0;
  const auto started = Clock::now();
  auto asked = started;
  for (;;) {
    const int result = driver_.stream_query(stream_);
    if (result == 0) break;
    if (result != driver_.not_ready) check("running", result);
    const auto now = Clock::now();
    if (now - started > std::chrono::milliseconds(2)) std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (poll_ == nullptr || now - asked < std::chrono::milliseconds(20)) continue;
    asked = now;
    if (poll_(poll_context_) != 0) cancelled = kFaultCancelled;  // what runs ends by itself, and is not used
  }
  staged_ = 0;
  Result fetched;
  std::memcpy(&fetched, staging_, sizeof fetched);
  return {fetched.loss, fetched.faults | cancelled};
}

DeviceFacts GpuBackend::facts() const {
  DeviceFacts facts;
  facts.vendor = driver_.vendor;
  facts.device = context_->index;
  facts.memory_bytes = context_->info.memory_bytes;
  facts.attention_scratch_bytes = uint64_t(scratch_.panels_floats) * sizeof(float);
  std::snprintf(facts.name, sizeof facts.name, "%s", context_->info.name);
  std::snprintf(facts.unit, sizeof facts.unit, "%s%d", driver_.architecture_prefix, context_->info.architecture);
  return facts;
}

uint64_t GpuBackend::lay_out(Scratch& scratch, char* memory, const Shape& s, int multiprocessors) {
  uint64_t used = 0;
  const auto take = [&](auto*& piece, int64_t count) {
    piece = memory ? reinterpret_cast<std::remove_reference_t<decltype(piece)>>(memory + used) : nullptr;
    used += (uint64_t(count) * 4 + 255) / 256 * 256;
  };
  const int64_t M = s.M(), D = s.D, F = s.F, V = s.V, KD = s.KD();
  scratch.head_rows = s.chunked_head ? smaller(M, larger(kLossBlock, kLogitsFloats / V)) : M;

  // Every matrix product of a step.
  const Contraction tree = Contraction::leaf_tree, rule = s.head_rule();
  const int64_t R = scratch.head_rows;
  const struct {
    int64_t m, n, k;
    Contraction rule;
  } products[] = {{M, D, D, tree}, {M, KD, D, tree}, {M, F, D, tree}, {M, D, F, tree},
                  {M, V, D, tree}, {M, D, KD, tree}, {D, D, M, tree}, {KD, D, M, tree},
                  {F, D, M, tree}, {D, F, M, tree},  {R, D, V, rule}, {V, D, R, rule}};
  scratch.gemm = {};
  for (const auto& p : products) {
    const GemmSpace need = gemm_space(p.m, p.n, p.k, p.rule, multiprocessors);
    scratch.gemm.stack_floats = larger(scratch.gemm.stack_floats, need.stack_floats);
    scratch.gemm.node_floats = larger(scratch.gemm.node_floats, need.node_floats);
    scratch.gemm.flag_count = larger(scratch.gemm.flag_count, need.flag_count);
  }
  take(scratch.gemm.stack, scratch.gemm.stack_floats);
  take(scratch.gemm.nodes, scratch.gemm.node_floats);
  take(scratch.gemm.flags, scratch.gemm.flag_count);

  // Attention's panels. The backward pass takes as many tiles of queries at a time as there is room for: at least one
  // tile of one head of each group; kPanelsFloats for all of them is plenty.
  const int64_t tiles = ceil_div(s.L, kAttentionTile), all = 2 * tiles * s.B * s.H;
  const int64_t panel = tiles * kAttentionTile * kAttentionTile;
  const int64_t forward = smaller(tiles * s.B * s.H, kForwardCtas * multiprocessors);
  const int64_t least = larger(forward, 2 * s.B * s.KV), room = larger(scratch.head_rows * V, kPanelsFloats);
  scratch.panels_floats = panel * larger(least, smaller(all, room / panel));
  take(scratch.panels, larger(scratch.panels_floats, scratch.head_rows * V));
  scratch.logits = scratch.panels;
  take(scratch.extents, M * 2 * (s.H + s.KV) * int64_t(sizeof(Extent) / 4));
  take(scratch.norm_leaves, ceil_div(M, leaf_length(M)) * D);
  take(scratch.row_loss, M);
  take(scratch.loss_leaves, ceil_div(M, smaller(leaf_length(M), kLossBlock)));
  return used;
}

uint64_t GpuBackend::scratch_bytes(const Shape& shape) const {
  Scratch scratch = {};
  return lay_out(scratch, nullptr, shape, context_->info.multiprocessors);
}

void GpuBackend::bind_scratch(void* memory, const Shape& shape) {
  require_live();
  const Context::Current current(*context_);
  lay_out(scratch_, static_cast<char*>(memory), shape, context_->info.multiprocessors);
  if (scratch_.gemm.flag_count)
    check("clearing memory", driver_.set_words(scratch_.gemm.flags, 0, size_t(scratch_.gemm.flag_count), stream_));
}

void GpuBackend::train_step(const Model& model) {
  require_live();
  const Context::Current current(*context_);
  Handle& recorded = recorded_[model.current];
  if (recorded == nullptr) {
    Handle graph = nullptr;
    check("recording a step", driver_.capture_begin(stream_, kCaptureRelaxed));
    try {
      Backend::train_step(model);
    } catch (...) {
      driver_.capture_end(stream_, &graph);
      if (graph) driver_.graph_destroy(graph);
      throw;
    }
    check("recording a step", driver_.capture_end(stream_, &graph));
    const int result = driver_.graph_instantiate(&recorded, graph, 0);
    driver_.graph_destroy(graph);
    check("preparing a step", result);
  }
  check("starting a step", driver_.graph_launch(recorded, stream_));
}

std::unique_ptr<Backend> open(const Driver& driver, int device, mjl_poll_fn poll, void* poll_context) {
  return std::make_unique<GpuBackend>(Context::of(driver, device), poll, poll_context);
}

}  // namespace mjl::gpu
