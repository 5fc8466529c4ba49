// SPDX-License-Identifier: Apache-2.0
//
// A libFuzzer target: sequences of valid and invalid calls of the C ABI on tiny shapes, as the input's bytes say. Finds
// memory errors by a sanitizer, and checks what holds after every call: a failed call says why and leaves its outputs
// and the state alone.
#include <mojolearn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "violated: %s; last error: %s\n", what, mjl_last_error());
  std::abort();
}

class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  bool empty() const { return at_ == end_; }
  uint8_t byte() { return empty() ? 0 : *at_++; }
  // Mostly small and acceptable, sometimes anything.
  int32_t number(int32_t most) {
    const uint8_t choice = byte();
    if (choice < 240) return 1 + choice % most;
    int32_t any = 0;
    for (int i = 0; i < 4; ++i) any = int32_t(uint32_t(any) << 8 | byte());
    return any;
  }
  // The same, but nothing that is valid and large.
  int32_t dimension(int32_t most) {
    const int32_t n = number(most);
    return n > 0 && n <= 1 << 20 ? n % 64 : n;
  }
  float real() {
    const uint8_t choice = byte();
    if (choice < 200) return (float(choice) - 100.0f) / 64.0f;
    static const float kRare[] = {0.0f, -0.0f, 1e-38f, -1e-45f, 3e38f, -3e38f, NAN, INFINITY};
    return kRare[choice % 8];
  }
  // Usually `right`, sometimes another.
  uint64_t count(uint64_t right) {
    const uint8_t choice = byte();
    return choice < 240 ? right : choice == 255 ? UINT64_MAX : choice - 240u;
  }
  uint32_t size_of(size_t right) {
    const uint8_t choice = byte();
    return choice < 248 ? uint32_t(right) : (choice - 248u) * uint32_t(right) / 8;
  }
  template <class T>
  T* sometimes_null(T* pointer) {
    return byte() < 248 ? pointer : nullptr;
  }

 private:
  const uint8_t *at_, *end_;
};

struct Exported {
  std::vector<float> arrays;  // parameters, m, v
  int64_t steps = -1;
};

class Fuzz {
 public:
  explicit Fuzz(Input& input) : in_(input) {}
  ~Fuzz() { mjl_session_close(session_); }

  void run() {
    open();
    for (int calls = 0; calls < 20 && !in_.empty(); ++calls) call();
  }

 private:
  void check(mjl_status status, bool read_only = false) {
    const Exported before = std::move(last_);
    if (status != MJL_OK) require(mjl_last_error()[0] != '\0', "an error has a text");
    if (!session_) return;
    last_ = exported();
    if ((status != MJL_OK || read_only) && before.steps >= 0)
      require(before.steps == last_.steps && before.arrays.size() == last_.arrays.size() &&
                  std::memcmp(before.arrays.data(), last_.arrays.data(), last_.arrays.size() * sizeof(float)) == 0,
              "the state is as before");
    for (const float x : last_.arrays) require(std::isfinite(x), "the state is finite");
  }

  Exported exported() {
    Exported state;
    state.arrays.resize(3 * parameters_);
    float* const at = state.arrays.data();
    require(mjl_session_export_state(session_, at, at + parameters_, at + 2 * parameters_, parameters_, &state.steps) ==
                MJL_OK,
            "a state can be exported");
    return state;
  }

  mjl_adamw adamw() {
    mjl_adamw h = {in_.size_of(sizeof h), 1e-3f, 0.9f, 0.999f, 1e-8f, 0.01f};
    float* const fields[] = {&h.lr, &h.beta1, &h.beta2, &h.eps, &h.weight_decay};
    for (float* field : fields)
      if (in_.byte() > 230) *field = in_.real();
    return h;
  }

  // Arrays of at most `room` floats, the values in turn from the input.
  mjl_state state(uint64_t count, std::vector<float>& memory) {
    memory.resize(3 * count + 1);
    float pattern[16];
    for (float& x : pattern) x = in_.real();
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = pattern[i % 16];
    for (size_t i = 2 * count; i < memory.size(); ++i) memory[i] = std::fabs(memory[i]);
    mjl_state s = {in_.size_of(sizeof(mjl_state)), in_.byte() > 250, memory.data(), nullptr, nullptr, count, 0};
    if (in_.byte() & 1) {
      s.m = memory.data() + count;
      s.v = in_.sometimes_null(memory.data() + 2 * count);
      s.completed_steps = in_.byte() < 240 ? in_.byte() : -1;
    }
    s.parameters = in_.sometimes_null(s.parameters);
    if (in_.byte() > 250) s.count = in_.byte();
    if (s.count > count) s.count = count - 1;
    return s;
  }

  void open() {
    const int32_t kv = 1 + in_.byte() % 2, heads = kv * (1 + in_.byte() % 2), head_dim = 2 * (1 + in_.byte() % 3);
    mjl_shape shape = {
        in_.size_of(sizeof shape), in_.dimension(3), in_.dimension(9),  heads * head_dim, heads, kv, head_dim,
        in_.dimension(9),          in_.dimension(2), in_.dimension(12), in_.byte() > 128};
    if (in_.byte() > 240) shape.d_model = in_.dimension(16);
    if (in_.byte() > 240) shape.head_dim = in_.dimension(8);
    mjl_session_options options = {in_.size_of(sizeof options), MJL_VENDOR_CPU, 0,
                                   1 + in_.byte() % 3,          nullptr,        nullptr};
    if (in_.byte() > 250) options.vendor = in_.number(5);
    if (in_.byte() > 250) options.device = in_.number(5);
    if (in_.byte() > 250) options.threads = -in_.number(5);
    const int64_t d = shape.d_model, v = shape.vocab_size, k = int64_t(kv) * head_dim, f = shape.intermediate;
    const bool tiny = d > 0 && d < 64 && v > 0 && v < 64 && f > 0 && f < 64 && shape.n_layers > 0 && shape.n_layers < 4;
    const int64_t right = tiny ? 2 * v * d + shape.n_layers * (2 * d + 2 * d * d + 2 * k * d + 3 * f * d) : 0;
    std::vector<float> memory;
    const mjl_adamw h = adamw();
    const mjl_state start = state(tiny ? uint64_t(right) : 100, memory);
    mjl_session* const mark = reinterpret_cast<mjl_session*>(&memory);
    mjl_session* opened = mark;
    const mjl_status status = mjl_session_open(in_.byte() < 200 ? &options : nullptr, in_.sometimes_null(&shape),
                                               in_.sometimes_null(&h), in_.sometimes_null(&start), &opened);
    require(status == MJL_OK || opened == mark, "a failed call leaves its outputs alone");
    if (status != MJL_OK) return check(status);
    session_ = opened;
    shape_ = shape;
    parameters_ = uint64_t(right);
    check(status);
  }

  std::vector<int32_t> ids(uint64_t count) {
    std::vector<int32_t> out(count);
    for (int32_t& id : out) id = in_.byte() % shape_.vocab_size;
    if (in_.byte() > 230 && count) out[in_.byte() % count] = in_.number(64);
    return out;
  }

  void call() {
    if (!session_) return open();
    const uint64_t batch = uint64_t(shape_.batch) * uint64_t(shape_.length + 1);
    switch (in_.byte() % 9) {
      case 0:
      case 1: {
        std::vector<int32_t> batch_ids = ids(batch);
        mjl_step_result result = {in_.size_of(sizeof result), -1.0f, -1};
        const mjl_status status =
            mjl_session_step(session_, in_.sometimes_null(batch_ids.data()), in_.count(batch), &result);
        require(status == MJL_OK || (result.loss == -1.0f && result.completed_steps == -1), "outputs are left alone");
        return check(status);
      }
      case 2: {
        std::vector<int32_t> batch_ids = ids(batch);
        float loss = -1.0f;
        const mjl_status status =
            mjl_session_evaluate(session_, in_.sometimes_null(batch_ids.data()), in_.count(batch), &loss);
        require(status == MJL_OK ? std::isfinite(loss) : loss == -1.0f, "outputs are left alone");
        return check(status, true);
      }
      case 3:
      case 4:
        return forward(in_.byte() & 1);
      case 5: {
        std::vector<float> gradients(parameters_);
        return check(
            mjl_session_export_gradients(session_, in_.sometimes_null(gradients.data()), in_.count(parameters_)), true);
      }
      case 6: {
        std::vector<float> memory;
        const mjl_adamw h = adamw();
        const mjl_state next = state(parameters_, memory);
        return check(mjl_session_load_state(session_, in_.byte() & 1 ? &h : nullptr, in_.sometimes_null(&next)));
      }
      case 7: {
        mjl_session_info info = {};
        info.struct_size = in_.size_of(sizeof info);
        return check(mjl_session_describe(session_, in_.sometimes_null(&info)), true);
      }
      default:
        mjl_session_close(session_);
        session_ = nullptr;
        last_ = {};
        return open();
    }
  }

  void forward(bool tokens_only) {
    const int32_t rows = in_.byte() < 240 ? 1 + in_.byte() % 5 : 0, given_length = in_.number(shape_.length);
    const int32_t length = given_length > shape_.length + 1 || given_length < 0 ? 0 : given_length;
    const std::vector<int32_t> prompt = ids(uint64_t(rows) * uint64_t(length));
    std::vector<int32_t> lengths(static_cast<size_t>(rows)), tokens(static_cast<size_t>(rows), -1);
    for (int32_t& n : lengths) n = in_.byte() < 250 ? 1 + in_.byte() % (length + 1) : in_.number(9);
    const int32_t* const ragged = in_.byte() & 1 ? lengths.data() : nullptr;
    const int32_t* const given = in_.sometimes_null(prompt.data());
    if (tokens_only) {
      const mjl_status status = mjl_session_next_tokens(session_, given, rows, length, ragged, tokens.data());
      for (const int32_t token : tokens)
        require(status == MJL_OK ? token >= 0 && token < shape_.vocab_size : token == -1, "a token is an id");
      return check(status, true);
    }
    const uint64_t right = prompt.size() * uint64_t(shape_.vocab_size);
    std::vector<float> out(right);
    check(mjl_session_logits(session_, given, rows, length, ragged, out.data(), in_.count(right)), true);
  }

  Input& in_;
  mjl_session* session_ = nullptr;
  mjl_shape shape_ = {};
  uint64_t parameters_ = 0;
  Exported last_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  Fuzz(input).run();
  return 0;
}
