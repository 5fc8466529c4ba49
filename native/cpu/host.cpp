// SPDX-License-Identifier: Apache-2.0
#include "cpu/host.h"

#include <sys/mman.h>
#include <time.h>

#include <cstdlib>

namespace mjl::cpu {
namespace {

constexpr uint64_t kLargePage = 2 << 20;

// Large blocks in large pages, where the system gives them: a step touches all of its memory, and with small pages it
// would spend much of its time on their addresses. The end of a block stays in small ones, so that it takes no more
// memory than it says.
void* system_allocate(uint64_t bytes) {
  const uint64_t large = bytes / kLargePage * kLargePage;
  void* memory;
  if (posix_memalign(&memory, large ? kLargePage : 64, bytes) != 0) return nullptr;
  if (large) madvise(memory, large, MADV_HUGEPAGE);  // a wish: it may be refused
  return memory;
}

int system_start_thread(pthread_t* thread, void* (*body)(void*), void* argument) {
  return pthread_create(thread, nullptr, body, argument);
}

uint64_t system_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);  // some milliseconds are fine enough here, and it is cheap
  return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
}

const Host kSystem = {system_allocate, std::free, system_start_thread, system_nanoseconds};
const Host* current = &kSystem;

}  // namespace

const Host& host() { return *current; }
void set_host(const Host* table) { current = table ? table : &kSystem; }

}  // namespace mjl::cpu
