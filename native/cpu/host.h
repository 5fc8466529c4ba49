// SPDX-License-Identifier: Apache-2.0
//
// What the CPU backend takes from the operating system, as one table of functions. Tests put their own in its place to
// make the n-th allocation or thread start fail, or time stand still.
#ifndef MJL_CPU_HOST_H
#define MJL_CPU_HOST_H

#include <pthread.h>

#include <cstdint>

namespace mjl::cpu {

struct Host {
  void* (*allocate)(uint64_t bytes);  // aligned to 64 bytes; null when it cannot be had
  void (*release)(void* memory);
  int (*start_thread)(pthread_t* thread, void* (*body)(void*), void* argument);  // 0, or an errno value
  uint64_t (*nanoseconds)();                                                     // monotonic
};

const Host& host();
// Replaces the table, null for the system's own; not while a session is open.
void set_host(const Host* table);

}  // namespace mjl::cpu

#endif
