# SPDX-License-Identifier: Apache-2.0
"""Array, and how arrays of callers are read."""

import array
import pickle

import numpy as np
import pytest

from mojolearn import Array
from mojolearn._array import FLOAT32, INT32, read_array


def test_repr_tells_shape_and_dtype():
    assert repr(Array.from_list([[1, 2, 3], [4, 5, 6]], "<f4")) == "Array(shape=(2, 3), dtype='<f4')"
    assert repr(Array.from_list([])) == "Array(shape=(0,), dtype='<f8')"


def test_from_buffer_is_a_view():
    memory = bytearray(8)
    view = Array.from_buffer(memory, "<f4", (2, 1))
    memory[3] = 0x3F
    assert view.tolist() == [[0.5], [0.0]]
    assert Array.from_buffer(np.arange(6, dtype=np.int32).reshape(2, 3)).shape == (2, 3)
    with pytest.raises(ValueError, match="buffer size"):
        Array.from_buffer(bytes(9), "<f4")


def test_it_behaves_as_an_ndarray():
    values = Array.from_list([[1.0, 2.0], [3.0, 4.0]], "<f4")
    assert isinstance(values, np.ndarray)
    for part in (values + 1, values[0], values.T, values.astype(np.float64), values.reshape(-1), values > 2):
        assert type(part) is Array
    for scalar in (
        values.sum(),
        values[0, 1],
        np.max(values),
        values @ values.T @ values[0] @ values[0],
        np.float32(1),
    ):
        assert isinstance(scalar, np.generic)
        assert not isinstance(scalar, np.ndarray)
    assert values.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert type(pickle.loads(pickle.dumps(values))) is Array


IDS = np.arange(6, dtype=np.int32).reshape(2, 3)


class Interface:
    """Offers nothing but NumPy's array interface."""

    __array_interface__ = IDS.__array_interface__


class Converter:
    """Offers nothing but `__array__`."""

    def __array__(self, dtype=None, copy=None):
        return IDS


def unaligned(values):
    memory = np.empty(values.nbytes + 1, np.uint8)
    view = memory[1:].view(values.dtype).reshape(values.shape)
    view[...] = values
    return view


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        IDS.view(Array),
        np.asfortranarray(IDS),
        np.repeat(IDS, 2, 1)[:, ::2],
        IDS[::-1][::-1],
        unaligned(IDS),
        memoryview(IDS),
        memoryview(array.array("i", range(6))).cast("B").cast("i", (2, 3)),
        Interface(),
        Converter(),
        np.frombuffer(IDS.tobytes(), np.int32).reshape(2, 3),
    ],
    ids=lambda given: type(given).__name__,
)
def test_whatever_holds_the_dtype_is_read(given):
    read = read_array("ids", given, INT32)
    assert read.flags.c_contiguous
    assert read.flags.aligned
    assert np.array_equal(read, IDS)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (IDS.tolist(), "ids must be an array of dtype int32, not list: convert it with numpy.asarray"),
        (((1, 2), (3, 4)), "not tuple"),
        (None, "not NoneType"),
        (3, "not int"),
        ("012", "not str"),
        (IDS.astype(np.int64), "ids must have dtype int32, not int64: convert it with numpy.asarray"),
        (IDS.astype(np.uint32), "not uint32"),
        (IDS.astype(np.float32), "not float32"),
        (IDS.astype(bool), "not bool"),
        (IDS.tobytes(), "not uint8"),
        (IDS.astype(IDS.dtype.newbyteorder()), "not int32 in foreign byte order"),
        (IDS.astype(object), "not object"),
    ],
)
def test_anything_else_is_refused_with_the_way_to_convert_it(given, text):
    with pytest.raises(TypeError, match=text):
        read_array("ids", given, INT32)


def test_what_is_right_already_is_not_copied():
    values = np.zeros(3, FLOAT32)
    assert read_array("parameters", values, FLOAT32) is values
