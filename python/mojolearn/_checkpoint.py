# SPDX-License-Identifier: Apache-2.0
"""The checkpoint codec: a training state to and from the bytes of a JSON or binary file (docs/checkpoints.md).

What is judged here is whether the bytes are a whole, undamaged checkpoint; what the values in it mean is judged by
`_state.validate_state`. All errors about content are ValueErrors that say what is wrong.
"""

import binascii
import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ._array import AnyArray
from ._files import Source, reading, write_atomically
from ._schedule import canonical_json

MAGIC = b"MOJOLEARN-BYTE-LM\x01\n"
STREAM_SCHEMA = "mojolearn.byte-lm-stream.v1"
JSON_SCHEMA = "mojolearn.small-byte-lm-json-checkpoint.v1"
HEADER_LIMIT = 1 << 20
JSON_LIMIT = 2 << 20

ARRAYS = {"parameters": "<f4", "m": "<f4", "v": "<f4", "flags": "<i4"}
FIELDS = frozenset(
    (
        "completed_steps",
        "config",
        "data_schedule",
        "next_batch_index",
        "numeric_mode",
        "parameter_names",
        "parameter_offsets",
        "parameter_shapes",
        "profile",
        "schema",
    )
)
OPTIONAL_FIELDS = frozenset(("model_shape",))

_DEPTH_LIMIT = 32  # no valid document has more than 11: a data_schedule goes to 8, two levels down
_DIGITS_LIMIT = 4300  # of an integer: what Python itself converts to and from text
_BLOCK = 1 << 20

State = dict[str, Any]
PathLike = str | os.PathLike[str]


def write_json(path: PathLike, state: Mapping[str, Any]) -> None:
    """Writes the state as a JSON checkpoint. Raises ValueError before writing if the file would pass 2 MiB."""
    if sum(2 * np.asarray(state[name]).nbytes for name in ARRAYS) > JSON_LIMIT:
        raise ValueError(
            f"{os.fspath(path)}: the model is too large for a JSON checkpoint (at most 2 MiB): use a binary one"
        )
    payload: State = _fields_of(state)
    for name in ARRAYS:
        array = _array_of(state, name)
        payload[name] = {"dtype": ARRAYS[name], "hex": array.tobytes().hex(), "shape": list(array.shape)}
    digest = hashlib.sha256(canonical_json(payload)).hexdigest()
    encoded = canonical_json({"payload": payload, "payload_sha256": digest, "schema": JSON_SCHEMA}) + b"\n"
    if len(encoded) > JSON_LIMIT:
        raise ValueError(
            f"{os.fspath(path)}: a JSON checkpoint holds at most {JSON_LIMIT} bytes and this one needs {len(encoded)}: "
            "use a binary one"
        )
    write_atomically(os.fspath(path), [encoded])


def read_json_file(path: PathLike) -> State:
    """The state in a JSON checkpoint file."""
    with reading(os.fspath(path)) as source:
        _check_json_size(source.size)
        return read_json(bytes(source.read(0, source.size)))


def read_json(encoded: bytes) -> State:
    """The state in the bytes of a JSON checkpoint."""
    if type(encoded) is not bytes:
        raise TypeError(f"encoded must be bytes, not {type(encoded).__name__}")
    _check_json_size(len(encoded))
    document = _object(_parse(encoded), "the checkpoint", {"payload", "payload_sha256", "schema"})
    if document["schema"] != JSON_SCHEMA:
        raise ValueError(f"the checkpoint's schema is {_shown(document['schema'])}, not {JSON_SCHEMA!r}")
    payload = _object(document["payload"], "payload", FIELDS | ARRAYS.keys(), OPTIONAL_FIELDS)
    if document["payload_sha256"] != hashlib.sha256(canonical_json(payload)).hexdigest():
        raise ValueError("payload_sha256 is not the digest of the payload: the checkpoint is damaged")
    return payload | {name: _array_from_hex(payload[name], name) for name in ARRAYS}


def write_binary(path: PathLike, state: Mapping[str, Any]) -> str:
    """Writes the state as a binary checkpoint; returns the SHA-256 of the file in hex.

    The arrays are hashed side by side, since the header holds their digests; the digest of the whole file, which
    begins with that header, is then computed while the file is written.
    """
    from concurrent.futures import ThreadPoolExecutor  # here, so that importing mojolearn stays quick

    arrays = {name: _array_of(state, name) for name in ARRAYS}
    views = [_bytes_of(array) for array in arrays.values()]
    with ThreadPoolExecutor(len(views)) as pool:
        digests = pool.map(lambda view: hashlib.sha256(view).hexdigest(), views)
        descriptors = [
            {"dtype": ARRAYS[name], "name": name, "nbytes": array.nbytes, "sha256": digest, "shape": list(array.shape)}
            for (name, array), digest in zip(arrays.items(), digests, strict=True)
        ]
        header = canonical_json({"arrays": descriptors, "schema": STREAM_SCHEMA, "state": _fields_of(state)})
        if len(header) > HEADER_LIMIT:
            raise ValueError(
                f"{os.fspath(path)}: the header of a checkpoint holds at most {HEADER_LIMIT} bytes and this one needs "
                f"{len(header)}: the model has too many layers"
            )
        start = MAGIC + struct.pack("<Q", len(header)) + header + hashlib.sha256(header).digest()
        file_digest = pool.submit(_hex_digest, [memoryview(start), *views])
        write_atomically(os.fspath(path), [start, *views])
        return file_digest.result()


def read_binary(path: PathLike) -> State:
    """The state in a binary checkpoint file. All of the file is verified before its arrays are allocated."""
    from concurrent.futures import ThreadPoolExecutor

    with reading(os.fspath(path)) as source, ThreadPoolExecutor(len(ARRAYS)) as pool:
        header, offset = _read_header(source)
        descriptors = _check_descriptors(header["arrays"])
        offsets = [offset]
        for descriptor in descriptors:
            offsets.append(offsets[-1] + descriptor["nbytes"])
        if source.size != offsets[-1]:
            what = "bytes are missing" if source.size < offsets[-1] else "there are bytes after the end"
            raise ValueError(f"{what}: the header tells of {offsets[-1]} bytes, the file has {source.size}")
        digests = pool.map(lambda span: _digest_span(source, *span), pairwise(offsets))
        for descriptor, digest in zip(descriptors, digests, strict=True):
            if digest != descriptor["sha256"]:
                raise ValueError(
                    f"{descriptor['name']} does not have the digest in the header: the checkpoint is damaged"
                )
        arrays = {item["name"]: np.empty(item["shape"], item["dtype"]) for item in descriptors}
        views = [_bytes_of(array) for array in arrays.values()]
        list(pool.map(source.read_into, views, offsets))
        return _object(header["state"], "state", FIELDS, OPTIONAL_FIELDS) | arrays


def format_of(path: PathLike) -> str:
    """ "binary" or "json", told by how the file begins. Raises ValueError if it can be neither."""
    with reading(os.fspath(path)) as source:
        if source.begins_with(MAGIC):
            return "binary"
        if source.read(0, min(source.size, 64)).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            return "json"
        raise ValueError("not a checkpoint: it begins neither as a binary one nor as JSON")


def _fields_of(state: Mapping[str, Any]) -> State:
    return {name: state[name] for name in FIELDS | (OPTIONAL_FIELDS & state.keys())}


def _array_of(state: Mapping[str, Any], name: str) -> AnyArray:
    return np.ascontiguousarray(state[name], dtype=ARRAYS[name])


def _bytes_of(array: AnyArray) -> memoryview:
    """The memory of a contiguous array; writing to the view writes to the array."""
    return array.view(np.uint8).data


def _hex_digest(views: list[memoryview]) -> str:
    digest = hashlib.sha256()
    for view in views:
        digest.update(view)
    return digest.hexdigest()


def _digest_span(source: Source, start: int, stop: int) -> str:
    digest = hashlib.sha256()
    block = memoryview(bytearray(min(_BLOCK, stop - start)))
    for offset in range(start, stop, _BLOCK):
        part = block[: stop - offset]
        source.read_into(part, offset)
        digest.update(part)
    return digest.hexdigest()


def _read_header(source: Source) -> tuple[State, int]:
    """The header and the offset at which the arrays begin."""
    before = len(MAGIC) + 8
    if not source.begins_with(MAGIC):
        raise ValueError("not a binary checkpoint: it does not begin with MOJOLEARN-BYTE-LM and version 1")
    if source.size < before:
        raise ValueError(f"bytes are missing: the file ends at byte {source.size}, within the header's length")
    (length,) = struct.unpack("<Q", source.read(len(MAGIC), 8))
    if not 1 <= length <= HEADER_LIMIT:
        raise ValueError(f"the header's length is {length}, not from 1 to {HEADER_LIMIT}")
    if source.size < before + length + 32:
        raise ValueError(
            f"bytes are missing: the header ends at byte {before + length + 32}, the file at {source.size}"
        )
    encoded = bytes(source.read(before, length))
    if source.read(before + length, 32) != hashlib.sha256(encoded).digest():
        raise ValueError("the header does not have its digest: the checkpoint is damaged")
    header = _object(_parse(encoded), "the header", {"arrays", "schema", "state"})
    if header["schema"] != STREAM_SCHEMA:
        raise ValueError(f"the header's schema is {_shown(header['schema'])}, not {STREAM_SCHEMA!r}")
    return header, before + length + 32


def _check_descriptors(descriptors: Any) -> list[State]:
    if not isinstance(descriptors, list) or len(descriptors) != len(ARRAYS):
        raise ValueError(f"arrays must be a list of {len(ARRAYS)} objects")
    for descriptor, (name, dtype) in zip(descriptors, ARRAYS.items(), strict=True):
        _object(descriptor, f"the descriptor of {name}", {"dtype", "name", "nbytes", "sha256", "shape"})
        if descriptor["name"] != name:
            raise ValueError(f"arrays must be {', '.join(ARRAYS)} in this order: found {_shown(descriptor['name'])}")
        count = _check_array(descriptor, name, dtype)
        if type(descriptor["nbytes"]) is not int or descriptor["nbytes"] != 4 * count:
            raise ValueError(
                f"nbytes of {name} is {_shown(descriptor['nbytes'])}, which does not fit its shape [{count}]"
            )
    return list(descriptors)


def _array_from_hex(value: Any, name: str) -> AnyArray:
    dtype = ARRAYS[name]
    count = _check_array(_object(value, name, {"dtype", "hex", "shape"}), name, dtype)
    text = value["hex"]
    if not isinstance(text, str) or len(text) != 8 * count:
        raise ValueError(f"{name} must have 8 hex digits for each of its {count} values")
    try:
        raw = binascii.unhexlify(text)
    except ValueError:
        raise ValueError(f"{name} has characters that are not hex digits") from None
    return np.frombuffer(bytearray(raw), dtype)


def _check_array(descriptor: State, name: str, dtype: str) -> int:
    """The number of values of an array whose dtype and shape have been checked."""
    if descriptor["dtype"] != dtype:
        raise ValueError(f"dtype of {name} is {_shown(descriptor['dtype'])}, not {dtype!r}")
    shape = descriptor["shape"]
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or shape[0] < 1:
        raise ValueError(f"shape of {name} must be a list of one positive integer")
    return shape[0]


def _check_json_size(size: int) -> None:
    if size > JSON_LIMIT:
        raise ValueError(f"a JSON checkpoint holds at most {JSON_LIMIT} bytes and this has {size}")


def _object(
    value: Any, what: str, required: "frozenset[str] | set[str]", optional: frozenset[str] = frozenset()
) -> State:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object")
    if missing := required - value.keys():
        raise ValueError(f"{what} lacks {min(missing)!r}")
    if unknown := value.keys() - required - optional:
        raise ValueError(f"{what} has the unknown key {_shown(min(unknown))}")
    return value


def _parse(encoded: bytes) -> Any:
    """Parses JSON from an unknown hand: no duplicate keys, no NaN, no numbers without end, no bottomless nesting."""
    _check_depth(encoded)
    try:
        text = encoded.decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_short_int)
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None


def _check_depth(encoded: bytes) -> None:
    """The parser is recursive, and how deep it may go before the interpreter's stack ends is not ours to know."""
    depth, in_string = 0, False
    for match in re.finditer(rb'\\.|["\[\]{}]', encoded, re.DOTALL):
        token = match.group()
        if token == b'"':
            in_string = not in_string
        elif in_string or token[0] == 0x5C:
            continue
        elif token in b"[{":
            depth += 1
            if depth > _DEPTH_LIMIT:
                raise ValueError(f"not a checkpoint: JSON nested more than {_DEPTH_LIMIT} deep")
        else:
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> State:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"not a checkpoint: the key {_shown(name)} appears twice in one object")
            seen.add(name)
    return result


def _no_constant(text: str) -> Any:
    raise ValueError(f"not a checkpoint: {text} is not a JSON number")


def _short_int(text: str) -> int:
    if len(text) > _DIGITS_LIMIT:
        raise ValueError(f"not a checkpoint: the integer {_shown(text)} is too long")
    return int(text)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
