# SPDX-License-Identifier: Apache-2.0
"""The same run on two backends, compared by bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mojolearn import LanguageModelConfig, LanguageModelTrainer

SCHEDULE = {"corpus": "random"}


def random_shape(rng: np.random.Generator, scale: int = 1) -> LanguageModelConfig:
    """Odd sizes on purpose: no multiple of a tile, a vector or a cache line. `scale` stretches all but the layers."""
    n_kv, group = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    head_dim = 2 * int(rng.integers(1, 20 * scale))
    vocab_size = int(rng.integers(2, 300 * scale))
    return LanguageModelConfig(
        batch=int(rng.integers(1, 5)),
        length=int(rng.integers(1, 150 * scale)),
        d_model=n_kv * group * head_dim,
        n_heads=n_kv * group,
        n_kv=n_kv,
        head_dim=head_dim,
        intermediate=int(rng.integers(1, 200 * scale)),
        n_layers=int(rng.integers(1, 4)),
        vocab_size=vocab_size,
        chunked_lm_head_v2=bool(rng.integers(2)),
    )


def parameters(shape: LanguageModelConfig, rng: np.random.Generator, planted: bool) -> np.ndarray[Any, Any]:
    """Random weights; if `planted`, with subnormals, zeros of both signs, and numbers whose products underflow."""
    flat = (rng.standard_normal(shape.n_total) * 0.08).astype(np.float32)
    if planted:
        at = rng.random(shape.n_total)
        sign = rng.integers(0, 2, shape.n_total, np.uint32) << 31
        subnormal = rng.integers(1, 1 << 23, shape.n_total, np.uint32) | sign
        flat = np.where(at < 0.02, subnormal.view(np.float32), flat)
        flat = np.where((at > 0.02) & (at < 0.05), np.float32(0), flat)
        flat = np.where((at > 0.05) & (at < 0.08), np.float32(-0.0), flat)
        tiny = np.ldexp(flat, rng.integers(-120, 0, shape.n_total)).astype(np.float32)
        flat = np.where((at > 0.08) & (at < 0.1), tiny, flat)
    return np.ascontiguousarray(flat, np.float32)


def run(shape: LanguageModelConfig, vendor: str, seed: int, planted: bool, steps: int) -> dict[str, Any]:
    """Everything that a training run shows: losses, gradients, state, logits (ragged too), next tokens."""
    rng = np.random.default_rng(seed)
    start = parameters(shape, rng, planted)
    trainer = LanguageModelTrainer(
        start, data_schedule=SCHEDULE, shape=shape, vendor=vendor, resident=True, weight_decay=0.01 * (seed % 2)
    )
    shown: dict[str, Any] = {}
    try:
        losses = []
        for step in range(steps):
            ids = rng.integers(0, shape.vocab_size, (shape.batch, shape.length + 1)).astype(np.int32)
            losses.append(trainer.train_step(ids)["loss"])
            if step in (0, steps - 1):
                for name, gradient in trainer.export_gradients()["gradients"].items():
                    shown[f"step {step + 1}, gradient of {name}"] = gradient
        shown["losses"] = np.array(losses, np.float32)
        shown["evaluation"] = np.array([trainer.evaluate(ids)], np.float32)
        rows = ids[:, :-1]
        shown["logits"] = trainer.logits(rows)
        lengths = rng.integers(1, shape.length + 1, shape.batch).tolist()
        shown["ragged logits"] = trainer.logits(rows, lengths=lengths)
        many = rng.integers(0, shape.vocab_size, (5 * shape.batch, max(1, shape.length // 7))).astype(np.int32)
        shown["logits of many short rows"] = trainer.logits(many)
        state = trainer.export_state()
        shown |= {name: state[name] for name in ("parameters", "m", "v")}
    finally:
        trainer.close()
    return shown


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    for name, right in theirs.items():
        left = ours[name]
        a, b = np.asarray(left).view(np.uint32).ravel(), np.asarray(right).view(np.uint32).ravel()
        differ = np.flatnonzero(a != b)
        if differ.size:
            i = int(differ[0])
            yield f"{name}: {differ.size} of {a.size} differ, first at {i}: {int(a[i]):08x}, right is {int(b[i]):08x}"
