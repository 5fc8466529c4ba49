// SPDX-License-Identifier: Apache-2.0
//
// The CPU backend for one vector unit. Its stages are spread over the .cpp files beside this one, an operation a file.
#ifndef MJL_CPU_UNIT_BACKEND_H
#define MJL_CPU_UNIT_BACKEND_H

#include "cpu/pool.h"
#include "cpu/unit/gemm.h"
#include "cpu/unit/simd.h"
#include "ops.h"

namespace mjl::cpu::MJL_UNIT {

// Rows of logits in one panel of the chunked head, and of one block of its loss sum.
inline constexpr int64_t kHeadPanel = 256;

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(Pool* pool) : pool_(*pool) {}  // takes the pool over
  ~CpuBackend() override;

  void* allocate(uint64_t bytes) override;
  void release(void* memory) override;
  void upload(void* device, const void* host, uint64_t bytes) override;
  void download(void* host, const void* device, uint64_t bytes) override;
  Outcome finish() override;
  DeviceFacts facts() const override;
  void abandon() override { pool_.abandon(); }
  uint64_t scratch_bytes(const Shape& shape) const override;
  void bind_scratch(void* scratch, const Shape& shape) override;

  void rotary_table(Heads, Tensor cos, Tensor sin) override;
  void embed(Tokens, Tensor table, Tensor x) override;
  void norm_qkv_rotary(Tokens, Heads, Tensor x, Tensor norm_w, Tensor w_q, Tensor w_k, Tensor w_v, Tensor cos,
                       Tensor sin, Tensor rstd, Tensor y, Tensor q, Tensor k, Tensor v) override;
  void attention(Tokens, Heads, Tensor q, Tensor k, Tensor v, Tensor score_max, Tensor denominator,
                 Tensor context) override;
  void project_residual(Tensor x, Tensor w, Tensor residual, Tensor out) override;
  void norm_gate_up(Tensor x, Tensor norm_w, Tensor w_gate, Tensor w_up, Tensor rstd, Tensor y, Tensor gate, Tensor up,
                    Tensor gated) override;
  void logits(Tensor x, Tensor lm_head, Tensor logits) override;
  void head_loss(Tokens, Tensor x, Tensor lm_head, Contraction) override;
  void head_loss_backward(Tokens, Tensor x, Tensor lm_head, Contraction, Tensor d_x, Tensor d_lm_head) override;
  void project_backward(Tensor d_out, Tensor x, Tensor w, Tensor d_x, Tensor d_w) override;
  void gate_up_norm_backward(Tensor d_gated, Tensor gate, Tensor up, Tensor y, Tensor rstd, Tensor x, Tensor norm_w,
                             Tensor w_gate, Tensor w_up, Tensor d_residual, Tensor d_gate, Tensor d_up, Tensor d_y,
                             Tensor d_w_gate, Tensor d_w_up, Tensor d_norm_w, Tensor d_x) override;
  void attention_backward(Tokens, Heads, Tensor q, Tensor k, Tensor v, Tensor score_max, Tensor denominator,
                          Tensor d_context, Tensor zz, Tensor d_q, Tensor d_k, Tensor d_v) override;
  void qkv_norm_backward(Tokens, Heads, Tensor d_q, Tensor d_k, Tensor d_v, Tensor cos, Tensor sin, Tensor y,
                         Tensor rstd, Tensor x, Tensor norm_w, Tensor w_q, Tensor w_k, Tensor w_v, Tensor d_residual,
                         Tensor d_y, Tensor d_w_q, Tensor d_w_k, Tensor d_w_v, Tensor d_norm_w, Tensor d_x) override;
  void embed_backward(Tokens, Tensor d_x, Tensor d_table) override;
  void update(const UpdateScalars*, Tensor g, Tensor p, Tensor m, Tensor v, Tensor next_p, Tensor next_m,
              Tensor next_v) override;

  // Parts of the stages.
  void norm_rows(Tensor x, Tensor w, Tensor rstd, Tensor y, Rows);
  void norm_backward_rows(Tensor d_y, Tensor x, Tensor w, Tensor rstd, Tensor d_residual, Tensor d_x, Rows);
  void norm_weight_gradient(Tensor d_y, Tensor x, Tensor rstd, Tensor d_w);
  void rotate_rows(Tokens, Heads, Tensor x, int64_t heads, Tensor cos, Tensor sin, bool backward, Rows);
  void silu_product_rows(Tensor gate, Tensor up, Tensor gated, Rows);
  void silu_product_backward_rows(Tensor d_gated, Tensor gate, Tensor up, Tensor d_gate, Tensor d_up, Rows);
  void multiply(const Product* products, int count, RowHook before = {}, RowHook after = {}) {
    MJL_UNIT::multiply({pool_, shared_, shared_floats_, thread_, thread_floats_}, products, count, before, after);
  }

 private:
  // body(task, thread) for every task, on all threads; `cycles`: what all tasks together cost, roughly.
  template <class Body>
  void parallel(int64_t tasks, int64_t cycles, Body&& body) {
    pool_.run(
        tasks, cycles, [](void* context, int64_t task, int thread) { (*static_cast<Body*>(context))(task, thread); },
        &body);
  }
  float* of_thread(int thread) const { return thread_ + thread * thread_floats_; }
  void fault(uint32_t faults) {
    if (faults != 0) __atomic_fetch_or(&faults_, faults, __ATOMIC_RELAXED);
  }

  void head_panel(Tokens, Tensor x, Tensor lm_head, Contraction, int64_t first, int64_t rows, bool gradient);
  void sum_losses(int64_t count, Contraction);
  void find_bounded(Tokens, Heads, Tensor q, Tensor k);

  Pool& pool_;
  float* shared_ = nullptr;  // packed operands of the product in progress
  int64_t shared_floats_ = 0;
  float* thread_ = nullptr;  // one piece a thread
  int64_t thread_floats_ = 0;
  float* logits_ = nullptr;    // [V, M], or [V, kHeadPanel] for the chunked head: a column a token
  float* row_loss_ = nullptr;  // [M]
  float* bounded_ = nullptr;   // [rows, H] attention.cpp
  uint64_t attention_scratch_bytes_ = 0;
  float loss_ = 0.0f;
  uint32_t faults_ = 0;
};

}  // namespace mjl::cpu::MJL_UNIT

#endif
