# SPDX-License-Identifier: Apache-2.0
"""The command line: `mojolearn`, or `python -m mojolearn`. One module per command."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from .. import __version__, _verify
from . import doctor, info, sample, train
from .options import UsageError

COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "train": (train, "train a byte model on a text"),
    "sample": (sample, "continue a text with a trained model"),
    "info": (info, "tell what a checkpoint holds"),
    "verify": (_verify, "replay recorded vectors and compare every bit"),
    "doctor": (doctor, "tell what the installation consists of and whether it works"),
}
INTERRUPTED = 130
BROKEN_PIPE = 141


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"mojolearn: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 for a failure, 2 for misuse, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter still gets the rest
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads our output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return _report("interrupted", INTERRUPTED, arguments.debug)
    except UsageError as error:
        return _report(f"error: {error}", 2, arguments.debug)
    except Exception as error:
        return _report(f"error: {_text_of(error)}", 1, arguments.debug)


def _report(message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"mojolearn: {message}", file=sys.stderr)
    return status


def _text_of(error: Exception) -> str:
    """The error in one line."""
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, (ValueError, TypeError, RuntimeError, OSError, MemoryError)) and str(error):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mojolearn",
        description="Trains decoder-only language models in float32, with the same bits on every machine.",
        epilog="`mojolearn train` without arguments trains a small model in about a minute. "
        "Exit status: 0 success, 1 failure, 2 misuse, 130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mojolearn {__version__}")
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, (module, help_text) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=help_text,
            description=getattr(module, "DESCRIPTION", help_text.capitalize() + "."),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show a traceback with an error"
        )
        command.set_defaults(run=module.run)
    return parser
