# SPDX-License-Identifier: Apache-2.0
"""The product's elementary functions against the reference, bit for bit, and the errors that docs/numerics.md tells."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

import operations as op
from native_build import ffi, reference_library
from reference_model import Floats, floats

BLOCK = 2**23


class Domain(NamedTuple):
    """Where a function is used, in ranges [first, last] of bit patterns, and its largest error there, in ulp."""

    ranges: tuple[tuple[int, int], ...]
    largest_error: float


ZERO, SIGN = 0x00000000, 0x80000000
SMALLEST_NORMAL, ONE, LONGEST, INFINITY = 0x00800000, 0x3F800000, 0x46000000, 0x7F800000
DOMAINS = {
    "exp": Domain(((ZERO, INFINITY), (SIGN, SIGN | INFINITY)), 1.02),
    "log": Domain(((SMALLEST_NORMAL, INFINITY - 1),), 0.83),
    "sin": Domain(((ZERO, LONGEST),), 1.6),  # 0 to 8192, the longest row; error in units of 2^-24
    "cos": Domain(((ZERO, LONGEST),), 1.6),
    "pow": Domain(((ZERO, ONE),), 10.6),  # 10000^p, 0 <= p <= 1: the frequencies of the rotary embedding
}
FUNCTIONS = pytest.mark.parametrize("name", DOMAINS)


def _product(library: Any, name: str, x: Floats) -> Floats:
    inputs = (np.full_like(x, 10000.0), x) if name == "pow" else (x,)
    return op.elementary(name, *inputs)(library)[0]


def _right(name: str, first: int, count: int) -> Floats:
    out = np.empty(count, np.float32)
    assert reference_library().reference_elementary(name.encode(), first, count, floats(out)) == 0
    return out


def _largest_error(name: str, first: int, values: Floats) -> tuple[float, int]:
    """In units in the last place, and the bits of the argument where it is found."""
    error, at = ffi().new("double *"), ffi().new("uint32_t *")
    library = reference_library()
    assert library.reference_largest_error(name.encode(), first, values.size, floats(values), error, at) == 0
    return float(error[0]), int(at[0])


def _assert_same(name: str, x: Floats, ours: Floats, right: Floats) -> None:
    differ = np.flatnonzero(ours.view(np.uint32) != right.view(np.uint32))
    assert not differ.size, f"{name}({x[differ[0]]!r}) is {ours[differ[0]]!r}, right is {right[differ[0]]!r}"


def _patterns(block: range) -> Floats:
    return np.arange(block.start, block.stop, dtype=np.int64).astype(np.uint32).view(np.float32)


@FUNCTIONS
def test_sample_of_all_exponents(name: str) -> None:
    """Every exponent's first, last and some random values."""
    rng = np.random.default_rng(11)
    for first, last in DOMAINS[name].ranges:
        starts = np.arange(first, last + 1, 2**23)
        spread = starts[:, np.newaxis] + rng.integers(0, 2**23, (starts.size, 400))
        near_starts = starts[:, np.newaxis] + np.arange(-3, 4)
        near_end = last - np.arange(4)
        sample = np.concatenate([spread.ravel(), near_starts.ravel(), near_end])
        x = sample[(sample >= first) & (sample <= last)].astype(np.uint32).view(np.float32)
        right = _product(reference_library(), name, x)
        for _, library in op.each_unit((1,)):
            _assert_same(name, x, _product(library, name, x), right)


@FUNCTIONS
def test_error_stays_below_the_stated_one(name: str) -> None:
    rng = np.random.default_rng(12)
    for first, last in DOMAINS[name].ranges:
        for start in rng.integers(first, last - 5000, 200).tolist():
            error, at = _largest_error(name, start, _right(name, start, 5000))
            assert error <= DOMAINS[name].largest_error, f"{name}: {error} at {at:08x}"


def test_values_where_the_function_changes() -> None:
    """The ends of exp's range, its result 2^-126, the halves that log splits at, and powers of nothing."""
    turns = (0x42B17218, 0xC2AEAC50, 0xC2AEAC4F, 0x3F3504F3, 0x3F000000, ONE)
    x = op.from_bits(*(turn + d for turn in turns for d in range(-3, 4)))
    for name in ("exp", "log"):
        given = np.abs(x) if name == "log" else x
        right = _product(reference_library(), name, given)
        for _, library in op.each_unit((1,)):
            _assert_same(name, given, _product(library, name, given), right)
    for base in (10000.0, 0.5, 3.0):
        inputs = np.full(4, base, np.float32), np.array([0.0, -0.0, 1.0, -1.0], np.float32)
        assert op.elementary("pow", *inputs)(reference_library())[0][:2].tolist() == [1.0, 1.0]
        op.assert_same_bits(op.elementary("pow", *inputs))


def test_any_power() -> None:
    rng = np.random.default_rng(13)
    base, exponent = np.exp2(rng.uniform(-126, 127, 20_000)).astype(np.float32), op.normal(rng, 20_000, 3.0)
    op.assert_same_bits(op.elementary("pow", base, exponent))


@pytest.mark.slow
@FUNCTIONS
def test_every_input(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All arguments of the domain, by each vector unit; prints the largest error."""

    def right(piece: range) -> tuple[Floats, tuple[float, int]]:
        values = _right(name, piece.start, len(piece))
        return values, _largest_error(name, piece.start, values)

    worst = (0.0, 0)
    with ThreadPoolExecutor() as pool:
        for first, last in DOMAINS[name].ranges:
            for start in range(first, last + 1, BLOCK):
                block = range(start, min(start + BLOCK, last + 1))
                pieces = list(pool.map(right, (block[i : i + BLOCK // 8] for i in range(0, len(block), BLOCK // 8))))
                values, x = np.concatenate([values for values, _ in pieces]), _patterns(block)
                worst = max(worst, *(error for _, error in pieces))
                for _, library in op.each_unit((1,)):
                    _assert_same(name, x, _product(library, name, x), values)
    with capsys.disabled():
        print(f"\n{name}: largest error {worst[0]:.4f} ulp at {worst[1]:08x}")
    assert worst[0] <= DOMAINS[name].largest_error
