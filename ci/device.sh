#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# On a machine with an NVIDIA GPU, nvcc, and a Python with numpy, cffi and pytest; no network is needed:
#
#   ci/device.sh [quick|parity|sanitize|bench]
#
#   quick     every recorded vector, and two dozen random shapes, against the CPU
#   parity    the same with some hundred shapes and runs of 200 steps
#   sanitize  compute-sanitizer's four tools on small shapes
#   bench     the time of a lean step, beside PyTorch where it is installed
#
# Builds the library unless MOJOLEARN_LIBRARY names one. Writes one record, DATE-TIER.json, to $OUT or docs/parity.
set -euo pipefail
cd "$(dirname "$0")/.."
tier=${1:-quick}
out=${OUT:-docs/parity}
export PYTHONPATH=python:tests${PYTHONPATH:+:$PYTHONPATH} MOJOLEARN_REQUIRE_CUDA=1
python=${PYTHON:-python3}

[ -n "${MOJOLEARN_LIBRARY:-}" ] || "$python" native/build.py
mkdir -p "$out"
record() { "$python" ci/device.py record "$tier" "$out" "$@"; }

case $tier in
quick | parity)
  runs=24
  [ "$tier" = quick ] || runs=300
  "$python" -m mojolearn verify --vectors tests/vectors --vendor cuda
  MOJOLEARN_CUDA_RUNS=$runs "$python" -m pytest -q -p no:cacheprovider tests/test_cuda.py
  record vectors=match "random_shapes=$runs" ;;
sanitize)
  for tool in memcheck racecheck initcheck synccheck; do
    echo "== $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" ci/device.py small
  done
  record memcheck=clean racecheck=clean initcheck=clean synccheck=clean ;;
bench)
  record bench ;;
*)
  echo "unknown tier: $tier; known are quick, parity, sanitize and bench" >&2
  exit 2 ;;
esac
