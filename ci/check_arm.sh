#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The library for Arm, built by a cross compiler and run by an emulator, gives the same bits as here.
set -euo pipefail
cd "$(dirname "$0")/.."
"${PYTHON:-python3}" native/build.py --cxx aarch64-linux-gnu-g++ --probe
"${PYTHON:-python3}" native/build.py
arm=build/native/release-aarch64/lib
here=python/mojolearn/_lib

# compile COMPILER LIBRARY SOURCE PROGRAM
compile() {
  "$1" -std=c99 -O2 -Wall -Wextra -Werror -I "$2" "$3" -L "$2" -lmojolearn -Wl,-rpath,"$PWD/$2" -o "$4"
}
emulator=(qemu-aarch64 -L /usr/aarch64-linux-gnu)

compile gcc "$here" examples/embed/c/train.c build/train
compile aarch64-linux-gnu-gcc "$arm" examples/embed/c/train.c build/train-aarch64
digest=$(build/train | tail -n 1)
arm_digest=$("${emulator[@]}" build/train-aarch64 | tail -n 1)
echo "this processor: $digest, Arm: $arm_digest"
[ "$digest" = "$arm_digest" ]

compile aarch64-linux-gnu-gcc "$arm" tests/native/replay.c build/replay-aarch64
.venv/bin/python tests/replay.py --work 3e7 "${emulator[@]}" build/replay-aarch64

aarch64-linux-gnu-g++ -std=c++17 -O2 -ffp-contract=off -fPIC -shared tests/native/reference.cpp -o build/libreference-aarch64.so
aarch64-linux-gnu-g++ -std=c++17 -O2 -Wall -Wextra -Werror tests/native/compare.cpp -o build/compare-aarch64
"${emulator[@]}" build/compare-aarch64 "$arm/libmojolearn_probe.so" build/libreference-aarch64.so
