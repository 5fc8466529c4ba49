# SPDX-License-Identifier: Apache-2.0
"""Continuing a text: one token after the other, the same ones for the same seed."""

from __future__ import annotations

import codecs
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from random import Random

import numpy as np

from .._trainer import LanguageModelTrainer
from .options import UsageError


def check_temperature(temperature: float) -> None:
    """Raises UsageError if this is no temperature."""
    if not 0 <= temperature < math.inf:
        raise UsageError(f"--temperature must be 0 or a positive number, not {temperature}")


def generate(
    trainer: LanguageModelTrainer, prompt: Iterable[int], count: int, window: int, temperature: float, seed: int
) -> Iterator[int]:
    """`count` tokens after a prompt of at least one. The model sees the last `window` of them.

    At temperature 0 each is the most likely one; otherwise it is drawn from the softmax of logits / temperature.
    """
    random = Random(seed)
    context = list(prompt)
    for _ in range(count):
        context = context[-window:]
        ids = np.array([context], np.int32)
        if temperature == 0:
            token = trainer.next_bytes(ids)[0]
        else:
            token = draw(trainer.logits(ids)[0, -1].tolist(), temperature, random)
        yield token
        context.append(token)


def draw(logits: list[float], temperature: float, random: Random) -> int:
    """An index drawn with the probabilities of softmax(logits / temperature)."""
    largest = max(logits)
    sums = list(accumulate(math.exp((logit - largest) / temperature) for logit in logits))
    return min(bisect_right(sums, random.random() * sums[-1]), len(sums) - 1)


def printable(tokens: Iterable[int]) -> Iterator[str]:
    """Bytes as text, piece by piece. What is not UTF-8, and what could upset a terminal, becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield _harmless(decoder.decode(bytes((token,))))
    yield _harmless(decoder.decode(b"", final=True))


def _harmless(text: str) -> str:
    return "".join(char if char in "\n\t" or char.isprintable() else "\ufffd" for char in text)
