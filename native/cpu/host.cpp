// SPDX-License-Identifier: Apache-2.0
#include "cpu/host.h"

#include <sys/mman.h>
#include <time.h>

#include <cstdlib>

namespace mjl::cpu {
namespace {

constexpr uint64_t kLargePage = 2 << 20;

// Large blocks in large pages, where the system gives them: a step touches all of its memory, and with small pages it
// would spend much of its time on their addresses.
void* system_allocate(uint64_t bytes) {
  const uint64_t page = bytes >= kLargePage ? kLargePage : 64;
  if (bytes > UINT64_MAX - page) return nullptr;
  const uint64_t size = (bytes + page - 1) / page * page;
  void* const memory = std::aligned_alloc(page, size);
  if (memory && page == kLargePage) madvise(memory, size, MADV_HUGEPAGE);  // a wish: it may be refused
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
