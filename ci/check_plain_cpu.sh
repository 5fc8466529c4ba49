#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The library gives the same bits on this processor and on an emulated x86-64 without AVX, where any AVX instruction would
# end the program.
set -euo pipefail
cd "$(dirname "$0")/.."
lib=$PWD/python/mojolearn/_lib

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
${CC:-cc} -std=c99 -O2 -I "$lib" examples/embed/c/train.c -L "$lib" -lmojolearn -Wl,-rpath,"$lib" -o "$scratch/train"
here=$("$scratch/train" | tail -n 1)
plain=$(qemu-x86_64 -cpu qemu64 "$scratch/train" | tail -n 1)
echo "this processor: $here, without AVX: $plain"
[ "$here" = "$plain" ]
