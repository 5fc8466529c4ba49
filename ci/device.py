# SPDX-License-Identifier: Apache-2.0
"""The parts of ci/device.sh that are easier in Python."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from mojolearn import LanguageModelConfig, LanguageModelTrainer, _native

# batch, length, d_model, n_heads, n_kv, head_dim, intermediate, n_layers, vocab_size; and timed steps
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "default": ((2, 32, 32, 4, 2, 8, 64, 2, 256), 300),
    "small": ((8, 256, 256, 8, 4, 32, 768, 4, 256), 100),
    "gpt2s": ((8, 1024, 768, 12, 4, 64, 2048, 12, 50257), 10),
    "half_b": ((4, 2048, 1536, 12, 4, 128, 4096, 16, 32000), 5),
    # Nobody tuned for these.
    "odd1": ((1, 100, 60, 3, 1, 20, 250, 3, 300), 100),
    "odd2": ((3, 33, 72, 9, 3, 8, 200, 2, 1000), 100),
    "odd3": ((5, 129, 96, 4, 4, 24, 300, 1, 500), 100),
    "odd4": ((1, 513, 128, 2, 1, 64, 384, 2, 256), 100),
    "odd5": ((7, 65, 80, 5, 5, 16, 210, 2, 777), 100),
    "odd6": ((2, 300, 136, 1, 1, 136, 400, 2, 1500), 100),
    "odd7": ((16, 17, 48, 6, 2, 8, 100, 4, 64), 100),
    "odd8": ((1, 1000, 64, 4, 1, 16, 160, 1, 5000), 50),
    "odd9": ((4, 90, 200, 10, 5, 20, 555, 2, 257), 100),
    "odd10": ((1, 40, 320, 5, 5, 64, 1000, 3, 97), 100),
}
NAMES = ("batch", "length", "d_model", "n_heads", "n_kv", "head_dim", "intermediate", "n_layers", "vocab_size")


def lean_step(sizes: tuple[int, ...], steps: int, chunked: bool = False) -> dict[str, Any]:
    """Median milliseconds of a lean step, and the session's memory."""
    shape = LanguageModelConfig(**dict(zip(NAMES, sizes, strict=True)), chunked_lm_head_v2=chunked)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(shape.n_total, dtype=np.float32) * np.float32(0.02)
    trainer = LanguageModelTrainer(
        weights, data_schedule={"corpus": "random"}, shape=shape, vendor="cuda", resident=True
    )
    times = []
    for _ in range(3 + steps):
        ids = rng.integers(0, shape.vocab_size, (shape.batch, shape.length + 1)).astype(np.int32)
        started = time.perf_counter()
        trainer.train_step(ids)
        times.append(time.perf_counter() - started)
    trainer.close()
    return {"ms": round(sorted(times[3:])[steps // 2] * 1e3, 4), "first_ms": round(times[0] * 1e3, 1)}


def torch_step(sizes: tuple[int, ...], steps: int) -> float | None:
    """Median milliseconds of the same step in eager PyTorch, in float32 without TF32."""
    try:
        import torch
    except ImportError:
        return None
    functional = torch.nn.functional
    batch, length, width, _, n_kv, head_dim, inner, layers, vocab = sizes

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            linear = lambda a, b: torch.nn.Linear(a, b, bias=False)  # noqa: E731
            self.norm1, self.norm2 = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
            self.q, self.k, self.v = (
                linear(width, width),
                linear(width, n_kv * head_dim),
                linear(width, n_kv * head_dim),
            )
            self.o, self.gate, self.up, self.down = (
                linear(width, width),
                linear(width, inner),
                linear(width, inner),
                linear(inner, width),
            )

        def forward(self, x: Any) -> Any:
            y = self.norm1(x)
            q, k, v = (part(y).view(batch, length, -1, head_dim).transpose(1, 2) for part in (self.q, self.k, self.v))
            context = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.o(context.transpose(1, 2).reshape(batch, length, width))
            y = self.norm2(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    torch.backends.cuda.matmul.allow_tf32 = False
    model = torch.nn.Sequential(
        torch.nn.Embedding(vocab, width), *(Layer() for _ in range(layers)), torch.nn.Linear(width, vocab, bias=False)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, vocab, (batch, length + 1), device="cuda")
    times = []
    for _ in range(3 + steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = functional.cross_entropy(model(ids[:, :-1]).view(-1, vocab), ids[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()
        times.append(time.perf_counter() - started)
    del model, optimizer, loss
    torch.cuda.empty_cache()
    return round(sorted(times[3:])[steps // 2] * 1e3, 4)


def bench() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (sizes, steps) in SHAPES.items():
        results[name] = {**lean_step(sizes, steps), "torch_eager_ms": torch_step(sizes, min(steps, 50))}
        print(name, results[name], flush=True)
    for name in ("small", "gpt2s"):
        sizes, steps = SHAPES[name]
        results[f"{name}, chunked head"] = lean_step(sizes, steps, chunked=True)
        print(f"{name}, chunked head", results[f"{name}, chunked head"], flush=True)
    return results


def small_runs() -> None:
    """A few steps that reach every kernel, for compute-sanitizer; the results are compared with the CPU's."""
    from vendor_parity import differences, run

    sizes = {
        "narrow": (2, 70, 24, 3, 1, 8, 20, 1, 40, False),
        "wide": (1, 130, 160, 2, 1, 80, 130, 1, 131, True),
        "tiled": (2, 130, 128, 2, 1, 64, 136, 1, 264, False),
        "unaligned": (2, 130, 130, 1, 1, 130, 133, 1, 301, True),
    }
    for name, values in sizes.items():
        shape = LanguageModelConfig(**dict(zip((*NAMES, "chunked_lm_head_v2"), values, strict=True)))
        found = list(differences(run(shape, "cuda", 3, True, 1), run(shape, "cpu", 3, True, 1)))
        if found:
            raise SystemExit(f"{name}: {found}")


def record(tier: str, out: Path, results: dict[str, Any]) -> None:
    facts = _native.facts()
    found = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "tier": tier,
        "device": _native.describe_device(_native.VENDORS.index("cuda"), 0),
        "driver": subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip(),
        "library": {name: facts[name] for name in ("version", "numerics_version", "library_sha256", "build")},
        "python": platform.python_version(),
        "results": results,
    }
    path = out / f"{datetime.now(timezone.utc):%Y-%m-%d}-{tier}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    if sys.argv[1] == "small":
        small_runs()
    else:
        tier, out, *pairs = sys.argv[2:]
        record(tier, Path(out), bench() if pairs == ["bench"] else dict(pair.split("=") for pair in pairs))
