/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults on demand, for tests/test_faults.py: what the library of probe.h takes from the system goes through here.
 */
#ifndef MOJOLEARN_FAULTS_H
#define MOJOLEARN_FAULTS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PROBE_API __attribute__((visibility("default")))

enum {
  FAULTS_BLOCK = 0,  /* blocks of the backend's memory */
  FAULTS_OBJECT = 1, /* operator new */
  FAULTS_THREAD = 2  /* thread starts */
};

/* Counts what is asked for from now on, and refuses the n-th request of a kind (1 is the next; 0: none), and where
 * `persistent` is not 0 every later one too. */
PROBE_API void faults_plan(int32_t kind, int64_t n, int32_t persistent);

/* Requests of a kind since it was last planned. */
PROBE_API int64_t faults_requests(int32_t kind);

/* What is held now: requests of a kind granted and not given back. Threads count until they end. */
PROBE_API int64_t faults_held(int32_t kind);

enum { FAULTS_CLOCK_RIGHT = 0, FAULTS_CLOCK_STILL = 1, FAULTS_CLOCK_BACK = 2, FAULTS_CLOCK_WILD = 3 };

/* A clock that is right, stands still, runs backwards, or jumps by days in both directions. */
PROBE_API void faults_clock(int32_t behaviour);

#ifdef __cplusplus
}
#endif

#endif /* MOJOLEARN_FAULTS_H */
