# SPDX-License-Identifier: Apache-2.0
"""Recorded checkpoints and made-up states that several test files use."""

import json
import pathlib

import numpy as np

from mojolearn import _checkpoint

RECORDED = pathlib.Path(__file__).parent / "vectors" / "checkpoints"
MANIFEST = json.loads((RECORDED / "manifest.json").read_text())["checkpoints"]
TINY_JSON = (RECORDED / "tiny.json").read_bytes()
TINY_BINARY = (RECORDED / "tiny.mjl").read_bytes()


def large_state(count):
    rng = np.random.default_rng(5)
    state = _checkpoint.read_json(TINY_JSON)
    return state | {name: rng.standard_normal(count, dtype=np.float32) for name in ("parameters", "m", "v")}


def same(left, right):
    return left.keys() == right.keys() and all(
        left[key].tobytes() == right[key].tobytes() if key in _checkpoint.ARRAYS else left[key] == right[key]
        for key in left
    )
