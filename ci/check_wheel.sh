#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs a wheel into an empty environment at an awkward path and uses it there: ci/check_wheel.sh dist/*.whl
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
wheel=$(realpath "$1")

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
home="$scratch/a path with spaces/größer žluťoučký 道"
mkdir -p "$home"
"${PYTHON:-python3}" -m venv "$home/venv"
python="$home/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check "$wheel"

cd "$home" # not the repository: its sources must not be found
"$python" "$root/ci/run_example.py" "$root/README.md"
"$home/venv/bin/mojolearn" verify
"$python" - <<'END'
import subprocess, sys

def seconds(code):
    code = f"import time; start = time.perf_counter(); {code}; print(time.perf_counter() - start)"
    return min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5))

print(f"import mojolearn: {1000 * seconds('import mojolearn'):.0f} ms, numpy's part {1000 * seconds('import numpy'):.0f} ms")
END
echo "$(basename "$wheel"): installed and used at $home"
