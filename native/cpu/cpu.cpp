// SPDX-License-Identifier: Apache-2.0
#include "cpu/cpu.h"

#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>

#include "mojolearn.h"

namespace mjl::cpu {

#define X(unit)                 \
  namespace unit {              \
  Backend* make_backend(Pool*); \
  }
MJL_UNIT_LIST
#undef X

namespace {

bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool has(const char* unit) {
  if (std::strcmp(unit, "avx512") == 0) return has_avx512();
  if (std::strcmp(unit, "avx2") == 0) return has_avx2();
  return true;  // what every processor of the architecture has
}

struct Unit {
  const char* name;
  Backend* (*make)(Pool*);
};

#define X(unit) {#unit, unit::make_backend},
const Unit kUnits[] = {MJL_UNIT_LIST};
#undef X

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (colon != std::string::npos && line.compare(0, 10, "model name") == 0) return line.substr(colon + 2);
  }
  return "CPU";
}

}  // namespace

std::string available_units() {
  std::string names;
  for (const Unit& unit : kUnits)
    if (has(unit.name)) names += (names.empty() ? "" : " ") + std::string(unit.name);
  return names;
}

std::string chosen_unit(std::string* problem) {
  const char* const asked = std::getenv("MOJOLEARN_CPU");
  for (const Unit& unit : kUnits)
    if (has(unit.name) && (asked == nullptr || *asked == '\0' || std::strcmp(asked, unit.name) == 0)) return unit.name;
  std::string built;
  for (const Unit& unit : kUnits) built += (built.empty() ? "" : " ") + std::string(unit.name);
  *problem = "MOJOLEARN_CPU asks for the vector unit '" + std::string(asked ? asked : "") +
             "'; this library was built with: " + built + "; this processor (" + processor_name() +
             ") can run: " + available_units();
  return "";
}

int default_threads(std::string* problem) {
  const char* const asked = std::getenv("MOJOLEARN_THREADS");
  if (asked != nullptr && *asked != '\0') {
    char* end;
    const long threads = std::strtol(asked, &end, 10);
    if (*end == '\0' && threads >= 1 && threads <= 256) return int(threads);
    *problem = "MOJOLEARN_THREADS is '" + std::string(asked) + "'; it must be a number from 1 to 256";
    return 0;
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  const int count = CPU_COUNT(&set);
  return count < 1 ? 1 : count > 256 ? 256 : count;
}

void describe_processor(DeviceFacts& facts) {
  facts.vendor = MJL_VENDOR_CPU;
  std::snprintf(facts.name, sizeof facts.name, "%s", processor_name().c_str());
  facts.memory_bytes = uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
}

std::unique_ptr<Backend> open(const std::string& unit, int threads, Pool::Poll poll, void* poll_context,
                              std::string* problem) {
  std::unique_ptr<Pool> pool(new (std::nothrow) Pool);
  if (pool && !pool->start(threads, poll, poll_context)) {
    *problem = "could not start " + std::to_string(threads - 1) +
               " threads beside the calling one; set MOJOLEARN_THREADS to use fewer";
    return nullptr;
  }
  for (const Unit& candidate : kUnits) {
    if (unit != candidate.name || !pool) continue;
    std::unique_ptr<Backend> backend(candidate.make(pool.get()));
    if (backend) {
      (void)pool.release();  // the backend's now
      return backend;
    }
  }
  *problem = "no memory for the CPU backend";
  return nullptr;
}

}  // namespace mjl::cpu
