// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda/cuda.h"
#include "cuda/images.h"
#include "mojolearn.h"

namespace mjl::cuda {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

bool covers(int architecture) {
  for (const char* at = architectures; *at != '\0'; at += std::strspn(at, " ")) {
    int number = 0;
    if (std::sscanf(at, "sm_%d", &number) == 1 && number / 10 == architecture / 10 && number <= architecture)
      return true;
    if (std::sscanf(at, "compute_%d", &number) == 1 && number <= architecture) return true;
    at += std::strcspn(at, " ");
  }
  return false;
}

// Finds functions in the library, and remembers the first that is missing.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}

  template <class Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    if (function == nullptr && missing_.empty()) missing_ = name;
  }
  const std::string& missing() const { return missing_; }

 private:
  void* library_;
  std::string missing_;
};

struct Opened {
  gpu::Driver driver = {};
  std::string problem;
};

Opened open() {
  Opened o;
  gpu::Driver& d = o.driver;
  d.images = images();
  if (d.images.empty()) {
    o.problem = "no cuda backend: looked for CUDA kernels in this library and found none (it was built without nvcc)";
    return o;
  }
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    o.problem = std::string("no cuda device: looked for NVIDIA's driver, ") + kLibrary + ", and could not open it (" +
                (why ? why : "no reason given") + ")";
    return o;
  }
  int (*init)(unsigned) = nullptr;
  int (*version)(int*) = nullptr;
  Symbols s(library);
  s.find(init, "cuInit");
  s.find(version, "cuDriverGetVersion");
  s.find(d.device_count, "cuDeviceGetCount");
  s.find(d.device_get, "cuDeviceGet");
  s.find(d.device_name, "cuDeviceGetName");
  s.find(d.device_memory, "cuDeviceTotalMem_v2");
  s.find(d.device_attribute, "cuDeviceGetAttribute");
  s.find(d.context_create, "cuCtxCreate_v2");
  s.find(d.context_destroy, "cuCtxDestroy_v2");
  s.find(d.context_push, "cuCtxPushCurrent_v2");
  s.find(d.context_pop, "cuCtxPopCurrent_v2");
  s.find(d.module_load, "cuModuleLoadData");
  s.find(d.module_function, "cuModuleGetFunction");
  s.find(d.function_attribute, "cuFuncGetAttribute");
  s.find(d.function_set_attribute, "cuFuncSetAttribute");
  s.find(d.launch, "cuLaunchKernel");
  s.find(d.memory_allocate, "cuMemAlloc_v2");
  s.find(d.memory_free, "cuMemFree_v2");
  s.find(d.host_allocate, "cuMemHostAlloc");
  s.find(d.host_free, "cuMemFreeHost");
  s.find(d.copy_to_device, "cuMemcpyHtoDAsync_v2");
  s.find(d.copy_to_host, "cuMemcpyDtoHAsync_v2");
  s.find(d.set_words, "cuMemsetD32Async");
  s.find(d.stream_create, "cuStreamCreate");
  s.find(d.stream_destroy, "cuStreamDestroy_v2");
  s.find(d.stream_query, "cuStreamQuery");
  s.find(d.stream_synchronize, "cuStreamSynchronize");
  s.find(d.capture_begin, "cuStreamBeginCapture_v2");
  s.find(d.capture_end, "cuStreamEndCapture");
  s.find(d.graph_instantiate, "cuGraphInstantiateWithFlags");
  s.find(d.graph_launch, "cuGraphLaunch");
  s.find(d.graph_destroy, "cuGraphDestroy");
  s.find(d.graph_executable_destroy, "cuGraphExecDestroy");
  s.find(d.error_name, "cuGetErrorName");
  if (!s.missing().empty()) {
    o.problem = std::string("no cuda device: NVIDIA's driver (") + kLibrary + ") is too old: looked for its function " +
                s.missing() + " and did not find it";
    return o;
  }
  int number = 0;
  const int result = init(0);
  version(&number);
  d.version = std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  if (result != 0) {
    const char* name = nullptr;
    d.error_name(result, &name);
    o.problem = std::string("no cuda device: found NVIDIA's driver for CUDA ") + d.version +
                ", which could not start: " + (name ? name : "unknown error") + " (" + std::to_string(result) + ")";
    return o;
  }
  d.vendor = MJL_VENDOR_CUDA;
  d.name = "cuda";
  d.architecture_prefix = "sm_";
  d.covers = covers;
  d.covered = architectures;
  d.attribute = {16, 75, 76, 8, 4};
  d.out_of_memory = 2;
  d.not_ready = 600;
  return o;
}

}  // namespace

const gpu::Driver* driver(std::string* problem) {
  static const Opened opened = open();
  *problem = opened.problem;
  return opened.problem.empty() ? &opened.driver : nullptr;
}

}  // namespace mjl::cuda
