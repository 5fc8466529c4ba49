// SPDX-License-Identifier: Apache-2.0
//
// What every entry point does: keep the caller's floating-point mode, and turn exceptions into a status and a text.
#ifndef MJL_API_GUARD_H
#define MJL_API_GUARD_H

#include <cstddef>
#include <cstring>
#include <new>
#include <string>

#include "cpu/float_mode.h"
#include "error.h"
#include "mojolearn.h"

namespace mjl::api {

void set_last_error(const char* text) noexcept;

template <class Body>
mjl_status guard(Body&& body) {
  const cpu::FloatMode mode;
  try {
    body();
    return MJL_OK;
  } catch (const Error& error) {
    set_last_error(error.what());
    return error.status;
  } catch (const std::bad_alloc&) {
    set_last_error("out of memory");
    return MJL_ERROR_MEMORY;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return MJL_ERROR_INTERNAL;
  }
}

template <class T>
void require(const T* pointer, const char* name) {
  if (pointer == nullptr) throw Error(MJL_ERROR_ARGUMENT, std::string(name) + " is NULL");
}

// A struct of the caller, which may be of an older or a newer version: what it lacks is zero, what we do not know must
// be zero.
template <class T>
T read_struct(const T* from, const char* name) {
  require(from, name);
  T result = {};
  const size_t size = from->struct_size;
  if (size < sizeof(uint32_t)) throw Error(MJL_ERROR_ARGUMENT, std::string(name) + ".struct_size is not set");
  std::memcpy(&result, from, std::min(size, sizeof(T)));
  for (size_t i = sizeof(T); i < size; ++i)
    if (reinterpret_cast<const char*>(from)[i] != 0)
      throw Error(MJL_ERROR_ARGUMENT,
                  std::string(name) + " is of a newer version and asks for something that this library does not know");
  return result;
}

// Copies as much of `result` as the caller's struct has room for; what it has beyond becomes zero.
template <class T>
void write_struct(T* to, const T& result) {
  const uint32_t size = to->struct_size;
  std::memcpy(to, &result, std::min<size_t>(size, sizeof(T)));
  if (size > sizeof(T)) std::memset(reinterpret_cast<char*>(to) + sizeof(T), 0, size - sizeof(T));
  to->struct_size = size;
}

template <class T>
void check_out_struct(const T* out, const char* name) {
  require(out, name);
  if (out->struct_size < sizeof(uint32_t))
    throw Error(MJL_ERROR_ARGUMENT, std::string(name) + "->struct_size is not set");
}

}  // namespace mjl::api

#endif
