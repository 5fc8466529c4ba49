// SPDX-License-Identifier: Apache-2.0
//
// How the library says no inside: an exception with the status that the entry point will return.
#ifndef MJL_ERROR_H
#define MJL_ERROR_H

#include <stdexcept>
#include <string>

#include "mojolearn.h"

namespace mjl {

struct Error : std::runtime_error {
  Error(mjl_status code, const std::string& what) : std::runtime_error(what), status(code) {}
  mjl_status status;
};

}  // namespace mjl

#endif
