// SPDX-License-Identifier: Apache-2.0
//
// The tiles of gemm.cu, which the host plans with.
#ifndef MJL_KERNELS_GEMM_H
#define MJL_KERNELS_GEMM_H

namespace mjl::gpu {

inline constexpr int kDepth = 32;  // values of k in one pipeline stage
inline constexpr int kStages = 3;  // one consumed, one examined, one on its way
inline constexpr int kPad = 4;     // floats after each shared row: makes the transposing copies free of bank conflicts

// CTA tile, a thread's tile, CTAs a multiprocessor.
template <int kM_, int kN_, int kTM_, int kTN_, int kCtas_>
struct GemmTile {
  static constexpr int kM = kM_, kN = kN_, kTM = kTM_, kTN = kTN_, kCtas = kCtas_;
  static constexpr int kWarpsM = kM / (8 * kTM), kWarpsN = kN / (4 * kTN), kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kMergeBatch = kTM * kTN == 128 ? 16 : 8;
  static constexpr int kStageFloats = kDepth * (kM + kN + 2 * kPad);
  static constexpr int kSharedBytes = kStages * kStageFloats * 4;
};

using LargeTile = GemmTile<128, 128, 8, 16, 2>;
using MediumTile = GemmTile<64, 64, 8, 8, 4>;

}  // namespace mjl::gpu

#endif
