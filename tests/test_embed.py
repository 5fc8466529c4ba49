# SPDX-License-Identifier: Apache-2.0
"""The programs in examples/embed print the digest that the Python trainer gives for the same numbers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mojolearn
from abi import HEADER

EMBED = Path(__file__).resolve().parent.parent / "examples" / "embed"
LIBRARY = HEADER.parent
RPATH = f"-Wl,-rpath,{LIBRARY}"


def random_bytes() -> Iterator[int]:
    state = 0
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 56


def fnv1a(data: bytes) -> int:
    digest = 0xCBF29CE484222325
    for byte in data:
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return digest


@pytest.fixture(scope="module")
def expected() -> str:
    """What the programs do, in Python."""
    shape = mojolearn.LanguageModelConfig()
    source = random_bytes()
    weights = np.array([(next(source) - 128) / 1024 for _ in range(shape.n_total)], np.float32)

    def batch() -> np.ndarray:
        size = (shape.batch, shape.length + 1)
        return np.fromiter(source, np.int32, size[0] * size[1]).reshape(size)

    trainer = mojolearn.LanguageModelTrainer(weights, data_schedule={"corpus": "random bytes"})
    losses = [trainer.train_step(batch())["loss"] for _ in range(20)]
    losses.append(trainer.evaluate(batch()))
    losses.append(trainer.train_step(batch())["loss"])
    state = trainer.export_state()
    arrays = [state["parameters"], state["m"], state["v"], np.array(losses, np.float32)]
    return f"{fnv1a(b''.join(array.tobytes() for array in arrays)):016x}"


def last_line(program: Path) -> str:
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()[-1]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) on this machine")
def test_c(expected: str, tmp_path: Path) -> None:
    program = tmp_path / "train"
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-O2", f"-I{LIBRARY}"]
    link = [f"-L{LIBRARY}", "-lmojolearn", RPATH]
    subprocess.run(["cc", *flags, EMBED / "c" / "train.c", *link, "-o", program], check=True)
    assert last_line(program) == expected


@pytest.mark.skipif(shutil.which("rustc") is None, reason="no Rust compiler (rustc) on this machine")
def test_rust(expected: str, tmp_path: Path) -> None:
    program = tmp_path / "main"
    flags = ["-O", "-D", "warnings", f"-Lnative={LIBRARY}", f"-Clink-arg={RPATH}"]
    subprocess.run(["rustc", *flags, EMBED / "rust" / "main.rs", "-o", program], check=True)
    assert last_line(program) == expected
