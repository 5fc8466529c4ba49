// SPDX-License-Identifier: Apache-2.0
//
// How a large matrix product is cut into units of work. No cut changes a bit: a unit is an aligned, power-of-two run of
// leaves, which is a subtree of the contraction's tree.
#include "gpu/gemm.h"

#include <initializer_list>

#include "kernels/gemm.h"

namespace mjl::gpu {
namespace {

constexpr int64_t kPlenty = int64_t(1) << 40;

// Thousands of cycles with every slot busy, measured on an H200: one leaf of 128, a unit's start and end, one meeting.
struct Costs {
  double leaf, fixed, meet;
};

template <class Tile>
GemmPlan plan_with(int64_t m, int64_t n, int64_t k, Contraction rule, int multiprocessors, const GemmSpace& space,
                   Costs costs, bool split_allowed) {
  GemmPlan base = {};
  base.large_tile = Tile::kM == LargeTile::kM;
  base.tiles_m = int32_t(ceil_div(m, Tile::kM));
  base.tiles_n = int32_t(ceil_div(n, Tile::kN));
  base.leaf = int32_t(rule == Contraction::chain ? k : leaf_length(k));
  base.leaves = int32_t(ceil_div(k, base.leaf));
  const int64_t slots = int64_t(multiprocessors) * Tile::kCtas, tiles = int64_t(base.tiles_m) * base.tiles_n;
  const double leaf = costs.leaf * base.leaf / 128;
  GemmPlan best = base;
  best.cost = 1e300;
  // The tiles that run whole: all, all that fill the device evenly, or none. The others are split, ever more finely.
  for (const int64_t whole : {tiles, tiles / slots * slots, int64_t(0)}) {
    const int64_t rest = tiles - whole;
    if (rest != 0 && !split_allowed) continue;
    for (int64_t u = 1; rest ? u < 2 * base.leaves : u == 1; u *= 2) {
      const int64_t run = rest ? smaller(u, base.leaves) : base.leaves, splits = rest ? ceil_div(base.leaves, run) : 1;
      const int64_t parts = rest * splits;
      GemmPlan p = base;
      p.whole = int32_t(whole);
      p.splits = int32_t(splits);
      p.split_leaves = int32_t(run);
      p.units = int32_t(whole + parts);
      p.grid = int32_t(smaller(slots, p.units));
      p.levels = 1;
      while ((int64_t(1) << p.levels) < (whole ? base.leaves : run)) ++p.levels;
      p.stack_floats = int64_t(p.grid) * p.levels * Tile::kM * Tile::kN;
      if (splits > 1) p.flag_count = 2 * parts;
      p.node_floats = p.flag_count * Tile::kM * Tile::kN;
      p.cost = double(ceil_div(whole, slots)) * (base.leaves * leaf + costs.fixed) +
               double(ceil_div(parts, slots)) * (double(run) * leaf + costs.fixed + (splits > 1 ? 2 * costs.meet : 0));
      if (p.stack_floats > space.stack_floats || p.node_floats > space.node_floats || p.flag_count > space.flag_count)
        continue;
      if (p.cost < best.cost) best = p;
    }
  }
  return best;
}

GemmPlan cheapest(int64_t m, int64_t n, int64_t k, Contraction rule, int multiprocessors, const GemmSpace& space,
                  bool split_allowed) {
  const GemmPlan large = plan_with<LargeTile>(m, n, k, rule, multiprocessors, space, {53, 8, 6}, split_allowed);
  const GemmPlan medium = plan_with<MediumTile>(m, n, k, rule, multiprocessors, space, {33, 6, 4}, split_allowed);
  return large.cost <= medium.cost ? large : medium;
}

}  // namespace

bool is_large(int64_t m, int64_t n, int64_t k) { return m >= 64 && n >= 64 && k >= 64 && m * n * k >= (1 << 23); }

GemmPlan plan_gemm(int64_t m, int64_t n, int64_t k, Contraction rule, int multiprocessors, const GemmSpace& space) {
  return cheapest(m, n, k, rule, multiprocessors, space, true);
}

GemmSpace gemm_space(int64_t m, int64_t n, int64_t k, Contraction rule, int multiprocessors) {
  GemmSpace need = {};
  if (!is_large(m, n, k)) return need;
  const GemmSpace plenty = {nullptr, nullptr, nullptr, kPlenty, kPlenty, kPlenty};
  // The unsplit cut with the medium tile needs no more for fewer rows, so that one cut always fits.
  const GemmPlan unsplit = plan_with<MediumTile>(m, n, k, rule, multiprocessors, plenty, {1, 1, 1}, false);
  for (const GemmPlan& p : {unsplit, cheapest(m, n, k, rule, multiprocessors, plenty, true)}) {
    need.stack_floats = larger(need.stack_floats, p.stack_floats);
    need.node_floats = larger(need.node_floats, p.node_floats);
    need.flag_count = larger(need.flag_count, p.flag_count);
  }
  return need;
}

}  // namespace mjl::gpu
