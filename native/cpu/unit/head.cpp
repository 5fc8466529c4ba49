// SPDX-License-Identifier: Apache-2.0
//
// Output head and cross-entropy. Logits are kept with a column a token, [V, tokens], so that the sums over the
// vocabulary, which belong to one token, run with tokens in the lanes.
#include "cpu/unit/backend.h"
#include "math/elementary.h"

namespace mjl::cpu::MJL_UNIT {
namespace {

constexpr int64_t kRun = 32;  // vocabulary entries whose gradients are computed before any replaces its logit

}  // namespace

// Logits, row losses and, where asked, dlogits (in place of the logits) of tokens [first, first + rows).
void CpuBackend::head_panel(Tokens tokens, Tensor x, Tensor lm_head, Contraction rule, int64_t first, int64_t rows,
                            bool gradient) {
  const int64_t V = lm_head.rows, D = x.cols;
  const Tensor x_rows = {x.data + first * D, rows, D};
  const Product product = {V,     rows,   {{plain(lm_head), transposed(x_rows), D}}, 1, Contraction::leaf_tree, nullptr,
                           false, logits_};
  multiply(&product, 1);
  parallel(ceil_div(rows, kLanes), 4 * rows * V, [&](int64_t task, int thread) {
    const int64_t i = task * kLanes;
    const int lanes = int(smaller(kLanes, rows - i));
    float* const column = logits_ + i;
    Ints target = {};
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
    float* const target_logit = of_thread(thread);  // [kLanes], like the next two
    float* const losses = target_logit + kLanes;
    float* const denominators = losses + kLanes;
    float* const gradients = denominators + kLanes;  // [kRun][kLanes]
    for (int lane = 0; lane < lanes; ++lane) target_logit[lane] = column[target[lane] * rows + lane];

    exact([&](auto arithmetic) {
      using A = decltype(arithmetic);
      const Floats shift = A::negate(m);
      const auto exponential = [&](int64_t v) {
        return math::exp<A>(A::add(raw_load(column + v * rows, lanes), shift));
      };
      Floats den = {};
      if (rule == Contraction::chain)
        for (int64_t v = 0; v < V; ++v) den = A::add(den, exponential(v));
      else
        den = sum_with_ones<A>(V, exponential);
      const Floats target_shifted = A::add(raw_load(target_logit, lanes), shift);
      A::store(losses, A::negate(A::add(target_shifted, A::negate(math::log<A>(den)))));
      A::store(denominators, den);
    });
    raw_store(row_loss_ + first + i, raw_load(losses), lanes);
    if (!gradient) return;

    // The gradient replaces the logits, a few rows at a time: exact() may have to compute them twice.
    const Floats den = raw_load(denominators);
    for (int64_t v = 0; v < V; v += kRun) {
      const int64_t end = smaller(v + kRun, V);
      exact([&](auto arithmetic) {
        using A = decltype(arithmetic);
        const Floats count = A::value(float(tokens.count())), shift = A::negate(m);
        for (int64_t u = v; u < end; ++u) {
          const Floats e = math::exp<A>(A::add(raw_load(column + u * rows, lanes), shift));
          const Floats hit = A::select(target == int32_t(u), A::value(-1.0f), Floats{});
          A::store(gradients + (u - v) * kLanes, A::div(A::add(A::div(e, den), hit), count));
        }
      });
      for (int64_t u = v; u < end; ++u) raw_store(column + u * rows, raw_load(gradients + (u - v) * kLanes), lanes);
    }
  });
}

// loss_ from the row losses.
void CpuBackend::sum_losses(int64_t count, Contraction rule) {
  parallel(1, count, [&](int64_t, int) {
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
