# SPDX-License-Identifier: Apache-2.0
"""The array type of results, and the one way in which arrays given by callers are read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

AnyArray = np.ndarray[Any, np.dtype[Any]]
FLOAT32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)


class Array(AnyArray):
    """A numpy.ndarray whose repr tells its shape and dtype, not its values. Everything else is as in NumPy.

    >>> Array.from_list([[1, 2, 3], [4, 5, 6]], "<f4")
    Array(shape=(2, 3), dtype='<f4')
    """

    @classmethod
    def from_buffer(
        cls, buffer: Any, dtype: DTypeLike | None = None, shape: int | tuple[int, ...] | None = None
    ) -> Array:
        """A view of the memory of `buffer`: writes to one are seen in the other.

        `dtype` and `shape` default to those of the buffer; with a dtype and no shape the view is flat.

        >>> Array.from_buffer(bytes(24), "<f4", (2, 3))
        Array(shape=(2, 3), dtype='<f4')
        """
        array = np.asarray(memoryview(buffer)) if dtype is None else np.frombuffer(buffer, dtype)
        return (array if shape is None else array.reshape(shape)).view(cls)

    @classmethod
    def from_list(cls, nested: Any, dtype: DTypeLike = "<f8") -> Array:
        """A new array from (nested) lists of numbers."""
        return np.array(nested, dtype).view(cls)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if array.ndim == 0 else array.view(Array)

    def __repr__(self) -> str:
        return f"Array(shape={self.shape}, dtype='{self.dtype.str}')"


def read_array(name: str, value: Any, dtype: np.dtype[Any]) -> AnyArray:
    """The array that `value` holds, in C order and aligned, without a copy where that is so already.

    Accepts whatever has the buffer protocol or NumPy's array interface, of exactly this dtype; all else is a TypeError.
    """
    if isinstance(value, np.ndarray):
        array = value
    elif hasattr(value, "__array_interface__") or hasattr(value, "__array__"):
        array = np.asarray(value)
    else:
        try:
            array = np.asarray(memoryview(value))
        except TypeError:
            raise TypeError(
                f"{name} must be an array of dtype {dtype.name}, not {type(value).__name__}: "
                f"convert it with numpy.asarray({name}, dtype=numpy.{dtype.name})"
            ) from None
    if array.dtype != dtype:
        raise TypeError(
            f"{name} must have dtype {dtype.name}, not {_dtype_text(array.dtype)}: "
            f"convert it with numpy.asarray({name}, dtype=numpy.{dtype.name})"
        )
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.require(array, requirements=("C", "A"))


def _dtype_text(dtype: np.dtype[Any]) -> str:
    return f"{dtype.name} in foreign byte order ('{dtype.str}')" if not dtype.isnative else dtype.name
