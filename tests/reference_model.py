# SPDX-License-Identifier: Apache-2.0
"""The reference's training step on NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from native_build import ffi, reference_library

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def floats(array: Floats) -> Any:
    return ffi().from_buffer("float[]", array)


def ints(array: Ints) -> Any:
    return ffi().from_buffer("int32_t[]", array)


@contextmanager
def variant(name: str) -> Iterator[None]:
    """Let the reference break one rule (a name of reference_math.hpp's Variant) inside the block."""
    library = reference_library()
    if library.reference_set_variant(name.encode()) != 0:
        raise ValueError(f"no such variant: {name}")
    try:
        yield
    finally:
        library.reference_set_variant(b"right")


def _check(status: int) -> None:
    if status != 0:
        raise FloatingPointError("not finite")


@dataclass
class ReferenceTrainer:
    """A training state, all zeros at the start, and the reference's step on it."""

    shape: Sequence[int]  # batch, length, d_model, n_heads, n_kv, head_dim, intermediate, n_layers, vocab_size
    chunked: bool = False
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        self._library = reference_library()
        self._shape = ffi().new("reference_shape *", [*self.shape, int(self.chunked)])
        self._adamw = ffi().new("reference_adamw *", [self.lr, *self.betas, self.eps, self.weight_decay])
        self.count = int(self._library.reference_parameter_count(self._shape))
        self.parameters, self.m, self.v = (np.zeros(self.count, np.float32) for _ in range(3))
        self.completed_steps = 0

    def step(self, ids: Ints) -> tuple[np.float32, Floats]:
        """One training step on ids [batch, length + 1]; returns the loss and the flat gradient."""
        loss, gradient = np.zeros(1, np.float32), np.zeros_like(self.parameters)
        state = map(floats, (self.parameters, self.m, self.v, loss, gradient))
        number = self.completed_steps + 1
        _check(self._library.reference_step(self._shape, self._adamw, number, ints(ids), *state))
        self.completed_steps = number
        return np.float32(loss[0]), gradient

    def evaluate(self, ids: Ints) -> np.float32:
        loss = np.zeros(1, np.float32)
        _check(self._library.reference_evaluate(self._shape, floats(self.parameters), ints(ids), floats(loss)))
        return np.float32(loss[0])

    def logits(self, ids: Ints, lengths: Sequence[int] | None = None) -> Floats:
        """Logits [rows, length, vocab_size] of ids [rows, length]."""
        ids = np.ascontiguousarray(ids, np.int32)
        out = np.zeros((*ids.shape, self.shape[-1]), np.float32)
        given = ffi().NULL if lengths is None else ints(np.array(lengths, np.int32))
        weights = floats(self.parameters)
        _check(self._library.reference_logits(self._shape, weights, ints(ids), *ids.shape, given, floats(out)))
        return out

    def tensors(self) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Where each parameter tensor starts in the flat vector, and its shape; in order."""
        _, _, d, _, n_kv, head_dim, f, n_layers, vocab = self.shape
        kv = n_kv * head_dim
        block: dict[str, tuple[int, ...]] = {
            "norm1_w": (d,),
            "w_q": (d, d),
            "w_k": (kv, d),
            "w_v": (kv, d),
            "w_o": (d, d),
            "norm2_w": (d,),
            "w_gate": (f, d),
            "w_up": (f, d),
            "w_down": (d, f),
        }
        shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, d)}
        for layer in range(n_layers):
            shapes |= {f"block{layer}.{name}": size for name, size in block.items()}
        shapes["lm_head"] = (vocab, d)
        out, offset = {}, 0
        for name, size in shapes.items():
            out[name] = (offset, size)
            offset += int(np.prod(size))
        return out
