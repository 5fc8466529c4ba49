// SPDX-License-Identifier: Apache-2.0
//
// A training state that lives on a device between steps.
#ifndef MJL_MODEL_SESSION_H
#define MJL_MODEL_SESSION_H

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "error.h"
#include "model/model.h"
#include "mojolearn.h"
#include "optim/adamw.h"

namespace mjl {

// A state in the host's memory. m and v null: zero.
struct HostState {
  const float* parameters;
  const float* m;
  const float* v;
  uint64_t count;
  int64_t completed_steps;
};

class Session {
 public:
  // The device that `backend` stands for holds everything from here on.
  Session(std::unique_ptr<Backend> backend, const Shape& shape, const AdamW& adamw, const HostState& state);
  ~Session();

  // Each call is a transaction: it throws Error with nothing changed, or it is done.
  mjl_step_result step(const int32_t* ids, uint64_t count);
  float evaluate(const int32_t* ids, uint64_t count);
  void logits(const int32_t* ids, int64_t rows, int64_t length, const int32_t* lengths, float* out, uint64_t count);
  void next_tokens(const int32_t* ids, int64_t rows, int64_t length, const int32_t* lengths, int32_t* out);
  void export_state(float* parameters, float* m, float* v, uint64_t count, int64_t* completed_steps);
  void export_gradients(float* out, uint64_t count);
  void load_state(const AdamW* adamw, const HostState& state);
  mjl_session_info describe();

 private:
  std::unique_lock<std::mutex> enter();
  void check_ids(int64_t rows, int64_t length, const int32_t* lengths) const;
  void upload_batch(const int32_t* ids, uint64_t count);
  void upload_state(int which, const HostState& state);
  void finish(const char* what);
  Outcome settle();
  const int32_t* take_request(const int32_t* ids, int64_t rows, int64_t length, const int32_t* lengths);
  template <class Use>
  void for_row_blocks(int64_t rows, int64_t length, const int32_t* lengths, Use&& use);

  std::unique_ptr<Backend> backend_;
  Model model_;
  AdamW adamw_;
  void* memory_ = nullptr;
  uint64_t memory_bytes_ = 0;
  int64_t completed_steps_ = 0;
  bool has_gradients_ = false;
  pid_t process_;
  // Copies of the caller's, who may be writing to his, and results on their way out; reused from call to call.
  std::vector<int32_t> ids_, lengths_, tokens_;
  std::vector<float> row_;
  std::mutex mutex_;  // calls queue
};

}  // namespace mjl

#endif
