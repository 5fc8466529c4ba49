// SPDX-License-Identifier: Apache-2.0
#include "faults.h"

#include <errno.h>
#include <time.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "cpu/host.h"

namespace {

struct Resource {
  std::atomic<int64_t> requests{0}, held{0}, first_refused{0}, last_refused{0};

  bool grant() {
    const int64_t n = ++requests;
    if (n >= first_refused && n <= last_refused) return false;
    ++held;
    return true;
  }
};

Resource resources[3];
std::atomic<int32_t> clock_behaviour{FAULTS_CLOCK_RIGHT};
std::atomic<uint64_t> clock_reads{0};

void* allocate(uint64_t bytes) {
  void* memory = nullptr;
  if (!resources[FAULTS_BLOCK].grant()) return nullptr;
  if (posix_memalign(&memory, 64, bytes) != 0) --resources[FAULTS_BLOCK].held;
  return memory;
}

void release(void* memory) {
  if (memory) --resources[FAULTS_BLOCK].held;
  std::free(memory);
}

struct Thread {
  void* (*body)(void*);
  void* argument;
};

void* run_thread(void* memory) {
  const Thread thread = *static_cast<Thread*>(memory);
  std::free(memory);
  void* const result = thread.body(thread.argument);
  --resources[FAULTS_THREAD].held;
  return result;
}

int start_thread(pthread_t* handle, void* (*body)(void*), void* argument) {
  if (!resources[FAULTS_THREAD].grant()) return EAGAIN;
  Thread* const thread = static_cast<Thread*>(std::malloc(sizeof(Thread)));
  *thread = {body, argument};
  return pthread_create(handle, nullptr, run_thread, thread);
}

uint64_t nanoseconds() {
  constexpr uint64_t kDay = 86'400'000'000'000;
  const uint64_t reads = ++clock_reads;
  timespec now;
  switch (clock_behaviour) {
    case FAULTS_CLOCK_STILL:
      return kDay;
    case FAULTS_CLOCK_BACK:
      return 365 * kDay - reads * 1000;
    case FAULTS_CLOCK_WILD:
      return 365 * kDay + (reads % 3 - 1) * kDay;
    default:
      clock_gettime(CLOCK_MONOTONIC, &now);
      return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
  }
}

const mjl::cpu::Host kHost = {allocate, release, start_thread, nanoseconds};
const bool installed = (mjl::cpu::set_host(&kHost), true);

void* new_object(size_t bytes, size_t alignment = alignof(std::max_align_t)) noexcept {
  void* memory = nullptr;
  if (!resources[FAULTS_OBJECT].grant()) return nullptr;
  if (posix_memalign(&memory, alignment, bytes) != 0) --resources[FAULTS_OBJECT].held;
  return memory;
}

void* or_throw(void* memory) {
  if (!memory) throw std::bad_alloc();
  return memory;
}

void delete_object(void* memory) noexcept {
  if (memory) --resources[FAULTS_OBJECT].held;
  std::free(memory);
}

}  // namespace

// All forms that the library uses: the runtime of a sanitizer would bring its own for those that are missing.
void* operator new(size_t bytes) { return or_throw(new_object(bytes)); }
void* operator new[](size_t bytes) { return or_throw(new_object(bytes)); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return new_object(bytes); }
void* operator new(size_t bytes, std::align_val_t alignment) { return or_throw(new_object(bytes, size_t(alignment))); }
void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return new_object(bytes, size_t(alignment));
}
void operator delete(void* memory) noexcept { delete_object(memory); }
void operator delete[](void* memory) noexcept { delete_object(memory); }
void operator delete(void* memory, size_t) noexcept { delete_object(memory); }
void operator delete[](void* memory, size_t) noexcept { delete_object(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { delete_object(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { delete_object(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { delete_object(memory); }
void operator delete(void* memory, std::align_val_t, const std::nothrow_t&) noexcept { delete_object(memory); }

void faults_plan(int32_t kind, int64_t n, int32_t persistent) {
  Resource& r = resources[kind];
  r.requests = 0;
  r.first_refused = n;
  r.last_refused = n != 0 && persistent ? INT64_MAX : n;
}

int64_t faults_requests(int32_t kind) { return resources[kind].requests; }
int64_t faults_held(int32_t kind) { return resources[kind].held; }
void faults_clock(int32_t behaviour) { clock_behaviour = behaviour; }
