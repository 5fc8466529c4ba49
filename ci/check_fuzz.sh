#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A minute of random calls of the C ABI, and one of damaged checkpoints: ci/check_fuzz.sh [SECONDS]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# fuzz CORPUS LONGEST_INPUT COMMAND... An input that fails lands in build.
fuzz() {
  local corpus=$1 longest=$2
  shift 2
  "$@" "$corpus" -max_total_time="$seconds" -max_len="$longest" -artifact_prefix=build/ -verbosity=0 -print_final_stats=1
}

"${PYTHON:-python3}" native/build.py --cxx clang++ --sanitize fuzzer-no-link,address,undefined
lib=build/native/release-fuzzer-no-link-address-undefined/lib
clang++ -std=c++17 -g -O1 -Wall -Wextra -Werror -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
  -I "$lib" tests/fuzz/abi.cpp -L "$lib" -lmojolearn -Wl,-rpath,"$PWD/$lib" -o build/fuzz-abi
cp -r tests/fuzz/corpus/abi "$scratch"
fuzz "$scratch/abi" 600 build/fuzz-abi

venv=build/fuzz-venv
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check atheris numpy cffi; then
  mkdir "$scratch/checkpoint"
  cp tests/vectors/checkpoints/tiny.* "$scratch/checkpoint"
  PYTHONPATH=python fuzz "$scratch/checkpoint" 8192 "$venv/bin/python" tests/fuzz/checkpoint.py
else
  echo "skipped: atheris, which has no wheel for $("$venv/bin/python" --version), could not be installed"
fi
