// SPDX-License-Identifier: Apache-2.0
//
// What a backend must do: the fused stages of a step, each one's arithmetic stated once, in words, above it.
// docs/numerics.md gives the same rules at length; where a comment below says "contraction", it means the rule of that
// page:
//
//   leaf_tree   k is cut into leaves (128 long while at most 1024 of them are needed, else ceil(k / 1024)); a leaf is
//               the chain acc = fma(a, b, acc) over ascending k from +0; the leaf sums are combined by a balanced tree
//               of adjacent pairs.
//   chain       one leaf, however long: acc = fma(a, b, acc) over all ascending k.
//
// Every value that is loaded or stored passes through z, which turns a subnormal into a zero of the same sign, and z
// follows every single operation. No result may depend on how many threads or blocks computed it.
//
// Stages are enqueued: they return nothing, may run later, and run in the order of the calls. What a step must tell the
// host (its loss, and the faults met on the way) gathers on the device until finish() fetches it. Everything that
// changes from step to step (ids, update scalars, which of two state buffers is current) is read through pointers, so a
// recorded step can be replayed. A backend that can do better than stage by stage overrides train_step().
#ifndef MJL_OPS_H
#define MJL_OPS_H

#include <cstdint>

namespace mjl {

enum class Contraction { leaf_tree, chain };

// A row-major matrix [rows, cols] in the backend's memory; a vector is [rows, 1].
struct Tensor {
  float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  // Where the producing stage may leave the smallest exponent of a non-zero element, for consumers that certify with it
  // that plain flushed arithmetic is exact; null when nobody tracks it.
  int32_t* min_exponent = nullptr;

  constexpr int64_t size() const { return rows * cols; }
};

// The sequences of one call: `batch` rows of `length` positions. Position t of row b is row b * length + t of every
// activation.
struct Tokens {
  const int32_t* ids = nullptr;  // id of position t of row b at ids[b * stride + t]; targets (training) one further on
  int64_t stride = 0;
  int64_t batch = 0;
  int64_t length = 0;
  const int32_t* lengths = nullptr;  // row b is real at t < lengths[b], padding after; null: all real

  constexpr int64_t count() const { return batch * length; }
};

struct Heads {
  int64_t n_heads = 0;   // H
  int64_t n_kv = 0;      // KV; query head h reads key/value head h / (H / KV)
  int64_t head_dim = 0;  // HD
};

// AdamW's scalars of one step, all rounded to float32 on the host (optim/adamw.h).
struct UpdateScalars {
  float beta1, beta2, c1, c2;  // c = 1 - beta
  float step;                  // lr / (1 - beta1^t)
  float root_bias2;            // sqrt(1 - beta2^t)
  float decay;                 // 1 - lr * weight_decay
  float eps;
  int32_t has_decay;  // weight_decay != 0
};

enum Fault : uint32_t {
  kFaultScores = 1,         // a NaN or infinity in an unmasked attention score
  kFaultLogits = 2,         // ... in the logits
  kFaultLoss = 4,           // ... in the loss
  kFaultGradient = 8,       // ... in the gradient
  kFaultParameters = 16,    // ... in the updated parameters
  kFaultFirstMoment = 32,   // ... in the updated m
  kFaultSecondMoment = 64,  // ... in the updated v, or a negative v
  kFaultCancelled = 128     // the caller asked to stop
};

struct Outcome {
  float loss = 0.0f;
  uint32_t faults = 0;
};

struct DeviceFacts {
  int32_t vendor = 0, device = 0, threads = 0;
  uint64_t memory_bytes = 0;             // of the device, in all
  uint64_t attention_scratch_bytes = 0;  // for tiles of scores, once scratch is bound
  char name[96] = {};
  char unit[32] = {};
};

struct Shape;  // model/shape.h
struct Model;  // model/model.h: weights, gradients and activations of one session

class Backend {
 public:
  virtual ~Backend();

  // ---- Memory and time ----
  virtual void* allocate(uint64_t bytes) = 0;  // null when it cannot be had
  virtual void release(void* memory) = 0;
  virtual void upload(void* device, const void* host, uint64_t bytes) = 0;
  virtual void download(void* host, const void* device, uint64_t bytes) = 0;
  virtual Outcome finish() = 0;  // waits for everything enqueued; fetches and clears loss and faults
  virtual DeviceFacts facts() const = 0;
  // In a forked child: what ran beside the calling thread is gone. Only release() may follow.
  virtual void abandon() = 0;
  // Bytes of scratch that the stages below need for models of this shape, and the memory where they may have them.
  virtual uint64_t scratch_bytes(const Shape& shape) const = 0;
  virtual void bind_scratch(void* scratch, const Shape& shape) = 0;

  // ---- Once per session ----
  // cos, sin [length, HD/2]: inv_freq_i = div(1, pow(10000, div(2i, HD))); the angle is mul(t, inv_freq_i).
  virtual void rotary_table(Heads heads, Tensor cos, Tensor sin) = 0;

  // ---- Forward ----
  // x[t] = table[id of t]; zeros at padding.
  virtual void embed(Tokens tokens, Tensor table, Tensor x) = 0;

  // Each row: ss = chain of fma(x, x, acc); rstd = rsqrt(add(div(ss, D), 1e-6)); y = mul(w, mul(x, rstd)).
  // q, k, v = y times the transposed weights, contraction over D. Then q and k are rotated in pairs (j, j + HD/2):
  // out_j = add(x_j * cos, r_j * sin), r = -x_{j+HD/2} in the low half and x_{j-HD/2} in the high half: two rounded
  // products and one rounded sum, never fused.
  virtual void norm_qkv_rotary(Tokens tokens, Heads heads, Tensor x, Tensor norm_w, Tensor w_q, Tensor w_k, Tensor w_v,
                               Tensor cos, Tensor sin, Tensor rstd, Tensor y, Tensor q, Tensor k, Tensor v) = 0;

  // Per query l and head, over ALL keys j of the row: s_j = add(mul(contraction over HD of q, k; rsqrt(HD)), mask),
  // mask +0 for j <= l and -FLT_MAX beyond; m = max s; e_j = exp(add(s_j, -m)); den = serial add over ascending j; p_j
  // = div(e_j, den); context_d = chain of fma(p_j, v_jd, acc) over ascending j. Masked keys have p = +0 and still
  // belong to the chain: they turn an accumulator of -0 into +0 when +0 * v is +0. Leaves m and den [M, H] for the
  // backward pass. Padding positions get a context of +0.
  virtual void attention(Tokens tokens, Heads heads, Tensor q, Tensor k, Tensor v, Tensor score_max, Tensor denominator,
                         Tensor context) = 0;

  // out = add(residual, contraction over the columns of x, with the transposed weight).
  virtual void project_residual(Tensor x, Tensor w, Tensor residual, Tensor out) = 0;

  // The norm as above; gate and up = y times the transposed weights; gated = mul(silu(gate), up), silu(g) = div(g,
  // add(exp(-g), 1)).
  virtual void norm_gate_up(Tensor x, Tensor norm_w, Tensor w_gate, Tensor w_up, Tensor rstd, Tensor y, Tensor gate,
                            Tensor up, Tensor gated) = 0;

  // logits = x times the transposed head, contraction over D.
  virtual void logits(Tensor x, Tensor lm_head, Tensor logits) = 0;

  // Mean cross-entropy over all M positions. Per row, over the V logits: m = max; e = exp(add(x, -m)); den =
  // contraction of e with ones over V; row loss = -add(add(x_target, -m), -log(den)); loss = div(contraction of the row
  // losses with ones over M, M). rule chain: den is one ascending chain over V, and the row losses are summed in blocks
  // of 256 rows (ascending from +0), the block sums by the adjacent tree. Logits keep the leaf tree in both.
  virtual void head_loss(Tokens tokens, Tensor x, Tensor lm_head, Contraction rule) = 0;

  // ---- Backward. d_NAME is the gradient of the loss by NAME ----
  // head_loss, and: dlogit = div(add(div(e, den), -[target]), M); dx = contraction over V of dlogit with the head;
  // d_lm_head = contraction over M of dlogit with x; both contractions by `rule`.
  virtual void head_loss_backward(Tokens tokens, Tensor x, Tensor lm_head, Contraction rule, Tensor d_x,
                                  Tensor d_lm_head) = 0;

  // For out = x times the transposed w: d_x = contraction over w's rows of d_out with w; d_w = contraction over tokens
  // of d_out with x.
  virtual void project_backward(Tensor d_out, Tensor x, Tensor w, Tensor d_x, Tensor d_w) = 0;

  // silu and product: d_silu = mul(d_gated, up); d_up = mul(d_gated, silu(gate)); sg = div(1, add(exp(-g), 1));
  // d_gate = mul(d_silu, mul(sg, add(1, mul(g, add(1, -sg))))). Then d_y = add(d_gate times w_gate, d_up times w_up),
  // the weights' gradients as in project_backward, and the norm: dh = mul(d_y, w); c = chain of fma(dh_j, x_j, acc); r3
  // = mul(mul(rstd, rstd), rstd); dv = div(mul(-0.5, mul(c, r3)), D); d_x = add(add(mul(dh, rstd), mul(dv, mul(2, x))),
  // d_residual); d_norm_w = contraction over tokens, with ones, of mul(d_y, mul(x, rstd)).
  virtual void gate_up_norm_backward(Tensor d_gated, Tensor gate, Tensor up, Tensor y, Tensor rstd, Tensor x,
                                     Tensor norm_w, Tensor w_gate, Tensor w_up, Tensor d_residual, Tensor d_gate,
                                     Tensor d_up, Tensor d_y, Tensor d_w_gate, Tensor d_w_up, Tensor d_norm_w,
                                     Tensor d_x) = 0;

  // dp_j = contraction over HD of d_context, v_j; zz = chain of fma(dp_j, p_j, acc) over all keys ascending;
  // ds_j = mul(mul(p_j, add(dp_j, -zz)), rsqrt(HD)); d_q = chain of fma(ds_j, k_j, acc) over all keys ascending; d_k
  // and d_v: one chain per key/value head and key: heads of its group ascending and within a head all queries
  // ascending, of fma(ds, q, acc) and fma(p, d_context, acc). Masked entries are +-0 and belong to the chains, as in
  // attention().
  virtual void attention_backward(Tokens tokens, Heads heads, Tensor q, Tensor k, Tensor v, Tensor score_max,
                                  Tensor denominator, Tensor d_context, Tensor zz, Tensor d_q, Tensor d_k,
                                  Tensor d_v) = 0;

  // d_q and d_k are rotated back in place (the sign of the paired half reversed); d_y = add(add(d_q w_q, d_k w_k), d_v
  // w_v); the norm and the weights' gradients as above.
  virtual void qkv_norm_backward(Tokens tokens, Heads heads, Tensor d_q, Tensor d_k, Tensor d_v, Tensor cos, Tensor sin,
                                 Tensor y, Tensor rstd, Tensor x, Tensor norm_w, Tensor w_q, Tensor w_k, Tensor w_v,
                                 Tensor d_residual, Tensor d_y, Tensor d_w_q, Tensor d_w_k, Tensor d_w_v,
                                 Tensor d_norm_w, Tensor d_x) = 0;

  // Row i of d_table: serial add, from +0, of d_x over the positions that hold id i, ascending.
  virtual void embed_backward(Tokens tokens, Tensor d_x, Tensor d_table) = 0;

  // ---- Update ----
  // Per element: p = mul(decay, p) if has_decay; m = fma(c1, g, mul(beta1, m)); v = fma(c2, mul(g, g), mul(beta2, v));
  // p = fma(-step, div(m, add(div(sqrt(v), root_bias2), eps)), p). Reads p, m, v, writes the next_ tensors, and reports
  // a non-finite gradient, parameter or moment and a negative v.
  virtual void update(const UpdateScalars* scalars, Tensor g, Tensor p, Tensor m, Tensor v, Tensor next_p,
                      Tensor next_m, Tensor next_v) = 0;

  // ---- The whole step as one entry ----
  // Forward, backward and update of `model`, up to but not including the swap that makes the update the state. By
  // default the stages above in the order of model/step.cpp; a backend that records a graph or runs one persistent
  // kernel does it here.
  virtual void train_step(const Model& model);
};

}  // namespace mjl

#endif
