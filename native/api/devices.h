// SPDX-License-Identifier: Apache-2.0
#ifndef MJL_API_DEVICES_H
#define MJL_API_DEVICES_H

#include <memory>

#include "error.h"
#include "mojolearn.h"
#include "ops.h"

namespace mjl::api {

// Resolves MJL_VENDOR_ANY; throws with what was looked for and found when the vendor or device is not there.
int32_t resolve_vendor(int32_t vendor, int32_t device);

std::unique_ptr<Backend> open_backend(const mjl_session_options& options);

}  // namespace mjl::api

#endif
