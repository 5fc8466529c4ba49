// SPDX-License-Identifier: Apache-2.0
#include "api/devices.h"

#include <cstdio>

#include "api/guard.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "gpu/backend.h"

namespace mjl::api {
namespace {

// The driver of a GPU vendor and what it says of a device; null with `problem` saying what was looked for and found.
const gpu::Driver* find_gpu(int32_t vendor, int32_t device, gpu::DeviceInfo* info, std::string* problem) {
  if (vendor == MJL_VENDOR_HIP) {
    *problem = "no hip backend: looked for its kernels in this library and found none";
    return nullptr;
  }
  const gpu::Driver* const driver = cuda::driver(problem);
  return driver != nullptr && gpu::describe(*driver, device, info, problem) ? driver : nullptr;
}

std::unique_ptr<Backend> open_cpu(const mjl_session_options& options) {
  std::string problem;
  const std::string unit = cpu::chosen_unit(&problem);
  if (unit.empty()) throw Error(MJL_ERROR_UNSUPPORTED, problem);
  const int threads = options.threads != 0 ? options.threads : cpu::default_threads(&problem);
  if (threads == 0) throw Error(MJL_ERROR_ARGUMENT, problem);
  std::unique_ptr<Backend> backend = cpu::open(unit, threads, options.poll, options.poll_context, &problem);
  if (!backend) throw Error(MJL_ERROR_MEMORY, problem);
  return backend;
}

void describe_cpu(mjl_device_info& info) {
  std::string problem;
  const std::string unit = cpu::chosen_unit(&problem);
  if (unit.empty()) throw Error(MJL_ERROR_UNSUPPORTED, problem);
  info.threads = cpu::default_threads(&problem);
  if (info.threads == 0) throw Error(MJL_ERROR_ARGUMENT, problem);
  DeviceFacts facts;
  cpu::describe_processor(facts);
  info.memory_bytes = facts.memory_bytes;
  std::snprintf(info.name, sizeof info.name, "%s", facts.name);
  std::snprintf(info.detail, sizeof info.detail, "vector unit %s; available: %s", unit.c_str(),
                cpu::available_units().c_str());
}

void describe_gpu(mjl_device_info& info) {
  std::string problem;
  gpu::DeviceInfo found;
  const gpu::Driver* const driver = find_gpu(info.vendor, info.device, &found, &problem);
  if (driver == nullptr) throw Error(MJL_ERROR_UNSUPPORTED, problem);
  info.memory_bytes = found.memory_bytes;
  std::snprintf(info.name, sizeof info.name, "%s", found.name);
  std::snprintf(info.detail, sizeof info.detail, "%s%d; driver %s; kernels: %s", driver->architecture_prefix,
                found.architecture, driver->version.c_str(), driver->covered);
}

}  // namespace

int32_t resolve_vendor(int32_t vendor, int32_t device) {
  if (vendor < MJL_VENDOR_ANY || vendor > MJL_VENDOR_HIP)
    throw Error(MJL_ERROR_ARGUMENT,
                "vendor is " + std::to_string(vendor) + "; known are 0 (any), 1 (cpu), 2 (cuda) and 3 (hip)");
  gpu::DeviceInfo info;
  std::string problem;
  if (vendor == MJL_VENDOR_ANY)
    vendor = find_gpu(MJL_VENDOR_CUDA, device, &info, &problem) ? MJL_VENDOR_CUDA : MJL_VENDOR_CPU;
  else if (vendor != MJL_VENDOR_CPU && !find_gpu(vendor, device, &info, &problem))
    throw Error(MJL_ERROR_UNSUPPORTED, problem);
  if (vendor == MJL_VENDOR_CPU && device != 0)
    throw Error(MJL_ERROR_UNSUPPORTED, "device " + std::to_string(device) + " of the cpu: there is only device 0" +
                                           (problem.empty() ? "" : " (" + problem + ")"));
  return vendor;
}

std::unique_ptr<Backend> open_backend(const mjl_session_options& options) {
  const int32_t vendor = resolve_vendor(options.vendor, options.device);
  if (options.threads < 0 || options.threads > 256)
    throw Error(MJL_ERROR_ARGUMENT, "options.threads is " + std::to_string(options.threads) +
                                        "; it must be from 1 to 256, or 0 for the default");
  if (vendor == MJL_VENDOR_CPU) return open_cpu(options);
  std::string problem;
  gpu::DeviceInfo info;
  const gpu::Driver* const driver = find_gpu(vendor, options.device, &info, &problem);
  if (driver == nullptr) throw Error(MJL_ERROR_UNSUPPORTED, problem);
  return gpu::open(*driver, options.device, options.poll, options.poll_context);
}

}  // namespace mjl::api

using namespace mjl;
using namespace mjl::api;

mjl_status mjl_device_probe(int32_t vendor, int32_t device, mjl_device_info* out_info) {
  return guard([&] {
    check_out_struct(out_info, "out_info");
    mjl_device_info info = {};
    info.vendor = resolve_vendor(vendor, device);
    info.device = device;
    info.vendor == MJL_VENDOR_CPU ? describe_cpu(info) : describe_gpu(info);
    write_struct(out_info, info);
  });
}
