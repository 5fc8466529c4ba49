# SPDX-License-Identifier: Apache-2.0
"""Canonical JSON, and the limits of the data_schedule that a training state carries."""

from __future__ import annotations

import json
from typing import Any

MAX_BYTES = 16_384
MAX_NODES = 256
MAX_ENTRIES = 128
MAX_DEPTH = 8
MAX_CHARACTERS = 2_048


def canonical_json(value: Any) -> bytes:
    """The one JSON text of `value`: sorted keys, no spaces, ASCII, shortest floats. NaN and infinities: ValueError."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def validate_schedule(schedule: Any, vocab_size: int) -> dict[str, Any]:
    """A deep copy of a data_schedule. Raises ValueError, saying where, if it is not one."""
    if type(schedule) is not dict or not schedule:
        raise ValueError(f"data_schedule must be a non-empty dict, not {_short(schedule)}")
    _check_nodes(schedule)
    encoded = canonical_json(schedule)
    if len(encoded) > MAX_BYTES:
        raise ValueError(f"data_schedule takes {len(encoded)} bytes as JSON, more than {MAX_BYTES}")
    _check_vocabulary(schedule.get("vocabulary"), vocab_size)
    copy: dict[str, Any] = json.loads(encoded)
    return copy


def _check_nodes(schedule: dict[str, Any]) -> None:
    """Walks without recursion, so that neither a cycle nor a deep nest can do harm."""
    pending: list[tuple[str, Any, int]] = [("data_schedule", schedule, 0)]
    count = 0
    while pending:
        path, value, depth = pending.pop()
        count += 1
        if count > MAX_NODES:
            raise ValueError(f"data_schedule holds more than {MAX_NODES} values")
        if depth > MAX_DEPTH:
            raise ValueError(f"data_schedule is nested more than {MAX_DEPTH} levels deep")
        if type(value) is dict:
            for key in value:
                if type(key) is not str:
                    raise ValueError(f"{path} has a key of type {type(key).__name__}: keys must be str")
                _check_text(f"a key of {path}", key)
            children = [(f"{path}[{_short(key)}]", child, depth + 1) for key, child in value.items()]
        elif type(value) is list:
            children = [(f"{path}[{index}]", child, depth + 1) for index, child in enumerate(value)]
        else:
            _check_scalar(path, value)
            continue
        if len(children) > MAX_ENTRIES:
            raise ValueError(f"{path} has {len(children)} entries, more than {MAX_ENTRIES}")
        pending.extend(children)


def _check_scalar(path: str, value: Any) -> None:
    if type(value) is str:
        _check_text(path, value)
    elif type(value) is float:
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{path} is {value}: it must be finite")
    elif value is not None and type(value) not in (bool, int):
        kinds = "dict, list, str, int, float, bool or None"
        raise ValueError(f"{path} is of type {type(value).__name__}: JSON keeps only {kinds}")


def _check_text(path: str, text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{path} has {len(text)} characters, more than {MAX_CHARACTERS}")


def _check_vocabulary(vocabulary: Any, vocab_size: int) -> None:
    if vocabulary is None:
        return
    if (
        type(vocabulary) is not dict
        or type(vocabulary.get("n_vocab")) is not int
        or type(vocabulary.get("sha256")) is not str
    ):
        raise ValueError("data_schedule['vocabulary'] must hold an int 'n_vocab' and a str 'sha256'")
    if vocabulary["n_vocab"] != vocab_size:
        raise ValueError(
            f"data_schedule['vocabulary']['n_vocab'] is {vocabulary['n_vocab']}, but shape.vocab_size is {vocab_size}"
        )


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, dict)) else f"{type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "..."
