// SPDX-License-Identifier: Apache-2.0
//
// Order of summation: leaves of ascending k, their sums merged as a binary counter counts, which is the tree of
// adjacent pairs. The tempting alternatives, a chain over blocks of k or one accumulator per block, are other sums.
//
// Loops, outermost first: slices of columns (their right-hand sides packed and shared), row blocks and column groups
// (the parallel tasks), blocks of k (a power of two of leaves, so a block is a complete subtree), panels of kPanel
// columns, tiles of kTileRows rows. A tile's sums stay in registers for a whole leaf.
#include "cpu/unit/gemm.h"

namespace mjl::cpu::MJL_UNIT {
namespace {

constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kBlockRows = 128 / kTileRows * kTileRows;
constexpr int64_t kBlockDepth = 1024;
constexpr int64_t kGroupPanels = 8;         // of a contraction over several blocks of k: bounds the partial sums
constexpr int64_t kSharedFloats = 1 << 20;  // of packed right-hand sides in one slice
constexpr int kBlockLevels = 4;             // log2 of the leaves in a block, 8 at most, and one
constexpr int64_t kTile = kTileRows * kPanel;

// Leaves of a block are as many as fit kBlockDepth; a longer leaf is a block of its own.
struct Blocking {
  int64_t leaf, depth;
};

Blocking blocking_of(int64_t k, Contraction rule) {
  if (rule == Contraction::chain) return {kBlockDepth, kBlockDepth};
  const int64_t leaf = leaf_length(k);
  int64_t leaves = 1;
  while (leaves < (1 << (kBlockLevels - 1)) && leaves * 2 * leaf <= kBlockDepth) leaves *= 2;
  return {leaf, leaves * leaf};
}

// kTileRows times kPanel sums over `depth` k. Element (r, k) of a is a[r * a_row + k * a_step]; b: [depth, kPanel], packed.
template <class A>
MJL_INLINE void tile(const float* __restrict a, int64_t a_row, int64_t a_step, const float* __restrict b, int64_t depth,
                     int64_t leaf, const float* start, float* __restrict out) {
  Floats stack[kBlockLevels][kTileRows][2];
  for (int64_t n = 0;; ++n) {
    const int64_t length = smaller(leaf, depth);
    Floats sum[kTileRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      sum[r][0] = start ? raw_load(start + r * kPanel) : Floats{};
      sum[r][1] = start ? raw_load(start + r * kPanel + kLanes) : Floats{};
    }
    for (int64_t k = 0; k < length; ++k, a += a_step, b += kPanel) {
      const Floats b0 = A::load(b), b1 = A::load(b + kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        const Floats ar = A::value(a[r * a_row]);
        sum[r][0] = A::fma(ar, b0, sum[r][0]);
        sum[r][1] = A::fma(ar, b1, sum[r][1]);
      }
    }
    depth -= length;
    const bool last = depth == 0;
    int level = 0;
    for (int64_t rest = n; last ? rest != 0 : (rest & 1) != 0; rest >>= 1, ++level) {
      if ((rest & 1) == 0) continue;
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        sum[r][0] = A::add(stack[level][r][0], sum[r][0]);
        sum[r][1] = A::add(stack[level][r][1], sum[r][1]);
      }
    }
    if (last) {
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        A::store(out + r * kPanel, sum[r][0]);
        A::store(out + r * kPanel + kLanes, sum[r][1]);
      }
      return;
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      stack[level][r][0] = sum[r][0];
      stack[level][r][1] = sum[r][1];
    }
  }
}

// The part of one product that a slice covers.
struct Part {
  int64_t first_panel, panels;  // of the product's columns
  int64_t depth;                // sum of k over the terms
  float* packed;                // [panels][depth][kPanel]
  int64_t block_rows, row_blocks, groups, group_panels;
  int64_t first_task;
};

// Where tile (row, panel) of a group's partial sums lies at a level of the binary counter.
MJL_INLINE float* partial(float* partials, int64_t level, int64_t tiles, int64_t tile_index) {
  return partials + (level * tiles + tile_index) * kTile;
}

void compute(const Product& p, const Part& part, int64_t task, float* space) {
  const int64_t row = task / part.groups * part.block_rows, rows = smaller(part.block_rows, p.m - row);
  const int64_t first = task % part.groups * part.group_panels;
  const int64_t end = smaller(first + part.group_panels, part.panels);
  const int64_t tiles = ceil_div(rows, kTileRows);
  // The thread's space: partial sums first, then the results of one panel, then the packed left-hand side.
  float* const partials = space;
  float* const results = partials + kLevels * kBlockRows * kGroupPanels * kPanel;
  float* const left = results + kBlockRows * kPanel;

  for (int64_t group = first; group < end; group += kGroupPanels) {
    const int64_t group_end = smaller(group + kGroupPanels, end);
    const int64_t group_tiles = (group_end - group) * tiles;
    int64_t term_offset = 0;
    for (int t = 0; t < p.term_count; ++t) {
      const Term& term = p.terms[t];
      const Blocking blocking = blocking_of(term.k, p.rule);
      const bool chain = p.rule == Contraction::chain;
      int64_t block = 0;
      for (int64_t k = 0; k < term.k; k += blocking.depth, ++block) {
        const int64_t depth = smaller(blocking.depth, term.k - k);
        const bool last = k + depth == term.k;
        // Rows that are contiguous in k are read where they are; others, and a last tile that is not full, are packed.
        const float* const a = term.a.data + row * term.a.row_stride + k * term.a.col_stride;
        const int64_t in_place = term.a.col_stride == 1 ? rows / kTileRows : 0;
        for (int64_t i = in_place; i < tiles; ++i)
          pack<kTileRows>(a + i * kTileRows * term.a.row_stride, term.a.row_stride, term.a.col_stride,
                          smaller(kTileRows, rows - i * kTileRows), depth, left + i * kTileRows * depth);
        for (int64_t panel = group; panel < group_end; ++panel) {
          const float* const right = part.packed + (panel * part.depth + term_offset + k) * kPanel;
          const int64_t first_tile = (panel - group) * tiles;
          const int64_t column = (part.first_panel + panel) * kPanel, columns = smaller(kPanel, p.n - column);
          if (chain && block == 0 && p.resume)
            for (int64_t r = 0; r < rows; ++r)
              for (int64_t j = 0; j < columns; ++j)
                partial(partials, 0, group_tiles, first_tile + r / kTileRows)[r % kTileRows * kPanel + j] =
                    p.c[(row + r) * p.n + column + j];
          const bool resumed = chain && (block > 0 || p.resume);
          exact([&](auto arithmetic) {
            using A = decltype(arithmetic);
            const auto start = [&](int64_t i) {
              return resumed ? partial(partials, 0, group_tiles, first_tile + i) : nullptr;
            };
            for (int64_t i = 0; i < in_place; ++i)
              tile<A>(a + i * kTileRows * term.a.row_stride, term.a.row_stride, 1, right, depth, blocking.leaf,
                      start(i), results + i * kTile);
            for (int64_t i = in_place; i < tiles; ++i)
              tile<A>(left + i * kTileRows * depth, 1, kTileRows, right, depth, blocking.leaf, start(i),
                      results + i * kTile);
          });
          // The block's sums join those of earlier blocks, or are final.
          using A = Arith<true>;
          for (int64_t i = 0; i < tiles; ++i) {
            float* const sums = results + i * kTile;
            int64_t level = 0;
            for (int64_t rest = chain ? 0 : block; last ? rest != 0 : (rest & 1) != 0; rest >>= 1, ++level) {
              if ((rest & 1) == 0) continue;
              const float* const earlier = partial(partials, level, group_tiles, first_tile + i);
              for (int64_t j = 0; j < kTile; j += kLanes)
                raw_store(sums + j, A::add(raw_load(earlier + j), raw_load(sums + j)));
            }
            if (!last) {
              float* const keep = partial(partials, level, group_tiles, first_tile + i);
              for (int64_t j = 0; j < kTile; j += kLanes) raw_store(keep + j, raw_load(sums + j));
              continue;
            }
            for (int64_t r = 0; r < smaller(kTileRows, rows - i * kTileRows); ++r) {
              const int64_t at = (row + i * kTileRows + r) * p.n + column;
              for (int64_t j = 0; j < columns; j += kLanes) {
                const int lanes = int(smaller(kLanes, columns - j));
                const bool full = lanes == kLanes;
                Floats sum = raw_load(sums + r * kPanel + j);
                if (t > 0) sum = A::add(full ? raw_load(p.c + at + j) : raw_load(p.c + at + j, lanes), sum);
                if (p.residual && t + 1 == p.term_count)
                  sum = A::add(full ? A::load(p.residual + at + j) : A::load(p.residual + at + j, lanes), sum);
                full ? raw_store(p.c + at + j, sum) : raw_store(p.c + at + j, sum, lanes);
              }
            }
          }
        }
      }
      term_offset += term.k;
    }
  }
}

}  // namespace

int64_t gemm_shared_floats(int64_t longest_terms) { return larger(kSharedFloats, longest_terms * kPanel); }

int64_t gemm_thread_floats(int64_t k) {
  const int64_t depth = larger(kBlockDepth, leaf_length(k));
  return kLevels * kBlockRows * kGroupPanels * kPanel + kBlockRows * kPanel + kBlockRows * depth;
}

void multiply(const GemmSpace& space, const Product* products, int count) {
  int64_t cycles = 0;
  for (int i = 0; i < count; ++i)
    for (int t = 0; t < products[i].term_count; ++t)  // a panel is two vectors, of which a cycle does two
      cycles += ceil_div(products[i].n, kPanel) * products[i].terms[t].k * products[i].m;
  const int64_t threads = Pool::worth_sharing(cycles) ? space.pool.threads() : 1;
  Part parts[4];
  int product = 0;
  int64_t panel = 0;  // of `product`, the first not yet done
  while (product < count) {
    // A slice: as many panels as fit the shared space.
    const int first_product = product;
    int64_t used = 0, slice_panels = 0, tasks = 0;
    int parts_count = 0;
    for (; product < count; ++product, panel = 0) {
      const Product& p = products[product];
      Part& part = parts[parts_count];
      part.depth = 0;
      for (int t = 0; t < p.term_count; ++t) part.depth += p.terms[t].k;
      const int64_t all = ceil_div(p.n, kPanel);
      part.first_panel = panel;
      part.panels = smaller(all - panel, (space.shared_floats - used) / (part.depth * kPanel));
      if (part.panels == 0) break;
      part.packed = space.shared + used;
      used += part.panels * part.depth * kPanel;
      slice_panels += part.panels;
      part.block_rows = smaller(kBlockRows, round_up(ceil_div(p.m, threads > 1 ? 2 * threads : 1), kTileRows));
      part.row_blocks = ceil_div(p.m, part.block_rows);
      part.groups = threads > 1 ? smaller(part.panels, ceil_div(2 * threads, part.row_blocks * count)) : 1;
      part.group_panels = ceil_div(part.panels, part.groups);
      part.groups = ceil_div(part.panels, part.group_panels);
      part.first_task = tasks;
      tasks += part.row_blocks * part.groups;
      ++parts_count;
      panel += part.panels;
      if (panel < all) break;
    }

    auto pack_panel = [&](int64_t task) {
      int i = 0;
      while (task >= parts[i].panels) task -= parts[i++].panels;
      const Product& p = products[first_product + i];
      const int64_t column = (parts[i].first_panel + task) * kPanel;
      float* to = parts[i].packed + task * parts[i].depth * kPanel;
      for (int t = 0; t < p.term_count; ++t) {
        const Term& term = p.terms[t];
        pack<kPanel>(term.b.data + column * term.b.col_stride, term.b.col_stride, term.b.row_stride,
                     smaller(kPanel, p.n - column), term.k, to);
        to += term.k * kPanel;
      }
    };
    space.pool.run(
        slice_panels, used / 4, [](void* f, int64_t task, int) { (*static_cast<decltype(pack_panel)*>(f))(task); },
        &pack_panel);

    auto compute_task = [&](int64_t task, int thread) {
      int i = parts_count - 1;
      while (task < parts[i].first_task) --i;
      compute(products[first_product + i], parts[i], task - parts[i].first_task,
              space.thread + thread * space.thread_floats);
    };
    space.pool.run(
        tasks, cycles,
        [](void* f, int64_t task, int thread) { (*static_cast<decltype(compute_task)*>(f))(task, thread); },
        &compute_task);
    if (space.pool.cancelled()) return;
  }
}

}  // namespace mjl::cpu::MJL_UNIT
