// SPDX-License-Identifier: Apache-2.0
//
// A device with the kernels loaded on it. All sessions of a process on one device share it, until it is poisoned.
#ifndef MJL_GPU_CONTEXT_H
#define MJL_GPU_CONTEXT_H

#include <memory>
#include <string>
#include <type_traits>

#include "gpu/driver.h"
#include "kernels/arguments.h"

namespace mjl::gpu {

struct DeviceInfo {
  int architecture;  // major * 10 + minor
  int multiprocessors;
  uint64_t memory_bytes;
  char name[96];
};

// False, with `problem` saying what was looked for and found, if there is no such device or it cannot run the kernels.
bool describe(const Driver& driver, int index, DeviceInfo* info, std::string* problem);

class Context {
 public:
  // The shared one, made at the first call; throws Error.
  static std::shared_ptr<Context> of(const Driver& driver, int index);
  Context(const Driver& driver, int index);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Driver& driver;
  const int index;
  DeviceInfo info = {};

  Handle function(Kernel kernel) const { return functions_[int(kernel)]; }
  // An error that the device does not recover from: sessions on this context are lost, the next one opens a new one.
  void poison() { poisoned_ = true; }
  bool poisoned() const { return poisoned_; }

  // The context is the calling thread's current one as long as this lives.
  class Current {
   public:
    explicit Current(const Context& context);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Driver& driver_;
  };

 private:
  void load_kernels();

  Handle handle_ = nullptr;
  Handle functions_[
#define X(file, name) +1
      MJL_GPU_KERNELS(X)
#undef X
  ] = {};
  bool poisoned_ = false;
};

// "cuMemAlloc: CUDA_ERROR_... (700)"
std::string error_text(const Driver& driver, const char* what, int result);

}  // namespace mjl::gpu

#endif
