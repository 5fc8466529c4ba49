# SPDX-License-Identifier: Apache-2.0
"""The reference reproduces the conformance vectors, so the other tests may ask it who is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference_model import ReferenceTrainer, variant
from vector_cases import replay, sha256

VECTORS = Path(__file__).parent / "vectors"
FAST_PRODUCTS = 1e8  # multiplications; the reference does some 300 million a second


def _products(case: dict[str, Any]) -> float:
    batch, length, width, heads, kv, head_dim, f, layers, vocab = case["shape"]
    weights = layers * (2 * width * width + 2 * kv * head_dim * width + 3 * f * width) + vocab * width
    attention = layers * heads * length * head_dim * 2
    return float((3 * case["steps"] + 3) * batch * length * (weights + attention))


def _vectors() -> list[Any]:
    out = []
    for path in sorted(VECTORS.glob("language_model*.json")):
        for index, vector in enumerate(json.loads(path.read_text(encoding="utf-8"))["vectors"]):
            slow = [pytest.mark.slow] if _products(vector["case"]) > FAST_PRODUCTS else []
            out.append(pytest.param(vector, id=f"{path.stem}-{index}", marks=slow))
    return out


@pytest.mark.parametrize("vector", _vectors())
def test_reference_reproduces_vector(vector: dict[str, Any]) -> None:
    expected = dict(vector["expected"])
    del expected["profile"]
    assert replay(vector["case"]) == expected


def _edge_vector(index: int) -> dict[str, Any]:
    vector: dict[str, Any] = json.loads((VECTORS / "language_model_edge.json").read_text(encoding="utf-8"))["vectors"][
        index
    ]
    return vector


def _first_difference(name: str) -> int | None:
    """The first edge vector that a variant fails."""
    with variant(name):
        for index in range(14):
            vector = _edge_vector(index)
            if replay(vector["case"])["steps"] != vector["expected"]["steps"]:
                return index
    return None


@pytest.mark.parametrize("name", ["hardware_flush", "no_flush", "wide_sums", "rotary_fused"])
def test_a_broken_rule_fails_the_edge_vectors(name: str) -> None:
    assert _first_difference(name) is not None


def test_variant_ends_with_its_block() -> None:
    case = _edge_vector(0)["case"]
    right = replay(case)
    with variant("no_flush"):
        assert replay(case) != right
    assert replay(case) == right


def test_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="no such variant"), variant("unheard_of"):
        pass


def test_ragged_rows_are_computed_alone() -> None:
    rng = np.random.default_rng(7)
    shape = (3, 9, 8, 2, 1, 4, 12, 2, 30)
    trainer = ReferenceTrainer(shape)
    trainer.parameters = rng.standard_normal(trainer.count).astype(np.float32)
    ids = rng.integers(0, 30, (3, 9)).astype(np.int32)
    together = trainer.logits(ids, [9, 1, 4])
    for row, length in enumerate((9, 1, 4)):
        assert sha256(together[row, :length]) == sha256(trainer.logits(ids[row : row + 1, :length])[0])
        assert not together[row, length:].view(np.uint32).any()
