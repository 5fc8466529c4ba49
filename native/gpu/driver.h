// SPDX-License-Identifier: Apache-2.0
//
// What the host code asks of a vendor's driver: its functions, found at run time, with the names and numbers that
// differ between vendors taken out. Every function returns 0 for success.
#ifndef MJL_GPU_DRIVER_H
#define MJL_GPU_DRIVER_H

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mjl::gpu {

using Handle = void*;  // a context, module, function, stream or graph of the driver

// A compiled file of native/kernels.
struct Image {
  const char* file;
  const void* data;
};

struct Driver {
  int32_t vendor;  // MJL_VENDOR_...
  const char* name;
  const char* architecture_prefix;  // "sm_"
  std::string version;              // of the driver, as text
  std::vector<Image> images;
  // Whether a device of this architecture (major * 10 + minor) can run the images.
  bool (*covers)(int architecture);
  const char* covered;  // in words

  struct {
    int multiprocessors, major, minor;    // of a device
    int dynamic_shared_bytes, registers;  // of a function
  } attribute;
  int out_of_memory, not_ready;  // results

  int (*device_count)(int* count);
  int (*device_get)(int* device, int index);
  int (*device_name)(char* name, int size, int device);
  int (*device_memory)(size_t* bytes, int device);
  int (*device_attribute)(int* value, int attribute, int device);

  int (*context_create)(Handle* context, unsigned flags, int device);
  int (*context_destroy)(Handle context);
  int (*context_push)(Handle context);
  int (*context_pop)(Handle* context);

  int (*module_load)(Handle* module, const void* image);
  int (*module_function)(Handle* function, Handle module, const char* name);
  int (*function_attribute)(int* value, int attribute, Handle function);
  int (*function_set_attribute)(Handle function, int attribute, int value);
  int (*launch)(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared_bytes, Handle stream, void** arguments, void** extra);

  int (*memory_allocate)(void** memory, size_t bytes);
  int (*memory_free)(void* memory);
  int (*host_allocate)(void** memory, size_t bytes, unsigned flags);
  int (*host_free)(void* memory);
  int (*copy_to_device)(void* to, const void* from, size_t bytes, Handle stream);
  int (*copy_to_host)(void* to, const void* from, size_t bytes, Handle stream);
  int (*set_words)(void* to, unsigned value, size_t count, Handle stream);

  int (*stream_create)(Handle* stream, unsigned flags);
  int (*stream_destroy)(Handle stream);
  int (*stream_query)(Handle stream);
  int (*stream_synchronize)(Handle stream);
  int (*capture_begin)(Handle stream, int mode);
  int (*capture_end)(Handle stream, Handle* graph);
  int (*graph_instantiate)(Handle* executable, Handle graph, unsigned long long flags);
  int (*graph_launch)(Handle executable, Handle stream);
  int (*graph_destroy)(Handle graph);
  int (*graph_executable_destroy)(Handle executable);

  int (*error_name)(int result, const char** text);
};

}  // namespace mjl::gpu

#endif
