// SPDX-License-Identifier: Apache-2.0
#include "cpu/unit/backend.h"

#include <new>

#include "cpu/cpu.h"
#include "cpu/host.h"
#include "model/shape.h"

namespace mjl::cpu::MJL_UNIT {

int64_t attention_thread_floats(int64_t length, int64_t head_dim);

namespace {

#define MJL_TEXT(name) #name
#define MJL_NAME(name) MJL_TEXT(name)

// Sizes of the pieces of scratch, in floats.
struct Pieces {
  int64_t shared, thread, logits, row_loss, bounded;
};

Pieces pieces_of(const Shape& s) {
  const auto max = [](int64_t a, int64_t b, int64_t c, int64_t d) { return larger(larger(a, b), larger(c, d)); };
  const int64_t M = s.M();
  Pieces p;
  p.shared = gemm_shared_floats(max(M, s.V, 2 * s.F, s.D + 2 * s.KD()));
  p.thread =
      max(gemm_thread_floats(max(M, s.V, s.F, s.D)), attention_thread_floats(s.L, s.HD), (2 * s.D + 1) * kLanes, 0);
  p.logits = s.V * (s.chunked_head ? smaller(M, kHeadPanel) : M);
  p.row_loss = M;
  p.bounded = M * s.H;
  for (int64_t* piece : {&p.shared, &p.thread, &p.logits, &p.row_loss, &p.bounded}) *piece = round_up(*piece, 16);
  return p;
}

}  // namespace

uint64_t CpuBackend::scratch_bytes(const Shape& shape) const {
  const Pieces p = pieces_of(shape);
  return sizeof(float) * uint64_t(p.shared + p.thread * pool_.threads() + p.logits + p.row_loss + p.bounded);
}

void CpuBackend::bind_scratch(void* scratch, const Shape& shape) {
  const Pieces p = pieces_of(shape);
  float* at = static_cast<float*>(scratch);
  const auto take = [&](int64_t floats) {
    float* const piece = at;
    at += floats;
    return piece;
  };
  shared_ = take(shared_floats_ = p.shared);
  thread_floats_ = p.thread;
  thread_ = take(p.thread * pool_.threads());
  attention_scratch_bytes_ = sizeof(float) * uint64_t(attention_thread_floats(shape.L, shape.HD) * pool_.threads());
  logits_ = take(p.logits);
  row_loss_ = take(p.row_loss);
  bounded_ = take(p.bounded);
}

CpuBackend::~CpuBackend() { delete &pool_; }

void* CpuBackend::allocate(uint64_t bytes) { return host().allocate(bytes); }
void CpuBackend::release(void* memory) { host().release(memory); }
void CpuBackend::upload(void* device, const void* from, uint64_t bytes) { __builtin_memcpy(device, from, bytes); }
void CpuBackend::download(void* to, const void* device, uint64_t bytes) { __builtin_memcpy(to, device, bytes); }

// Stages have run when their call returns.
Outcome CpuBackend::finish() {
  const Outcome outcome = {loss_, faults_ | (pool_.cancelled() ? uint32_t(kFaultCancelled) : 0u)};
  loss_ = 0.0f;
  faults_ = 0;
  pool_.clear_cancelled();
  return outcome;
}

DeviceFacts CpuBackend::facts() const {
  DeviceFacts facts;
  describe_processor(facts);
  facts.threads = pool_.threads();
  facts.attention_scratch_bytes = attention_scratch_bytes_;
  __builtin_strcpy(facts.unit, MJL_NAME(MJL_UNIT));
  return facts;
}

Backend* make_backend(Pool* pool) { return new (std::nothrow) CpuBackend(pool); }

}  // namespace mjl::cpu::MJL_UNIT
