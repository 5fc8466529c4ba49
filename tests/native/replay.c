/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs one recorded case through the C ABI, on processors that the tests in Python do not reach: replay INPUT OUTPUT.
 * tests/replay.py writes the input and reads the output. Both are arrays of 32-bit numbers in the machine's order:
 *
 *   input   the ten fields of mjl_shape after its size; steps; the number of parameters; the five of mjl_adamw;
 *           parameters; ids of each step and one batch more; lengths [batch]
 *   output  loss and gradient of each step; parameters, m and v after the last; the loss, the logits, the ragged logits
 *           and the next tokens of the batch that was not trained on
 */
#include <mojolearn.h>
#include <stdio.h>
#include <stdlib.h>

static void check(mjl_status status) {
  if (status != MJL_OK) {
    fprintf(stderr, "replay: %s (status %d)\n", mjl_last_error(), (int)status);
    exit(EXIT_FAILURE);
  }
}

static void* words(size_t count) {
  void* memory = malloc(count * 4);
  if (memory == NULL) abort();
  return memory;
}

static void* take(FILE* file, size_t count) {
  void* memory = words(count);
  if (fread(memory, 4, count, file) != count) {
    fputs("replay: the input is too short\n", stderr);
    exit(EXIT_FAILURE);
  }
  return memory;
}

static void give(FILE* file, const void* memory, size_t count) {
  if (fwrite(memory, 4, count, file) != count) abort();
}

int main(int argc, char** argv) {
  FILE* in = argc == 3 ? fopen(argv[1], "rb") : NULL;
  FILE* out = argc == 3 ? fopen(argv[2], "wb") : NULL;
  if (in == NULL || out == NULL) {
    fputs("usage: replay INPUT OUTPUT\n", stderr);
    return EXIT_FAILURE;
  }
  const int32_t* n = take(in, 12);
  mjl_shape shape = {sizeof shape, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9]};
  const size_t steps = (size_t)n[10], count = (size_t)n[11];
  const float* h = take(in, 5);
  mjl_adamw adamw = {sizeof adamw, h[0], h[1], h[2], h[3], h[4]};
  const size_t rows = (size_t)shape.batch, length = (size_t)shape.length, batch = rows * (length + 1);
  float* parameters = take(in, count);
  const int32_t* ids = take(in, (steps + 1) * batch);
  const int32_t* lengths = take(in, rows);

  mjl_state state = {sizeof state, 0, parameters, NULL, NULL, count, 0};
  mjl_session* session = NULL;
  check(mjl_session_open(NULL, &shape, &adamw, &state, &session));

  float *m = words(count), *v = words(count);
  for (size_t i = 0; i < steps; i++, ids += batch) {
    mjl_step_result result = {sizeof result, 0, 0};
    check(mjl_session_step(session, ids, batch, &result));
    give(out, &result.loss, 1);
    check(mjl_session_export_gradients(session, m, count));
    give(out, m, count);
  }
  check(mjl_session_export_state(session, parameters, m, v, count, NULL));
  give(out, parameters, count);
  give(out, m, count);
  give(out, v, count);

  float loss;
  check(mjl_session_evaluate(session, ids, batch, &loss));
  give(out, &loss, 1);
  const size_t size = rows * length * (size_t)shape.vocab_size;
  float* logits = words(size);
  int32_t *prompts = words(rows * length), *tokens = words(rows);
  for (size_t i = 0; i < rows * length; i++) prompts[i] = ids[i / length * (length + 1) + i % length];
  for (int ragged = 0; ragged < 2; ragged++) {
    check(mjl_session_logits(session, prompts, shape.batch, shape.length, ragged ? lengths : NULL, logits, size));
    give(out, logits, size);
  }
  check(mjl_session_next_tokens(session, prompts, shape.batch, shape.length, lengths, tokens));
  give(out, tokens, rows);
  mjl_session_close(session);
  if (fclose(out) != 0) abort();
  return EXIT_SUCCESS;
}
