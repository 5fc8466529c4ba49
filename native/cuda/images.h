// SPDX-License-Identifier: Apache-2.0
#ifndef MJL_CUDA_IMAGES_H
#define MJL_CUDA_IMAGES_H

#include <vector>

#include "gpu/driver.h"

namespace mjl::cuda {

std::vector<gpu::Image> images();  // empty when the library was built without nvcc

// What the images hold, such as "sm_80 sm_90 compute_90": machine code runs on devices of the same major version and at
// least the minor one, compute_ code on everything from there on.
extern const char* const architectures;

}  // namespace mjl::cuda

#endif
