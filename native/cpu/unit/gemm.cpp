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
constexpr int64_t kAhead = 16;              // rows to prefetch: they are too far apart for the processor's own guesses
constexpr int64_t kTileGap = 16;            // floats between packed tiles
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

// kTileRows times kPanel sums over `depth` k. Element (r, k) of a is a[r * a_row + k * a_step]; b is packed,
// [depth, kPanel].
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

// Rows [row, row + rows) of a term's left-hand side over [k, k + depth). Whole tiles of rows that are contiguous in k
// are read where they are; the others are packed, each [depth, kTileRows].
struct Left {
  const float* rows;
  int64_t row_stride, in_place;  // the first tile that is packed
  int64_t tile_stride;           // no power of two: tiles that are written side by side would share cache sets
  float* packed;

  Left(const Term& term, int64_t row, int64_t count, int64_t k, int64_t depth, float* space)
      : rows(term.a.data + row * term.a.row_stride + k * term.a.col_stride),
        row_stride(term.a.row_stride),
        in_place(term.a.col_stride == 1 ? count / kTileRows : 0),
        tile_stride(depth * kTileRows + kTileGap),
        packed(space) {
    int64_t tile = in_place;
    if (row_stride == 1) {  // k outermost: it reads whole lines, once
      const int64_t whole = count / kTileRows;
      for (int64_t d = 0; d < depth; ++d) {
        const float* const line = rows + d * term.a.col_stride;
        for (int64_t i = 0; i < whole; ++i) {
          __builtin_prefetch(line + kAhead * term.a.col_stride + i * kTileRows);
          __builtin_memcpy(packed + i * tile_stride + d * kTileRows, line + i * kTileRows, kTileRows * sizeof(float));
        }
      }
      tile = whole;
    }
    for (; tile * kTileRows < count; ++tile)
      pack<kTileRows>(rows + tile * kTileRows * row_stride, row_stride, term.a.col_stride,
                      smaller(kTileRows, count - tile * kTileRows), depth, packed + tile * tile_stride);
  }
};

// A tile's sums over one block of k join those of earlier blocks, which `partials` holds level by level as a binary
// counter does. False if more blocks are to come, true if `sums` is now the whole contraction.
bool join(float* sums, int64_t block, bool last, float* partials, int64_t level_stride) {
  using A = Arith<true>;
  for (int64_t rest = block; last ? rest != 0 : (rest & 1) != 0; rest >>= 1, partials += level_stride)
    if (rest & 1)
      for (int64_t j = 0; j < kTile; j += kLanes)
        raw_store(sums + j, A::add(raw_load(partials + j), raw_load(sums + j)));
  if (!last)
    for (int64_t j = 0; j < kTile; j += kLanes) raw_store(partials + j, raw_load(sums + j));
  return last;
}

// Term `t` of c at (row, column): the first is stored, later ones are added, and the last also meets the residual.
void write(const Product& p, int t, const float* sums, int64_t row, int64_t rows, int64_t column) {
  using A = Arith<true>;
  const int64_t columns = smaller(kPanel, p.n - column);
  const bool with_residual = p.residual && t + 1 == p.term_count;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = (row + r) * p.n + column;
    if (columns == kPanel && t == 0 && !with_residual) {
      __builtin_memcpy(p.c + at, sums + r * kPanel, kPanel * sizeof(float));
      continue;
    }
    for_lanes(0, columns, [&](int64_t j, int lanes) {
      Floats sum = raw_load(sums + r * kPanel + j);
      if (t > 0) sum = A::add(A::load(p.c + at + j, lanes), sum);
      if (with_residual) sum = A::add(A::load(p.residual + at + j, lanes), sum);
      A::store(p.c + at + j, sum, lanes);
    });
  }
}

void compute(const Product& p, const Part& part, int64_t task, float* space) {
  const int64_t row = task / part.groups * part.block_rows, rows = smaller(part.block_rows, p.m - row);
  const int64_t first = task % part.groups * part.group_panels;
  const int64_t end = smaller(first + part.group_panels, part.panels);
  const int64_t tiles = ceil_div(rows, kTileRows);
  const bool chain = p.rule == Contraction::chain;
  // The thread's space: partial sums first, then the results of one panel, then the packed left-hand side.
  float* const partials = space;
  float* const results = partials + kLevels * kBlockRows * kGroupPanels * kPanel;
  float* const left_space = results + kBlockRows * kPanel;

  for (int64_t group = first; group < end; group += kGroupPanels) {
    const int64_t group_end = smaller(group + kGroupPanels, end);
    const int64_t level_stride = (group_end - group) * tiles * kTile;
    int64_t term_offset = 0;
    for (int t = 0; t < p.term_count; ++t) {
      const Term& term = p.terms[t];
      const Blocking blocking = blocking_of(term.k, p.rule);
      int64_t block = 0;
      for (int64_t k = 0; k < term.k; k += blocking.depth, ++block) {
        const int64_t depth = smaller(blocking.depth, term.k - k);
        const bool last = k + depth == term.k, resumed = chain && (block > 0 || p.resume);
        const Left left(term, row, rows, k, depth, left_space);
        for (int64_t panel = group; panel < group_end; ++panel) {
          const float* const right = part.packed + (panel * part.depth + term_offset + k) * kPanel;
          float* const earlier = partials + (panel - group) * tiles * kTile;
          const int64_t column = (part.first_panel + panel) * kPanel;
          if (p.resume && block == 0)
            for (int64_t r = 0; r < rows; ++r)
              __builtin_memcpy(earlier + r * kPanel, p.c + (row + r) * p.n + column,
                               uint64_t(smaller(kPanel, p.n - column)) * sizeof(float));
          exact([&](auto arithmetic) {
            using A = decltype(arithmetic);
            const auto start = [&](int64_t i) { return resumed ? earlier + i * kTile : nullptr; };
            for (int64_t i = 0; i < left.in_place; ++i)
              tile<A>(left.rows + i * kTileRows * left.row_stride, left.row_stride, 1, right, depth, blocking.leaf,
                      start(i), results + i * kTile);
            for (int64_t i = left.in_place; i < tiles; ++i)
              tile<A>(left.packed + i * left.tile_stride, 1, kTileRows, right, depth, blocking.leaf, start(i),
                      results + i * kTile);
          });
          for (int64_t i = 0; i < tiles; ++i)
            if (join(results + i * kTile, chain ? 0 : block, last, earlier + i * kTile, level_stride))
              write(p, t, results + i * kTile, row + i * kTileRows, smaller(kTileRows, rows - i * kTileRows), column);
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
  return kLevels * kBlockRows * kGroupPanels * kPanel + kBlockRows * kPanel + kBlockRows * depth +
         kBlockRows / kTileRows * kTileGap;
}

void multiply(const GemmSpace& space, const Product* products, int count, RowHook before, RowHook after) {
  const bool by_rows = before.run || after.run;  // then a task is a block of rows of all products
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
      part.groups = threads > 1 && !by_rows ? smaller(part.panels, ceil_div(2 * threads, part.row_blocks * count)) : 1;
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

    const bool first_slice = first_product == 0 && parts[0].first_panel == 0, last_slice = product == count;
    auto compute_task = [&](int64_t task, int thread) {
      float* const own = space.thread + thread * space.thread_floats;
      if (by_rows) {
        const int64_t row = task * parts[0].block_rows;
        const Rows rows = {row, smaller(parts[0].block_rows, products[0].m - row), thread};
        if (before.run && first_slice) before.run(before.context, rows);
        for (int i = 0; i < parts_count; ++i) compute(products[first_product + i], parts[i], task, own);
        if (after.run && last_slice) after.run(after.context, rows);
        return;
      }
      int i = parts_count - 1;
      while (task < parts[i].first_task) --i;
      compute(products[first_product + i], parts[i], task - parts[i].first_task, own);
    };
    space.pool.run(
        by_rows ? parts[0].row_blocks : tasks, cycles,
        [](void* f, int64_t task, int thread) { (*static_cast<decltype(compute_task)*>(f))(task, thread); },
        &compute_task);
    if (space.pool.cancelled()) return;
  }
}

}  // namespace mjl::cpu::MJL_UNIT
