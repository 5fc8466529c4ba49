/* SPDX-License-Identifier: Apache-2.0
 *
 * Trains, evaluates, exports and resumes a small language model from C. Build and run:
 *
 *   LIB=$(python3 -c "import mojolearn, os; print(os.path.dirname(mojolearn.__file__))")/_lib
 *   cc -std=c99 -O2 -I "$LIB" train.c -L "$LIB" -lmojolearn -Wl,-rpath,"$LIB" -o train
 *   ./train
 *
 * The last line is a digest of the trained state and of all losses. ../rust/main.rs and the Python package print the
 * same.
 */
#include <mojolearn.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 2, LENGTH = 32, VOCAB = 256, D = 32, HEADS = 4, KV = 2, HEAD_DIM = 8, FF = 64, LAYERS = 2 };
enum { BLOCK = 2 * D + 2 * D * D + 2 * KV * HEAD_DIM * D + 3 * FF * D };
enum { PARAMETERS = 2 * VOCAB * D + LAYERS * BLOCK, IDS = BATCH * (LENGTH + 1), STEPS = 20 };

/* A random byte: the top bits of a linear congruential generator. */
static unsigned random_byte(void) {
  static uint64_t state = 0;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (unsigned)(state >> 56);
}

static void fill_ids(int32_t* ids) {
  for (int i = 0; i < IDS; i++) ids[i] = (int32_t)random_byte();
}

/* FNV-1a over the bytes of `count` floats. */
static uint64_t digest(uint64_t hash, const float* values, size_t count) {
  const unsigned char* bytes = (const unsigned char*)values;
  for (size_t i = 0; i < count * sizeof(float); i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
  return hash;
}

static void check(mjl_status status) {
  if (status != MJL_OK) {
    fprintf(stderr, "mojolearn: %s (status %d)\n", mjl_last_error(), (int)status);
    exit(EXIT_FAILURE);
  }
}

int main(void) {
  static float parameters[PARAMETERS], m[PARAMETERS], v[PARAMETERS];
  static int32_t ids[IDS];
  float losses[STEPS + 2];

  if (mjl_abi_version() != MJL_ABI_VERSION) {
    fprintf(stderr, "the library has ABI version %u, this program needs %u\n", (unsigned)mjl_abi_version(),
            (unsigned)MJL_ABI_VERSION);
    return EXIT_FAILURE;
  }

  mjl_shape shape = {sizeof shape, BATCH, LENGTH, D, HEADS, KV, HEAD_DIM, FF, LAYERS, VOCAB, 0};
  mjl_adamw adamw = {sizeof adamw, 1e-3f, 0.9f, 0.999f, 1e-8f, 0.01f};
  for (int i = 0; i < PARAMETERS; i++) parameters[i] = (float)((int)random_byte() - 128) / 1024.0f;

  /* The moments of a new model are zero: leaving them NULL says so. Without options the best device is used. */
  mjl_state state = {sizeof state, 0, parameters, NULL, NULL, PARAMETERS, 0};
  mjl_session* session = NULL;
  check(mjl_session_open(NULL, &shape, &adamw, &state, &session));

  mjl_step_result result = {sizeof result, 0, 0};
  for (int step = 0; step < STEPS; step++) {
    fill_ids(ids);
    check(mjl_session_step(session, ids, IDS, &result));
    losses[step] = result.loss;
  }
  fill_ids(ids);
  check(mjl_session_evaluate(session, ids, IDS, &losses[STEPS]));
  printf("loss %.6f at step 1, %.6f at step %d; held out %.6f\n", losses[0], losses[STEPS - 1], STEPS, losses[STEPS]);

  /* The exported state is all there is to a model: another session goes on from it as if nothing had happened. */
  check(mjl_session_export_state(session, parameters, m, v, PARAMETERS, &state.completed_steps));
  mjl_session_close(session);
  state.m = m;
  state.v = v;
  check(mjl_session_open(NULL, &shape, &adamw, &state, &session));
  fill_ids(ids);
  check(mjl_session_step(session, ids, IDS, &result));
  losses[STEPS + 1] = result.loss;
  check(mjl_session_export_state(session, parameters, m, v, PARAMETERS, &state.completed_steps));
  mjl_session_close(session);

  uint64_t hash = digest(0xcbf29ce484222325u, parameters, PARAMETERS);
  hash = digest(digest(hash, m, PARAMETERS), v, PARAMETERS);
  hash = digest(hash, losses, STEPS + 2);
  printf("%016llx\n", (unsigned long long)hash);
  return EXIT_SUCCESS;
}
