# SPDX-License-Identifier: Apache-2.0
"""`mojolearn sample`: continue a text with a trained model."""

from __future__ import annotations

import argparse
import sys

from .generate import check_temperature, generate, printable
from .options import UsageError, number, whole
from .plan import open_checkpoint

DESCRIPTION = """\
Continue a text with a trained model. The same checkpoint, prompt and seed give the same text on every machine.

A model with a vocabulary of 256 speaks bytes. Of any other, prompt and output are token ids."""

BYTES = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `sample`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a JSON or binary checkpoint")
    parser.add_argument("--prompt", default=None, metavar="TEXT", help="what to continue (default: a new line)")
    parser.add_argument("--length", type=whole(0), default=400, metavar="N", help="tokens to add (default: 400)")
    parser.add_argument(
        "--temperature", type=number, default=0.8, metavar="X", help="0: always the most likely token (default: 0.8)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="another seed, another text (default: 0)")
    parser.add_argument("--vendor", default=None, metavar="NAME", help="cpu, cuda or hip (default: the best there is)")
    parser.add_argument("--device", type=whole(0), default=None, metavar="N", help="index of the device (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Writes the prompt and what follows it, as it is made."""
    check_temperature(arguments.temperature)
    trainer, shape = open_checkpoint(arguments.checkpoint, arguments.vendor, arguments.device)
    prompt = _prompt(arguments.prompt, shape.vocab_size)
    tokens = generate(trainer, prompt, arguments.length, shape.length, arguments.temperature, arguments.seed)
    if shape.vocab_size == BYTES:
        sys.stdout.write("".join(printable(prompt)))
        pieces = printable(tokens)
    else:
        sys.stdout.write(" ".join(map(str, prompt)))
        pieces = (f" {token}" for token in tokens)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _prompt(text: str | None, vocab_size: int) -> list[int]:
    if vocab_size == BYTES:
        prompt = list(("\n" if text is None else text).encode("utf-8", "surrogateescape"))
    else:
        try:
            prompt = [int(word) for word in ("0" if text is None else text).split()]
        except ValueError:
            raise UsageError(f"--prompt must be token ids with spaces between them, not {text!r}") from None
        if not all(0 <= token < vocab_size for token in prompt):
            raise UsageError(f"--prompt has an id that is not from 0 to {vocab_size - 1}")
    if not prompt:
        raise UsageError("--prompt must not be empty")
    return prompt
