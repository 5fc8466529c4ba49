// SPDX-License-Identifier: Apache-2.0
//
// The kernels, compiled by nvcc, as read-only data. MJL_CUDA_IMAGES lists them as X(name, file); it is empty where the
// library was built without nvcc.
#include "cuda/images.h"

#define X(name, file)                                                                                            \
  asm(".pushsection .rodata\n.balign 64\nmjl_cuda_" #name ":\n.incbin \"" file "\"\n.balign 64\n.popsection\n"); \
  extern "C" __attribute__((visibility("hidden"))) const char mjl_cuda_##name[];
MJL_CUDA_IMAGES
#undef X

namespace mjl::cuda {

std::vector<gpu::Image> images() {
  return {
#define X(name, file) {#name, mjl_cuda_##name},
      MJL_CUDA_IMAGES
#undef X
  };
}

const char* const architectures = MJL_CUDA_ARCHITECTURES;

}  // namespace mjl::cuda
