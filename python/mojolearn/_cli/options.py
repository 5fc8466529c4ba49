# SPDX-License-Identifier: Apache-2.0
"""The options of a training run: each is a flag, a key of the TOML file, and a field with a default."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any

from .._config import ByteLanguageModelConfig


class UsageError(Exception):
    """The command was called in a way that cannot work: exit status 2."""


def whole(minimum: int) -> Callable[[str], int]:
    """Converts the text of a whole number that is at least `minimum`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, not {text!r}")
        return value

    return convert


def number(text: str) -> float:
    """Converts the text of a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


def option(default: Any, convert: Callable[[str], Any], metavar: str, help_text: str) -> Any:
    """A field of Options."""
    return field(default=default, metadata={"convert": convert, "metavar": metavar, "help": help_text})


@dataclass(frozen=True)
class Options:
    """What a training run is made of."""

    data: str | None = option(None, str, "FILE", "the text: any file, read as bytes (default: a play by Shakespeare)")
    steps: int = option(100_000, whole(1), "N", "train until this many steps are completed")
    seed: int = option(0, whole(0), "N", "seed of the initial weights, the order of the data and the sample")
    lr: float = option(0.003, number, "X", "learning rate at the start; it falls linearly to zero")
    beta1: float = option(0.9, number, "X", "decay rate of AdamW's first moment")
    beta2: float = option(0.999, number, "X", "decay rate of AdamW's second moment")
    eps: float = option(1e-8, number, "X", "AdamW's epsilon")
    weight_decay: float = option(0.03, number, "X", "decoupled weight decay")
    batch: int = option(2, whole(1), "N", "sequences in a step")
    length: int = option(32, whole(1), "N", "bytes in a sequence, at most 8192")
    d_model: int = option(32, whole(1), "N", "width of the model: n-heads times an even number")
    n_heads: int = option(4, whole(1), "N", "attention heads")
    n_kv: int = option(2, whole(1), "N", "key/value heads, a divisor of n-heads")
    intermediate: int = option(64, whole(1), "N", "width of the MLP")
    n_layers: int = option(2, whole(1), "N", "layers")
    evaluate_every: int | None = option(
        None, whole(0), "N", "measure the held-out loss every N steps, 0: only before and after (default: ten times)"
    )
    checkpoint: str | None = option(None, str, "FILE", "save the state there at the end, as JSON if it ends in .json")
    checkpoint_every: int = option(0, whole(0), "N", "save it also every N steps (default: only at the end)")
    resume: str | None = option(None, str, "FILE", "continue from this checkpoint of an earlier run")
    sample: int = option(400, whole(0), "N", "bytes to sample at the end")
    temperature: float = option(0.8, number, "X", "temperature of that sample")
    vendor: str | None = option(None, str, "NAME", "cpu, cuda or hip (default: a GPU if there is one, else the CPU)")
    device: int | None = option(None, whole(0), "N", "index among the devices of the vendor (default: 0)")

    def shape(self) -> ByteLanguageModelConfig:
        """The model's and the batch's dimensions."""
        return ByteLanguageModelConfig(
            batch=self.batch,
            length=self.length,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv=self.n_kv,
            head_dim=max(1, self.d_model // self.n_heads),
            intermediate=self.intermediate,
            n_layers=self.n_layers,
        )


OPTIMIZER = ("lr", "beta1", "beta2", "eps", "weight_decay")
MODEL = ("batch", "length", "d_model", "n_heads", "n_kv", "intermediate", "n_layers")
GROUPS = {
    "the run": ("data", "steps", "seed", "evaluate_every", "sample", "temperature"),
    "the optimizer (AdamW)": OPTIMIZER,
    "the model": MODEL,
    "checkpoints": ("checkpoint", "checkpoint_every", "resume"),
    "the device": ("vendor", "device"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every option, in groups; flags that are not given leave no trace in the parsed arguments."""
    by_name = {item.name: item for item in fields(Options)}
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            group.add_argument(
                flag(name),
                type=by_name[name].metadata["convert"],
                metavar=by_name[name].metadata["metavar"],
                default=argparse.SUPPRESS,
                help=_help(by_name[name]),
            )


def flag(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options given: those of the TOML file, if there is one, overruled by those of the command line."""
    from_file = read_config(arguments.config) if arguments.config else {}
    names = {item.name for item in fields(Options)}
    return from_file | {name: value for name, value in vars(arguments).items() if name in names}


def read_config(path: str) -> dict[str, Any]:
    """The options in a TOML file, whose keys are those of Options, without tables."""
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        import tomli as toml
    with open(path, "rb") as file:
        try:
            table = toml.load(file)
        except ValueError as error:
            raise UsageError(f"{path} is not TOML: {error}") from None
    converters = {item.name: item.metadata["convert"] for item in fields(Options)}
    options = {}
    for name, value in table.items():
        if name not in converters:
            raise UsageError(f"{path}: there is no option {name!r}; the options are {', '.join(converters)}")
        if type(value) not in (str, int, float):
            raise UsageError(f"{path}: {name} must be a number or a string")
        try:
            options[name] = converters[name](str(value))
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{path}: {name} {error}") from None
    return options


def _help(item: Field[Any]) -> str:
    text: str = item.metadata["help"]
    return text if item.default is None or "default" in text else f"{text} (default: {item.default})"
