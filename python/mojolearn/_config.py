# SPDX-License-Identifier: Apache-2.0
"""The shape of a model and of its training batch."""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

MAX_DIMENSION = 1 << 20
MAX_LENGTH = 8192
MAX_INDEX = (1 << 31) - 1

_LAYER_TENSORS = ("norm1_w", "w_q", "w_k", "w_v", "w_o", "norm2_w", "w_gate", "w_up", "w_down")


@dataclass(frozen=True)
class ByteLanguageModelConfig:
    """The dimensions of a decoder-only language model and of the batches it is trained on.

    Pass it to :class:`mojolearn.LanguageModelTrainer` as ``shape``. ``LanguageModelConfig`` is the same class.

    Args:
        batch: sequences in a training step.
        length: positions of a sequence; at most 8192.
        d_model: width of the model; equals ``n_heads * head_dim``.
        n_heads: query heads; a multiple of ``n_kv``.
        n_kv: key and value heads. ``n_heads / n_kv`` query heads share one.
        head_dim: width of a head; even.
        intermediate: width of the gated MLP inside.
        n_layers: decoder layers.
        vocab_size: token ids lie in ``[0, vocab_size)``.
        chunked_lm_head_v2: sum the loss and the gradients of the output head in the order of the chunked profile, which
            needs less memory at large vocabularies and gives (slightly) other bits. Needs a vocabulary of at least 2.

    Every dimension is an integer in ``[1, 2**20]``; no array of the model may have more than ``2**31 - 1`` elements.

    Raises:
        ValueError: a field is no integer, out of range, or does not fit the others.

    >>> shape = ByteLanguageModelConfig(batch=1, length=128, d_model=64, n_heads=4, n_kv=2, head_dim=16,
    ...                                 intermediate=128, n_layers=2, vocab_size=256)
    >>> shape.n_total
    106752
    """

    batch: int = 2
    length: int = 32
    d_model: int = 32
    n_heads: int = 4
    n_kv: int = 2
    head_dim: int = 8
    intermediate: int = 64
    n_layers: int = 2
    vocab_size: int = 256
    chunked_lm_head_v2: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "chunked_lm_head_v2":
                object.__setattr__(self, field.name, _dimension(field.name, getattr(self, field.name)))
        if type(self.chunked_lm_head_v2) is not bool:
            raise ValueError(f"chunked_lm_head_v2 must be True or False, not {self.chunked_lm_head_v2!r}")
        if self.length > MAX_LENGTH:
            raise ValueError(f"length must be at most {MAX_LENGTH}, not {self.length}")
        if self.d_model != self.n_heads * self.head_dim:
            raise ValueError(
                f"d_model must equal n_heads * head_dim = {self.n_heads} * {self.head_dim} = "
                f"{self.n_heads * self.head_dim}, not {self.d_model}"
            )
        if self.n_heads % self.n_kv:
            raise ValueError(f"n_heads must be a multiple of n_kv = {self.n_kv}, not {self.n_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}")
        if self.chunked_lm_head_v2 and self.vocab_size < 2:
            raise ValueError("chunked_lm_head_v2 needs a vocab_size of at least 2, not 1")
        for what, count in self._spans().items():
            if count > MAX_INDEX:
                raise ValueError(f"the shape exceeds signed 32-bit indexing: {what} = {count}, more than {MAX_INDEX}")

    def _spans(self) -> dict[str, int]:
        positions = self.batch * self.length
        return {
            "n_total": self.n_total,
            "batch * length * vocab_size": positions * self.vocab_size,
            "batch * length * d_model": positions * self.d_model,
            "batch * length * intermediate": positions * self.intermediate,
            "batch * n_heads * length * length": positions * self.n_heads * self.length,
            "batch * n_kv * length * head_dim": positions * self.n_kv * self.head_dim,
            "batch * (length + 1)": self.batch * (self.length + 1),
        }

    @property
    def native_shape(self) -> tuple[int, ...]:
        """The nine dimensions in the order of the fields, and a 1 after them for the chunked head."""
        dimensions = tuple(getattr(self, field.name) for field in fields(self))
        return (*dimensions[:-1], 1) if self.chunked_lm_head_v2 else dimensions[:-1]

    @property
    def profile(self) -> str:
        """The name of the arithmetic of this shape: equal names, equal bits."""
        heads = f"h{self.n_heads}-kv{self.n_kv}"
        tail = f"v{self.vocab_size}-blocks{self.n_layers}.fp32"
        if self == ByteLanguageModelConfig():
            version = "v1"  # the first published name has no head width
        else:
            heads += f"-hd{self.head_dim}"
            version = "v2" if (self.n_layers, self.vocab_size) == (2, 256) else "v3"
        name = f"b{self.batch}-l{self.length}-d{self.d_model}-{heads}-ff{self.intermediate}-{tail}.{version}"
        return f"mojolearn.byte-lm.{name}{'-lmhead-chunk256-v2' if self.chunked_lm_head_v2 else ''}"

    @property
    def n_tensors(self) -> int:
        """The number of parameter tensors."""
        return 2 + len(_LAYER_TENSORS) * self.n_layers

    @property
    def n_total(self) -> int:
        """The number of parameters."""
        return 2 * self.vocab_size * self.d_model + self.n_layers * sum(map(prod, self._layer_shapes))

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The name of each parameter tensor, in the order of the flat vector."""
        layers = (f"block{layer}.{name}" for layer in range(self.n_layers) for name in _LAYER_TENSORS)
        return ("embed", *layers, "lm_head")

    @property
    def parameter_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each parameter tensor, in the order of the flat vector."""
        table = (self.vocab_size, self.d_model)
        return (table, *(self._layer_shapes * self.n_layers), table)

    @property
    def parameter_offsets(self) -> tuple[int, ...]:
        """Where each parameter tensor starts in the flat vector, and ``n_total`` after the last."""
        return tuple(accumulate(map(prod, self.parameter_shapes), initial=0))

    offsets = parameter_offsets

    @property
    def _layer_shapes(self) -> tuple[tuple[int, ...], ...]:
        d, kv, f = self.d_model, self.n_kv * self.head_dim, self.intermediate
        return (d,), (d, d), (kv, d), (kv, d), (d, d), (d,), (f, d), (f, d), (d, f)

    def to_dict(self) -> dict[str, Any]:
        """The fields, such that ``ByteLanguageModelConfig(**shape.to_dict()) == shape``."""
        return asdict(self)


LanguageModelConfig = ByteLanguageModelConfig


def _dimension(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be an integer in [1, {MAX_DIMENSION}], not the boolean {value}")
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer in [1, {MAX_DIMENSION}], not {value!r}") from None
    if not 1 <= number <= MAX_DIMENSION:
        raise ValueError(f"{name} must be in [1, {MAX_DIMENSION}], not {number}")
    return number
