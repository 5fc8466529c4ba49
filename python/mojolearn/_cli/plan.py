# SPDX-License-Identifier: Apache-2.0
"""A training run that is ready: newly begun, or resumed from a checkpoint."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import _checkpoint
from .._array import AnyArray
from .._config import ByteLanguageModelConfig
from .._trainer import LanguageModelTrainer
from .options import MODEL, OPTIMIZER, Options, UsageError, flag
from .text import SHIPPED, Text, read_text

ORDER = "row r of step k starts at byte splitmix64(seed, k * batch + r) mod (train_bytes - length)"
LEARNING_RATE = "lr * (1 - k / planned_steps) from step k on, for every k that is a multiple of lr_steps"
LEARNING_RATES = 100  # in a run


@dataclass(frozen=True)
class Plan:
    """A run that is ready to begin or to go on."""

    options: Options
    shape: ByteLanguageModelConfig
    text: Text
    trainer: LanguageModelTrainer

    def batch(self, step: int) -> AnyArray:
        """The ids of a step: a function of the text, the shape, the seed and the step alone."""
        return self.text.batch(step, self.options.seed, self.shape)

    def set_learning_rate(self, step: int) -> None:
        """Gives the trainer the learning rate of a step, if a new one begins there; it falls linearly to zero."""
        if step % _lr_steps(self.options) == 0:
            state = self.trainer.state_dict()
            state["config"]["lr"] = float(np.float32(self.options.lr * (1 - step / self.options.steps)))
            self.trainer.load_state_dict(state)


def initial_parameters(shape: ByteLanguageModelConfig, seed: int) -> dict[str, AnyArray]:
    """Norms are 1; matrices are normal with deviation 1 / (2 sqrt(columns)), and w_o and w_down, which add to the
    residual, that divided by sqrt(2 n_layers).

    The values come from numpy.random.default_rng(seed), by one standard_normal call for each matrix in order.
    """
    rng = np.random.default_rng(seed)
    parameters: dict[str, AnyArray] = {}
    for row in LanguageModelTrainer.parameter_registry(shape):
        name, dimensions = row["name"], row["shape"]
        if len(dimensions) == 1:
            parameters[name] = np.ones(dimensions, np.float32)
        else:
            deviation = 0.5 / math.sqrt(dimensions[1])
            if name.endswith(("w_o", "w_down")):
                deviation /= math.sqrt(2 * shape.n_layers)
            parameters[name] = (rng.standard_normal(dimensions) * deviation).astype(np.float32)
    return parameters


def begin(given: dict[str, Any]) -> Plan:
    """A new run with the given options."""
    options = Options(**given)
    text = read_text(options.data)
    try:
        shape = options.shape()
        text.require_room(shape.length)
        trainer = LanguageModelTrainer(
            initial_parameters(shape, options.seed),
            data_schedule=_schedule(options, text),
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            shape=shape,
            resident=True,
            vendor=options.vendor,
            device=options.device,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Plan(options, shape, text, trainer)


def resume(given: dict[str, Any]) -> Plan:
    """Goes on from a checkpoint, which decides everything that decides the bits, but for the number of steps."""
    path = given["resume"]
    trainer, shape = open_checkpoint(path, given.get("vendor"), given.get("device"))
    schedule = trainer.data_schedule
    if schedule.get("order") != ORDER or schedule.get("learning_rate") != LEARNING_RATE:
        raise ValueError(f"{path} does not come from `mojolearn train`: its data_schedule is of another kind")
    recorded = _recorded_options(trainer, shape)
    for name in (recorded.keys() & given.keys()) - {"steps"}:
        if not _same(given[name], recorded[name]):
            raise UsageError(f"{flag(name)} is {given[name]}, but {path} was made with {recorded[name]}")
    options = Options(**(recorded | given))
    if options.data is None and schedule["corpus"] != SHIPPED:
        raise UsageError(f"{path} was made with the text {schedule['corpus']}: give it with --data")
    text = read_text(options.data)
    if text.sha256 != schedule["sha256"]:
        raise ValueError(f"{text.name} is not the text of {path}: its SHA-256 is not {schedule['sha256']}")
    if options.steps <= trainer.step_:
        raise UsageError(f"{path} has completed {trainer.step_:,} steps: ask for more with --steps")
    if options.steps != recorded["steps"]:
        trainer.load_state_dict(trainer.state_dict() | {"data_schedule": _schedule(options, text)})
    return Plan(options, shape, text, trainer)


def open_checkpoint(
    path: str, vendor: str | None, device: int | None
) -> tuple[LanguageModelTrainer, ByteLanguageModelConfig]:
    """A trainer from a checkpoint of either format, and its shape."""
    binary = _checkpoint.format_of(path) == "binary"
    restore = LanguageModelTrainer.from_checkpoint_binary if binary else LanguageModelTrainer.from_checkpoint
    trainer = restore(path, resident=True, vendor=vendor, device=device)
    return trainer, ByteLanguageModelConfig(**trainer.run_metadata()["model_shape"])


def save_checkpoint(trainer: LanguageModelTrainer, path: str) -> None:
    """Saves the state, as JSON if the name ends in .json."""
    if path.endswith(".json"):
        trainer.export_checkpoint(path)
    else:
        trainer.export_checkpoint_binary(path)


def check_destination(options: Options, shape: ByteLanguageModelConfig) -> None:
    """Finds out before the run, not after, that its checkpoint cannot be written."""
    path = options.checkpoint
    if path is None:
        if options.checkpoint_every:
            raise UsageError("--checkpoint-every needs --checkpoint")
        return
    folder = Path(path).absolute().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--checkpoint: {folder} is not a folder that can be written to")
    if os.path.exists(path):
        try:
            _checkpoint.format_of(path)
        except ValueError:
            raise UsageError(f"--checkpoint: {path} exists and is not a checkpoint") from None
    if path.endswith(".json") and 24 * shape.n_total > _checkpoint.JSON_LIMIT:
        raise UsageError("--checkpoint: the model is too large for JSON; take a name that does not end in .json")


def _lr_steps(options: Options) -> int:
    return -(-options.steps // LEARNING_RATES)


def _schedule(options: Options, text: Text) -> dict[str, Any]:
    """The data_schedule: with the shape, it says what every step does."""
    return {
        "corpus": text.name,
        "sha256": text.sha256,
        "train_bytes": text.train_bytes,
        "order": ORDER,
        "seed": options.seed,
        "planned_steps": options.steps,
        "learning_rate": LEARNING_RATE,
        "lr": options.lr,
        "lr_steps": _lr_steps(options),
    }


def _recorded_options(trainer: LanguageModelTrainer, shape: ByteLanguageModelConfig) -> dict[str, Any]:
    """The options that a checkpoint holds."""
    schedule, dimensions = trainer.data_schedule, shape.to_dict()
    recorded = {"seed": schedule["seed"], "steps": schedule["planned_steps"]}
    recorded |= trainer.run_metadata()["config"] | {"lr": schedule["lr"]}
    recorded |= dimensions
    return {name: recorded[name] for name in ("seed", "steps", *OPTIMIZER, *MODEL)}


def _same(given: Any, recorded: Any) -> bool:
    """Whether an option is that of the checkpoint, which holds most numbers as float32."""
    return bool(given == recorded or (isinstance(recorded, float) and np.float32(given) == np.float32(recorded)))
