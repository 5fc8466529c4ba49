// SPDX-License-Identifier: Apache-2.0
//
// The backend for GPUs of any vendor: one stream, on which each stage enqueues its kernels. Stages are in stages.cpp,
// the planning of matrix products in gemm.cpp.
#ifndef MJL_GPU_BACKEND_H
#define MJL_GPU_BACKEND_H

#include <memory>

#include "gpu/context.h"
#include "gpu/gemm.h"
#include "kernels/arguments.h"
#include "mojolearn.h"
#include "ops.h"

namespace mjl::gpu {

// Errors of the device are thrown: Error with MJL_ERROR_DEVICE, or MJL_ERROR_LOST when it does not recover, in which
// case every later call throws the same.
class GpuBackend final : public Backend {
 public:
  GpuBackend(std::shared_ptr<Context> context, mjl_poll_fn poll, void* poll_context);
  ~GpuBackend() override;

  void* allocate(uint64_t bytes) override;
  void release(void* memory) override;
  void upload(void* device, const void* host, uint64_t bytes) override;
  void download(void* host, const void* device, uint64_t bytes) override;
  Outcome finish() override;
  DeviceFacts facts() const override;
  void abandon() override { abandoned_ = true; }
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
  // Records the stages as a graph, one for each of the two states that can be current, and replays it.
  void train_step(const Model& model) override;

 private:
  // Where the stages' scratch lies.
  struct Scratch {
    GemmSpace gemm;
    float* norm_leaves;  // [leaves, D]
    Extent* extents;     // [M, 2 H + 2 KV]: calls with short rows may have M of them
    float* panels;       // attention's, in the same memory as
    float* logits;       // [head_rows, V]
    int64_t panels_floats;
    int64_t head_rows;  // rows of logits at a time
    float* row_loss;    // [M]
    float* loss_leaves;
  };
  static uint64_t lay_out(Scratch& scratch, char* memory, const Shape& shape, int multiprocessors);

  void check(const char* what, int result);
  [[noreturn]] void fail(const char* what, int result);
  void require_live() const;
  template <class Arguments>
  void launch(Kernel kernel, int64_t blocks, int threads, const Arguments& arguments, int shared_bytes = 0,
              int64_t blocks_y = 1);
  // A thread for each of `count` elements.
  template <class Arguments>
  void launch_elements(Kernel kernel, int64_t count, const Arguments& arguments) {
    launch(kernel, ceil_div(count, 256), 256, arguments);
  }

  void multiply(const Product* products, int count);
  void multiply_large(const Product& product);
  void norm_forward(Tensor x, Tensor w, Tensor rstd, Tensor y);
  void norm_backward(Tensor d_y, Tensor x, Tensor w, Tensor rstd, Tensor d_residual, Tensor d_w, Tensor d_x);
  void rotate(Tokens, Heads, Tensor q, Tensor k, Tensor cos, Tensor sin, bool backward);
  void head_panel(Tokens, Tensor x, Tensor lm_head, Contraction, int64_t first, int64_t rows, bool gradient);
  void mean_loss(int64_t count, Contraction);
  void survey(const AttentionArguments& arguments, int64_t heads);
  AttentionArguments attention_arguments(Tokens, Heads, Tensor q, Tensor k, Tensor v, Tensor score_max,
                                         Tensor denominator);

  std::shared_ptr<Context> context_;
  const Driver& driver_;
  const mjl_poll_fn poll_;
  void* const poll_context_;
  Handle stream_ = nullptr;
  Result* result_ = nullptr;  // on the device
  char* staging_ = nullptr;   // in page-locked memory of the host: small uploads, and the fetched result
  uint64_t staged_ = 0;       // bytes in use
  Handle recorded_[2] = {};   // the step as a graph, by Model::current
  std::string lost_;          // why, once the device is lost
  bool abandoned_ = false;
  Scratch scratch_ = {};
};

std::unique_ptr<Backend> open(const Driver& driver, int device, mjl_poll_fn poll, void* poll_context);

}  // namespace mjl::gpu

#endif
