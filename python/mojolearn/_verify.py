# SPDX-License-Identifier: Apache-2.0
"""Replays recorded vectors and compares every bit: `python -m mojolearn verify`.

A vector file is JSON: {"vectors": [{"case": ..., "expected": ...}]}. The case says how the inputs are made; what is
expected are SHA-256 digests of little-endian arrays and the bits of single floats in hexadecimal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from . import _native
from ._array import INT32, AnyArray
from ._config import ByteLanguageModelConfig
from ._errors import BackendError
from ._trainer import LanguageModelTrainer

PACKAGED_VECTORS = Path(__file__).resolve().parent / "_data" / "vectors"
MATCH, MISMATCH, MISUSE, COULD_NOT_RUN = 0, 1, 2, 4

_DIMENSIONS = tuple(field.name for field in fields(ByteLanguageModelConfig))[:9]


@dataclass(frozen=True)
class VectorResult:
    """One vector: what differed from what was expected, in the order in which it was computed."""

    file: str
    index: int
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All vectors of a folder, and the JSON files in it that hold vectors of another kind."""

    vectors: tuple[VectorResult, ...]
    not_replayed: tuple[str, ...]

    @property
    def mismatches(self) -> tuple[VectorResult, ...]:
        return tuple(vector for vector in self.vectors if vector.differences)


def verify_folder(folder: Path, vendor: str | None = None, device: int | None = None) -> Report:
    """Replays every language-model vector in a folder.

    Raises ValueError if there are none, and BackendError or MemoryError if they cannot be run here.
    """
    _, others = _vector_files(folder)
    return Report(tuple(replay_folder(folder, vendor, device)), tuple(others))


def replay_folder(folder: Path, vendor: str | None = None, device: int | None = None) -> Iterator[VectorResult]:
    """As `verify_folder`, one vector after the other."""
    files, _ = _vector_files(folder)
    for name in files:
        for index, vector in enumerate(_read_vectors(folder / name)):
            yield VectorResult(name, index, tuple(replay(vector, vendor, device)))


def replay(vector: dict[str, Any], vendor: str | None = None, device: int | None = None) -> list[str]:
    """What differs between what a vector expects and what its case gives here; empty if every bit is the same."""
    try:
        return list(_differences("", vector["expected"], _run_case(vector["case"], vendor, device)))
    except (BackendError, MemoryError):
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        return [f"could not be replayed: {type(error).__name__}: {error}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `verify`."""
    parser.add_argument("--vectors", type=Path, metavar="DIR", default=PACKAGED_VECTORS, help="folder of vector files")
    parser.add_argument("--vendor", choices=_native.VENDORS[1:], help="where to run them (default: the best there is)")
    parser.add_argument("--device", type=int, metavar="N", help="which of the vendor's devices (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints what matched and what did not. 0: every bit matched; 1: some did not; 2: misuse; 4: could not run."""
    started = time.perf_counter()
    results: list[VectorResult] = []
    try:
        _, others = _vector_files(args.vectors)
        facts = _native.facts()
        device = _native.describe_device(_native.vendor_number(args.vendor), args.device or 0)
        if not args.json:
            print(f"{facts['numerics_version']} on {device['vendor']} {device['device']}: {device['name']}")
        for result in replay_folder(args.vectors, args.vendor, args.device):
            results.append(result)
            if not args.json:
                _print_mismatch(result)
    except ValueError as error:
        print(f"verify: {error}", file=sys.stderr)
        return MISUSE
    except (BackendError, MemoryError) as error:
        print(f"verify: could not run: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    report = Report(tuple(results), tuple(others))
    seconds = time.perf_counter() - started
    if args.json:
        document = {
            **asdict(report),
            "matched": len(report.vectors) - len(report.mismatches),
            "mismatched": len(report.mismatches),
            "seconds": round(seconds, 3),
            "numerics_version": facts["numerics_version"],
            "library_sha256": facts["library_sha256"],
            "device": device,
        }
        print(json.dumps(document, indent=1))
    else:
        _print_summary(report, seconds)
    return MISMATCH if report.mismatches else MATCH


def _print_mismatch(result: VectorResult) -> None:
    if result.differences:
        print(f"{result.file}, vector {result.index}: {len(result.differences)} differences, the first of them:")
        for difference in result.differences[:3]:
            print(f"  {difference}")


def _print_summary(report: Report, seconds: float) -> None:
    for name in dict.fromkeys(vector.file for vector in report.vectors):
        same = [not vector.differences for vector in report.vectors if vector.file == name]
        print(f"{name}: {sum(same)} of {len(same)} vectors match")
    for name in report.not_replayed:
        print(f"{name}: not replayed (no language-model vectors)")
    verdict = f"{len(report.mismatches)} vectors differ" if report.mismatches else "every bit matches"
    print(f"{verdict} ({seconds:.1f} s)")


def _vector_files(folder: Path) -> tuple[list[str], list[str]]:
    """The names of the files to replay, and those of the other JSON files."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    names = sorted(path.name for path in folder.glob("*.json"))
    files = [name for name in names if name.startswith("language_model")]
    if not files:
        raise ValueError(f"no vectors: {folder} has no file language_model*.json")
    return files, [name for name in names if name not in files]


def _read_vectors(path: Path) -> list[dict[str, Any]]:
    try:
        vectors = json.loads(path.read_text("utf-8"))["vectors"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a file of vectors: {type(error).__name__}: {error}") from error
    if not isinstance(vectors, list) or not vectors or not all(isinstance(vector, dict) for vector in vectors):
        raise ValueError(f"{path} is not a file of vectors: it must hold a list of at least one")
    return vectors


def _differences(path: str, expected: Any, actual: Any) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in actual:
            yield from _differences(f"{path}{key} ", expected.get(key, "nothing"), actual[key])
        for key in expected.keys() - actual.keys():
            yield f"{path}{key}: not among what is replayed"
    elif isinstance(expected, list) and isinstance(actual, list) and path == "steps ":
        if len(expected) != len(actual):
            yield f"steps: expected {len(expected)}, got {len(actual)}"
        for step, pair in enumerate(zip(expected, actual, strict=False), 1):
            yield from _differences(f"step {step} ", *pair)
    elif type(expected) is not type(actual) or expected != actual:
        yield f"{path.strip()}: expected {expected}, got {actual}"


def _run_case(case: dict[str, Any], vendor: str | None, device: int | None) -> dict[str, Any]:
    """Does what the case says; answers in the form of `expected`."""
    dimensions = dict(zip(_DIMENSIONS, case["shape"], strict=True))
    shape = ByteLanguageModelConfig(**dimensions, chunked_lm_head_v2=case["chunked"])
    parameters = _initial_parameters(case, shape)
    rng = np.random.default_rng(case["seed"] + 1)

    def draw_ids() -> AnyArray:
        return rng.integers(0, shape.vocab_size, (shape.batch, shape.length + 1)).astype(INT32)

    trainer = LanguageModelTrainer(
        parameters,
        data_schedule={"corpus": "conformance"},
        shape=shape,
        resident=True,
        vendor=vendor,
        device=device,
        **case["hyper"],
    )
    steps = []
    for _ in range(case["steps"]):
        ids = draw_ids()
        if case["repeat_token"]:
            ids[:, ::2] = 3 % shape.vocab_size
        loss = trainer.train_step(ids)["loss"]
        gradient = trainer.export_gradients(named=False)["flat_gradients"]
        steps.append({"ids_sha256": _digest(ids), "loss": _bits(loss), "gradient_sha256": _digest(gradient)})
    state = trainer.export_state()
    final = {key: _digest(state[key]) for key in ("parameters", "m", "v")}
    ids = draw_ids()
    rows = ids[:, :-1]
    lengths = [1 + (7 * row + 3) % shape.length for row in range(shape.batch)]
    answers = {
        "profile": shape.profile,
        "n_total": shape.n_total,
        "initial_sha256": _digest(parameters),
        "steps": steps,
        "final": final,
        "evaluate": _bits(trainer.evaluate(ids)),
        "logits_sha256": _digest(trainer.logits(rows)),
        "ragged": {
            "lengths": lengths,
            "logits_sha256": _digest(trainer.logits(rows, lengths=lengths)),
            "next": trainer.next_bytes(rows, lengths=lengths),
        },
    }
    trainer.close()
    return answers


def _initial_parameters(case: dict[str, Any], shape: ByteLanguageModelConfig) -> AnyArray:
    plant = case["plant"]
    if plant == "edge":
        return _edge_parameters(case["seed"], shape)
    normal = np.random.default_rng(case["seed"]).standard_normal(shape.n_total)
    parameters: AnyArray = (normal * case["scale"]).astype(np.float32)
    if plant == "tiny":
        parameters[::7] = (parameters[::7].astype(np.float64) * 2.0**-120).astype(np.float32)
    elif plant == "negzero":
        parameters[::5] = -0.0
    elif plant == "large":
        parameters[::11] *= np.float32(40.0)
    elif plant == "norms":
        for row in LanguageModelTrainer.parameter_registry(shape):
            if row["name"].endswith(("norm1_w", "norm2_w")):
                parameters[row["offset"] : row["offset"] + row["size"]] = 1.0
    elif plant != "none":
        raise ValueError(f"unknown plant {plant!r}")
    return parameters


def _edge_parameters(seed: int, shape: ByteLanguageModelConfig) -> AnyArray:
    """Each tensor gets one kind of values near the edge of the subnormals. (The order of the draws is part of it.)"""
    rng = np.random.default_rng(seed + 10**6)
    parameters = np.zeros(shape.n_total, np.float32)
    for row in LanguageModelTrainer.parameter_registry(shape):
        size = row["size"]
        kind = int(rng.integers(0, 7))
        sign = np.where(rng.integers(0, 2, size) == 1, -1.0, 1.0)
        full = 1.0 - rng.integers(0, 3, size) * 2.0**-24

        def scaled(low: int, high: int, factor: AnyArray, size: int = size) -> AnyArray:
            return factor * 2.0 ** -rng.integers(low, high, size).astype(float)

        if kind == 0:
            values = rng.standard_normal(size) * 0.05
        elif kind == 1:
            values = np.zeros(size)
        elif kind == 2:
            values = scaled(60, 66, sign * full)
        elif kind == 3:
            values = scaled(120, 127, sign * full)
        elif kind == 4:
            values = scaled(0, 8, sign)
        elif kind == 5:
            empty = rng.random(size) < 0.5
            values = np.where(empty, 0.0, scaled(100, 127, sign * full))
        else:
            values = scaled(20, 45, sign * full)
        parameters[row["offset"] : row["offset"] + size] = values.astype(np.float32)
    return parameters


def _digest(array: AnyArray) -> str:
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return hashlib.sha256(np.ascontiguousarray(little_endian).data).hexdigest()


def _bits(value: float) -> str:
    return format(int(np.float32(value).view(np.uint32)), "08x")
