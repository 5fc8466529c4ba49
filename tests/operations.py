# SPDX-License-Identifier: Apache-2.0
"""The operations of tests/native/probe.h on NumPy arrays, and inputs near the edges of the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from native_build import ffi, probe_library, reference_library
from reference_model import Floats, Ints, floats, ints, variant

Call = Callable[[Any], "list[Floats]"]  # runs an operation of the given library
TINY = np.float32(2.0**-126)  # the smallest normal number

# Wrong rules that results near TINY may notice.
ROUNDS_UP = ("hardware_flush",)
ROUNDING = ("hardware_flush", "no_flush")


# ---- Comparing ----


def same_bits(a: list[Floats], b: list[Floats]) -> bool:
    return all(
        x.shape == y.shape and np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(a, b, strict=True)
    )


def each_unit(threads: tuple[int, ...] = (1, 3)) -> Iterator[tuple[str, Any]]:
    """The product's library, once for each vector unit of this machine and number of threads."""
    library = probe_library()
    for unit in ffi().string(library.probe_units()).decode().split(","):
        for count in threads:
            assert library.probe_select(unit.encode(), count) == 0, unit
            yield f"{unit}, {count} threads", library


def assert_same_bits(call: Call, wrong: tuple[str, ...] = ()) -> None:
    """The product gives the reference's bits, and a reference that breaks any rule in `wrong` does not."""
    right = call(reference_library())
    for name in wrong:
        with variant(name):
            assert not same_bits(call(reference_library()), right), f"these inputs don't notice {name}"
    for where, library in each_unit():
        for index, (ours, theirs) in enumerate(zip(call(library), right, strict=True)):
            differ = np.flatnonzero(ours.view(np.uint32).ravel() != theirs.view(np.uint32).ravel())
            assert not differ.size, (
                f"{where}, output {index}: {differ.size} of {ours.size} differ; {_show(ours, theirs, differ[0])}"
            )


def _show(ours: Floats, theirs: Floats, at: Any) -> str:
    place = tuple(map(int, np.unravel_index(at, ours.shape)))
    a, b = ours[place], theirs[place]
    return f"at {place} it is {a} ({a.view(np.uint32):08x}), right is {b} ({b.view(np.uint32):08x})"


# ---- Values ----


def from_bits(*patterns: int) -> Floats:
    return np.array(patterns, np.uint32).view(np.float32)


def normal(rng: np.random.Generator, shape: Any, scale: float = 1.0) -> Floats:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def near(rng: np.random.Generator, shape: Any, low: int, high: int, zeros: float = 0.1) -> Floats:
    """+-2^e, e from low to high, times 1, 1 - 2^-24, 1 - 2^-23 or a random mantissa; a share of zeros of both signs."""
    full = 1.0 - rng.integers(0, 3, shape) * 2.0**-24
    size = np.where(rng.random(shape) < 0.7, full, rng.uniform(1.0, 2.0, shape))
    size = np.where(rng.random(shape) < zeros, 0.0, size)
    sign = np.where(rng.random(shape) < 0.5, -1.0, 1.0)
    values: Floats = np.ldexp(sign * size, rng.integers(low, high + 1, shape)).astype(np.float32)
    return values


def partner(x: Floats) -> Floats:
    """Factors that, for most x of size below 1, take x to a product that is less than 2^-126 and rounds up to it."""
    exact = (1.0 - 2.0**-25) * 2.0**-126
    return np.asarray(np.divide(exact, x, out=np.zeros(x.shape), where=x != 0), np.float32)


# ---- Operations ----


def run(status: int, *outputs: Floats) -> list[Floats]:
    assert status == 0, f"status {status}"
    return list(outputs)


def output(call: Call, index: int) -> Call:
    """The same operation, looking at one of its outputs."""
    return lambda library: [call(library)[index]]


def elementary(name: str, *x: Floats) -> Call:
    def call(library: Any) -> list[Floats]:
        out = np.empty_like(x[0])
        return run(getattr(library, f"probe_{name}")(out.size, *map(floats, x), floats(out)), out)

    return call


# The three layouts of a layer: (a transposed, b transposed).
FORWARD, BACKWARD_DX, BACKWARD_DW = (0, 1), (0, 0), (1, 0)
TREE, CHAIN = 0, 1


def contract(a: Floats, b: Floats, layout: tuple[int, int] = FORWARD, rule: int = TREE) -> Call:
    """a: [m,k], b: [k,n] whatever the layout, which says how they lie in memory."""
    (m, k), n = a.shape, b.shape[1]
    a_stored = np.ascontiguousarray(a.T if layout[0] else a)
    b_stored = np.ascontiguousarray(b.T if layout[1] else b)

    def call(library: Any) -> list[Floats]:
        out = np.empty((m, n), np.float32)
        return run(library.probe_contract(rule, *layout, m, n, k, floats(a_stored), floats(b_stored), floats(out)), out)

    return call


def norm_forward(x: Floats, w: Floats) -> Call:
    def call(library: Any) -> list[Floats]:
        y, rstd = np.empty_like(x), np.empty(len(x), np.float32)
        return run(library.probe_norm_forward(*x.shape, floats(x), floats(w), floats(y), floats(rstd)), y, rstd)

    return call


def norm_backward(x: Floats, w: Floats, dy: Floats, d_residual: Floats) -> Call:
    rstd = norm_forward(x, w)(reference_library())[1]

    def call(library: Any) -> list[Floats]:
        dx, dw = np.empty_like(x), np.empty_like(w)
        given = map(floats, (x, rstd, w, dy, d_residual, dx, dw))
        return run(library.probe_norm_backward(*x.shape, *given), dx, dw)

    return call


def rotary(x: Floats, backward: bool = False) -> Call:
    """x: [batch, length, heads, head_dim]."""

    def call(library: Any) -> list[Floats]:
        out = np.empty_like(x)
        return run(library.probe_rotary(int(backward), *x.shape, floats(x), floats(out)), out)

    return call


def attention_forward(q: Floats, k: Floats, v: Floats) -> Call:
    """q: [batch, length, n_heads, head_dim]; k, v: [batch, length, n_kv, head_dim]."""
    batch, length, heads, head_dim = q.shape

    def call(library: Any) -> list[Floats]:
        ctx = np.empty_like(q)
        given = map(floats, (q, k, v, ctx))
        return run(library.probe_attention_forward(batch, length, heads, k.shape[2], head_dim, *given), ctx)

    return call


def attention_backward(q: Floats, k: Floats, v: Floats, dctx: Floats) -> Call:
    batch, length, heads, head_dim = q.shape

    def call(library: Any) -> list[Floats]:
        out = [np.empty_like(x) for x in (q, k, v)]
        given = map(floats, (q, k, v, dctx, *out))
        return run(library.probe_attention_backward(batch, length, heads, k.shape[2], head_dim, *given), *out)

    return call


def swiglu_forward(gate: Floats, up: Floats) -> Call:
    return elementary("swiglu_forward", gate, up)


def swiglu_backward(gate: Floats, up: Floats, dgated: Floats) -> Call:
    def call(library: Any) -> list[Floats]:
        out = [np.empty_like(gate) for _ in range(2)]
        return run(library.probe_swiglu_backward(gate.size, *map(floats, (gate, up, dgated, *out))), *out)

    return call


def head_loss(hidden: Floats, head: Floats, targets: Ints, chunked: bool = False) -> Call:
    def call(library: Any) -> list[Floats]:
        loss, dhidden, dhead = np.empty(1, np.float32), np.empty_like(hidden), np.empty_like(head)
        sizes = (int(chunked), *hidden.shape, len(head))
        given = (floats(hidden), floats(head), ints(targets), floats(loss), floats(dhidden), floats(dhead))
        return run(library.probe_head_loss(*sizes, *given), loss, dhidden, dhead)

    return call


def embed_backward(ids: Ints, dx: Floats, vocab: int) -> Call:
    def call(library: Any) -> list[Floats]:
        out = np.empty((vocab, dx.shape[1]), np.float32)
        return run(library.probe_embed_backward(*dx.shape, vocab, ints(ids), floats(dx), floats(out)), out)

    return call


def adamw(
    step: int, hyper: tuple[float, float, float, float, float], g: Floats, p: Floats, m: Floats, v: Floats
) -> Call:
    """hyper: lr, beta1, beta2, eps, weight_decay."""

    def call(library: Any) -> list[Floats]:
        out = [p.copy(), m.copy(), v.copy()]
        return run(library.probe_adamw(g.size, step, *hyper, floats(g), *map(floats, out)), *out)

    return call
