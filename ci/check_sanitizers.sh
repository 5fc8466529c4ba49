#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tests of the C ABI with a library that looks for memory errors and undefined behaviour, and a training run with one
# that looks for data races.
set -euo pipefail
cd "$(dirname "$0")/.."
build() { "${PYTHON:-python3}" native/build.py --sanitize "$1"; }

build address,undefined
# The library is at fault if it fails, not Python: leaks are not looked for, and the test that limits the address space,
# of which the sanitizer reserves terabytes, is left out.
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
  MOJOLEARN_LIBRARY="$PWD/build/native/release-address-undefined/lib/libmojolearn.so" \
  .venv/bin/python -m pytest -q tests/test_abi.py tests/test_abi_errors.py -k "not out_of_memory"

build thread
lib=$PWD/build/native/release-thread/lib
gcc -fsanitize=thread -I "$lib" examples/embed/c/train.c -L "$lib" -lmojolearn -Wl,-rpath,"$lib" -o build/train-races
MOJOLEARN_THREADS=3 build/train-races
