// SPDX-License-Identifier: Apache-2.0
#include <new>

#include "api/guard.h"

namespace mjl::api {
namespace {
thread_local std::string last_error;
}
void set_last_error(const char* text) noexcept {
  try {
    last_error = text;
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";  // short enough to need no memory
  }
}
}  // namespace mjl::api

uint32_t mjl_abi_version(void) { return MJL_ABI_VERSION; }
const char* mjl_version(void) { return "0.1.0"; }
const char* mjl_numerics_version(void) { return "identical.fp32.v1"; }
const char* mjl_build_info(void) { return MJL_BUILD_INFO; }
const char* mjl_last_error(void) { return mjl::api::last_error.c_str(); }
