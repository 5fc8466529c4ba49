// SPDX-License-Identifier: Apache-2.0
//
// Large matrix products, at the speed of the processor's flushed multiply-add.
//
// Order of summation: the contraction of ops.h. Inside a leaf acc = fma(a, b, acc) for ascending k from +0; leaf sums
// meet in a balanced tree of adjacent pairs. (The chain rule is one leaf, which may go on from what c holds.)
//
// How that is met at speed. The processor's flushed fma equals z(RN(fma)) whenever the exact result is a multiple of
// 2^-149. A normal float is such a multiple, and so is a product whose factors satisfy exponent(a) + exponent(b) >=
// -103. Each stage of kDepth values of k is therefore examined before it is consumed: when its smallest nonzero |a| and
// |b| allow it, the stage runs on flushed fma; otherwise, and where a stage is cut short, on IEEE fma followed by a
// flush.
//
// How the work is cut. A unit is an output tile and an aligned, power-of-two run of leaves (or all of them). A CTA
// keeps the tree inside its unit on a binary-counter stack; units of one tile meet in memory, the second to arrive
// adding.
#include "kernels/arguments.h"
#include "kernels/arithmetic.h"
#include "kernels/gemm.h"

namespace mjl::gpu {
namespace {

constexpr int kStep = 4;  // values of k in one turn of the innermost loop, which must fit the instruction cache

// How an operand's tile is copied: along k when k is contiguous in memory (the copy transposes it), along rows when the
// operand's own index (m or n) is contiguous, with 16-byte words where everything is aligned.
enum class Copy { along_k, along_rows, along_rows_unaligned };

// One thread's part in copying kRows x kDepth values of an operand to s[k][row], in kPasses passes. In an along_k pass
// a warp copies 8 k x 4 rows (whole 32-byte sectors from memory, 32 different banks) and repeats that for each 8 k; in
// the others the CTA copies kThreads / kLanes whole rows of the stage.
template <Copy kMode, int kRows, int kThreads>
struct Copier {
  static constexpr bool kAlongK = kMode == Copy::along_k;
  static constexpr int kBytes = kMode == Copy::along_rows ? 16 : 4;
  static constexpr int kLanes = kAlongK ? 8 : kRows * 4 / kBytes, kGroup = kThreads / kLanes;
  static constexpr int kPasses = (kAlongK ? kRows : kDepth) / kGroup, kPerStep = kPasses * kStep / kDepth;
  static constexpr int kRowBytes = (kRows + kPad) * 4, kTargetStep = kGroup * (kAlongK ? 4 : kRowBytes);
  static_assert(kThreads % kLanes == 0 && kPerStep * kDepth == kPasses * kStep);

  static MJL_DEVICE int first_row() { return kAlongK ? threadIdx.x / kLanes : threadIdx.x % kLanes * (kBytes / 4); }
  static MJL_DEVICE int first_k() { return kAlongK ? threadIdx.x % kLanes : threadIdx.x / kLanes; }
  // Where this thread starts: in memory, for the tile at `row` and the stage at `k`; in shared memory.
  static MJL_DEVICE const float* source(const float* g, int64_t ld, int row, int k) {
    return kAlongK ? g + (row + first_row()) * ld + k + first_k() : g + (k + first_k()) * ld + row + first_row();
  }
  static MJL_DEVICE unsigned target(const float* tile) {
    return shared_address(tile) + first_k() * kRowBytes + first_row() * 4;
  }
  // One pass of a stage that lies wholly inside the operand; leaves `from` and `to` at the next pass.
  static MJL_DEVICE void pass(const float*& from, unsigned& to, int64_t ld) {
#pragma unroll
    for (int h = 0; h < (kAlongK ? kDepth : 1); h += 8) copy_async<kBytes>(to + h * kRowBytes, from + h);
    from += kGroup * ld;
    to += kTargetStep;
  }
  // A whole stage of any shape, zeros outside `rows` and `depth`.
  static MJL_DEVICE void stage(const float* from, unsigned to, int64_t ld, int rows, int depth) {
#pragma unroll 1
    for (int i = 0; i < kPasses; ++i) {
#pragma unroll
      for (int h = 0; h < (kAlongK ? kDepth : 1); h += 8) {
        const bool inside = kAlongK ? first_row() + i * kGroup < rows && first_k() + h < depth
                                    : first_row() < rows && first_k() + i * kGroup < depth;
        copy_async_or_zero<kBytes>(to + h * kRowBytes, from + (inside ? h : 0), inside);
      }
      from += kGroup * ld;
      to += kTargetStep;
    }
  }
};

// The smallest |x| >= 2^-126 among one operand's stage, as bits; each warp looks at its share. Zeros and subnormals
// (which act as zeros) do not count; a warp that meets one looks a second time.
template <int kRows, int kThreads>
MJL_DEVICE uint32_t smallest(const float* s) {
  constexpr int kWords = kDepth * kRows / 4 / kThreads;
  float4 v[kWords];
  float least = __int_as_float(0x7f800000);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int e = threadIdx.x + i * kThreads;
    v[i] = *(const float4*)&s[e / (kRows / 4) * (kRows + kPad) + e % (kRows / 4) * 4];
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    least = fminf(fminf(fminf(least, fabsf(v[i].x)), fabsf(v[i].y)), fminf(fabsf(v[i].z), fabsf(v[i].w)));
  uint32_t bits = warp_min(__float_as_uint(least));
  if (bits < 0x00800000u) {
    uint32_t u = ~0u;  // doubled bits less 2^24: drops the sign and sends zeros and subnormals to the top
    const auto doubled = [](float x) { return __float_as_uint(x) * 2 - 0x01000000u; };
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      u = min(min(min(u, doubled(v[i].x)), doubled(v[i].y)), min(doubled(v[i].z), doubled(v[i].w)));
    bits = (warp_min(u) >> 1) + 0x00800000u;
  }
  return bits;
}

// k .. end is the unit's range of k. The last tile of a row or column of tiles is moved back inside the matrix: it
// computes some outputs a second time, and writes only those from first_row and first_col on, which are its own.
struct Unit {
  int tile, split, row, col, first_row, first_col, k, end;
};

template <class S>
MJL_DEVICE Unit find_unit(const GemmArguments& p, int u) {
  Unit t;
  int first = 0, leaves = p.leaves;
  t.tile = u;
  t.split = 0;
  if (u >= p.whole) {
    const int v = u - p.whole;
    t.tile = p.whole + v / p.splits;
    t.split = v % p.splits;
    first = t.split * p.split_leaves;
    leaves = p.split_leaves;
  }
  constexpr int kGroup = 16;  // tiles run down groups of this many tile rows, which keeps a wave's operands in L2
  const int g = t.tile / (kGroup * p.tiles_n), in_g = t.tile % (kGroup * p.tiles_n);
  const int rows = min(kGroup, p.tiles_m - g * kGroup);
  t.first_row = (g * kGroup + in_g % rows) * S::kM;
  t.first_col = in_g / rows * S::kN;
  t.row = min(t.first_row, max(p.m - S::kM, 0));
  t.col = min(t.first_col, max(p.n - S::kN, 0));
  t.k = first * p.leaf;
  t.end = int(min(int64_t(p.k), int64_t(first + leaves) * p.leaf));
  return t;
}

template <class S, Copy kCopyA, Copy kCopyB>
MJL_DEVICE void gemm(const GemmArguments& p) {
  constexpr int kM = S::kM, kN = S::kN, kTM = S::kTM, kTN = S::kTN, kThreads = S::kThreads;
  constexpr int kRowA = kM + kPad, kRowB = kN + kPad;
  using CopyA = Copier<kCopyA, kM, kThreads>;
  using CopyB = Copier<kCopyB, kN, kThreads>;
  extern __shared__ __align__(16) float shared[];
  const auto tile_a = [&](int s) { return shared + s * S::kStageFloats; };
  const auto tile_b = [&](int s) { return shared + s * S::kStageFloats + kDepth * kRowA; };
  uint32_t* const word = (uint32_t*)(shared + kM);  // two words, for agreements of the CTA, in a row's padding

  // The thread's place: a warp is 8 x 4 threads, interleaved so that neighbours share addresses; a thread owns blocks
  // of 4 rows 32 apart and blocks of 4 columns 16 apart.
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int row0 = warp / S::kWarpsN * (8 * kTM) + ((lane >> 1 & 1) | (lane >> 2 & 6)) * 4;
  const int col0 = warp % S::kWarpsN * (4 * kTN) + ((lane & 1) | (lane >> 1 & 2)) * 4;

  float acc[kTM][kTN], a[2][kTM], b[2][kTN];
  const auto clear = [&] {
#pragma unroll
    for (int i = 0; i < kTM; ++i)
#pragma unroll
      for (int j = 0; j < kTN; ++j) acc[i][j] = 0.0f;
  };
  const auto load_k = [&](int to, const float* sa, const float* sb) {  // one k's factors
#pragma unroll
    for (int i = 0; i < kTM; i += 4) *(float4*)&a[to][i] = *(const float4*)&sa[i * 8];
#pragma unroll
    for (int j = 0; j < kTN; j += 4) *(float4*)&b[to][j] = *(const float4*)&sb[j * 4];
  };
  // Tiles of sums in memory: 16-byte words, thread after thread; a thread meets only its own.
  const auto keep = [&](float* to) {
#pragma unroll
    for (int i = 0; i < kTM; ++i)
#pragma unroll
      for (int j = 0; j < kTN; j += 4) *((float4*)to + (i * kTN + j) / 4 * kThreads + tid) = *(float4*)&acc[i][j];
  };
  const auto merge = [&](const float* from) {  // loads go out in batches, to wait for memory seldom
    constexpr int kBatch = S::kMergeBatch;
    const float4* q = (const float4*)from + tid;
#pragma unroll
    for (int e = 0; e < kTM * kTN / 4; e += kBatch) {
      float4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) x[i] = load_shared_by_blocks(q + (e + i) * kThreads);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        float* to = &acc[(e + i) / (kTN / 4)][(e + i) % (kTN / 4) * 4];
        to[0] = add_flushed(x[i].x, to[0]);
        to[1] = add_flushed(x[i].y, to[1]);
        to[2] = add_flushed(x[i].z, to[2]);
        to[3] = add_flushed(x[i].w, to[3]);
      }
    }
  };
  // body(output, sum) for each output that belongs to this thread and tile.
  const auto for_outputs = [&](const Unit& t, auto&& body) {
#pragma unroll
    for (int i = 0; i < kTM; ++i) {
      const int row = t.row + row0 + i / 4 * 32 + i % 4;
      if (row < t.first_row || row >= p.m) continue;
#pragma unroll
      for (int j = 0; j < kTN; ++j) {
        const int col = t.col + col0 + j / 4 * 16 + j % 4;
        if (col >= t.first_col && col < p.n) body(int64_t(row) * p.n + col, acc[i][j]);
      }
    }
  };
  float* const stack = p.stack + int64_t(blockIdx.x) * p.levels * (kM * kN);

  // The copies run kStages - 1 stages ahead of the arithmetic, across units; `c` is the stage they have reached.
  struct {
    const float *a, *b;
    int unit, k, leaf_end, end;
  } c;
  c.unit = blockIdx.x;
  const auto aim = [&] {
    const Unit t = find_unit<S>(p, c.unit);
    c.a = CopyA::source(p.a, p.lda, t.row, t.k);
    c.b = CopyB::source(p.b, p.ldb, t.col, t.k);
    c.k = t.k;
    c.end = t.end;
    c.leaf_end = min(t.k + p.leaf, t.end);
  };
  const auto advance = [&] {
    const int depth = min(kDepth, c.leaf_end - c.k);
    c.k += depth;
    c.a += kCopyA == Copy::along_k ? depth : depth * p.lda;
    c.b += kCopyB == Copy::along_k ? depth : depth * p.ldb;
    if (c.k == c.leaf_end) {
      if (c.k < c.end) {
        c.leaf_end = min(c.leaf_end + p.leaf, c.end);
      } else {  // after the last unit, a stage is copied again, which nobody reads
        if (c.unit + int(gridDim.x) < p.units) c.unit += gridDim.x;
        aim();
      }
    }
  };
  const auto copy_any = [&](int slot) {
    const int depth = min(kDepth, c.leaf_end - c.k);
    CopyA::stage(c.a, CopyA::target(tile_a(slot)), p.lda, min(kM, p.m), depth);
    CopyB::stage(c.b, CopyB::target(tile_b(slot)), p.ldb, min(kN, p.n), depth);
  };

  aim();
#pragma unroll 1
  for (int s = 0; s < kStages - 1; ++s) {
    copy_any(s);
    copy_commit();
    advance();
  }
  copy_wait<kStages - 2>();
  __syncthreads();
  load_k(0, tile_a(0) + row0, tile_b(0) + col0);  // from here on a[0], b[0] hold the next k's factors between stages

  bool suspect = true;  // this thread has not seen its share of the next stage, or saw a small value there
  int slot = 0;
#pragma unroll 1
  for (int u = blockIdx.x; u < p.units; u += gridDim.x) {
    int k, end;
    {
      const Unit t = find_unit<S>(p, u);
      k = t.k;
      end = t.end;
      clear();
      if (p.resume) for_outputs(t, [&](int64_t at, float& sum) { sum = load(p.c + at); });
    }
    int leaf_end = min(k + p.leaf, end), leaf = 0;
#pragma unroll 1
    while (k < end) {
      copy_wait<kStages - 3>();                     // the stage after this one has landed,
      const bool look = __syncthreads_or(suspect);  // everyone sees it, and the slot of the stage before is free
      const int next = slot == kStages - 1 ? 0 : slot + 1, spare = slot == 0 ? kStages - 1 : slot - 1;
      const int depth = min(kDepth, leaf_end - k);
      bool fast = depth == kDepth && c.leaf_end - c.k >= kDepth && p.m >= kM && p.n >= kN;
      if (look && fast) {
        if (tid < 2) word[tid] = ~0u;
        __syncthreads();
        const uint32_t least_a = smallest<kM, kThreads>(tile_a(slot)), least_b = smallest<kN, kThreads>(tile_b(slot));
        if (lane == 0) {
          atomicMin(&word[0], least_a);
          atomicMin(&word[1], least_b);
        }
        __syncthreads();
        fast = (word[0] >> 23) + (word[1] >> 23) >= 254 - 103;
      }

      const float *sa = tile_a(slot) + row0, *sb = tile_b(slot) + col0;
      const float *next_sa = tile_a(next) + row0, *next_sb = tile_b(next) + col0;
      if (fast) {
        const float* look_a = tile_a(next) + tid / (kM / 4) * kRowA + tid % (kM / 4) * 4;
        const float* look_b = tile_b(next) + tid / (kN / 4) * kRowB + tid % (kN / 4) * 4;
        const float *from_a = c.a, *from_b = c.b;
        unsigned to_a = CopyA::target(tile_a(spare)), to_b = CopyB::target(tile_b(spare));
        float least = __int_as_float(0x7f800000);
#pragma unroll 1
        for (int q = 0; q < kDepth; q += kStep) {
          const float* after_a = q + kStep < kDepth ? sa + kStep * kRowA : next_sa;
          const float* after_b = q + kStep < kDepth ? sb + kStep * kRowB : next_sb;
          constexpr int kLooksA = kStep * kM / 4 / kThreads, kLooksB = kStep * kN / 4 / kThreads;
          float4 x[kLooksA + kLooksB];
#pragma unroll
          for (int s = 0; s < kStep; ++s) {
            load_k((s + 1) & 1, s + 1 < kStep ? sa + (s + 1) * kRowA : after_a,
                   s + 1 < kStep ? sb + (s + 1) * kRowB : after_b);
            // among the arithmetic: a part of the copies, and a part of the look at the next stage
            if (s == 0) {
#pragma unroll
              for (int i = 0; i < CopyA::kPerStep; ++i) CopyA::pass(from_a, to_a, p.lda);
#pragma unroll
              for (int i = 0; i < CopyB::kPerStep; ++i) CopyB::pass(from_b, to_b, p.ldb);
            }
            if (s == 1) {
#pragma unroll
              for (int i = 0; i < kLooksA; ++i) x[i] = *(const float4*)(look_a + i * (kThreads / (kM / 4)) * kRowA);
#pragma unroll
              for (int i = 0; i < kLooksB; ++i)
                x[kLooksA + i] = *(const float4*)(look_b + i * (kThreads / (kN / 4)) * kRowB);
            }
#pragma unroll
            for (int i = 0; i < kTM; ++i)
#pragma unroll
              for (int jj = 0; jj < kTN; ++jj) {
                const int j = i & 1 ? kTN - 1 - jj : jj;  // back and forth: a step changes one factor only
                acc[i][j] = fma_flushed(a[s & 1][i], b[s & 1][j], acc[i][j]);
              }
            if (s == 2) {
#pragma unroll
              for (int i = 0; i < kLooksA + kLooksB; ++i)
                least = fminf(fminf(fminf(least, fabsf(x[i].x)), fabsf(x[i].y)), fminf(fabsf(x[i].z), fabsf(x[i].w)));
            }
          }
          sa = after_a;
          sb = after_b;
          look_a += kStep * kRowA;
          look_b += kStep * kRowB;
        }
        suspect = !(least >= 0x1p-51f);  // then every product of the next stage is at least 2^-102
      } else {
        copy_any(spare);
#pragma unroll 1
        for (int q = 0; q < depth; ++q) {
          load_k(0, sa + q * kRowA, sb + q * kRowB);
#pragma unroll
          for (int i = 0; i < kTM; ++i) a[0][i] = flush(a[0][i]);
#pragma unroll
          for (int j = 0; j < kTN; ++j) b[0][j] = flush(b[0][j]);
#pragma unroll
          for (int i = 0; i < kTM; ++i)
#pragma unroll
            for (int j = 0; j < kTN; ++j) acc[i][j] = flush(fma_ieee(a[0][i], b[0][j], acc[i][j]));
        }
        load_k(0, next_sa, next_sb);
        suspect = true;
      }
      copy_commit();
      advance();
      slot = next;
      k += depth;
      if (k == leaf_end) {  // a leaf is done: add it to the stack as a binary counter carries
        const bool last = k == end;
        int level = 0;
#pragma unroll 1
        for (int n = leaf; n; n >>= 1, ++level) {
          if (n & 1) {
            merge(stack + level * (kM * kN));
          } else if (!last) {
            break;
          }
        }
        if (!last) {
          keep(stack + level * (kM * kN));
          clear();
        }
        ++leaf;
        leaf_end = min(leaf_end + p.leaf, end);
      }
    }

    // Units of one tile meet: climb the tree for as long as the sibling's sum is there.
    const Unit t = find_unit<S>(p, u);
    bool root = true;
    if (t.tile >= p.whole && p.splits > 1) {
      int node = t.split, width = p.splits, base = (t.tile - p.whole) * 2 * p.splits;
#pragma unroll 1
      while (root && width > 1) {
        const int parent = base + node / 2;
        if ((node ^ 1) < width) {
          __syncthreads();
          if (tid == 0) {
            const uint32_t seen = atomicCAS(&p.flags[parent], 0u, 1u);
            if (seen)
              while (*(volatile uint32_t*)&p.flags[parent] != 2u) {
              }
            __threadfence();
            word[0] = seen;
          }
          __syncthreads();
          float* const there = p.nodes + int64_t(parent) * (kM * kN);
          if (word[0]) {
            merge(there);
            if (tid == 0) p.flags[parent] = 0;
          } else {
            keep(there);
            __threadfence();
            __syncthreads();
            if (tid == 0) atomicExch(&p.flags[parent], 2u);
            root = false;
          }
        }
        base += (width + 1) / 2;
        node /= 2;
        width = (width + 1) / 2;
      }
    }
    if (!root) continue;
    if (p.residual) for_outputs(t, [&](int64_t at, float& sum) { sum = add_flushed(p.residual[at], sum); });
    if (p.n % 4 == 0 && t.first_col == t.col && (uintptr_t)p.c % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kTM; ++i) {
        const int row = t.row + row0 + i / 4 * 32 + i % 4;
        if (row < t.first_row || row >= p.m) continue;
#pragma unroll
        for (int j = 0; j < kTN; j += 4) {
          const int col = t.col + col0 + j * 4;
          if (col < p.n) *(float4*)&p.c[int64_t(row) * p.n + col] = *(float4*)&acc[i][j];
        }
      }
    } else {
      for_outputs(t, [&](int64_t at, float& sum) { p.c[at] = sum; });
    }
  }
}

}  // namespace

#define MJL_GEMM(name, shape, copy_a, copy_b)                                                                         \
  MJL_KERNEL __launch_bounds__(shape::kThreads, shape::kCtas) name(const __grid_constant__ GemmArguments arguments) { \
    gemm<shape, Copy::copy_a, Copy::copy_b>(arguments);                                                               \
  }
MJL_GEMM(gemm_large_nt, LargeTile, along_k, along_k)
MJL_GEMM(gemm_large_nn, LargeTile, along_k, along_rows)
MJL_GEMM(gemm_large_nn_unaligned, LargeTile, along_k, along_rows_unaligned)
MJL_GEMM(gemm_large_tn, LargeTile, along_rows, along_rows)
MJL_GEMM(gemm_large_tn_unaligned, LargeTile, along_rows_unaligned, along_rows_unaligned)
MJL_GEMM(gemm_medium_nt, MediumTile, along_k, along_k)
MJL_GEMM(gemm_medium_nn, MediumTile, along_k, along_rows)
MJL_GEMM(gemm_medium_nn_unaligned, MediumTile, along_k, along_rows_unaligned)
MJL_GEMM(gemm_medium_tn, MediumTile, along_rows, along_rows)
MJL_GEMM(gemm_medium_tn_unaligned, MediumTile, along_rows_unaligned, along_rows_unaligned)

}  // namespace mjl::gpu
