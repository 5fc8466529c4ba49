// SPDX-License-Identifier: Apache-2.0
#include "cpu/unit/backend.h"

namespace mjl::cpu::MJL_UNIT {
namespace {

// The id at a position, or -1 at padding.
MJL_INLINE int64_t id_at(const Tokens& tokens, int64_t position) {
  const int64_t b = position / tokens.length, t = position % tokens.length;
  return tokens.lengths && t >= tokens.lengths[b] ? -1 : tokens.ids[b * tokens.stride + t];
}

}  // namespace

void CpuBackend::embed(Tokens tokens, Tensor table, Tensor x) {
  using A = Arith<true>;
  const int64_t D = x.cols, rows_a_task = larger(1, 1024 / D);
  parallel(ceil_div(x.rows, rows_a_task), x.size() / 4, [&](int64_t task, int) {
    for (int64_t row = task * rows_a_task; row < smaller((task + 1) * rows_a_task, x.rows); ++row) {
      const int64_t id = id_at(tokens, row);
      for (int64_t d = 0; d < D; d += kLanes) {
        const int lanes = int(smaller(kLanes, D - d));
        A::store(x.data + row * D + d, id < 0 ? Floats{} : raw_load(table.data + id * D + d, lanes), lanes);
      }
    }
  });
}

// Each task owns some columns of the whole table, so positions that share an id meet in their order.
void CpuBackend::embed_backward(Tokens tokens, Tensor d_x, Tensor d_table) {
  using A = Arith<true>;
  const int64_t D = d_x.cols, width = larger(kLanes, round_up(ceil_div(D, pool_.threads()), kLanes));
  parallel(ceil_div(D, width), (d_x.size() + d_table.size()) / 4, [&](int64_t task, int) {
    const int64_t begin = task * width, end = smaller(begin + width, D);
    for (int64_t id = 0; id < d_table.rows; ++id)
      for (int64_t d = begin; d < end; ++d) d_table.data[id * D + d] = 0.0f;
    for (int64_t row = 0; row < d_x.rows; ++row) {
      float* const to = d_table.data + id_at(tokens, row) * D;
      for (int64_t d = begin; d < end; d += kLanes) {
        const int lanes = int(smaller(kLanes, end - d));
        A::store(to + d, A::add(raw_load(to + d, lanes), A::load(d_x.data + row * D + d, lanes)), lanes);
      }
    }
  });
}

}  // namespace mjl::cpu::MJL_UNIT
