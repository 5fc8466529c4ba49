# SPDX-License-Identifier: Apache-2.0
"""Inputs of the conformance vectors (tests/vectors/language_model*.json), and what the reference makes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference_model import Floats, Ints, ReferenceTrainer


def sha256(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()).hexdigest()


def hex_bits(x: np.float32) -> str:
    return format(int(x.view(np.uint32)), "08x")


def edge_tensor(rng: np.random.Generator, count: int) -> Floats:
    """One of seven kinds of values near 2^-63, near 2^-126, powers of two, or zeros."""
    kind = int(rng.integers(0, 7))
    x: NDArray[np.float64]
    sign = np.where(rng.integers(0, 2, count) == 1, -1.0, 1.0)
    full = 1.0 - rng.integers(0, 3, count) * 2.0**-24

    def power(low: int, high: int) -> NDArray[np.float64]:
        return np.asarray(2.0 ** -rng.integers(low, high, count).astype(float))

    if kind == 0:
        x = rng.standard_normal(count) * 0.05
    elif kind == 1:
        x = np.zeros(count)
    elif kind == 2:
        x = sign * full * power(60, 66)
    elif kind == 3:
        x = sign * full * power(120, 127)
    elif kind == 4:
        x = sign * power(0, 8)
    elif kind == 5:
        keep = rng.random(count) >= 0.5
        x = np.where(keep, sign * full * power(100, 127), 0.0)
    else:
        x = sign * full * power(20, 45)
    return np.asarray(x, np.float32)


def initial_parameters(case: dict[str, Any], trainer: ReferenceTrainer) -> Floats:
    """The parameters that a vector starts from; `trainer` knows the layout."""
    count, plant = trainer.count, case["plant"]
    if plant == "edge":
        rng = np.random.default_rng(case["seed"] + 10**6)
        return np.concatenate([edge_tensor(rng, int(np.prod(size))) for _, size in trainer.tensors().values()])
    w = (np.random.default_rng(case["seed"]).standard_normal(count) * case["scale"]).astype(np.float32)
    if plant == "tiny":
        w[::7] = (w[::7].astype(np.float64) * 2.0**-120).astype(np.float32)
    elif plant == "negzero":
        w[::5] = np.float32(-0.0)
    elif plant == "large":
        w[::11] *= np.float32(40.0)
    elif plant == "norms":
        for name, (offset, size) in trainer.tensors().items():
            if name.endswith(("norm1_w", "norm2_w")):
                w[offset : offset + size[0]] = 1.0
    return w


def batches(case: dict[str, Any]) -> Iterator[Ints]:
    """The ids [batch, length + 1] of each step, and one batch more, which is not trained on."""
    batch, length, *_, vocab = case["shape"]
    rng = np.random.default_rng(case["seed"] + 1)
    for step in range(case["steps"] + 1):
        ids = rng.integers(0, vocab, (batch, length + 1)).astype(np.int32)
        if case["repeat_token"] and step < case["steps"]:
            ids[:, ::2] = 3 % vocab
        yield ids


def ragged_lengths(case: dict[str, Any]) -> list[int]:
    batch, length, *_ = case["shape"]
    return [1 + (7 * row + 3) % length for row in range(batch)]


def untrained(case: dict[str, Any]) -> ReferenceTrainer:
    """The reference at the parameters that a vector starts from."""
    hyper = {**case["hyper"], "betas": tuple(case["hyper"].get("betas", (0.9, 0.999)))}
    trainer = ReferenceTrainer(case["shape"], chunked=case["chunked"], **hyper)
    trainer.parameters = initial_parameters(case, trainer)
    return trainer


def replay(case: dict[str, Any]) -> dict[str, Any]:
    """What the reference answers to a vector's case, in the form of its "expected"."""
    trainer = untrained(case)
    out: dict[str, Any] = {"n_total": trainer.count, "initial_sha256": sha256(trainer.parameters), "steps": []}
    *training, held_out = batches(case)
    for ids in training:
        loss, gradient = trainer.step(ids)
        out["steps"].append({"ids_sha256": sha256(ids), "loss": hex_bits(loss), "gradient_sha256": sha256(gradient)})
    out["final"] = {name: sha256(getattr(trainer, name)) for name in ("parameters", "m", "v")}
    out["evaluate"] = hex_bits(trainer.evaluate(held_out))
    lengths = ragged_lengths(case)
    ragged = trainer.logits(held_out[:, :-1], lengths)
    out["logits_sha256"] = sha256(trainer.logits(held_out[:, :-1]))
    out["ragged"] = {
        "lengths": lengths,
        "logits_sha256": sha256(ragged),
        "next": [int(np.argmax(ragged[i, n - 1])) for i, n in enumerate(lengths)],
    }
    return out
