// SPDX-License-Identifier: Apache-2.0
#include "gpu/context.h"

#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "error.h"
#include "kernels/gemm.h"
#include "mojolearn.h"

namespace mjl::gpu {

std::string error_text(const Driver& driver, const char* what, int result) {
  const char* name = nullptr;
  driver.error_name(result, &name);
  return std::string(driver.name) + " device: " + what + ": " + (name ? name : "unknown error") + " (" +
         std::to_string(result) + ")";
}

namespace {

// Of a kernel that asks for more than a launch gets by default.
int shared_bytes(const char* name) {
  static const struct {
    const char* prefix;
    int bytes;
  } kKernels[] = {{"gemm_large", LargeTile::kSharedBytes},
                  {"gemm_medium", MediumTile::kSharedBytes},
                  {"attention_forward_wide", kForwardWideTiles * kAttentionTileFloats * 4},
                  {"attention_forward", kForwardTiles * kAttentionTileFloats * 4},
                  {"attention_backward_query", kQueryTiles * kAttentionTileFloats * 4},
                  {"attention_backward_key_wide", kKeyWideTiles * kAttentionTileFloats * 4},
                  {"attention_backward_key", kKeyTiles * kAttentionTileFloats * 4}};
  for (const auto& kernel : kKernels)
    if (std::strncmp(name, kernel.prefix, std::strlen(kernel.prefix)) == 0) return kernel.bytes;
  return 0;
}

}  // namespace

bool describe(const Driver& driver, int index, DeviceInfo* info, std::string* problem) {
  int count = 0, device = 0, major = 0, minor = 0;
  size_t bytes = 0;
  if (const int result = driver.device_count(&count)) {
    *problem = error_text(driver, "counting the devices", result);
    return false;
  }
  if (index < 0 || index >= count) {
    *problem = "device " + std::to_string(index) + " of " + driver.name + ": the driver (" + driver.version +
               ") shows " + std::to_string(count) + (count == 1 ? " device" : " devices");
    return false;
  }
  *info = {};
  int result = driver.device_get(&device, index);
  if (!result) result = driver.device_name(info->name, sizeof info->name, device);
  if (!result) result = driver.device_memory(&bytes, device);
  if (!result) result = driver.device_attribute(&info->multiprocessors, driver.attribute.multiprocessors, device);
  if (!result) result = driver.device_attribute(&major, driver.attribute.major, device);
  if (!result) result = driver.device_attribute(&minor, driver.attribute.minor, device);
  if (result) {
    *problem = error_text(driver, "describing the device", result);
    return false;
  }
  info->memory_bytes = bytes;
  info->architecture = major * 10 + minor;
  if (!driver.covers(info->architecture)) {
    *problem = std::string("device ") + std::to_string(index) + " of " + driver.name + " (" + info->name + ") is " +
               driver.architecture_prefix + std::to_string(info->architecture) +
               "; looked for kernels for it and found " + driver.covered;
    return false;
  }
  return true;
}

std::shared_ptr<Context> Context::of(const Driver& driver, int index) {
  // Never destroyed: at exit the driver may be gone before us.
  static std::mutex& mutex = *new std::mutex;
  static auto& contexts = *new std::map<std::pair<int, int>, std::shared_ptr<Context>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Context>& context = contexts[{driver.vendor, index}];
  if (!context || context->poisoned()) {
    context.reset();
    context = std::make_shared<Context>(driver, index);
  }
  return context;
}

Context::Context(const Driver& table, int device_index) : driver(table), index(device_index) {
  std::string problem;
  if (!describe(driver, index, &info, &problem)) throw Error(MJL_ERROR_UNSUPPORTED, problem);
  int device = 0;
  int result = driver.device_get(&device, index);
  if (!result) result = driver.context_create(&handle_, 0, device);
  if (result) throw Error(MJL_ERROR_DEVICE, error_text(driver, "opening it", result));
  Handle popped;
  driver.context_pop(&popped);
  try {
    const Current current(*this);
    load_kernels();
  } catch (...) {
    driver.context_destroy(handle_);
    throw;
  }
}

Context::~Context() { driver.context_destroy(handle_); }

void Context::load_kernels() {
  const auto check = [&](const std::string& what, int result) {
    if (result) throw Error(MJL_ERROR_DEVICE, error_text(driver, what.c_str(), result));
  };
  std::map<std::string, Handle> modules;
  for (const Image& image : driver.images)
    check(std::string("loading the kernels of ") + image.file, driver.module_load(&modules[image.file], image.data));
  static const struct {
    const char *file, *name;
  } kNames[] = {
#define X(file, name) {#file, #name},
      MJL_GPU_KERNELS(X)
#undef X
  };
  for (size_t i = 0; i < std::size(kNames); ++i) {
    const char* const name = kNames[i].name;
    check(std::string("finding the kernel ") + name,
          driver.module_function(&functions_[i], modules[kNames[i].file], name));
    const int shared = shared_bytes(name);
    if (shared)
      check(std::string("preparing the kernel ") + name,
            driver.function_set_attribute(functions_[i], driver.attribute.dynamic_shared_bytes, shared));
    int registers;  // asking makes a driver that loads lazily load now, and not while a graph is recorded
    check(std::string("loading the kernel ") + name,
          driver.function_attribute(&registers, driver.attribute.registers, functions_[i]));
  }
}

Context::Current::Current(const Context& context) : driver_(context.driver) {
  if (const int result = driver_.context_push(context.handle_))
    throw Error(MJL_ERROR_DEVICE, error_text(driver_, "switching to its context", result));
}

Context::Current::~Current() {
  Handle popped;
  driver_.context_pop(&popped);
}

}  // namespace mjl::gpu
