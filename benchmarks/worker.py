# SPDX-License-Identifier: Apache-2.0
"""One system, timed on request. Reads lines of JSON {"shape": [...], "steps": n}, answers each with {"ms": median}.

    python worker.py mojolearn | torch | torch-compiled

`mojolearn` is whichever package of that name the interpreter finds: this project's, or the published wheel.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

NAMES = ("batch", "length", "d_model", "n_heads", "n_kv", "head_dim", "intermediate", "n_layers", "vocab_size")
Step = Callable[[Any], float]


def mojolearn_step(dims: list[int]) -> Step:
    import mojolearn

    shape = mojolearn.LanguageModelConfig(**dict(zip(NAMES, dims, strict=True)))
    weights = (np.random.default_rng(0).standard_normal(shape.n_total) * 0.02).astype(np.float32)
    for name, offset, size in zip(shape.parameter_names, shape.offsets, shape.parameter_shapes, strict=False):
        if "norm" in name:
            weights[offset : offset + size[0]] = 1.0
    trainer = mojolearn.LanguageModelTrainer(
        weights, data_schedule={"corpus": "benchmark"}, shape=shape, resident=True, step_result="lean"
    )
    return lambda ids: trainer.train_step(ids)["loss"]


def torch_step(dims: list[int], compiled: bool) -> Step:
    """The same model in PyTorch: RMSNorm, rotary grouped-query attention, gated MLP, untied head, fused AdamW."""
    import torch
    from torch import nn
    from torch.nn import functional

    _, length, d, n_heads, n_kv, head_dim, intermediate, n_layers, vocab = dims
    torch.manual_seed(0)
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), inverse)
    cos, sin = angle.cos().float(), angle.sin().float()

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
            self.q, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
            self.k, self.v = (nn.Linear(d, n_kv * head_dim, bias=False) for _ in range(2))
            self.gate, self.up = (nn.Linear(d, intermediate, bias=False) for _ in range(2))
            self.down = nn.Linear(intermediate, d, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch = x.shape[0]
            y = self.norm1(x)

            def heads(z: torch.Tensor, n: int) -> torch.Tensor:
                return z.view(batch, length, n, head_dim).transpose(1, 2)

            q, k, v = rotate(heads(self.q(y), n_heads)), rotate(heads(self.k(y), n_kv)), heads(self.v(y), n_kv)
            k, v = (z.repeat_interleave(n_heads // n_kv, 1) for z in (k, v))
            context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = x + self.o(context.transpose(1, 2).reshape(batch, length, d))
            y = self.norm2(h)
            return h + self.down(functional.silu(self.gate(y)) * self.up(y))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocab, d)
            self.layers = nn.ModuleList(Layer() for _ in range(n_layers))
            self.head = nn.Linear(d, vocab, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids[:, :-1])
            for layer in self.layers:
                x = layer(x)
            return functional.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())

    model = Model()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    forward = torch.compile(model) if compiled else model

    def step(ids: Any) -> float:
        loss = forward(torch.from_numpy(ids).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return step


def main() -> None:
    system = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w")  # what libraries print goes to stderr
    os.dup2(2, 1)
    steps: dict[str, Step] = {}
    for line in sys.stdin:
        request = json.loads(line)
        dims = request["shape"]
        try:
            if str(dims) not in steps:
                steps.clear()
                steps[str(dims)] = (
                    mojolearn_step(dims) if system == "mojolearn" else torch_step(dims, system == "torch-compiled")
                )
            step, rng, times = steps[str(dims)], np.random.default_rng(1), []
            for i in range(request["steps"] + 3):
                ids = rng.integers(0, dims[8], (dims[0], dims[1] + 1), dtype=np.int32)
                started = time.perf_counter()
                step(ids)
                if i >= 3:
                    times.append(time.perf_counter() - started)
            answer = {"ms": statistics.median(times) * 1e3}
        except Exception as error:  # a peer that cannot run a shape must not end the comparison
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
