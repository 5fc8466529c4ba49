# SPDX-License-Identifier: Apache-2.0
"""Where a training step on the CPU spends its time: `python benchmarks/stages.py [default] [small]`.

Needs the tests' library (`python native/build.py --probe`). A stage of matrix products is limited by the processor's
multiply-adds (the peak is measured); the update by its divisions and square roots or by memory.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import numpy as np
from cpu import SHAPES, flops, measure_peak

LIBRARY = Path(__file__).resolve().parent.parent / "build" / "libmojolearn_probe.so"


def stage_flops(dims: list[int]) -> dict[str, float]:
    """Multiply-adds, as 2 each, of one step's products in each stage; recomputed scores count once, as in `flops`."""
    batch, length, d, heads, kv, head_dim, f, layers, vocab = dims
    tokens = batch * length
    pairs = layers * batch * heads * length * (length + 1) / 2 * head_dim * 2  # one product over visible pairs
    qkv, out, mlp, down, head = (
        2 * tokens * n for n in (d * (d + 2 * kv * head_dim), d * d, 2 * f * d, f * d, vocab * d)
    )
    return {
        "norm_qkv_rotary": layers * qkv,
        "attention": 2 * pairs,
        "project_residual": layers * (out + down),
        "norm_gate_up": layers * mlp,
        "head_loss_backward": 3 * head,
        "project_backward": 2 * layers * (out + down),
        "gate_up_norm_backward": 2 * layers * mlp,
        "attention_backward": 4 * pairs,
        "qkv_norm_backward": 2 * layers * qkv,
    }


def main() -> None:
    probe = ctypes.CDLL(str(LIBRARY))
    threads = len(os.sched_getaffinity(0))
    peak = measure_peak(threads)
    for shape in sys.argv[1:] or ["default", "small"]:
        dims, steps = SHAPES[shape][0], 400 if shape == "default" else 8
        batch, length, d, _, kv, head_dim, f, layers, vocab = dims
        count = 2 * vocab * d + layers * (2 * d + 2 * d * d + 2 * kv * head_dim * d + 3 * f * d)
        rng = np.random.default_rng(0)
        weights = (rng.standard_normal(count) * 0.05).astype(np.float32)
        ids = rng.integers(0, vocab, (batch, length + 1), dtype=np.int32)
        out = ctypes.create_string_buffer(4096)
        arguments = (np.array(dims, np.int32).ctypes, weights.ctypes, ids.ctypes, steps, out, ctypes.c_uint64(len(out)))
        status = probe.probe_stage_seconds(*arguments)
        if status != 0:
            sys.exit(f"probe_stage_seconds: status {status}")
        rows = [line.split() for line in out.value.decode().splitlines()]
        seconds = {name: float(value) / steps for name, value in rows if name != "rotary_table"}
        total, work = sum(seconds.values()), stage_flops(dims)
        print(f"\n{shape}: {total * 1e3:.3g} ms in stages, {flops(dims) / total * 1e-9:.0f} of {peak:.0f} GFLOP/s\n")
        print("| stage | ms | share | GFLOP/s | of the peak |\n|---|---|---|---|---|")
        for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
            rate = work.get(name, 0) / value * 1e-9
            cells = f"{rate:.0f} | {rate / peak:.0%}" if rate else "– | –"
            print(f"| {name} | {value * 1e3:.3g} | {value / total:.0%} | {cells} |")


if __name__ == "__main__":
    main()
