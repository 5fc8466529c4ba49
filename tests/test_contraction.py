# SPDX-License-Identifier: Apache-2.0
"""The product's contraction against the reference, bit for bit, on inputs planted where a shortcut would show.

As in test_operations.py, each test names the wrong rules that its inputs must notice, and fails if they don't.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import operations as op
from native_build import reference_library
from operations import ROUNDING, ROUNDS_UP, TINY, assert_same_bits, from_bits, near, normal


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(sum(map(ord, request.node.originalname)))


LAYOUTS = pytest.mark.parametrize("layout", [op.FORWARD, op.BACKWARD_DX, op.BACKWARD_DW], ids=["x.wT", "dy.w", "dyT.x"])
RULES = pytest.mark.parametrize("rule", [op.TREE, op.CHAIN], ids=["tree", "chain"])


@LAYOUTS
@RULES
def test_product_that_rounds_up_to_the_smallest_normal(layout: tuple[int, int], rule: int) -> None:
    a, b = from_bits(0x1D7FFFFF).reshape(1, 1), from_bits(0x22800000).reshape(1, 1)
    call = op.contract(a, b, layout, rule)
    assert call(reference_library())[0] == TINY
    assert_same_bits(call, ROUNDS_UP)


@LAYOUTS
@RULES
@pytest.mark.parametrize("k", [3, 40, 128, 300])
def test_contraction_near_the_smallest_normal(
    rng: np.random.Generator, layout: tuple[int, int], rule: int, k: int
) -> None:
    """Products and partial sums on both sides of 2^-126: rounded up to it, exactly subnormal, or cancelled."""
    a, b = near(rng, (33, k), -64, -62), near(rng, (k, 49), -64, -62)
    assert_same_bits(op.contract(a, b, layout, rule), (*ROUNDING, "wide_sums"))


@LAYOUTS
@RULES
def test_contraction_whose_exact_sums_are_subnormal(
    rng: np.random.Generator, layout: tuple[int, int], rule: int
) -> None:
    """All products are multiples of 2^-149, so sums are exact and only z, after each of them, changes anything."""
    a, b = (
        near(rng, (17, 64), -126, -123, zeros=0.3),
        np.where(rng.random((64, 31)) < 0.5, -1.0, 1.0).astype(np.float32),
    )
    assert_same_bits(op.contract(a, b, layout, rule), ("no_flush", "wide_sums"))


@LAYOUTS
@RULES
def test_one_tiny_block_among_ordinary_values(rng: np.random.Generator, layout: tuple[int, int], rule: int) -> None:
    """A kernel that certifies whole blocks must see the few rows and columns that are not ordinary."""
    a, b = normal(rng, (70, 140)), normal(rng, (140, 70))
    a[37:40], b[:, 41:49] = near(rng, (3, 140), -64, -62, zeros=0.7), near(rng, (140, 8), -64, -62, zeros=0.7)
    assert_same_bits(op.contract(a, b, layout, rule), (*ROUNDING, "wide_sums"))


@LAYOUTS
@RULES
def test_contraction_of_subnormal_inputs(rng: np.random.Generator, layout: tuple[int, int], rule: int) -> None:
    a, b = normal(rng, (9, 50)), near(rng, (50, 23), -140, -120)
    assert_same_bits(op.contract(a * np.float32(2.0**40), b, layout, rule), ("no_flush", "wide_sums"))
    assert_same_bits(op.contract(b.T.copy(), a.T * np.float32(2.0**40), layout, rule), ("no_flush", "wide_sums"))


@LAYOUTS
@RULES
def test_signs_of_zero_in_a_contraction(rng: np.random.Generator, layout: tuple[int, int], rule: int) -> None:
    """A product that underflows leaves -0, which a later +0 turns into +0."""
    a, b = near(rng, (33, 6), -101, -99, zeros=0.5), near(rng, (6, 33), -60, 3, zeros=0.5)
    call = op.contract(a, b, layout, rule)
    right = call(reference_library())[0]
    assert (np.signbit(right) & (right == 0)).any()
    assert_same_bits(call, ("wide_sums",))


@LAYOUTS
@pytest.mark.parametrize(
    ("k", "wrong"),
    [
        (1, ()),
        (127, ("wide_sums",)),
        (128, ("wide_sums",)),
        (129, ("wide_sums", "leaf_256")),
        (255, ("wide_sums", "leaf_256")),
        (256, ("wide_sums", "leaf_256")),
        (257, ("wide_sums", "leaf_256", "fold_from_the_right")),
        (640, ("wide_sums", "leaf_256", "fold_from_the_right")),
        (1000, ("wide_sums", "leaf_256", "fold_from_the_right")),
    ],
)
def test_leaves_and_fold(rng: np.random.Generator, layout: tuple[int, int], k: int, wrong: tuple[str, ...]) -> None:
    a, b = normal(rng, (19, k)), normal(rng, (k, 53))
    assert_same_bits(op.contract(a, b, layout), wrong)


@LAYOUTS
@pytest.mark.parametrize("k", [131_072, 131_073, 140_000])
def test_leaves_longer_than_128(rng: np.random.Generator, layout: tuple[int, int], k: int) -> None:
    """Beyond 131,072 terms a leaf is ceil(k / 1024) long."""
    a, b = normal(rng, (3, k)), normal(rng, (k, 5))
    assert_same_bits(op.contract(a, b, layout), ("wide_sums", "leaf_256", "fold_from_the_right"))


@LAYOUTS
@pytest.mark.parametrize("k", [1, 129, 1000, 2500])
def test_chain(rng: np.random.Generator, layout: tuple[int, int], k: int) -> None:
    a, b = normal(rng, (5, k)), normal(rng, (k, 37))
    chain, tree = op.contract(a, b, layout, op.CHAIN), op.contract(a, b, layout, op.TREE)
    if k > 128:
        assert not op.same_bits(chain(reference_library()), tree(reference_library()))
    assert_same_bits(chain, ("wide_sums",) if k > 1 else ())


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 80),
    k=st.integers(1, 300),
    layout=st.sampled_from([op.FORWARD, op.BACKWARD_DX, op.BACKWARD_DW]),
    rule=st.sampled_from([op.TREE, op.CHAIN]),
    low=st.sampled_from([-126, -64, -40, 0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_contraction_of_any_size(
    m: int, n: int, k: int, layout: tuple[int, int], rule: int, low: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a, b = near(rng, (m, k), low, low + 4), near(rng, (k, n), -126 - low if low > -126 else 0, 4 - 126 - low)
    assert_same_bits(op.contract(a, b, layout, rule))
