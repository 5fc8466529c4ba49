# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of the product against the reference, bit for bit, on any small shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import bits, shapes
from models import trainer as open_trainer
from mojolearn import LanguageModelConfig, NonFiniteError
from operations import normal
from reference_model import Floats, Ints, ReferenceTrainer, variant
from vector_cases import edge_tensor

KINDS = ("ordinary", "large", "edge", "mixed")
SMALL_EDGE = LanguageModelConfig(
    batch=1, length=4, d_model=4, n_heads=1, n_kv=1, head_dim=4, intermediate=4, n_layers=1, vocab_size=8
)
SMALL_MASKED = LanguageModelConfig(
    batch=2, length=6, d_model=8, n_heads=2, n_kv=1, head_dim=4, intermediate=8, n_layers=2, vocab_size=9
)


def _weights(kind: str, shape: LanguageModelConfig, seed: int) -> Floats:
    """Ordinary or large numbers, or tensors whose products, or themselves, are near the smallest normal number."""
    rng = np.random.default_rng(seed)
    pieces = []
    for size in map(int, map(np.prod, shape.parameter_shapes)):
        planted = kind == "edge" or (kind == "mixed" and rng.random() < 0.4)
        pieces.append(edge_tensor(rng, size) if planted else normal(rng, size, 3.0 if kind == "large" else 0.2))
    return np.concatenate(pieces)


def _ids(shape: LanguageModelConfig, rng: np.random.Generator) -> Ints:
    return rng.integers(0, shape.vocab_size, (shape.batch, shape.length + 1)).astype(np.int32)


def _reference(kind: str, shape: LanguageModelConfig, seed: int, **hyper: Any) -> ReferenceTrainer:
    fields = [value for name, value in shape.to_dict().items() if name != "chunked_lm_head_v2"]
    reference = ReferenceTrainer(fields, chunked=shape.chunked_lm_head_v2, **hyper)
    reference.parameters = _weights(kind, shape, seed)
    return reference


def _both(right: Callable[[Ints], Any], ours: Callable[[Ints], Any], ids: Ints) -> tuple[Any, Any] | None:
    """Both answers; None if both refuse."""
    try:
        answer = right(ids)
    except FloatingPointError:
        with pytest.raises(NonFiniteError):
            ours(ids)
        return None
    return answer, ours(ids)


@settings(max_examples=150, deadline=None)
@given(
    shape=shapes(),
    kind=st.sampled_from(KINDS),
    hyper=st.sampled_from([{}, {"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.5, "weight_decay": 0.5, "eps": 1e-6}]),
    seed=st.integers(0, 2**32 - 1),
)
def test_steps_have_the_bits_of_the_reference(
    shape: LanguageModelConfig, kind: str, hyper: dict[str, float], seed: int
) -> None:
    reference = _reference(kind, shape, seed, **hyper)
    trainer = open_trainer(shape, reference.parameters.copy(), step_result="full", **hyper)
    rng = np.random.default_rng(seed)
    for _ in range(2):
        ids = _ids(shape, rng)
        if (step := _both(reference.step, trainer.train_step, ids)) is None:
            return
        (loss, gradient), result = step
        assert bits(np.float32(result["loss"])) == bits(loss)
        assert bits(np.asarray(result["flat_gradients"])) == bits(gradient)
        state = trainer.state_dict()
        for name in ("parameters", "m", "v"):
            assert bits(np.asarray(state[name])) == bits(getattr(reference, name)), name
        if losses := _both(reference.evaluate, trainer.evaluate, ids):
            assert bits(np.float32(losses[1])) == bits(losses[0])
            assert bits(np.asarray(trainer.logits(ids[:, :-1]))) == bits(reference.logits(ids[:, :-1]))


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [
        (SMALL_EDGE, ("hardware_flush", "no_flush", "wide_sums")),
        (SMALL_MASKED, ("masked_dropped", "queries_descending", "heads_descending", "positions_descending")),
    ],
    ids=["rounding", "order"],
)
def test_rare_cases_inside_a_step(shape: LanguageModelConfig, wrong: tuple[str, ...]) -> None:
    """Some of these steps, and few of others, notice each of the wrong rules."""
    noticed = dict.fromkeys(wrong, 0)
    for seed in range(150):
        reference = _reference("edge", shape, seed)
        trainer = open_trainer(shape, reference.parameters.copy(), step_result="full")
        ids = _ids(shape, np.random.default_rng(seed))
        right = bits(reference.step(ids)[1])
        assert bits(np.asarray(trainer.train_step(ids)["flat_gradients"])) == right, f"seed {seed}"
        for name in wrong:
            with variant(name):
                noticed[name] += bits(_reference("edge", shape, seed).step(ids)[1]) != right
    assert all(noticed.values()), noticed
