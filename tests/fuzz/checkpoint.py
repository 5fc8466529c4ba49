# SPDX-License-Identifier: Apache-2.0
"""An atheris target: the readers of checkpoints on damaged bytes.

    python tests/fuzz/checkpoint.py [CORPUS] [libFuzzer options]

Whatever the bytes, reading either raises ValueError or gives a state that can be written and read again. Digests would
stop almost every damaged file at the door, so each input is also read with those that its content asks for.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["mojolearn"]):
    from mojolearn import _checkpoint, _state
    from mojolearn._schedule import canonical_json

DIRECTORY = tempfile.TemporaryDirectory()
FILE = Path(DIRECTORY.name) / "checkpoint"
DAMAGE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error)
VALUES = (
    None,
    True,
    0,
    1,
    -1,
    36,
    2**31,
    2**64,
    0.5,
    1e300,
    "",
    "x",
    "00",
    "<f4",
    "<f8",
    [],
    [0],
    [1, 1],
    {},
    {"x": 1},
)


def parts(data: bytes) -> tuple[Any, bytes | None]:
    """The JSON of a file and, of a binary one, the bytes of its arrays. Raises what damage raises."""
    if not data.startswith(_checkpoint.MAGIC):
        return json.loads(data), None
    start = len(_checkpoint.MAGIC) + 8
    (length,) = struct.unpack("<Q", data[start - 8 : start])
    return json.loads(data[start : start + length]), data[start + length + 32 :]


def whole(document: Any, arrays: bytes | None) -> bytes:
    """A file of these parts, with the digests that they ask for."""
    if arrays is None:
        document["payload_sha256"] = hashlib.sha256(canonical_json(document["payload"])).hexdigest()
        return bytes(canonical_json(document)) + b"\n"
    offset = 0
    for descriptor in document["arrays"]:
        end = offset + descriptor["nbytes"]
        descriptor["sha256"] = hashlib.sha256(arrays[offset:end]).hexdigest()
        offset = end
    header = canonical_json(document)
    return _checkpoint.MAGIC + struct.pack("<Q", len(header)) + header + hashlib.sha256(header).digest() + arrays


def with_right_digests(data: bytes) -> bytes:
    """The same file with right digests, as far as it has the form of a checkpoint."""
    try:
        return whole(*parts(data))
    except DAMAGE:
        return data


def mutate(data: bytes, longest: int, seed: int) -> bytes:
    """Changes bytes, or puts another value at some place of the JSON."""
    rng = random.Random(seed)
    try:
        document, arrays = parts(data)
        place, containers = document, []
        while isinstance(place, dict | list) and place:
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
            containers.append((place, key))
            place = place[key]
        container, key = rng.choice(containers)
        if rng.random() < 0.2:
            del container[key]
        else:
            container[key] = rng.choice(VALUES)
        changed = whole(document, arrays)
    except (*DAMAGE, IndexError):
        changed = b""
    if 0 < len(changed) <= longest and rng.random() < 0.5:
        return changed
    return bytes(atheris.Mutate(data, longest))


def read(data: bytes) -> dict[str, Any]:
    FILE.write_bytes(data)
    binary = _checkpoint.format_of(FILE) == "binary"
    return _checkpoint.read_binary(FILE) if binary else _checkpoint.read_json_file(FILE)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    arrays = _checkpoint.ARRAYS
    return all(left[name].tobytes() == right[name].tobytes() for name in arrays) and all(
        left[key] == right[key] for key in left.keys() | right.keys() if key not in arrays
    )


def check(data: bytes) -> None:
    try:
        state = read(data)
        _state.validate_state(state)
    except ValueError as error:
        if not str(error):
            raise RuntimeError("an error without a text") from error
        return
    for write, again in (
        (_checkpoint.write_json, _checkpoint.read_json_file),
        (_checkpoint.write_binary, _checkpoint.read_binary),
    ):
        write(FILE, state)
        assert same(state, again(FILE)), "what was read is written and read again"


def one_input(data: bytes) -> None:
    check(data)
    check(with_right_digests(data))


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input, custom_mutator=mutate)
    atheris.Fuzz()
