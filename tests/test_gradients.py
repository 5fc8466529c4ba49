# SPDX-License-Identifier: Apache-2.0
"""Loss and gradients against float64 backpropagation, which is itself checked by finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from float64_model import Float64Model, Weights
from mojolearn import LanguageModelConfig, LanguageModelTrainer

FIELDS = ("batch", "length", "d_model", "n_heads", "n_kv", "head_dim", "intermediate", "n_layers", "vocab_size")
SHAPES = [
    (1, 1, 2, 1, 1, 2, 1, 1, 2),
    (2, 7, 12, 2, 1, 6, 10, 2, 11),
    (3, 17, 48, 6, 3, 8, 100, 1, 300),
    (1, 40, 24, 3, 3, 8, 40, 4, 65),
    (2, 33, 20, 2, 1, 10, 129, 2, 257),
    (1, 130, 32, 4, 2, 8, 24, 1, 131),
]


def _case(
    fields: tuple[int, ...], chunked: bool = False
) -> tuple[LanguageModelConfig, NDArray[np.float32], NDArray[np.int32]]:
    """A shape, weights of ordinary sizes, and ids with repetitions."""
    shape = LanguageModelConfig(**dict(zip(FIELDS, fields, strict=True)), chunked_lm_head_v2=chunked)
    rng = np.random.default_rng(sum(fields))
    weights = [
        rng.uniform(0.5, 1.5, size) if len(size) == 1 else rng.standard_normal(size) / np.sqrt(size[1])
        for size in shape.parameter_shapes
    ]
    ids = rng.integers(0, shape.vocab_size, (shape.batch, shape.length + 1)).astype(np.int32)
    ids[:, ::3] = 1
    return shape, np.concatenate([w.ravel() for w in weights]).astype(np.float32), ids


def _named(shape: LanguageModelConfig, flat: NDArray[np.float32]) -> Weights:
    ends = shape.parameter_offsets[1:]
    pieces = np.split(flat.astype(np.float64), ends[: shape.n_tensors - 1])
    named = zip(shape.parameter_names, shape.parameter_shapes, pieces, strict=True)
    return {name: piece.reshape(size) for name, size, piece in named}


@pytest.mark.parametrize("chunked", [False, True], ids=["plain", "chunked"])
@pytest.mark.parametrize("fields", SHAPES, ids=str)
def test_trainer_agrees_with_float64(fields: tuple[int, ...], chunked: bool) -> None:
    shape, flat, ids = _case(fields, chunked)
    trainer = LanguageModelTrainer(flat, data_schedule={"corpus": "random"}, shape=shape, step_result="full")
    result = trainer.train_step(ids)
    loss, gradients = Float64Model(shape, _named(shape, flat)).loss_and_gradients(ids)
    assert result["loss"] == pytest.approx(loss, rel=1e-6)
    for name, right in gradients.items():
        error = np.abs(result["gradients"][name] - right).max()
        assert error <= 1e-5 * np.abs(right).max(), name


def test_oracle_agrees_with_finite_differences() -> None:
    shape, flat, ids = _case(SHAPES[1])
    weights = _named(shape, flat)
    _, gradients = Float64Model(shape, weights).loss_and_gradients(ids)
    rng, step = np.random.default_rng(5), 1e-5
    for name, value in weights.items():
        for index in rng.choice(value.size, min(value.size, 8), replace=False):
            original, losses = value.flat[index], []
            for moved in (original + step, original - step):
                value.flat[index] = moved
                losses.append(Float64Model(shape, weights).loss_and_gradients(ids)[0])
            value.flat[index] = original
            slope = (losses[0] - losses[1]) / (2 * step)
            assert slope == pytest.approx(gradients[name].flat[index], rel=1e-6, abs=1e-9), f"{name}[{index}]"
