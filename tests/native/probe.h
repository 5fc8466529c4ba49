/* SPDX-License-Identifier: Apache-2.0
 *
 * Single operations of the product, for tests/test_operations.py and tests/test_elementary.py.
 *
 * The library behind this header links the product's own objects; it is built for tests only. Every array is row-major
 * and dense. M = batch * length rows, D = d_model, H = n_heads, KV = n_kv, HD = head_dim, V = vocab_size.
 * Functions that return int32_t return a status of mojolearn.h (MJL_OK = 0).
 */
#ifndef MOJOLEARN_PROBE_H
#define MOJOLEARN_PROBE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PROBE_API __attribute__((visibility("default")))

/* ---- Which code runs ---- */

/* Vector units that this machine can run, best first, comma-separated: "avx512,avx2,plain". */
PROBE_API const char* probe_units(void);

/* Chooses the vector unit (NULL: the best) and the number of threads (0: the default) for the calls that follow.
 * MJL_ERROR_UNSUPPORTED for a unit that is not there. */
PROBE_API int32_t probe_select(const char* unit, int32_t threads);

/* ---- Elementary functions, over `count` values ---- */

PROBE_API int32_t probe_exp(int64_t count, const float* x, float* out);
PROBE_API int32_t probe_log(int64_t count, const float* x, float* out);
PROBE_API int32_t probe_sin(int64_t count, const float* x, float* out);
PROBE_API int32_t probe_cos(int64_t count, const float* x, float* out);
PROBE_API int32_t probe_pow(int64_t count, const float* base, const float* exponent, float* out);

/* ---- Contraction: out[m,n] = sum over k ---- */

enum { PROBE_RULE_TREE = 0, PROBE_RULE_CHAIN = 1 };

/* a: [m,k], or [k,m] if a_transposed; b: [k,n], or [n,k] if b_transposed. The product needs (0,1), (0,0) and (1,0);
 * MJL_ERROR_UNSUPPORTED for a pair that it has no code for. */
PROBE_API int32_t probe_contract(int32_t rule, int32_t a_transposed, int32_t b_transposed, int64_t m, int64_t n,
                                 int64_t k, const float* a, const float* b, float* out);

/* ---- Stages of the model ---- */

/* x, y: [M,D]; w: [D]; rstd: [M]. */
PROBE_API int32_t probe_norm_forward(int64_t rows, int64_t width, const float* x, const float* w, float* y,
                                     float* rstd);

/* dx = add(gradient through the norm, d_residual): a residual of -0.0 shows the bare gradient.
 * x, rstd, w: as in the forward pass; dy, d_residual, dx: [M,D]; dw: [D]. */
PROBE_API int32_t probe_norm_backward(int64_t rows, int64_t width, const float* x, const float* rstd, const float* w,
                                      const float* dy, const float* d_residual, float* dx, float* dw);

/* x, out: [batch*length, heads*head_dim]; backward: 0 or 1. */
PROBE_API int32_t probe_rotary(int32_t backward, int64_t batch, int64_t length, int64_t heads, int64_t head_dim,
                               const float* x, float* out);

/* q, ctx: [M, H*HD]; k, v: [M, KV*HD]; q and k are after the rotary embedding. */
PROBE_API int32_t probe_attention_forward(int64_t batch, int64_t length, int64_t n_heads, int64_t n_kv,
                                          int64_t head_dim, const float* q, const float* k, const float* v, float* ctx);

/* dctx, dq: [M, H*HD]; dk, dv: [M, KV*HD]; dq and dk are before the backward rotation. */
PROBE_API int32_t probe_attention_backward(int64_t batch, int64_t length, int64_t n_heads, int64_t n_kv,
                                           int64_t head_dim, const float* q, const float* k, const float* v,
                                           const float* dctx, float* dq, float* dk, float* dv);

PROBE_API int32_t probe_swiglu_forward(int64_t count, const float* gate, const float* up, float* gated);
PROBE_API int32_t probe_swiglu_backward(int64_t count, const float* gate, const float* up, const float* dgated,
                                        float* dgate, float* dup);

/* hidden, dhidden: [M,D]; head, dhead: [V,D]; targets: [M]; chunked: 0 or 1; loss: one float. */
PROBE_API int32_t probe_head_loss(int32_t chunked, int64_t rows, int64_t width, int64_t vocab, const float* hidden,
                                  const float* head, const int32_t* targets, float* loss, float* dhidden, float* dhead);

/* ids: [M]; dx: [M,D]; dembed: [V,D], written in full. */
PROBE_API int32_t probe_embed_backward(int64_t rows, int64_t width, int64_t vocab, const int32_t* ids, const float* dx,
                                       float* dembed);

/* The update of step `step` >= 1; p, m, v: [count], replaced. */
PROBE_API int32_t probe_adamw(int64_t count, int64_t step, float lr, float beta1, float beta2, float eps,
                              float weight_decay, const float* g, float* p, float* m, float* v);

#ifdef __cplusplus
}
#endif

#endif /* MOJOLEARN_PROBE_H */
