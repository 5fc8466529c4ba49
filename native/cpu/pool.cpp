// SPDX-License-Identifier: Apache-2.0
#include "cpu/pool.h"

#include <sched.h>
#include <signal.h>

#include "cpu/float_mode.h"
#include "cpu/host.h"

namespace mjl::cpu {
namespace {

constexpr uint64_t kPollEvery = 20'000'000;  // ns
constexpr int kMostUnpolled = 1000;          // chances to poll, in case that the clock stands still
constexpr uint64_t kClosed = 0xffffffff;     // no task has this number
constexpr int kSpins = 4000;  // some 100 us: longer than the pause between two steps, shorter than a time slice

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

Pool::~Pool() { finish_workers(); }

void Pool::finish_workers() {
  if (workers_ == 0) return;
  stopping_ = true;
  pthread_mutex_lock(&mutex_);
  pthread_cond_broadcast(&wake_);
  pthread_mutex_unlock(&mutex_);
  for (int i = 0; i < workers_; ++i) pthread_join(thread_[i], nullptr);
  workers_ = 0;
}

bool Pool::start(int threads, Poll poll, void* poll_context) {
  poll_ = poll;
  poll_context_ = poll_context;
  clear_cancelled();
  // Signals belong to the threads of the program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  while (started && workers_ < threads - 1 && workers_ < kMaxWorkers) {
    started = host().start_thread(&thread_[workers_], enter, this) == 0;
    if (started) ++workers_;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!started) finish_workers();
  return started;
}

void* Pool::enter(void* self) {
  const FloatMode mode;
  Pool* pool = static_cast<Pool*>(self);
  pool->work(pool->next_thread_.fetch_add(1));
  return nullptr;
}

bool Pool::take(uint32_t epoch, int64_t* task) {
  const int64_t count = count_.load(std::memory_order_relaxed);
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (uint32_t(ticket >> 32) == epoch && int64_t(uint32_t(ticket)) < count) {
    if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
      *task = int64_t(uint32_t(ticket));
      return true;
    }
  }
  return false;
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    uint32_t epoch;
    while ((epoch = uint32_t(ticket_.load(std::memory_order_acquire) >> 32)) == seen) {
      if (stopping_.load(std::memory_order_relaxed)) return;
      if (++spins < kSpins) {
        pause();
        continue;
      }
      pthread_mutex_lock(&mutex_);
      sleepers_.fetch_add(1);
      while (uint32_t(ticket_.load() >> 32) == seen && !stopping_.load()) pthread_cond_wait(&wake_, &mutex_);
      sleepers_.fetch_sub(1);
      pthread_mutex_unlock(&mutex_);
    }
    seen = epoch;
    // Read before the claim, valid only if the claim succeeds: the fields change only between loops.
    const Body body = body_.load(std::memory_order_relaxed);
    void* const context = context_.load(std::memory_order_relaxed);
    int64_t task;
    while (take(epoch, &task)) {
      if (!cancelled()) body(context, task, thread);
      done_.fetch_add(1, std::memory_order_release);
    }
  }
}

void Pool::run(int64_t count, int64_t cycles, Body body, void* context) {
  if (count <= 0 || cancelled()) return;
  poll();
  if (workers_ == 0 || count == 1 || !worth_sharing(cycles)) {
    for (int64_t task = 0; task < count && !cancelled(); ++task) {
      body(context, task, 0);
      poll();
    }
    return;
  }
  const uint32_t epoch = uint32_t(ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  body_.store(body, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  count_.store(count, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  ticket_.store(uint64_t(epoch) << 32);
  if (sleepers_.load() > 0) {
    pthread_mutex_lock(&mutex_);
    pthread_cond_broadcast(&wake_);
    pthread_mutex_unlock(&mutex_);
  }
  int64_t task;
  while (take(epoch, &task)) {
    if (!cancelled()) body(context, task, 0);
    done_.fetch_add(1, std::memory_order_release);
    poll();
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) != count; ++spins) {
    if (spins < kSpins) {
      pause();
    } else {
      sched_yield();
      poll();
    }
  }
  // Closed before the fields change for the next loop, so that a late worker cannot take a task that does not exist.
  ticket_.store(uint64_t(epoch) << 32 | kClosed, std::memory_order_release);
}

void Pool::poll() {
  if (poll_ == nullptr) return;
  // Seen from a clock that was set back, much time has passed.
  if (host().nanoseconds() - polled_at_ < kPollEvery && ++unpolled_ < kMostUnpolled) return;
  if (poll_(poll_context_) != 0) cancelled_ = true;
  polled_at_ = host().nanoseconds();
  unpolled_ = 0;
}

void Pool::clear_cancelled() {
  cancelled_ = false;
  polled_at_ = host().nanoseconds();
  unpolled_ = 0;
}

}  // namespace mjl::cpu
