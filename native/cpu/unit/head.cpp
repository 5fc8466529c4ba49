// SPDX-License-Identifier: Apache-2.0
//
// Output head and cross-entropy. Logits are kept with a column a token, [V, tokens], so that the sums over the
// vocabulary, which belong to one token, run with tokens in the lanes.
#include "cpu/unit/backend.h"
#include "math/elementary.h"

namespace mjl::cpu::MJL_UNIT {

// Logits, row losses and, where asked, dlogits (in place of the logits) of tokens [first, first + rows).
void CpuBackend::head_panel(Tokens tokens, Tensor x, Tensor lm_head, Contraction rule, int64_t first, int64_t rows,
                            bool gradient) {
  const int64_t V = lm_head.rows, D = x.cols;
  const Tensor x_rows = {x.data + first * D, rows, D};
  const Product product = {V,     rows,   {{plain(lm_head), transposed(x_rows), D}}, 1, Contraction::leaf_tree, nullptr,
                           false, logits_};
  multiply(&product, 1);
  parallel(ceil_div(rows, kLanes), [&](int64_t task, int) {
    const int64_t i = task * kLanes;
    const int lanes = int(smaller(kLanes, rows - i));
    float* const column = logits_ + i;
    int32_t target[kLanes];
    for (int lane = 0; lane < lanes; ++lane) {
      const int64_t token = first + i + lane;
      target[lane] = tokens.ids[token / tokens.length * tokens.stride + token % tokens.length + 1];
    }
    Floats m = broadcast(-__builtin_inff());
    Ints bad = {};
    for (int64_t v = 0; v < V; ++v) {
      const Floats logit = raw_load(column + v * rows, lanes);
      bad |= non_finite(logit);
      m = Arith<true>::max(m, logit);
    }
    if (any(bad)) fault(kFaultLogits);
    float target_shifted[kLanes] = {}, denominators[kLanes];
    for (int lane = 0; lane < lanes; ++lane)
      target_shifted[lane] = Arith<true>::add(broadcast(column[target[lane] * rows + lane]), -broadcast(m[lane]))[0];

    // Not through exact(): the exponentials replace the logits.
    using A = Arith<true>;
    const auto exponential = [&](int64_t v) {
      const Floats e = math::exp<A>(A::add(raw_load(column + v * rows, lanes), A::negate(m)));
      raw_store(column + v * rows, e, lanes);
      return e;
    };
    Floats den = {};
    if (rule == Contraction::chain)
      for (int64_t v = 0; v < V; ++v) den = A::add(den, exponential(v));
    else
      den = sum_with_ones<A>(V, exponential);
    raw_store(denominators, den);
    const Floats row_loss = A::negate(A::add(raw_load(target_shifted), A::negate(math::log<A>(den))));
    raw_store(row_loss_ + first + i, row_loss, lanes);
    if (!gradient) return;

    const Floats count = A::value(float(tokens.count()));
    for (int lane = 0; lane < lanes; ++lane) {
      float* const e = column + target[lane] * rows + lane;
      target_shifted[lane] =
          A::div(A::add(A::div(broadcast(*e), broadcast(denominators[lane])), broadcast(-1.0f)), count)[0];
    }
    for (int64_t v = 0; v < V; ++v)
      raw_store(column + v * rows, A::div(A::div(raw_load(column + v * rows, lanes), den), count), lanes);
    for (int lane = 0; lane < lanes; ++lane) column[target[lane] * rows + lane] = target_shifted[lane];
  });
}

// loss_ from the row losses.
void CpuBackend::sum_losses(int64_t count, Contraction rule) {
  parallel(1, [&](int64_t, int) {
    using A = Arith<true>;
    Floats sum;
    if (rule == Contraction::chain) {
      const int64_t blocks = ceil_div(count, kHeadPanel);
      for (int64_t block = 0; block < blocks; ++block) {
        Floats block_sum = {};
        for (int64_t i = block * kHeadPanel; i < smaller((block + 1) * kHeadPanel, count); ++i)
          block_sum = A::add(block_sum, A::value(row_loss_[i]));
        row_loss_[block] = block_sum[0];
      }
      for (int64_t width = 1; width < blocks; width *= 2)
        for (int64_t i = 0; i + width < blocks; i += 2 * width)
          row_loss_[i] = A::add(broadcast(row_loss_[i]), broadcast(row_loss_[i + width]))[0];
      sum = broadcast(row_loss_[0]);
    } else {
      sum = sum_with_ones<A>(count, [&](int64_t i) { return A::value(row_loss_[i]); });
    }
    const Floats loss = A::div(sum, A::value(float(count)));
    loss_ = loss[0];
    if (any(non_finite(loss))) fault(kFaultLoss);
  });
}

void CpuBackend::head_loss(Tokens tokens, Tensor x, Tensor lm_head, Contraction rule) {
  const int64_t M = tokens.count(), panel = rule == Contraction::chain ? kHeadPanel : M;
  for (int64_t first = 0; first < M; first += panel)
    head_panel(tokens, x, lm_head, rule, first, smaller(panel, M - first), false);
  sum_losses(M, rule);
}

void CpuBackend::head_loss_backward(Tokens tokens, Tensor x, Tensor lm_head, Contraction rule, Tensor d_x,
                                    Tensor d_lm_head) {
  const int64_t M = tokens.count(), V = lm_head.rows, D = x.cols, panel = rule == Contraction::chain ? kHeadPanel : M;
  for (int64_t first = 0; first < M; first += panel) {
    const int64_t rows = smaller(panel, M - first);
    head_panel(tokens, x, lm_head, rule, first, rows, true);
    const Matrix d_logits = {logits_, rows, 1}, d_logits_by_token = {logits_, 1, rows};
    const Matrix x_rows = {x.data + first * D, D, 1};
    const Product products[] = {
        {rows, D, {{d_logits_by_token, plain(lm_head), V}}, 1, rule, nullptr, false, d_x.data + first * D},
        {V, D, {{d_logits, x_rows, rows}}, 1, rule, nullptr, first > 0, d_lm_head.data}};
    multiply(products, 2);
  }
  sum_losses(M, rule);
}

}  // namespace mjl::cpu::MJL_UNIT
