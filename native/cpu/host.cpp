// SPDX-License-Identifier: Apache-2.0
#include "cpu/host.h"

#include <time.h>

#include <cstdlib>

namespace mjl::cpu {
namespace {

void* system_allocate(uint64_t bytes) {
  if (bytes > UINT64_MAX - 63) return nullptr;
  return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
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
