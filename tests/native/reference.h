/* SPDX-License-Identifier: Apache-2.0
 *
 * The referee of the tests: a literal, scalar implementation of docs/numerics.md that shares no code with the product.
 * Its library implements the operations of probe.h, and beside them what follows. Functions return 0 or a status of
 * mojolearn.h.
 */
#ifndef MOJOLEARN_REFERENCE_H
#define MOJOLEARN_REFERENCE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define REFERENCE_API __attribute__((visibility("default")))

/* Breaks one rule in all later calls: a name of reference_math.hpp's Variant; "right" breaks none. */
REFERENCE_API int32_t reference_set_variant(const char* name);

typedef struct reference_shape {
  int32_t batch;
  int32_t length;
  int32_t d_model;
  int32_t n_heads;
  int32_t n_kv;
  int32_t head_dim;
  int32_t intermediate;
  int32_t n_layers;
  int32_t vocab_size;
  int32_t chunked_lm_head_v2;
} reference_shape;

typedef struct reference_adamw {
  float lr;
  float beta1;
  float beta2;
  float eps;
  float weight_decay;
} reference_adamw;

REFERENCE_API int64_t reference_parameter_count(const reference_shape* shape);

/* Training step number `step` >= 1. ids: [batch, length + 1]; parameters, m, v, gradients: [parameter_count].
 * A refused step changes nothing but *loss. */
REFERENCE_API int32_t reference_step(const reference_shape* shape, const reference_adamw* adamw, int64_t step,
                                     const int32_t* ids, float* parameters, float* m, float* v, float* loss,
                                     float* gradients);

/* The loss alone. */
REFERENCE_API int32_t reference_evaluate(const reference_shape* shape, const float* parameters, const int32_t* ids,
                                         float* loss);

/* ids: [rows, length]; lengths: [rows] or NULL; out: [rows, length, vocab_size]. Each row is computed alone, at its own
 * length. */
REFERENCE_API int32_t reference_logits(const reference_shape* shape, const float* parameters, const int32_t* ids,
                                       int32_t rows, int32_t length, const int32_t* lengths, float* out);

/* An elementary function by name ("exp", "log", "sin", "cos", or "pow" with base 10000), over `count` consecutive bit
 * patterns. */
REFERENCE_API int32_t reference_elementary(const char* name, uint32_t first_bits, int64_t count, float* out);

/* Largest error of values[i] against the function in double, in units of the true value's last place (for sin and cos:
 * in units of 2^-24), over the same patterns. Zeros and infinities among the values are left out. */
REFERENCE_API int32_t reference_largest_error(const char* name, uint32_t first_bits, int64_t count, const float* values,
                                              double* error, uint32_t* at_bits);

#ifdef __cplusplus
}
#endif

#endif /* MOJOLEARN_REFERENCE_H */
