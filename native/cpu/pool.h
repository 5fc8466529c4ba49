// SPDX-License-Identifier: Apache-2.0
//
// A few threads that share the tasks of one parallel loop after another. Which thread takes a task never matters to a
// result.
#ifndef MJL_CPU_POOL_H
#define MJL_CPU_POOL_H

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace mjl::cpu {

class Pool {
 public:
  typedef int32_t (*Poll)(void* context);
  typedef void (*Body)(void* context, int64_t task, int thread);

  Pool() = default;
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Starts threads - 1 workers (the caller is the last one). False, with everything undone, if a thread does not start.
  bool start(int threads, Poll poll, void* poll_context);
  int threads() const { return workers_ + 1; }

  // Whether work of so many cycles is worth waking others for: handing it over costs about a microsecond, and what they
  // write must come back from their caches.
  static bool worth_sharing(int64_t cycles) { return cycles >= 200'000; }

  // Runs body(context, task, thread) for every task in [0, count) and returns when all are done; alone if the `cycles`
  // of all tasks together are too few to share. Polls now and then from the calling thread; once cancelled, this and
  // later loops skip their tasks until clear_cancelled().
  void run(int64_t count, int64_t cycles, Body body, void* context);

  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  // Also restarts the clock after which the next poll is due.
  void clear_cancelled();

  // In a forked child the workers do not exist: forget them instead of waiting for them.
  void abandon() { workers_ = 0; }

 private:
  static constexpr int kMaxWorkers = 255;

  static void* enter(void* self);
  void work(int thread);
  bool take(uint32_t epoch, int64_t* task);
  void poll();
  void finish_workers();

  // The loop in progress. `ticket_` holds its epoch in the upper half and the next task in the lower; a worker that
  // claims a task by compare-and-swap therefore knows that the fields below belong to the same loop.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int64_t> count_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> cancelled_{false};
  std::atomic<int> sleepers_{0};
  std::atomic<int> next_thread_{1};

  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake_ = PTHREAD_COND_INITIALIZER;
  pthread_t thread_[kMaxWorkers];
  int workers_ = 0;
  Poll poll_ = nullptr;
  void* poll_context_ = nullptr;
  uint64_t polled_at_ = 0;
  int unpolled_ = 0;
};

}  // namespace mjl::cpu

#endif
