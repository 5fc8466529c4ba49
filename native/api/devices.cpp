// SPDX-License-Identifier: Apache-2.0
#include "api/devices.h"

#include <cstdio>

#include "api/guard.h"
#include "cpu/cpu.h"

namespace mjl::api {

int32_t resolve_vendor(int32_t vendor, int32_t device) {
  static const char* const kNames[] = {"any", "cpu", "cuda", "hip"};
  if (vendor < MJL_VENDOR_ANY || vendor > MJL_VENDOR_HIP)
    throw Error(MJL_ERROR_ARGUMENT,
                "vendor is " + std::to_string(vendor) + "; known are 0 (any), 1 (cpu), 2 (cuda) and 3 (hip)");
  if (vendor == MJL_VENDOR_CUDA || vendor == MJL_VENDOR_HIP)
    throw Error(MJL_ERROR_UNSUPPORTED,
                std::string("no ") + kNames[vendor] +
                    " backend: looked for its kernels in this library and found none; backends built in: cpu");
  if (device != 0)
    throw Error(MJL_ERROR_UNSUPPORTED, "device " + std::to_string(device) + " of the cpu: there is only device 0");
  return MJL_VENDOR_CPU;
}

std::unique_ptr<Backend> open_backend(const mjl_session_options& options) {
  resolve_vendor(options.vendor, options.device);
  std::string problem;
  const std::string unit = cpu::chosen_unit(&problem);
  if (unit.empty()) throw Error(MJL_ERROR_UNSUPPORTED, problem);
  if (options.threads < 0 || options.threads > 256)
    throw Error(MJL_ERROR_ARGUMENT, "options.threads is " + std::to_string(options.threads) +
                                        "; it must be from 1 to 256, or 0 for the default");
  const int threads = options.threads != 0 ? options.threads : cpu::default_threads(&problem);
  if (threads == 0) throw Error(MJL_ERROR_ARGUMENT, problem);
  std::unique_ptr<Backend> backend = cpu::open(unit, threads, options.poll, options.poll_context, &problem);
  if (!backend) throw Error(MJL_ERROR_MEMORY, problem);
  return backend;
}

}  // namespace mjl::api

using namespace mjl;
using namespace mjl::api;

mjl_status mjl_device_probe(int32_t vendor, int32_t device, mjl_device_info* out_info) {
  return guard([&] {
    check_out_struct(out_info, "out_info");
    mjl_device_info info = {};
    info.vendor = resolve_vendor(vendor, device);
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
    write_struct(out_info, info);
  });
}
