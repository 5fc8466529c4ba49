// SPDX-License-Identifier: Apache-2.0
//
// RMSNorm. The sums along a row are serial chains, so the vector runs across rows: lane r holds row r of a block of
// kLanes rows.
#include "cpu/unit/backend.h"

namespace mjl::cpu::MJL_UNIT {

void CpuBackend::norm_rows(Tensor x, Tensor w, Tensor rstd, Tensor y, Rows block) {
  const int64_t D = x.cols, end = block.first + block.count;
  float* const columns = of_thread(block.thread);  // [D][kLanes]
  for (int64_t row = block.first; row < end; row += kLanes) {
    const int rows = int(smaller(kLanes, end - row));
    const float* const from = x.data + row * D;
    pack<kLanes>(from, D, 1, rows, D, columns);
    exact([&](auto arithmetic) {
      using A = decltype(arithmetic);
      Floats ss = {};
      for (int64_t d = 0; d < D; ++d) {
        const Floats xd = A::load(columns + d * kLanes);
        ss = A::fma(xd, xd, ss);
      }
      A::store(rstd.data + row, A::rsqrt(A::add(A::div(ss, A::value(float(D))), A::value(1e-6f))), rows);
      for (int r = 0; r < rows; ++r) {
        const Floats scale = A::value(rstd.data[row + r]);
        for_lanes(0, D, [&](int64_t d, int lanes) {
          const Floats wd = A::load(w.data + d, lanes), xd = A::load(from + r * D + d, lanes);
          A::store(y.data + (row + r) * D + d, A::mul(wd, A::mul(xd, scale)), lanes);
        });
      }
    });
  }
}

void CpuBackend::norm_backward_rows(Tensor d_y, Tensor x, Tensor w, Tensor rstd, Tensor d_residual, Tensor d_x,
                                    Rows block) {
  const int64_t D = x.cols, end = block.first + block.count;
  float* const d_y_columns = of_thread(block.thread);  // [D][kLanes]
  float* const x_columns = d_y_columns + D * kLanes;   // [D][kLanes]
  float* const d_variance = x_columns + D * kLanes;    // [kLanes]
  for (int64_t row = block.first; row < end; row += kLanes) {
    const int rows = int(smaller(kLanes, end - row));
    pack<kLanes>(d_y.data + row * D, D, 1, rows, D, d_y_columns);
    pack<kLanes>(x.data + row * D, D, 1, rows, D, x_columns);
    exact([&](auto arithmetic) {
      using A = decltype(arithmetic);
      Floats c = {};
      for (int64_t d = 0; d < D; ++d) {
        const Floats dh = A::mul(A::load(d_y_columns + d * kLanes), A::value(w.data[d]));
        c = A::fma(dh, A::load(x_columns + d * kLanes), c);
      }
      const Floats s = A::load(rstd.data + row, rows);
      const Floats r3 = A::mul(A::mul(s, s), s);
      A::store(d_variance, A::div(A::mul(A::value(-0.5f), A::mul(c, r3)), A::value(float(D))));
      for (int r = 0; r < rows; ++r) {
        const Floats scale = A::value(rstd.data[row + r]), dv = A::value(d_variance[r]);
        for_lanes(0, D, [&](int64_t d, int lanes) {
          const int64_t at = (row + r) * D + d;
          const Floats dh = A::mul(A::load(d_y.data + at, lanes), A::load(w.data + d, lanes));
          const Floats twice = A::mul(A::value(2.0f), A::load(x.data + at, lanes));
          const Floats dx = A::add(A::mul(dh, scale), A::mul(dv, twice));
          A::store(d_x.data + at, A::add(dx, A::load(d_residual.data + at, lanes)), lanes);
        });
      }
    });
  }
}

// A contraction over tokens: here the vector runs across columns.
void CpuBackend::norm_weight_gradient(Tensor d_y, Tensor x, Tensor rstd, Tensor d_w) {
  const int64_t D = x.cols;
  parallel(ceil_div(D, kLanes), x.size(), [&](int64_t task, int) {
    const int64_t d = task * kLanes;
    const int lanes = int(smaller(kLanes, D - d));
    exact([&](auto arithmetic) {
      using A = decltype(arithmetic);
      const Floats sum = sum_with_ones<A>(x.rows, [&](int64_t i) {
        const Floats normed = A::mul(A::load(x.data + i * D + d, lanes), A::value(rstd.data[i]));
        return A::mul(A::load(d_y.data + i * D + d, lanes), normed);
      });
      A::store(d_w.data + d, sum, lanes);
    });
  });
}

}  // namespace mjl::cpu::MJL_UNIT
