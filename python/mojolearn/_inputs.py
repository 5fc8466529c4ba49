# SPDX-License-Identifier: Apache-2.0
"""Token ids and row lengths as callers give them. (That ids lie in the vocabulary is checked by the native library.)"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from ._array import INT32, AnyArray, read_array
from ._config import ByteLanguageModelConfig

MAX_ROWS = 1024
MAX_CELLS = 1 << 28


def read_batch(ids: Any, shape: ByteLanguageModelConfig) -> AnyArray:
    """The ids of a training step: int32 [batch, length + 1]."""
    array = read_array("ids", ids, INT32)
    if array.shape != (shape.batch, shape.length + 1):
        expected = (shape.batch, shape.length + 1)
        raise ValueError(f"ids must have shape (batch, length + 1) = {expected}, not {array.shape}")
    return array


def read_rows(
    ids: Any, lengths: Iterable[Any] | None, shape: ByteLanguageModelConfig
) -> tuple[AnyArray, list[int] | None]:
    """The ids [rows, length] of logits, int32, and the length of each row."""
    array = read_array("ids", ids, INT32)
    if array.ndim != 2:
        raise ValueError(f"ids must have two dimensions, rows and length, not shape {array.shape}")
    rows, length = array.shape
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"ids must have from 1 to {MAX_ROWS} rows, not {rows}")
    if not 1 <= length <= shape.length:
        raise ValueError(f"rows of ids must have a length from 1 to shape.length = {shape.length}, not {length}")
    cells = rows * length * shape.vocab_size
    if cells > MAX_CELLS:
        raise ValueError(f"ids ask for rows * length * vocab_size = {cells} logits, more than {MAX_CELLS}")
    return array, None if lengths is None else _read_lengths(lengths, rows, length)


def _read_lengths(lengths: Iterable[Any], rows: int, length: int) -> list[int]:
    try:
        given = list(lengths)
    except TypeError:
        raise TypeError(f"lengths must be a sequence of int, one for each row, not {type(lengths).__name__}") from None
    if len(given) != rows:
        raise ValueError(f"lengths must have one entry for each of the {rows} rows of ids, not {len(given)}")
    result = []
    for row, value in enumerate(given):
        if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
            raise TypeError(f"lengths[{row}] must be an int, not {value!r}")
        result.append(operator.index(value))
        if not 1 <= result[-1] <= length:
            raise ValueError(f"lengths[{row}] must be an int in [1, {length}], not {value}")
    return result
