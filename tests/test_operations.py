# SPDX-License-Identifier: Apache-2.0
"""Single operations of the product against the reference, bit for bit, on inputs planted where a shortcut would show.

Random data never comes near the edges of the arithmetic, so each test names the wrong rules that its inputs must
notice, and fails if they don't.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import operations as op
from native_build import reference_library
from operations import ROUNDING, ROUNDS_UP, assert_same_bits, near, normal, partner
from reference_model import Floats


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(sum(map(ord, request.node.originalname)))


# ---- RMSNorm ----


@pytest.mark.parametrize(("rows", "width"), [(1, 2), (3, 30), (7, 129), (300, 48)])
def test_norm_forward(rng: np.random.Generator, rows: int, width: int) -> None:
    call = op.norm_forward(normal(rng, (rows, width)), normal(rng, width))
    assert_same_bits(call, ("wide_sums",) if width > 2 else ())


def test_norm_forward_near_the_smallest_normal(rng: np.random.Generator) -> None:
    x = normal(rng, (1, 33), 0.5)
    scaled = op.norm_forward(x, np.ones(33, np.float32))(reference_library())[0]  # x * rstd
    assert_same_bits(op.norm_forward(x, partner(scaled[0])), ROUNDING)
    assert_same_bits(op.norm_forward(near(rng, (40, 33), -73, -71), near(rng, 33, -64, -62)), ("no_flush",))
    assert_same_bits(op.norm_forward(near(rng, (40, 33), -64, -62), normal(rng, 33)))
    assert_same_bits(op.norm_forward(np.full((3, 8), -0.0, np.float32), normal(rng, 8)))


@pytest.mark.parametrize(
    ("rows", "width", "wrong"),
    [(1, 2, ()), (5, 30, ("wide_sums",)), (300, 33, ("leaf_256", "fold_from_the_right")), (131, 130, ("leaf_256",))],
)
def test_norm_backward(rng: np.random.Generator, rows: int, width: int, wrong: tuple[str, ...]) -> None:
    x, w, dy, residual = normal(rng, (rows, width)), normal(rng, width), *normal(rng, (2, rows, width))
    assert_same_bits(op.norm_backward(x, w, dy, residual), wrong)


def test_norm_backward_near_the_smallest_normal(rng: np.random.Generator) -> None:
    nothing = np.full((40, 33), -0.0, np.float32)
    for x, w, dy in ((0, -64, -62), (0, 0, -126), (-63, 0, -73)):
        given = (near(rng, (40, 33), x, x + 2), near(rng, 33, w, w + 2), near(rng, (40, 33), dy, dy + 2))
        assert_same_bits(op.norm_backward(*given, nothing), ("no_flush",))
        assert_same_bits(op.norm_backward(*given, near(rng, (40, 33), -126, -124)), ("no_flush",))


def test_norm_backward_products_that_round_up_to_the_smallest_normal(rng: np.random.Generator) -> None:
    x, w = normal(rng, (1, 33), 0.5), normal(rng, 33, 0.1)
    nothing = np.full((1, 33), -0.0, np.float32)
    scaled = op.norm_forward(x, np.ones(33, np.float32))(reference_library())[0]
    for index, dy in ((0, partner(w)[np.newaxis]), (1, partner(scaled))):  # dx from dy * w; dw from dy * (x * rstd)
        assert_same_bits(op.output(op.norm_backward(x, w, dy, nothing), index), ROUNDS_UP)


# ---- Rotary embedding ----


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 17, 3, 2), (1, 33, 2, 10), (3, 130, 1, 64), (1, 9, 2, 136)])
def test_rotary(rng: np.random.Generator, backward: bool, shape: tuple[int, ...]) -> None:
    assert_same_bits(op.rotary(normal(rng, shape), backward), ("rotary_fused",) if shape[1] > 1 else ())


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_rotary_near_the_smallest_normal(rng: np.random.Generator, backward: bool) -> None:
    """Slow rotations have cosines just under 1, which take 2^-126 to the first number that rounds back up to it."""
    x = near(rng, (2, 40, 2, 32), -126, -125)
    assert_same_bits(op.rotary(x, backward), (*ROUNDING, "rotary_fused"))


# ---- Attention ----

ATTENTION_SHAPES = pytest.mark.parametrize(
    ("batch", "length", "heads", "n_kv", "head_dim"),
    [
        (1, 1, 1, 1, 2),
        (2, 5, 2, 1, 6),
        (1, 17, 6, 2, 8),
        (2, 33, 3, 3, 10),
        (1, 65, 4, 1, 32),
        (1, 130, 2, 1, 64),
        (1, 70, 2, 1, 136),
        (1, 257, 1, 1, 4),
    ],
)


def _qkv(rng: np.random.Generator, batch: int, length: int, heads: int, n_kv: int, head_dim: int) -> tuple[Floats, ...]:
    """q, k, v, dctx."""
    q, dctx = normal(rng, (2, batch, length, heads, head_dim))
    k, v = normal(rng, (2, batch, length, n_kv, head_dim))
    return q, k, v, dctx


@ATTENTION_SHAPES
def test_attention(rng: np.random.Generator, batch: int, length: int, heads: int, n_kv: int, head_dim: int) -> None:
    q, k, v, dctx = _qkv(rng, batch, length, heads, n_kv, head_dim)
    wrong: tuple[str, ...] = ("wide_sums",) if length > 1 else ()
    if head_dim > 128:
        wrong += ("leaf_256",)
    assert_same_bits(op.attention_forward(q, k, v), wrong)
    if length > 1:
        wrong += ("queries_descending",)
    if heads > n_kv and length > 1:
        wrong += ("heads_descending",)
    assert_same_bits(op.attention_backward(q, k, v, dctx), wrong)


def test_attention_with_three_leaves_in_a_head(rng: np.random.Generator) -> None:
    q, k, v, dctx = _qkv(rng, 1, 6, 2, 1, 264)
    for call in (op.attention_forward(q, k, v), op.attention_backward(q, k, v, dctx)):
        assert_same_bits(call, ("leaf_256", "fold_from_the_right"))


MASKED = pytest.mark.parametrize(("length", "heads", "n_kv"), [(3, 2, 1), (9, 3, 1), (35, 4, 2), (70, 2, 1)])


@MASKED
def test_masked_keys_stay_in_the_chain_of_the_context(
    rng: np.random.Generator, length: int, heads: int, n_kv: int
) -> None:
    """A chain of products that underflow ends at -0; a masked key's +0 times a positive number makes that +0."""
    q, k, v, _ = _qkv(rng, 2, length, heads, n_kv, 6)
    v = near(rng, v.shape, -126, -126, zeros=0.5)
    call = op.attention_forward(q, k, v)
    right = call(reference_library())[0]
    assert (np.signbit(right) & (right == 0)).any()
    assert_same_bits(call, ("masked_dropped", "no_flush"))


@MASKED
def test_masked_keys_stay_in_the_chains_of_the_gradient(
    rng: np.random.Generator, length: int, heads: int, n_kv: int
) -> None:
    """The same for dq; in dk and dv one head's -0 meets the masked queries of the group's next head."""
    q, k, v, dctx = (normal(rng, x.shape, 0.3) for x in _qkv(rng, 16, length, heads, n_kv, 6))
    low = length.bit_length() - 126  # a query's ds is some 1 / length of its dctx
    dctx = near(rng, dctx.shape, low, low + 5)
    dctx[rng.random(dctx.shape[:-1]) < 0.6] = 0.0
    call = op.attention_backward(q, k, v, dctx)
    assert_same_bits(op.output(call, 0), ("masked_dropped", "no_flush"))
    assert_same_bits(op.output(call, 1), ("masked_dropped", "no_flush"))
    call = op.attention_backward(q, k, v, near(rng, dctx.shape, -126, -126, zeros=0.7))
    assert_same_bits(op.output(call, 2), ("masked_dropped", "no_flush"))


def test_attention_near_the_smallest_normal(rng: np.random.Generator) -> None:
    q, k, v, dctx = (near(rng, x.shape, -1, 1) for x in _qkv(rng, 2, 19, 4, 2, 8))
    tiny = [near(rng, x.shape, -126, -125) for x in (q, k, v, dctx)]
    half = [near(rng, x.shape, -64, -62) for x in (q, k, v, dctx)]
    assert_same_bits(op.attention_forward(q, k, tiny[2]), ("no_flush",))
    assert_same_bits(op.attention_forward(half[0], half[1], v))
    for inputs in ((q, k, v, tiny[3]), (q, k, half[2], half[3]), (q, half[1], v, half[3]), (half[0], k, v, half[3])):
        assert_same_bits(op.attention_backward(*inputs), ("no_flush",))


def test_attention_products_that_round_up_to_the_smallest_normal(rng: np.random.Generator) -> None:
    """With q or k zero every probability of query l is 1 / (l + 1)."""
    q, k, v, dctx = (np.zeros_like(x) for x in _qkv(rng, 1, 7, 2, 1, 6))
    values = partner((1.0 / np.arange(2, 8)).astype(np.float32))
    v[0, 0, 0] = values
    assert_same_bits(op.attention_forward(q, k, v), ROUNDS_UP)
    dctx[0, np.arange(1, 7), :, np.arange(6)] = values[:, np.newaxis]
    assert_same_bits(op.output(op.attention_backward(q, k, v, dctx), 2), ROUNDS_UP)

    shape, nothing = (300, 4, 1, 4), np.zeros((300, 4, 1, 4), np.float32)
    v, dctx = near(rng, shape, -20, -19, zeros=0.7), near(rng, shape, -20, -19, zeros=0.7)
    other = near(rng, shape, -86, -80, zeros=0.7)
    assert_same_bits(op.output(op.attention_backward(nothing, other, v, dctx), 0), ROUNDS_UP)
    assert_same_bits(op.output(op.attention_backward(other, nothing, v, dctx), 1), ROUNDS_UP)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 2),
    length=st.integers(1, 50),
    group=st.integers(1, 3),
    n_kv=st.integers(1, 2),
    half=st.integers(1, 20),
    scores=st.sampled_from([-130, -20, -2, 3]),
    values=st.sampled_from([-126, -100, -64, 0]),
    gradients=st.sampled_from([-126, -118, -64, -24, 0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_of_any_size(
    batch: int, length: int, group: int, n_kv: int, half: int, scores: int, values: int, gradients: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    zeros = float(rng.choice([0.0, 0.1, 0.7]))
    q_size, kv_size = (batch, length, n_kv * group, 2 * half), (batch, length, n_kv, 2 * half)
    q_low = int(rng.integers(-126, 1)) if scores < -20 else 0
    q, dctx = near(rng, q_size, q_low, q_low + 1, zeros), near(rng, q_size, gradients, gradients + 3, zeros)
    k, v = near(rng, kv_size, scores - q_low, scores - q_low + 1, zeros), near(rng, kv_size, values, values + 3, zeros)
    assert_same_bits(op.attention_forward(q, k, v))
    assert_same_bits(op.attention_backward(q, k, v, dctx))


@pytest.mark.parametrize("scale", [1e2, 1e6, 1e18])
def test_attention_with_large_scores(rng: np.random.Generator, scale: float) -> None:
    """Most unmasked probabilities are +0 too."""
    q, k, v, dctx = _qkv(rng, 1, 24, 2, 1, 4)
    assert_same_bits(op.attention_forward(q * np.float32(scale), k * np.float32(scale), v))
    assert_same_bits(op.attention_backward(q * np.float32(scale), k * np.float32(scale), v, dctx))


def test_a_huge_masked_score_outweighs_the_mask(rng: np.random.Generator) -> None:
    """The mask is added, so a masked score near the largest float beats an unmasked one near its negative."""
    q, k, v, dctx = _qkv(rng, 1, 12, 2, 1, 2)
    largest = np.finfo(np.float32).max
    q[:], k[:] = (1.0, 0.0), (-largest, 0.0)
    k[0, 7:, 0] = (largest, 0.0)
    call = op.attention_forward(q, k, v)
    context = call(reference_library())[0]
    np.testing.assert_allclose(context[0, 0, 0], v[0, 7:, 0].mean(axis=0), rtol=1e-5)
    assert_same_bits(call, ("masked_dropped",))
    assert_same_bits(op.attention_backward(q, k, v, dctx), ("masked_dropped",))


def test_huge_masked_scores_that_tie_with_unmasked_ones(rng: np.random.Generator) -> None:
    q, k, v, dctx = _qkv(rng, 1, 12, 2, 1, 2)
    largest, scale = np.finfo(np.float32).max, np.float32(1.0) / np.sqrt(np.float32(2.0))
    masked = largest * scale - largest
    tie = np.float32(masked / scale)
    tie = next(x for x in (tie, np.nextafter(tie, largest), np.nextafter(tie, -largest)) if x * scale == masked)
    q[:], k[..., 1] = (1.0, 0.0), 0.0
    k[0, :6, 0, 0] = tie, -largest, tie, tie, -largest, tie
    k[0, 6:, 0, 0] = largest, tie, largest, -largest, largest, 0.0
    assert_same_bits(op.attention_forward(q, k, v), ("masked_dropped",))
    assert_same_bits(op.attention_backward(q, k, v, dctx), ("masked_dropped",))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_an_unmasked_score_that_is_not_finite_is_refused(rng: np.random.Generator, value: float) -> None:
    q, k, v, _ = _qkv(rng, 1, 5, 1, 1, 4)
    q[0, 3, 0, 1] = value
    for _, library in (("", reference_library()), *op.each_unit()):
        with pytest.raises(AssertionError, match="status 220"):
            op.attention_forward(q, k, v)(library)


# ---- SwiGLU ----

GATES = [0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 87.3, -87.3, 88.7, -88.7, 88.8, -88.8, 1e5, -1e5, 3e38, -3e38]


def test_swiglu(rng: np.random.Generator) -> None:
    gate = np.concatenate([normal(rng, 1000, 4.0), np.repeat(np.array(GATES, np.float32), 8), near(rng, 301, -140, 3)])
    up, dgated = normal(rng, (2, gate.size))
    assert_same_bits(op.swiglu_forward(gate, up), ("no_flush",))
    assert_same_bits(op.swiglu_backward(gate, up, dgated), ("no_flush",))


def test_swiglu_near_the_smallest_normal(rng: np.random.Generator) -> None:
    for low in (-126, -64, -40, 0):
        gate, up = near(rng, 4001, low, low + 2), near(rng, 4001, -126 - low, -124 - low)
        assert_same_bits(op.swiglu_forward(gate, up), ("no_flush",))
        assert_same_bits(op.swiglu_backward(gate, normal(rng, 4001), up), ("no_flush",))
        assert_same_bits(op.swiglu_backward(normal(rng, 4001), gate, up), ("no_flush",))


def test_swiglu_products_that_round_up_to_the_smallest_normal(rng: np.random.Generator) -> None:
    gate, up, one = normal(rng, 4001, 0.5), normal(rng, 4001, 0.2), np.ones(4001, np.float32)
    silu = op.swiglu_forward(gate, one)(reference_library())[0]
    slope = op.swiglu_backward(gate, one, one)(reference_library())[0]
    assert_same_bits(op.swiglu_forward(gate, partner(silu)), ROUNDS_UP)
    for index, dgated, ups in ((0, partner(slope), one), (0, partner(up), up), (1, partner(silu), up)):
        assert_same_bits(op.output(op.swiglu_backward(gate, ups, dgated), index), ROUNDS_UP)


# ---- Head and loss ----

HEADS = pytest.mark.parametrize("chunked", [False, True], ids=["plain", "chunked"])


@HEADS
@pytest.mark.parametrize(
    ("rows", "width", "vocab", "wrong"),
    [
        (1, 2, 2, ()),
        (5, 30, 131, ("wide_sums",)),
        (33, 136, 1000, ("wide_sums", "leaf_256")),
        (257, 8, 300, ("wide_sums",)),
        (600, 12, 37, ("wide_sums",)),
        (900, 6, 3, ("wide_sums", "fold_from_the_right")),
    ],
)
def test_head_loss(
    rng: np.random.Generator, chunked: bool, rows: int, width: int, vocab: int, wrong: tuple[str, ...]
) -> None:
    hidden, head = normal(rng, (rows, width)), normal(rng, (vocab, width))
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    call = op.head_loss(hidden, head, targets, chunked)
    if vocab > 128:
        other = op.head_loss(hidden, head, targets, not chunked)
        assert not op.same_bits(call(reference_library()), other(reference_library()))
    assert_same_bits(call, wrong)


@HEADS
def test_head_loss_near_the_smallest_normal(rng: np.random.Generator, chunked: bool) -> None:
    targets = rng.integers(0, 40, 21).astype(np.int32)
    for hidden_low, head_low in ((0, -121), (-121, 0)):
        hidden, head = near(rng, (21, 9), hidden_low, hidden_low + 2), near(rng, (40, 9), head_low, head_low + 2)
        assert_same_bits(op.head_loss(hidden, head, targets, chunked), ("no_flush", "wide_sums"))


@HEADS
def test_head_loss_with_probabilities_near_the_smallest_normal(rng: np.random.Generator, chunked: bool) -> None:
    """Logits some 80 to 100 below the largest: probabilities, and their gradients, go through the subnormals."""
    hidden, head = np.ones((21, 1), np.float32), -rng.uniform(80, 100, (300, 1)).astype(np.float32)
    head[7] = 0.0
    targets = rng.integers(0, 40, 21).astype(np.int32)
    targets[::2] = 7
    assert_same_bits(op.head_loss(hidden, head, targets, chunked), ("no_flush", "wide_sums"))


@HEADS
@pytest.mark.parametrize(("rows", "vocab"), [(2, 131_073), (131_073, 2)])
def test_head_loss_over_more_than_131072(rng: np.random.Generator, chunked: bool, rows: int, vocab: int) -> None:
    hidden, head = normal(rng, (rows, 2)), normal(rng, (vocab, 2))
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    wrong = ("wide_sums",) if chunked else ("wide_sums", "leaf_256", "fold_from_the_right")
    assert_same_bits(op.head_loss(hidden, head, targets, chunked), wrong)


# ---- Embedding gradient ----


@pytest.mark.parametrize(("rows", "width", "vocab"), [(1, 2, 2), (64, 5, 3), (500, 30, 7), (300, 17, 1000)])
def test_embed_backward(rng: np.random.Generator, rows: int, width: int, vocab: int) -> None:
    ids = rng.integers(0, vocab, rows).astype(np.int32)
    ids[::2] = vocab - 1
    wrong = ("positions_descending",) if rows > 1 else ()
    assert_same_bits(op.embed_backward(ids, normal(rng, (rows, width)), vocab), wrong)


def test_embed_backward_near_the_smallest_normal(rng: np.random.Generator) -> None:
    ids = rng.integers(0, 5, 200).astype(np.int32)
    dx = near(rng, (200, 9), -126, -124, zeros=0.4)
    assert_same_bits(op.embed_backward(ids, dx, 5), ("no_flush", "positions_descending"))


def test_embed_backward_starts_from_plus_zero() -> None:
    call = op.embed_backward(np.zeros(1, np.int32), np.full((1, 4), -0.0, np.float32), 2)
    assert not np.signbit(call(reference_library())[0]).any()
    assert_same_bits(call)


# ---- AdamW ----

HYPER = [(1e-3, 0.9, 0.999, 1e-8, 0.01), (1e-2, 0.0, 0.9, 1e-6, 0.0), (3e-3, 0.9, 0.95, 1e-6, 0.1)]


@pytest.mark.parametrize("hyper", HYPER)
@pytest.mark.parametrize("step", [1, 2, 3, 1000, 10**6, 2**31 + 5])
def test_adamw(rng: np.random.Generator, hyper: tuple[float, float, float, float, float], step: int) -> None:
    g, p, m = normal(rng, (3, 1003))
    assert_same_bits(op.adamw(step, hyper, g, p, m, normal(rng, 1003) ** 2))


@pytest.mark.parametrize("hyper", HYPER)
def test_adamw_near_the_smallest_normal(
    rng: np.random.Generator, hyper: tuple[float, float, float, float, float]
) -> None:
    p, m, v = near(rng, 4001, -126, -124), near(rng, 4001, -126, -120), np.abs(near(rng, 4001, -126, -120))
    for low in (-126, -120, -64, -58):
        assert_same_bits(op.adamw(3, hyper, near(rng, 4001, low, low + 2), p, m, v), ("no_flush",))


def test_adamw_products_that_round_up_to_the_smallest_normal(rng: np.random.Generator) -> None:
    nothing = np.zeros(50, np.float32)
    betas = rng.uniform(0.5, 1.0, 50).astype(np.float32)
    tiny = partner(betas)
    for beta in betas[betas.astype(float) * tiny < 2.0**-126][:5].tolist():
        call = op.adamw(5, (1e-3, beta, beta, 1e-8, 0.0), nothing, nothing, tiny, tiny)
        assert_same_bits(op.output(call, 1), ROUNDS_UP)
        assert_same_bits(op.output(call, 2), ROUNDS_UP)
        decayed = op.adamw(5, (1.0, 0.9, 0.9, 1e-8, 1.0 - beta), nothing, tiny, nothing, nothing)
        assert_same_bits(op.output(decayed, 0), ROUNDS_UP)
