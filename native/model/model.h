// SPDX-License-Identifier: Apache-2.0
//
// Everything a step reads and writes, as tensors in one block of the backend's memory.
#ifndef MJL_MODEL_MODEL_H
#define MJL_MODEL_MODEL_H

#include <cstdint>
#include <vector>

#include "model/shape.h"
#include "ops.h"

namespace mjl {

struct LayerWeights {
  Tensor norm1;     // [D]
  Tensor q;         // [D, D]
  Tensor k, v;      // [KD, D]
  Tensor o;         // [D, D]
  Tensor norm2;     // [D]
  Tensor gate, up;  // [F, D]
  Tensor down;      // [D, F]
};

// A flat vector in parameter order, and the same memory by name. Weights and gradients alike.
struct Weights {
  Tensor flat;   // [parameter_count]
  Tensor embed;  // [V, D]
  std::vector<LayerWeights> layers;
  Tensor lm_head;  // [V, D]
};

// What one layer's forward pass leaves for its backward pass.
struct LayerActivations {
  Tensor x;                       // [M, D] the layer's input
  Tensor rstd1;                   // [M]
  Tensor y1;                      // [M, D] normed x
  Tensor q;                       // [M, D] rotated
  Tensor k, v;                    // [M, KD], k rotated
  Tensor score_max, denominator;  // [M, H]
  Tensor context;                 // [M, D]
  Tensor h;                       // [M, D] x plus attention's output
  Tensor rstd2;                   // [M]
  Tensor y2;                      // [M, D] normed h
  Tensor gate, up, gated;         // [M, F]
};

// Parameters and AdamW's moments. There are two: the current state, and the one that an update writes before it becomes
// the state.
struct State {
  Weights weights;
  Tensor m, v;  // [parameter_count]
};

struct Model {
  Shape shape;
  Tokens tokens;  // of the batch in training; logits() brings its own
  State state[2];
  int current = 0;
  Weights gradients;
  std::vector<LayerActivations> layers;
  Tensor x_out;     // [M, D] the last layer's output
  Tensor cos, sin;  // [L, HD/2]
  // Gradients of activations, shared by all layers.
  Tensor d_x, d_h, d_y;              // [M, D]
  Tensor d_q, d_context;             // [M, D]
  Tensor d_k, d_v;                   // [M, KD]
  Tensor zz;                         // [M, H]
  Tensor d_gated, d_gate, d_up;      // [M, F]
  int32_t* ids = nullptr;            // [B, L + 1] in the backend's memory
  UpdateScalars* scalars = nullptr;  // in the backend's memory

  const State& now() const { return state[current]; }
  const State& next() const { return state[1 - current]; }
};

// The stages of model/step.cpp.
void forward(Backend& b, const Model& m, const Tokens& tokens);
void loss_only(Backend& b, const Model& m);
void train_step(Backend& b, const Model& m);

// Lays `model` out in one block of memory: call with null to learn the bytes, then again with the block.
uint64_t plan(Model& model, void* memory);

}  // namespace mjl

#endif
