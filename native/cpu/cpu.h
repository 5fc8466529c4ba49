// SPDX-License-Identifier: Apache-2.0
//
// The CPU as a device: its vector units, and the backend that uses the best of them.
#ifndef MJL_CPU_CPU_H
#define MJL_CPU_CPU_H

#include <cstdint>
#include <memory>
#include <string>

#include "cpu/pool.h"
#include "ops.h"

namespace mjl::cpu {

// The vector units that were built in and that this processor has, best first, such as "avx512 avx2 plain".
std::string available_units();

// The unit that MOJOLEARN_CPU names, else the best; "" with `problem` set if the processor lacks it.
std::string chosen_unit(std::string* problem);

// MOJOLEARN_THREADS, else one for each processor that the calling thread may run on; 0 with `problem` set if that is no
// number.
int default_threads(std::string* problem);

// Name and memory.
void describe_processor(DeviceFacts& facts);

// Null with `problem` set if memory or threads cannot be had.
std::unique_ptr<Backend> open(const std::string& unit, int threads, Pool::Poll poll, void* poll_context,
                              std::string* problem);

}  // namespace mjl::cpu

#endif
