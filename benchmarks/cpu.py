# SPDX-License-Identifier: Apache-2.0
"""Times a training step on the CPU beside PyTorch and the published wheel, in one run, and prints a Markdown table.

    python benchmarks/cpu.py [--torch PYTHON] [--wheel PYTHON] [--rounds 5] [--shapes default,small,odd]

PYTHON is an interpreter whose environment holds the peer: PyTorch, or mojolearn-core. The systems take turns, one round
after another, so that whatever the machine does meets all of them; a figure is the median of the rounds' medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHAPES: dict[str, tuple[list[int], int]] = {  # batch, length, d_model, heads, kv, head_dim, intermediate, layers, vocab
    "default": ([2, 32, 32, 4, 2, 8, 64, 2, 256], 300),
    "small": ([8, 256, 256, 8, 4, 32, 768, 4, 256], 3),
    # Nobody tuned for these.
    "odd1": ([1, 100, 60, 3, 1, 20, 250, 3, 300], 30),
    "odd2": ([3, 33, 72, 9, 3, 8, 200, 2, 1000], 30),
    "odd3": ([5, 129, 96, 4, 4, 24, 300, 1, 500], 15),
    "odd4": ([1, 513, 128, 2, 1, 64, 384, 2, 256], 10),
    "odd5": ([7, 65, 80, 5, 5, 16, 210, 2, 777], 15),
    "odd6": ([2, 300, 136, 1, 1, 136, 400, 2, 1500], 8),
    "odd7": ([16, 17, 48, 6, 2, 8, 100, 4, 64], 30),
    "odd8": ([1, 1000, 64, 4, 1, 16, 160, 1, 5000], 8),
    "odd9": ([4, 90, 200, 10, 5, 20, 555, 2, 257], 10),
    "odd10": ([1, 40, 320, 5, 5, 64, 1000, 3, 97], 15),
}
PEAK = r"""
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#define STEPS 20000000L
static void* spin(void* out) {
  typedef float V __attribute__((vector_size(WIDTH)));
  V a[12], x, y;
  for (int i = 0; i < (int)(sizeof x / 4); ++i) x[i] = 0.999f, y[i] = 0.001f;
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) a[i] = y;
  for (long n = 0; n < STEPS; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) a[i] = a[i] * x + y;
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) __asm__ volatile("" : "+v"(a[i]));
  }
#pragma GCC unroll 12
  for (int i = 1; i < 12; ++i) a[0] += a[i];
  *(float*)out = a[0][0];
  return 0;
}
int main(int argc, char** argv) {
  int n = atoi(argv[argc - 1]);
  pthread_t t[256];
  float out[256];
  struct timespec a, b;
  clock_gettime(CLOCK_MONOTONIC, &a);
  for (int i = 0; i < n; ++i) pthread_create(&t[i], 0, spin, &out[i]);
  for (int i = 0; i < n; ++i) pthread_join(t[i], 0);
  clock_gettime(CLOCK_MONOTONIC, &b);
  double s = (b.tv_sec - a.tv_sec) + 1e-9 * (b.tv_nsec - a.tv_nsec);
  printf("%.1f\n", n * STEPS * 12.0 * (WIDTH / 4) * 2 / s * 1e-9);
}
"""


def flops(dims: list[int]) -> float:
    """Of one step: 2 per multiply-add; the backward pass is twice the forward one; attention counts visible keys."""
    batch, length, d, heads, kv, head_dim, f, layers, vocab = dims
    per_token = layers * (2 * d * d + 2 * kv * head_dim * d + 3 * f * d) + vocab * d
    attention = layers * heads * length * (length + 1) * head_dim  # scores and contexts
    return 3.0 * batch * (2 * length * per_token + 2 * attention)


def measure_peak(threads: int) -> float:
    """What the processor does in multiply-adds that wait for nothing, in GFLOP/s."""
    width = 64 if "avx512f" in Path("/proc/cpuinfo").read_text() else 32
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "peak.c"), Path(folder, "peak")
        source.write_text(PEAK)
        flags = ["-O2", "-march=native", "-ffp-contract=fast", f"-DWIDTH={width}", "-pthread"]
        subprocess.run(["gcc", *flags, str(source), "-o", str(program)], check=True)
        return float(subprocess.run([program, str(threads)], check=True, capture_output=True, text=True).stdout)


class Worker:
    def __init__(self, python: str, system: str, environment: dict[str, str]) -> None:
        command = [python, str(HERE / "worker.py"), system]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip

    def time(self, dims: list[int], steps: int) -> float | None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"shape": dims, "steps": steps}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or "{}")
        return float(answer["ms"]) if "ms" in answer else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--wheel", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", default="default,small,odd", help="names, or `odd` for all ten odd ones")
    parser.add_argument("--wheel-shapes", default="default", help="the wheel is slow: only these (default: default)")
    parser.add_argument("--no-compile", action="store_true", help="leave PyTorch's compiled form out")
    arguments = parser.parse_args()

    threads = len(os.sched_getaffinity(0))
    workers = {
        "mojolearn": Worker(sys.executable, "mojolearn", {}),
        "one thread": Worker(sys.executable, "mojolearn", {"MOJOLEARN_THREADS": "1"}),
    }
    if arguments.torch:
        workers["PyTorch eager"] = Worker(arguments.torch, "torch", {})
        if not arguments.no_compile:
            workers["PyTorch compiled"] = Worker(arguments.torch, "torch-compiled", {})
    if arguments.wheel:
        libraries = Path(arguments.wheel).parent.parent.glob("lib/python*/site-packages/mojolearn/.libs")
        environment = {"MOJOLEARN_VENDOR": "cpu", "LD_LIBRARY_PATH": ":".join(map(str, libraries))}
        workers["published wheel"] = Worker(arguments.wheel, "mojolearn", environment)
    peak = measure_peak(threads)

    asked = arguments.shapes.split(",")
    names = [n for n in SHAPES if n in asked or (n.startswith("odd") and "odd" in asked)]
    peers = list(workers)[1:]
    processor = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in processor if line.startswith("model name")), "?")
    print(f"{date.today()}, {model}, {threads} threads, measured fma peak {peak:.0f} GFLOP/s, {platform.platform()}\n")
    print("| shape | mojolearn ms | GFLOP/s | of the peak | " + " | ".join(f"{p} ms (ratio)" for p in peers) + " |")
    print("|---|---|---|---|" + "---|" * len(peers), flush=True)
    for name in names:
        dims, steps = SHAPES[name]
        times: dict[str, list[float]] = {system: [] for system in workers}
        for _ in range(arguments.rounds):
            for system, worker in workers.items():
                if system == "published wheel" and name not in arguments.wheel_shapes.split(","):
                    continue
                if (ms := worker.time(dims, steps)) is not None:
                    times[system].append(ms)
        median = {system: statistics.median(values) for system, values in times.items() if values}
        ours = median["mojolearn"]
        rate = flops(dims) / ours * 1e-6
        cells = [f"{median[p]:.3g} ({median[p] / ours:.2f}×)" if p in median else "–" for p in peers]
        label = name if not name.startswith("odd") else " ".join(map(str, dims))
        print(f"| {label} | {ours:.3g} | {rate:.0f} | {rate / peak:.0%} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
