#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The faster tests with libraries that look for memory errors and undefined behaviour, and for data races. Leaks are not
# looked for, since Python has its own: tests/test_faults.py counts what the library holds.
set -euo pipefail
cd "$(dirname "$0")/.."

# sanitized SANITIZERS RUNTIMES PYTEST_ARGUMENT...
sanitized() {
  local lib=$PWD/build/native/release-${1//,/-}/lib runtime preload=""
  "${PYTHON:-python3}" native/build.py --sanitize "$1" --probe
  for runtime in $2; do preload+="$(g++ -print-file-name="lib$runtime.so") "; done
  LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 MOJOLEARN_LIBRARY=$lib/libmojolearn.so \
    MOJOLEARN_PROBE=$lib/libmojolearn_probe.so .venv/bin/python -m pytest -q -p no:cacheprovider "${@:3}"
}

# Left out: a test that limits the address space, of which the sanitizer reserves terabytes.
sanitized address,undefined "asan ubsan" tests/test_abi.py tests/test_abi_errors.py tests/test_faults.py \
  tests/test_operations.py tests/test_contraction.py tests/test_training_step.py tests/test_trainer.py \
  -k "not out_of_memory"

# Left out: tests that fork, and one that counts threads, since the sanitizer has one of its own.
MOJOLEARN_THREADS=3 sanitized thread tsan tests/test_abi.py tests/test_faults.py tests/test_surroundings.py \
  -k "(abi or faults or thread) and not fork and not threads_end_with"

# Models large enough for their work to be shared.
lib=build/native/release-thread/lib
gcc -std=c99 -O1 -g -fsanitize=thread -I "$lib" tests/native/replay.c -L "$lib" -lmojolearn -Wl,-rpath,"$PWD/$lib" \
  -o build/replay-thread
MOJOLEARN_THREADS=3 .venv/bin/python tests/replay.py --work 1e9 build/replay-thread
