# SPDX-License-Identifier: Apache-2.0
"""The model's loss and gradients in float64, derived on paper: shares no rule of summation with the product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Weights = dict[str, Doubles]  # by the names of LanguageModelConfig.parameter_names


def _rms_norm(x: Doubles, w: Doubles) -> tuple[Doubles, Doubles]:
    """The normalized rows, and the rows over their root mean square."""
    unit = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    return unit * w, unit


def _rms_norm_backward(dy: Doubles, x: Doubles, unit: Doubles, w: Doubles) -> tuple[Doubles, Doubles]:
    rms = np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    dunit = dy * w
    dx = (dunit - unit * (dunit * unit).mean(axis=-1, keepdims=True)) / rms
    return dx, (dy * unit).sum(axis=tuple(range(x.ndim - 1)))


def _rotation(length: int, head_dim: int) -> NDArray[np.complex128]:
    """[length, 1, head_dim / 2]: pair j of position t turns by t / 10000^(2j / head_dim)."""
    frequency = 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    rotation: NDArray[np.complex128] = np.exp(1j * np.arange(length)[:, np.newaxis, np.newaxis] * frequency)
    return rotation


def _rotate(x: Doubles, rotation: NDArray[np.complex128]) -> Doubles:
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * rotation
    return np.concatenate([turned.real, turned.imag], axis=-1)


@dataclass
class Float64Model:
    """shape: a LanguageModelConfig. Weights are matrices [out, in]."""

    shape: Any
    weights: Weights

    def loss_and_gradients(self, ids: NDArray[np.int32]) -> tuple[float, Weights]:
        """The mean cross-entropy of ids [batch, length + 1] and its derivative by every weight."""
        s, w = self.shape, self.weights
        inputs, targets = ids[:, :-1], ids[:, 1:]
        grads: Weights = {name: np.zeros_like(value) for name, value in w.items()}
        x, kept = w["embed"][inputs], []
        for layer in range(s.n_layers):
            x, saved = self._block(layer, x)
            kept.append(saved)
        logits = x @ w["lm_head"].T
        logits = logits - logits.max(axis=-1, keepdims=True)
        p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        at_target = np.eye(s.vocab_size)[targets]
        loss = float(-np.log((p * at_target).sum(axis=-1)).mean())

        dlogits = (p - at_target) / targets.size
        grads["lm_head"] = np.einsum("btv,btd->vd", dlogits, x)
        dx = dlogits @ w["lm_head"]
        for layer in reversed(range(s.n_layers)):
            dx = self._block_backward(layer, dx, kept[layer], grads)
        np.add.at(grads["embed"], inputs, dx)
        return loss, grads

    def _name(self, layer: int, tensor: str) -> str:
        return f"block{layer}.{tensor}"

    def _heads(self, x: Doubles, heads: int) -> Doubles:
        return x.reshape(*x.shape[:2], heads, self.shape.head_dim)

    def _block(self, layer: int, x: Doubles) -> tuple[Doubles, dict[str, Doubles]]:
        s = self.shape
        norm1, w_q, w_k, w_v, w_o, norm2, w_gate, w_up, w_down = (
            self.weights[self._name(layer, t)]
            for t in ("norm1_w", "w_q", "w_k", "w_v", "w_o", "norm2_w", "w_gate", "w_up", "w_down")
        )
        rotation, group = _rotation(s.length, s.head_dim), s.n_heads // s.n_kv
        n1, unit1 = _rms_norm(x, norm1)
        q = _rotate(self._heads(n1 @ w_q.T, s.n_heads), rotation)
        k = np.repeat(_rotate(self._heads(n1 @ w_k.T, s.n_kv), rotation), group, axis=2)
        v = np.repeat(self._heads(n1 @ w_v.T, s.n_kv), group, axis=2)
        scores = np.einsum("blhd,bjhd->bhlj", q, k) / np.sqrt(s.head_dim)
        scores = np.where(np.tri(s.length, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        context = np.einsum("bhlj,bjhd->blhd", p, v).reshape(x.shape)
        h = x + context @ w_o.T
        n2, unit2 = _rms_norm(h, norm2)
        gate, up = n2 @ w_gate.T, n2 @ w_up.T
        sigmoid = 1.0 / (1.0 + np.exp(-gate))
        out = h + (gate * sigmoid * up) @ w_down.T
        names = ("x", "n1", "unit1", "q", "k", "v", "p", "context", "h", "n2", "unit2", "gate", "up", "sigmoid")
        return out, dict(zip(names, (x, n1, unit1, q, k, v, p, context, h, n2, unit2, gate, up, sigmoid), strict=True))

    def _block_backward(self, layer: int, dout: Doubles, a: dict[str, Doubles], grads: Weights) -> Doubles:
        s = self.shape
        rotation, group = _rotation(s.length, s.head_dim), s.n_heads // s.n_kv

        def linear(tensor: str, dy: Doubles, x: Doubles) -> Doubles:
            """Notes the gradient of y = x w^T by w, and returns the one by x."""
            grads[self._name(layer, tensor)] = np.einsum("bto,bti->oi", dy, x)
            return dy @ self.weights[self._name(layer, tensor)]

        def norm(tensor: str, dy: Doubles, x: Doubles, unit: Doubles) -> Doubles:
            name = self._name(layer, tensor)
            dx, grads[name] = _rms_norm_backward(dy, x, unit, self.weights[name])
            return dx

        silu = a["gate"] * a["sigmoid"]
        dgated = linear("w_down", dout, silu * a["up"])
        dgate = dgated * a["up"] * a["sigmoid"] * (1.0 + a["gate"] * (1.0 - a["sigmoid"]))
        dn2 = linear("w_gate", dgate, a["n2"]) + linear("w_up", dgated * silu, a["n2"])
        dh = dout + norm("norm2_w", dn2, a["h"], a["unit2"])

        dcontext = self._heads(linear("w_o", dh, a["context"]), s.n_heads)
        dp = np.einsum("blhd,bjhd->bhlj", dcontext, a["v"])
        dscores = a["p"] * (dp - (dp * a["p"]).sum(axis=-1, keepdims=True)) / np.sqrt(s.head_dim)
        dq = np.einsum("bhlj,bjhd->blhd", dscores, a["k"])
        dk = np.einsum("bhlj,blhd->bjhd", dscores, a["q"])
        dv = np.einsum("bhlj,blhd->bjhd", a["p"], dcontext)

        def shared(d: Doubles) -> Doubles:
            """The sum over the query heads that read the same key/value head."""
            return d.reshape(*d.shape[:2], s.n_kv, group, s.head_dim).sum(axis=3)

        def flat(d: Doubles) -> Doubles:
            return d.reshape(*d.shape[:2], -1)

        dn1 = linear("w_q", flat(_rotate(dq, rotation.conj())), a["n1"])
        dn1 = dn1 + linear("w_k", flat(_rotate(shared(dk), rotation.conj())), a["n1"])
        dn1 = dn1 + linear("w_v", flat(shared(dv)), a["n1"])
        return dh + norm("norm1_w", dn1, a["x"], a["unit1"])
