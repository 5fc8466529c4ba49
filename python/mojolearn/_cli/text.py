# SPDX-License-Identifier: Apache-2.0
"""The text that a run trains on, and which bytes of it each step sees."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from .._array import AnyArray
from .._config import ByteLanguageModelConfig

SHIPPED = "asyoulik.txt"
HELD_OUT_WINDOWS = 2048  # at most so many are evaluated

_MASK = (1 << 64) - 1


def splitmix64(seed: int, index: int) -> int:
    """Number `index` (from 0) of the splitmix64 generator that starts from `seed`."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True)
class Text:
    """A text as bytes: the first nine tenths are trained on, the rest is held out."""

    name: str
    content: AnyArray  # uint8
    sha256: str

    @property
    def train_bytes(self) -> int:
        return len(self.content) - len(self.content) // 10

    def require_room(self, length: int) -> None:
        """Raises ValueError unless both parts hold a sequence and the byte after it."""
        if len(self.content) // 10 <= length:
            raise ValueError(
                f"{self.name} has {len(self.content):,} bytes: with sequences of {length} bytes it must have at least "
                f"{10 * (length + 1):,}, of which a tenth is held out"
            )

    def batch(self, step: int, seed: int, shape: ByteLanguageModelConfig) -> AnyArray:
        """The ids of a step, int32 [batch, length + 1]: a pure function of the text, the seed and the step."""
        room = self.train_bytes - shape.length
        first = step * shape.batch
        return self._windows([splitmix64(seed, first + row) % room for row in range(shape.batch)], shape.length)

    def held_out(self, shape: ByteLanguageModelConfig) -> list[AnyArray]:
        """Batches of ids that cover the held-out part evenly, first byte to last."""
        last = len(self.content) - 1 - shape.length
        room = last - self.train_bytes
        count = min(HELD_OUT_WINDOWS, room // shape.length + 1)
        count = max(shape.batch, count - count % shape.batch)
        starts = [last - room * index // max(1, count - 1) for index in range(count)]
        return [self._windows(starts[row : row + shape.batch], shape.length) for row in range(0, count, shape.batch)]

    def held_out_opening(self, count: int) -> bytes:
        """At most `count` bytes of the held-out part, from its first paragraph on if it has any."""
        held_out = self.content[self.train_bytes :].tobytes()
        return held_out[held_out.find(b"\n\n") + 1 :].lstrip(b"\n")[:count] or held_out[:count]

    def _windows(self, starts: list[int], length: int) -> AnyArray:
        return self.content[np.add.outer(starts, np.arange(length + 1))].astype(np.int32)


def read_text(path: str | None) -> Text:
    """The text in a file, or the one that comes with the package."""
    if path is None:
        name, encoded = SHIPPED, resources.files("mojolearn").joinpath("_data", SHIPPED).read_bytes()
    else:
        name, encoded = Path(path).name, Path(path).read_bytes()
    return Text(name, np.frombuffer(encoded, np.uint8), hashlib.sha256(encoded).hexdigest())
