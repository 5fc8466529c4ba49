// SPDX-License-Identifier: Apache-2.0
//
// Compares the product's operations with the reference's, bit for bit, on processors that the tests in Python do not
// reach: compare PROBE_LIBRARY REFERENCE_LIBRARY. The inputs lie near the edges of the arithmetic: subnormals,
// products just below 2^-126, differences that are exact subnormals, zeros of both signs.
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "probe.h"

namespace {

typedef std::vector<float> Floats;
typedef std::vector<int32_t> Ints;

std::mt19937 random_bits(1);

int between(int low, int high) { return low + int(random_bits() % unsigned(high - low + 1)); }

// +-2^e, e from low to high, times 1, 1 - 2^-24, 1 - 2^-23 or a random mantissa; some zeros of both signs.
Floats near(int64_t count, int low, int high) {
  Floats values(static_cast<size_t>(count));
  for (float& x : values) {
    const double size = between(0, 9) < 7 ? 1.0 - between(0, 2) * 0x1p-24 : 1.0 + random_bits() * 0x1p-32;
    x = between(0, 9) == 0 ? 0.0f : float(std::ldexp(size, between(low, high)));
    if (random_bits() & 1) x = -x;
  }
  return values;
}

// Exponents that make products and sums cross the edge: both factors near 2^-63, one of them tiny, or neither.
struct Range {
  int a_low, a_high, b_low, b_high;
};
const Range kRanges[] = {{-65, -61, -65, -61}, {-127, -120, -3, 3},   {-3, 3, -127, -120},
                         {-149, -126, 0, 20},  {-110, -90, -36, -16}, {-4, 2, -4, 2}};

struct Libraries {
  void* probe;
  void* reference;
  int passed = 0, failed = 0;

  // call(function, outputs) runs one operation of either library.
  template <class Function>
  void compare(const char* name, std::initializer_list<int64_t> sizes,
               const std::function<int32_t(Function*, std::vector<Floats>&)>& call) {
    std::vector<Floats> out[2];
    int32_t status[2];
    for (int i = 0; i < 2; ++i) {
      for (const int64_t size : sizes) out[i].emplace_back(size_t(size), 1.0f);
      status[i] = call(reinterpret_cast<Function*>(dlsym(i == 0 ? probe : reference, name)), out[i]);
    }
    bool same = status[0] == 0 && status[1] == 0;
    for (size_t i = 0; i < sizes.size(); ++i)
      same = same && std::memcmp(out[0][i].data(), out[1][i].data(), out[0][i].size() * sizeof(float)) == 0;
    ++(same ? passed : failed);
    if (!same) std::printf("%s differs (status %d, %d)\n", name, int(status[0]), int(status[1]));
  }
};

#define COMPARE(name, sizes, ...)                  \
  libraries.compare<decltype(name)>(               \
      #name, std::initializer_list<int64_t> sizes, \
      [&](decltype(name)* function, std::vector<Floats>& out) -> int32_t { return function(__VA_ARGS__); })

void compare_all(Libraries& libraries, const Range& r) {
  const int64_t m = between(1, 20), n = between(1, 40), k = between(1, 300), f = 2 * between(1, 9);
  const auto a = [&](int64_t count) { return near(count, r.a_low, r.a_high); };
  const auto b = [&](int64_t count) { return near(count, r.b_low, r.b_high); };

  const Floats left = a(m * k), right = b(k * n);
  for (const auto& [ta, tb] : {std::pair(0, 1), std::pair(0, 0), std::pair(1, 0)})
    for (const int rule : {PROBE_RULE_TREE, PROBE_RULE_CHAIN})
      COMPARE(probe_contract, {m * n}, rule, ta, tb, m, n, k, left.data(), right.data(), out[0].data());

  const Floats x = a(m * n), w = b(n), dy = b(m * n), residual = a(m * n), rstd = near(m, -2, 10);
  COMPARE(probe_norm_forward, ({m * n, m}), m, n, x.data(), w.data(), out[0].data(), out[1].data());
  COMPARE(probe_norm_backward, ({m * n, n}), m, n, x.data(), rstd.data(), w.data(), dy.data(), residual.data(),
          out[0].data(), out[1].data());

  const Floats turned = a(2 * m * 3 * f);
  for (const int backward : {0, 1})
    COMPARE(probe_rotary, {2 * m * 3 * f}, backward, 2, m, 3, f, turned.data(), out[0].data());

  const Floats q = a(m * 2 * f), key = b(m * f), v = a(m * f), d = b(m * 2 * f);
  COMPARE(probe_attention_forward, {m * 2 * f}, 1, m, 2, 1, f, q.data(), key.data(), v.data(), out[0].data());
  COMPARE(probe_attention_backward, ({m * 2 * f, m * f, m * f}), 1, m, 2, 1, f, q.data(), key.data(), v.data(),
          d.data(), out[0].data(), out[1].data(), out[2].data());

  COMPARE(probe_swiglu_forward, {m * n}, m * n, x.data(), dy.data(), out[0].data());
  COMPARE(probe_swiglu_backward, ({m * n, m * n}), m * n, x.data(), dy.data(), residual.data(), out[0].data(),
          out[1].data());
  COMPARE(probe_exp, {m * n}, m * n, x.data(), out[0].data());

  const Floats hidden = a(m * f), head = b(n * f);
  Ints ids(static_cast<size_t>(m));
  for (int32_t& id : ids) id = between(0, int(n) - 1);
  for (const int chunked : {0, 1})
    COMPARE(probe_head_loss, ({1, m * f, n * f}), chunked, m, f, n, hidden.data(), head.data(), ids.data(),
            out[0].data(), out[1].data(), out[2].data());
  COMPARE(probe_embed_backward, {n * f}, m, f, n, ids.data(), hidden.data(), out[0].data());

  const Floats p = b(m * n);
  Floats second = a(m * n);
  for (float& value : second) value = std::fabs(value);
  libraries.compare<decltype(probe_adamw)>("probe_adamw", {m * n, m * n, m * n},
                                           [&](decltype(probe_adamw)* function, std::vector<Floats>& out) {
                                             out[0] = p, out[1] = x, out[2] = second;
                                             return function(m * n, 3, 1e-3f, 0.9f, 0.999f, 1e-8f, 0.01f, dy.data(),
                                                             out[0].data(), out[1].data(), out[2].data());
                                           });
}

}  // namespace

int main(int argc, char** argv) {
  Libraries libraries = {argc == 3 ? dlopen(argv[1], RTLD_NOW) : nullptr,
                         argc == 3 ? dlopen(argv[2], RTLD_NOW) : nullptr};
  if (!libraries.probe || !libraries.reference) {
    std::fprintf(stderr, "usage: compare PROBE_LIBRARY REFERENCE_LIBRARY; %s\n", argc == 3 ? dlerror() : "");
    return 1;
  }
  for (int round = 0; round < 40; ++round)
    for (const Range& range : kRanges) compare_all(libraries, range);
  std::printf("%d passed, %d failed\n", libraries.passed, libraries.failed);
  return libraries.failed != 0 || libraries.passed == 0;
}
