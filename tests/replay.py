# SPDX-License-Identifier: Apache-2.0
"""Replays recorded vectors by a program built from tests/native/replay.c, which may be for another processor.

    python tests/replay.py --work 3e7 qemu-aarch64 -L /usr/aarch64-linux-gnu build/replay

runs every vector of at most so much work and prints how many passed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from vector_cases import batches, hex_bits, ragged_lengths, sha256, untrained

VECTORS = Path(__file__).resolve().parent / "vectors"
FILES = ("language_model_edge.json", "language_model.json", "language_model_chunked.json")


def replay(command: list[str], case: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What the program answers to a vector's case, in the form of its "expected"."""
    batch, length, *_, vocab = case["shape"]
    start, lengths, *_ = untrained(case), ragged_lengths(case)
    *training, held_out = batches(case)
    numbers = [
        np.array([*case["shape"], case["chunked"], len(training), start.count], np.int32),
        np.array([start.lr, *start.betas, start.eps, start.weight_decay], np.float32),
        start.parameters,
        *training,
        held_out,
        np.array(lengths, np.int32),
    ]
    given, answered = directory / "input", directory / "output"
    given.write_bytes(b"".join(array.tobytes() for array in numbers))
    subprocess.run([*command, str(given), str(answered)], check=True)
    words = np.fromfile(answered, np.float32)
    used = 0

    def take(count: int) -> Any:
        nonlocal used
        used += count
        return words[used - count : used]

    steps = [
        {"ids_sha256": sha256(ids), "loss": hex_bits(take(1)[0]), "gradient_sha256": sha256(take(start.count))}
        for ids in training
    ]
    out = {
        "n_total": start.count,
        "initial_sha256": sha256(start.parameters),
        "steps": steps,
        "final": {name: sha256(take(start.count)) for name in ("parameters", "m", "v")},
        "evaluate": hex_bits(take(1)[0]),
        "logits_sha256": sha256(take(batch * length * vocab)),
        "ragged": {
            "lengths": lengths,
            "logits_sha256": sha256(take(batch * length * vocab)),
            "next": take(batch).view(np.int32).tolist(),
        },
    }
    assert used == words.size, f"the program wrote {words.size} numbers, not {used}"
    return out


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=float, default=1e9, help="most tokens times parameters of all steps of a case")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program, to which two file names are added")
    arguments = parser.parse_args()
    passed, failed, started = 0, 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        for name in FILES:
            for index, vector in enumerate(json.loads((VECTORS / name).read_text("utf-8"))["vectors"]):
                case, expected = vector["case"], vector["expected"]
                batch, length, *_ = case["shape"]
                if batch * length * expected["n_total"] * (case["steps"] + 1) > arguments.work:
                    continue
                answer = replay(arguments.command, case, Path(directory))
                wrong = [key for key in answer if answer[key] != expected[key]]
                passed, failed = passed + (not wrong), failed + bool(wrong)
                if wrong:
                    print(f"{name}, vector {index}: {', '.join(wrong)} differ")
    print(f"{passed} passed, {failed} failed ({time.perf_counter() - started:.0f} s)")
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    sys.exit(main())
