/* SPDX-License-Identifier: Apache-2.0
 *
 * mojolearn: trains decoder-only language models in FP32 with the same bits on every backend.
 *
 * This header is the whole contract of the library: what is not in it is not public. It compiles as C99 and as C++17.
 * docs/abi.md tells the rules of ownership, threading, errors and versioning at length; in short:
 *
 *   - Every call that can fail returns a status. MJL_OK is 0. mjl_last_error() then tells, for the calling thread, what
 *     was wrong.
 *   - Outputs come last and are untouched when a call fails (mjl_session_logits says where it differs).
 *   - A struct passed by pointer starts with `struct_size`; set it to sizeof(the struct). Structs only ever grow at the
 *     end: a smaller one is read as far as it goes, a larger one is accepted if what this library does not know is
 *     zero.
 *   - A session may be used from several threads: calls queue. A session must not be used in a forked child.
 *   - Releasing NULL does nothing. Handles may be released in any order.
 *   - No call changes the caller's floating-point mode, and none depends on it.
 */
#ifndef MOJOLEARN_H
#define MOJOLEARN_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define MJL_API __declspec(dllexport)
#else
#define MJL_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Versions ----------------------------------------------------------------------------------------------- */

/* Rises when a function or struct changes in a way that old callers would notice. */
#define MJL_ABI_VERSION 1

MJL_API uint32_t mjl_abi_version(void);
/* The library's version, such as "0.1.0". */
MJL_API const char* mjl_version(void);
/* Names the arithmetic. Two libraries with the same name here give the same bits. */
MJL_API const char* mjl_numerics_version(void);
/* Compiler, flags and the backends that were built in: one line of JSON. */
MJL_API const char* mjl_build_info(void);

/* ---- 2. Status and errors -------------------------------------------------------------------------------------- */

typedef int32_t mjl_status;

enum {
  MJL_OK = 0,
  MJL_ERROR_ARGUMENT = 100,    /* a pointer, count, size or value is not acceptable */
  MJL_ERROR_STATE = 200,       /* the call is not possible now (no gradient yet, used after a fork) */
  MJL_ERROR_CANCELLED = 210,   /* the poll function asked to stop; nothing was changed */
  MJL_ERROR_NON_FINITE = 220,  /* a NaN or infinity in scores, logits, loss, gradient or update; nothing was changed */
  MJL_ERROR_UNSUPPORTED = 300, /* the asked-for vendor, device or vector unit is not there */
  MJL_ERROR_MEMORY = 400,      /* memory or threads could not be had */
  MJL_ERROR_DEVICE = 500,      /* the device refused a command; nothing was changed */
  MJL_ERROR_LOST = 600,    /* the device is gone, and with it the state since the last export; load a state to go on */
  MJL_ERROR_IO = 700,      /* a file could not be read or written, or is damaged */
  MJL_ERROR_INTERNAL = 900 /* a defect of the library */
};

/* What was wrong in the last failed call of this thread; "" if none has failed. Valid until the thread's next call. */
MJL_API const char* mjl_last_error(void);

/* ---- 3. Devices ------------------------------------------------------------------------------------------------ */

enum {
  MJL_VENDOR_ANY = 0, /* the best that is usable: a GPU if there is one, else the CPU */
  MJL_VENDOR_CPU = 1,
  MJL_VENDOR_CUDA = 2,
  MJL_VENDOR_HIP = 3
};

typedef struct mjl_device_info {
  uint32_t struct_size;
  int32_t vendor;        /* never MJL_VENDOR_ANY */
  int32_t device;        /* index among the vendor's devices */
  int32_t threads;       /* CPU: threads a session would use by default; 0 elsewhere */
  uint64_t memory_bytes; /* total memory of the device */
  char name[96];         /* such as the processor's brand string */
  char detail[160];      /* CPU: the vector unit in use and those available */
} mjl_device_info;

/* Describes a device without opening it; MJL_ERROR_UNSUPPORTED says what was looked for and found. */
MJL_API mjl_status mjl_device_probe(int32_t vendor, int32_t device, mjl_device_info* out_info);

/* ---- 4. Sessions ----------------------------------------------------------------------------------------------- */

/* The dimensions of a model and of its training batch. All in [1, 2^20]; length <= 8192; d_model = n_heads * head_dim;
 * n_heads divisible by n_kv; head_dim even. The flat parameter vector holds, row-major [out, in] and in this order:
 * embed [vocab_size, d_model]; per layer norm1_w [d_model], w_q [d_model, d_model], w_k and w_v [n_kv*head_dim,
 * d_model], w_o [d_model, d_model], norm2_w [d_model], w_gate and w_up [intermediate, d_model], w_down [d_model,
 * intermediate]; lm_head [vocab_size, d_model]. */
typedef struct mjl_shape {
  uint32_t struct_size;
  int32_t batch;
  int32_t length;
  int32_t d_model;
  int32_t n_heads;
  int32_t n_kv;
  int32_t head_dim;
  int32_t intermediate;
  int32_t n_layers;
  int32_t vocab_size;
  int32_t chunked_lm_head_v2; /* 0 or 1 */
} mjl_shape;

/* lr > 0, 0 <= beta < 1, eps > 0, weight_decay >= 0; all finite. */
typedef struct mjl_adamw {
  uint32_t struct_size;
  float lr;
  float beta1;
  float beta2;
  float eps;
  float weight_decay;
} mjl_adamw;

/* A training state in the caller's memory. Each array holds `count` floats: the parameters and AdamW's two moments.
 * m and v may both be NULL when completed_steps is 0: they are then zero. */
typedef struct mjl_state {
  uint32_t struct_size;
  uint32_t reserved; /* 0 */
  const float* parameters;
  const float* m;
  const float* v;
  uint64_t count;
  int64_t completed_steps;
} mjl_state;

/* Asked every 20 ms or so, from the thread that made the call, during long calls; a non-zero answer cancels the call.
 */
typedef int32_t (*mjl_poll_fn)(void* context);

typedef struct mjl_session_options {
  uint32_t struct_size;
  int32_t vendor;   /* MJL_VENDOR_... */
  int32_t device;   /* index among the vendor's devices; 0 on the CPU */
  int32_t threads;  /* CPU: number of threads, 0 = one for each processor the caller may run on */
  mjl_poll_fn poll; /* may be NULL */
  void* poll_context;
} mjl_session_options;

typedef struct mjl_session mjl_session;

/* Opens a session that holds the state until it is closed; `state` is copied. `options` may be NULL. */
MJL_API mjl_status mjl_session_open(const mjl_session_options* options, const mjl_shape* shape, const mjl_adamw* adamw,
                                    const mjl_state* state, mjl_session** out_session);

typedef struct mjl_step_result {
  uint32_t struct_size;
  float loss;              /* mean cross-entropy of this batch, before the update */
  int64_t completed_steps; /* after this step */
} mjl_step_result;

/* One training step. ids: [batch, length + 1], each in [0, vocab_size); ids_count = batch * (length + 1).
 * A failed step changes nothing. */
MJL_API mjl_status mjl_session_step(mjl_session* session, const int32_t* ids, uint64_t ids_count,
                                    mjl_step_result* out_result);

/* Mean loss on ids (as for a step); changes no state. */
MJL_API mjl_status mjl_session_evaluate(mjl_session* session, const int32_t* ids, uint64_t ids_count, float* out_loss);

/* Logits [rows, length, vocab_size] of ids [rows, length]; 1 <= length <= the session's length. `lengths` (rows counts,
 * or NULL) makes the batch ragged: ids at positions >= lengths[i] are not read and their logits are +0. out_count is
 * the number of floats in out_logits, which may be partly written when the call fails. */
MJL_API mjl_status mjl_session_logits(mjl_session* session, const int32_t* ids, int32_t rows, int32_t length,
                                      const int32_t* lengths, float* out_logits, uint64_t out_count);

/* The most likely token after each row's last (real) position; the lowest id on ties. out_tokens: [rows]. */
MJL_API mjl_status mjl_session_next_tokens(mjl_session* session, const int32_t* ids, int32_t rows, int32_t length,
                                           const int32_t* lengths, int32_t* out_tokens);

/* Copies the state out. Each array holds `count` floats; any of the outputs may be NULL. */
MJL_API mjl_status mjl_session_export_state(mjl_session* session, float* out_parameters, float* out_m, float* out_v,
                                            uint64_t count, int64_t* out_completed_steps);

/* The gradient of the last completed step, before its update. MJL_ERROR_STATE if there is none. */
MJL_API mjl_status mjl_session_export_gradients(mjl_session* session, float* out_gradients, uint64_t count);

/* Replaces the state and, where `adamw` is not NULL, the hyperparameters. Validated before anything changes. */
MJL_API mjl_status mjl_session_load_state(mjl_session* session, const mjl_adamw* adamw, const mjl_state* state);

typedef struct mjl_session_info {
  uint32_t struct_size;
  int32_t vendor;
  int32_t device;
  int32_t threads;              /* CPU threads in use */
  uint64_t memory_bytes;        /* all memory the session holds on its device */
  uint64_t attention_bytes;     /* of which attention holds between its forward and its backward pass */
  uint64_t forward_score_cells; /* of which score cells kept for the backward pass (0: recomputed) */
  uint64_t scratch_bytes;       /* of which attention's scratch for tiles of scores */
  char device_name[96];
  char vector_unit[32]; /* CPU: "avx512", "avx2" or "plain" */
} mjl_session_info;

MJL_API mjl_status mjl_session_describe(mjl_session* session, mjl_session_info* out_info);

/* Releases the session and all it holds. In a forked child it frees the memory only. */
MJL_API void mjl_session_close(mjl_session* session);

#ifdef __cplusplus
}
#endif

#endif /* MOJOLEARN_H */
