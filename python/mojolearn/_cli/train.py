# SPDX-License-Identifier: Apache-2.0
"""`mojolearn train`: train a byte model on a text."""

from __future__ import annotations

import argparse
import hashlib
import math
import shlex
import sys

from .. import __version__, _native
from .._array import AnyArray
from .._trainer import LanguageModelTrainer
from .generate import check_temperature, generate, printable
from .options import add_flags, given_options
from .plan import Plan, begin, check_destination, resume, save_checkpoint
from .progress import Progress, duration

DESCRIPTION = """\
Train a byte model on a text. Without arguments: a small one, on a play by Shakespeare, in about a minute.

The last tenth of the text is held out. The text and the options decide every bit of the result, on every machine,
and a run that was interrupted and resumed ends in the same bits as one that was not. Ctrl-C ends a run after the
last complete step and saves it, if --checkpoint is given."""

EVALUATIONS = 10
PROMPT_BYTES = 64
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `train`."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file in which every flag below is a key, as in `n_layers = 4`; flags overrule it",
    )
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Trains; 0 at the end, 130 after Ctrl-C."""
    given = given_options(arguments)
    plan = resume(given) if "resume" in given else begin(given)
    options = plan.options
    check_temperature(options.temperature)
    check_destination(options, plan.shape)
    print(_header(plan))
    held_out = plan.text.held_out(plan.shape)
    before = held_out_loss(plan.trainer, held_out)
    print(f"  held-out loss  {before:.3f}\n", flush=True)
    with Progress(plan.trainer.step_, options.steps, plan.shape.batch * plan.shape.length) as progress:
        try:
            _train(plan, held_out, progress)
        except KeyboardInterrupt:
            progress.clear()
            return _end_early(plan)
    _print_sample(plan)
    _print_summary(plan, before, held_out_loss(plan.trainer, held_out), progress)
    return 0


def held_out_loss(trainer: LanguageModelTrainer, batches: list[AnyArray]) -> float:
    """The mean loss over the held-out part, in nats a byte."""
    return math.fsum(trainer.evaluate(ids) for ids in batches) / len(batches)


def _train(plan: Plan, held_out: list[AnyArray], progress: Progress) -> None:
    options, trainer = plan.options, plan.trainer
    evaluate_every = options.evaluate_every
    if evaluate_every is None:
        evaluate_every = max(1, options.steps // EVALUATIONS)
    for step in range(trainer.step_, options.steps):
        plan.set_learning_rate(step)
        result = trainer.train_step(plan.batch(step))
        progress.advance(result["loss"])
        done = result["step"]
        if evaluate_every and done % evaluate_every == 0:
            progress.milestone(f"held out {held_out_loss(trainer, held_out):.3f}")
        if options.checkpoint is not None and (
            done == options.steps or (options.checkpoint_every and done % options.checkpoint_every == 0)
        ):
            save_checkpoint(trainer, options.checkpoint)


def _end_early(plan: Plan) -> int:
    """Saves what has been trained, and says in one line how things stand."""
    trainer, path, data = plan.trainer, plan.options.checkpoint, plan.options.data
    message = f"interrupted after step {trainer.step_:,}"
    if path is not None:
        save_checkpoint(trainer, path)
        command = ["mojolearn", "train", "--resume", path, "--checkpoint", path, *(["--data", data] if data else [])]
        message += f"; saved: go on with `{shlex.join(command)}`"
    print(f"mojolearn: {message}", file=sys.stderr)
    return INTERRUPTED


def _header(plan: Plan) -> str:
    options, shape, text = plan.options, plan.shape, plan.text
    device = _native.describe_device(_native.vendor_number(options.vendor), options.device or 0)
    held_out = len(text.content) - text.train_bytes
    lines = {
        "model": f"{shape.n_total:,} parameters: {shape.n_layers} layers, width {shape.d_model}, {shape.n_heads} heads "
        f"({shape.n_kv} key/value), MLP {shape.intermediate}, bytes",
        "text": f"{text.name}: {text.train_bytes:,} bytes to train on, {held_out:,} held out",
        "device": f"{device['vendor']}: {device['name']}"
        + (f", {device['threads']} threads" if device["threads"] else ""),
        "run": f"{options.steps:,} steps of {shape.batch} × {shape.length} bytes, AdamW, learning rate {options.lr:g}, "
        f"seed {options.seed}",
    }
    if options.resume is not None:
        lines["resumed"] = f"{options.resume}, after step {plan.trainer.step_:,}"
    return "\n".join([f"mojolearn {__version__}", *(f"  {name:<13}  {value}" for name, value in lines.items())])


def _print_sample(plan: Plan) -> None:
    """The first bytes of the held-out part, and how the model goes on from there."""
    options = plan.options
    if options.sample:
        prompt = list(plan.text.held_out_opening(PROMPT_BYTES))
        tokens = generate(plan.trainer, prompt, options.sample, plan.shape.length, options.temperature, options.seed)
        start, rest = "".join(printable(prompt)), "".join(printable(tokens))
        print("\n  The held-out text begins, and the model goes on after the mark:\n")
        print("\n".join(f"    {line}".expandtabs(4).rstrip() for line in f"{start}▌{rest}".splitlines()))


def _print_summary(plan: Plan, before: float, after: float, progress: Progress) -> None:
    digest = hashlib.sha256(plan.trainer.parameters_.data).hexdigest()
    bits = [loss / math.log(2) for loss in (before, after)]
    print(f"\n  held-out loss  {before:.3f} -> {after:.3f} nats a byte ({bits[0]:.2f} -> {bits[1]:.2f} bits)")
    print(f"  speed          {progress.tokens:,} bytes in {duration(progress.seconds)}")
    print(f"  parameters     SHA-256 {digest}")
    if plan.options.checkpoint is not None:
        print(f"  checkpoint     {plan.options.checkpoint}, to be continued with `mojolearn sample`")
