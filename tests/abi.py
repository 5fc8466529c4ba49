# SPDX-License-Identifier: Apache-2.0
"""The raw library for tests: its declarations, structs with their sizes filled in, and a tiny model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import cffi
import numpy as np

import mojolearn

PACKAGED_LIBRARY = Path(mojolearn.__file__).resolve().parent / "_lib" / "libmojolearn.so"
LIBRARY = Path(os.environ.get("MOJOLEARN_LIBRARY") or PACKAGED_LIBRARY)
HEADER = LIBRARY.with_name("mojolearn.h")

OK, ARGUMENT, STATE, CANCELLED, NON_FINITE, UNSUPPORTED, MEMORY = 0, 100, 200, 210, 220, 300, 400
SENTINEL = 0x5A


def declarations() -> str:
    """The header as cffi reads it: without comments, preprocessor lines and C++ brackets."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    text = re.sub(r'#ifdef __cplusplus\n(extern "C" \{|\})\n#endif', "", text)
    return re.sub(r"^#.*$", "", text, flags=re.MULTILINE).replace("MJL_API", "")


ffi = cffi.FFI()
ffi.cdef(declarations())
lib: Any = ffi.dlopen(str(LIBRARY))

# A tiny model: vocabulary 8, width 4, one layer.
SHAPE = {
    "batch": 2,
    "length": 4,
    "d_model": 4,
    "n_heads": 2,
    "n_kv": 1,
    "head_dim": 2,
    "intermediate": 6,
    "n_layers": 1,
    "vocab_size": 8,
}
COUNT = 2 * 8 * 4 + (2 * 4 + 2 * 16 + 2 * 2 * 4 + 3 * 6 * 4)
IDS = np.array([[1, 2, 3, 4, 5], [7, 6, 5, 4, 3]], np.int32)
WEIGHTS = np.random.default_rng(7).standard_normal(COUNT).astype(np.float32)


# What a struct points to, which must live as long as the struct.
owned: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def struct(name: str, **fields: Any) -> Any:
    """A struct with its size filled in."""
    value = ffi.new(f"mjl_{name} *", {"struct_size": ffi.sizeof(f"mjl_{name}"), **fields})
    owned[value] = fields
    return value


def floats(array: np.ndarray) -> Any:
    return ffi.from_buffer("float[]", array)


def ints(array: np.ndarray) -> Any:
    return ffi.from_buffer("int32_t[]", array)


def shape_struct(**changes: int) -> Any:
    return struct("shape", **{**SHAPE, **changes})


def adamw_struct(**changes: float) -> Any:
    return struct("adamw", **{"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, **changes})


def state_struct(weights: np.ndarray = WEIGHTS, **changes: Any) -> Any:
    return struct("state", **{"parameters": floats(weights), "count": weights.size, **changes})


def last_error() -> str:
    return str(ffi.string(lib.mjl_last_error()).decode())


def refused(status: int, expected: int, *words: str) -> None:
    """Asserts a status and that the message says what it is about."""
    assert status == expected, f"status {status}: {last_error()}"
    message = last_error()
    assert message
    for word in words:
        assert word in message


def open_session(shape: Any = None, adamw: Any = None, state: Any = None, options: Any = ffi.NULL) -> tuple[int, Any]:
    out = ffi.new("mjl_session **", ffi.cast("mjl_session *", SENTINEL))
    arguments = [shape or shape_struct(), adamw or adamw_struct(), state or state_struct()]
    status = lib.mjl_session_open(options, *arguments, out)
    if status != OK:
        assert out[0] == ffi.cast("mjl_session *", SENTINEL), "the output changed although the call failed"
        return status, ffi.NULL
    return status, out[0]


def step(session: Any, ids: np.ndarray = IDS) -> float:
    result = struct("step_result")
    assert lib.mjl_session_step(session, ints(ids), ids.size, result) == OK, last_error()
    return float(result.loss)


def export(session: Any, count: int = COUNT) -> tuple[bytes, int]:
    arrays = np.zeros((3, count), np.float32)
    steps = ffi.new("int64_t *")
    pointers = [floats(array) for array in arrays]
    assert lib.mjl_session_export_state(session, *pointers, count, steps) == OK, last_error()
    return arrays.tobytes(), steps[0]


def every_call(session: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Every function of a session, with acceptable arguments by name."""
    ids, prompt, state = IDS.copy(), np.ascontiguousarray(IDS[:, :4]), np.zeros((4, COUNT), np.float32)
    logits, tokens, lengths = np.zeros(2 * 4 * 8, np.float32), np.zeros(2, np.int32), np.array([4, 2], np.int32)
    arguments = {
        "step": {"ids": ints(ids), "ids_count": ids.size, "out_result": struct("step_result")},
        "evaluate": {"ids": ints(ids), "ids_count": ids.size, "out_loss": ffi.new("float *")},
        "logits": {
            "ids": ints(prompt),
            "rows": 2,
            "length": 4,
            "lengths": ints(lengths),
            "out_logits": floats(logits),
            "out_count": logits.size,
        },
        "next_tokens": {
            "ids": ints(prompt),
            "rows": 2,
            "length": 4,
            "lengths": ints(lengths),
            "out_tokens": ints(tokens),
        },
        "export_state": {
            "out_parameters": floats(state[0]),
            "out_m": floats(state[1]),
            "out_v": floats(state[2]),
            "count": COUNT,
            "out_completed_steps": ffi.new("int64_t *"),
        },
        "export_gradients": {"out_gradients": floats(state[3]), "count": COUNT},
        "load_state": {"adamw": adamw_struct(), "state": state_struct()},
        "describe": {"out_info": struct("session_info")},
    }
    return {
        name: (getattr(lib, f"mjl_session_{name}"), {"session": session, **rest}) for name, rest in arguments.items()
    }
