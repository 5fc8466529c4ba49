# SPDX-License-Identifier: Apache-2.0
"""`mojolearn info`: tell what a checkpoint holds."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from .. import _checkpoint
from .._state import ValidState, validate_state

DESCRIPTION = """\
Tell what a checkpoint holds, after checking all of it. The format is recognised by its content."""

READERS = {"binary": _checkpoint.read_binary, "json": _checkpoint.read_json_file}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `info`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a JSON or binary checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints the summary."""
    path = arguments.checkpoint
    kind = _checkpoint.format_of(path)
    state = validate_state(READERS[kind](path))
    if arguments.json:
        print(json.dumps(_document(path, kind, state), indent=1))
    else:
        print(_summary(path, kind, state))
    return 0


def _document(path: str, kind: str, state: ValidState) -> dict[str, Any]:
    return {
        "file": path,
        "format": kind,
        "bytes": os.path.getsize(path),
        "sha256": _sha256_of_file(path),
        "profile": state.shape.profile,
        "model_shape": state.shape.to_dict(),
        "parameters": state.shape.n_total,
        "completed_steps": state.completed_steps,
        "config": state.config,
        "data_schedule": state.data_schedule,
        "arrays": {name: hashlib.sha256(getattr(state, name).data).hexdigest() for name in _checkpoint.ARRAYS},
    }


def _sha256_of_file(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _summary(path: str, kind: str, state: ValidState) -> str:
    document = _document(path, kind, state)
    shape, config = state.shape, state.config
    head = ", chunked head" if shape.chunked_lm_head_v2 else ""
    lines = {
        "format": f"{'JSON' if kind == 'json' else kind}, {document['bytes']:,} bytes, SHA-256 {document['sha256']}",
        "model": f"{shape.n_total:,} parameters: {shape.n_layers} layers, width {shape.d_model}, {shape.n_heads} heads "
        f"({shape.n_kv} key/value), MLP {shape.intermediate}, vocabulary {shape.vocab_size:,}{head}",
        "profile": shape.profile,
        "batch": f"{shape.batch} sequences of {shape.length} tokens",
        "steps": f"{state.completed_steps:,} completed",
        "AdamW": ", ".join(f"{name} {config[name]:.6g}" for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
        **{name: f"SHA-256 {digest}" for name, digest in document["arrays"].items() if name != "flags"},
    }
    rows = [f"  {name:<10}  {value}" for name, value in lines.items()]
    schedule = [f"    {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in state.data_schedule.items()]
    return "\n".join([Path(path).name, *rows, "  data_schedule", *schedule])
