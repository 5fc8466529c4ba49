// SPDX-License-Identifier: Apache-2.0
#ifndef MJL_CUDA_CUDA_H
#define MJL_CUDA_CUDA_H

#include <string>

#include "gpu/driver.h"

namespace mjl::cuda {

// NVIDIA's driver, opened at the first call; null with `problem` saying what was looked for and found.
const gpu::Driver* driver(std::string* problem);

}  // namespace mjl::cuda

#endif
