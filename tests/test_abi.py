# SPDX-License-Identifier: Apache-2.0
"""The C ABI as a caller from another language meets it: the raw library, no Python class in between."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cffi
import pytest

import mojolearn
from abi import (
    ARGUMENT,
    COUNT,
    HEADER,
    IDS,
    OK,
    SENTINEL,
    WEIGHTS,
    adamw_struct,
    export,
    ffi,
    ints,
    last_error,
    lib,
    open_session,
    owned,
    refused,
    shape_struct,
    state_struct,
    step,
    struct,
)

# ---- The header and what identifies the library ----


@pytest.mark.parametrize(("compiler", "standard"), [("cc", "c99"), ("cc", "c11"), ("c++", "c++17"), ("c++", "c++20")])
def test_header_compiles(compiler: str, standard: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} on this machine")
    language = "c++" if compiler == "c++" else "c"
    flags = [f"-std={standard}", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    done = subprocess.run([compiler, "-x", language, *flags, HEADER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_versions() -> None:
    (abi_version,) = re.findall(r"#define MJL_ABI_VERSION (\d+)", HEADER.read_text())
    assert lib.mjl_abi_version() == int(abi_version)
    assert ffi.string(lib.mjl_version()).decode() == mojolearn.__version__
    assert ffi.string(lib.mjl_numerics_version())


def test_build_info_is_json_without_paths() -> None:
    text = ffi.string(lib.mjl_build_info()).decode()
    info = json.loads(text)
    assert info["compiler"]
    assert "-ffp-contract=off" in info["flags"]
    assert "cpu" in info["backends"]
    assert str(Path.home()) not in text


def test_status_values_are_pinned() -> None:
    values = dict(re.findall(r"(MJL_(?:OK|ERROR_\w+)) = (\d+)", HEADER.read_text()))
    assert values == {
        "MJL_OK": "0",
        "MJL_ERROR_ARGUMENT": "100",
        "MJL_ERROR_STATE": "200",
        "MJL_ERROR_CANCELLED": "210",
        "MJL_ERROR_NON_FINITE": "220",
        "MJL_ERROR_UNSUPPORTED": "300",
        "MJL_ERROR_MEMORY": "400",
        "MJL_ERROR_DEVICE": "500",
        "MJL_ERROR_LOST": "600",
        "MJL_ERROR_IO": "700",
        "MJL_ERROR_INTERNAL": "900",
    }


# ---- Structs that grow ----


def resized(value: Any, size: int, tail: bytes = b"") -> Any:
    """A copy of a struct as a program with another header would pass it: an allocation of `size` bytes that ends in
    `tail`."""
    data = bytearray(bytes(ffi.buffer(value))[:size].ljust(size, b"\0"))
    data[:4] = size.to_bytes(4, sys.byteorder)
    data[size - len(tail) :] = tail
    memory = ffi.new(f"char[{size}]", bytes(data))
    pointer = ffi.cast(ffi.typeof(value), memory)
    owned[pointer] = memory, value
    return pointer


# How to make each input struct; open_session() takes it by the same name.
INPUTS = {
    "options": lambda: struct("session_options", vendor=1),
    "shape": shape_struct,
    "adamw": adamw_struct,
    "state": state_struct,
}


@pytest.mark.parametrize("name", INPUTS)
def test_larger_struct_with_zero_tail_is_accepted(name: str) -> None:
    value = INPUTS[name]()
    status, handle = open_session(**{name: resized(value, value.struct_size + 24)})
    assert status == OK, last_error()
    assert step(handle) > 0
    lib.mjl_session_close(handle)


@pytest.mark.parametrize("position", [1, 16, 24])
@pytest.mark.parametrize("name", INPUTS)
def test_larger_struct_with_unknown_content_is_refused(name: str, position: int) -> None:
    value = INPUTS[name]()
    larger = resized(value, value.struct_size + 24, b"\1".ljust(position, b"\0"))
    refused(open_session(**{name: larger})[0], ARGUMENT, name)


@pytest.mark.parametrize(
    ("name", "last_field"),
    [
        ("shape", "chunked_lm_head_v2"),
        ("options", "poll"),
        ("state", "completed_steps"),
        ("adamw", "weight_decay"),
    ],
)
def test_smaller_struct_is_read_as_far_as_it_goes(name: str, last_field: str) -> None:
    """What is missing counts as zero, and nothing beyond the struct is read."""
    full = INPUTS[name]()
    smaller = resized(full, ffi.offsetof(ffi.typeof(full).item, last_field))
    setattr(full, last_field, ffi.NULL if last_field == "poll" else 0)
    results = set()
    for value in (smaller, full):
        status, handle = open_session(**{name: value})
        assert status == OK, last_error()
        results.add((step(handle), export(handle)))
        lib.mjl_session_close(handle)
    assert len(results) == 1


@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("name", INPUTS)
def test_impossible_struct_size_is_refused(name: str, size: int) -> None:
    value = INPUTS[name]()
    value.struct_size = size
    refused(open_session(**{name: value})[0], ARGUMENT, "struct_size")


def test_smaller_shape_without_its_dimensions_is_refused() -> None:
    smaller = resized(shape_struct(), ffi.offsetof("mjl_shape", "vocab_size"))
    refused(open_session(shape=smaller)[0], ARGUMENT, "vocab_size")


OUTPUTS = ["device_info", "step_result", "session_info"]


def call_with_output(session: Any, name: str, pointer: Any) -> int:
    if name == "device_info":
        return int(lib.mjl_device_probe(1, 0, pointer))
    if name == "step_result":
        return int(lib.mjl_session_step(session, ints(IDS), IDS.size, pointer))
    return int(lib.mjl_session_describe(session, pointer))


@pytest.mark.parametrize("name", OUTPUTS)
def test_smaller_output_is_written_as_far_as_it_goes(session: Any, name: str) -> None:
    size = ffi.sizeof(f"mjl_{name}")
    memory = ffi.new(f"char[{size}]", bytes([SENTINEL]) * size)
    pointer = ffi.cast(f"mjl_{name} *", memory)
    pointer.struct_size = 8
    assert call_with_output(session, name, pointer) == OK, last_error()
    assert pointer.struct_size == 8
    assert bytes(ffi.buffer(memory))[4:8] != bytes([SENTINEL]) * 4
    assert bytes(ffi.buffer(memory))[8:] == bytes([SENTINEL]) * (size - 8)


@pytest.mark.parametrize("name", OUTPUTS)
def test_larger_output_gets_zeros_where_this_library_knows_nothing(session: Any, name: str) -> None:
    size = ffi.sizeof(f"mjl_{name}")
    memory = ffi.new("char[]", size + 24)
    pointer = ffi.cast(f"mjl_{name} *", memory)
    pointer.struct_size = size + 24
    assert call_with_output(session, name, pointer) == OK, last_error()
    assert bytes(ffi.buffer(memory))[size:] == bytes(24)


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_with_impossible_size_is_refused(session: Any, name: str) -> None:
    value = struct(name)
    value.struct_size = 2
    before, state = bytes(ffi.buffer(value)), export(session)
    refused(call_with_output(session, name, value), ARGUMENT, "struct_size")
    assert bytes(ffi.buffer(value)) == before
    assert export(session) == state


# ---- Threads, handles and the caller's floating-point mode ----


def test_last_error_belongs_to_the_thread(session: Any) -> None:
    refused(lib.mjl_session_step(session, ffi.NULL, 0, struct("step_result")), ARGUMENT)
    here = last_error()
    there: list[str] = []

    def other() -> None:
        there.append(last_error())
        lib.mjl_session_evaluate(session, ints(IDS), 1, ffi.new("float *"))
        there.append(last_error())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert there[0] == ""
    assert there[1] not in ("", here)
    assert last_error() == here


def test_calls_of_several_threads_queue(session: Any) -> None:
    """Steps on the same ids commute, so any interleaving gives the bits of a serial run."""
    status, serial = open_session()
    assert status == OK
    for _ in range(40):
        step(serial)
    threads = [threading.Thread(target=lambda: [step(session) for _ in range(10)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert export(session) == export(serial)
    lib.mjl_session_close(serial)


def test_release_null_and_in_any_order() -> None:
    lib.mjl_session_close(ffi.NULL)
    sessions = [open_session()[1] for _ in range(3)]
    lib.mjl_session_close(sessions[1])
    assert step(sessions[0]) == step(sessions[2])
    lib.mjl_session_close(sessions[0])
    assert step(sessions[2]) > 0
    lib.mjl_session_close(sessions[2])


def test_the_state_is_copied() -> None:
    weights = WEIGHTS.copy()
    status, session = open_session(state=state_struct(weights))
    assert status == OK
    weights[:] = 0
    assert export(session)[0][: 4 * COUNT] == WEIGHTS.tobytes()
    lib.mjl_session_close(session)


def test_threads_option() -> None:
    results = set()
    for threads in (1, 2, 3):
        status, session = open_session(options=struct("session_options", vendor=1, threads=threads))
        assert status == OK, last_error()
        info = struct("session_info")
        assert lib.mjl_session_describe(session, info) == OK, last_error()
        assert (info.vendor, info.threads) == (1, threads)
        results.add((step(session), export(session)))
        lib.mjl_session_close(session)
    assert len(results) == 1


def test_describe(session: Any) -> None:
    info, device = struct("session_info"), struct("device_info")
    assert lib.mjl_session_describe(session, info) == OK, last_error()
    assert lib.mjl_device_probe(info.vendor, info.device, device) == OK, last_error()
    assert ffi.string(info.device_name) == ffi.string(device.name)
    assert info.memory_bytes >= 8 * 4 * COUNT  # two states of three arrays, and the gradient
    assert info.memory_bytes >= info.attention_bytes >= info.forward_score_cells
    assert device.memory_bytes > info.memory_bytes


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="sets the MXCSR register of x86-64")
def test_floating_point_mode_of_the_caller() -> None:
    """Flush-to-zero, denormals-are-zero and rounding upwards change no bit and are still set after the call."""
    mode = cffi.FFI()
    mode.cdef("int fegetenv(char *); int fesetenv(const char *);")
    libm: Any = mode.dlopen("libm.so.6")
    status, session = open_session()
    assert status == OK
    expected = step(session), export(session)
    lib.mjl_session_close(session)

    environment, after = mode.new("char[32]"), mode.new("char[32]")
    assert libm.fegetenv(environment) == 0
    usual = mode.new("char[32]", bytes(mode.buffer(environment)))
    # Made here: in the unusual mode even the conversion of 1e-3 to a float gives another number.
    arguments = [shape_struct(), adamw_struct(), state_struct(), struct("session_options")]
    result = struct("step_result")
    control = int.from_bytes(mode.buffer(environment)[28:32], "little")
    unusual = control | 1 << 15 | 1 << 6 | 2 << 13
    mode.buffer(environment)[28:32] = unusual.to_bytes(4, "little")
    libm.fesetenv(environment)
    try:
        status, session = open_session(*arguments)
        stepped = lib.mjl_session_step(session, ints(IDS), IDS.size, result)
        libm.fegetenv(after)
    finally:
        libm.fesetenv(usual)
    assert (status, stepped) == (OK, OK)
    flags = 0x3F  # sticky exception flags, which any arithmetic raises
    assert int.from_bytes(mode.buffer(after)[28:32], "little") & ~flags == unusual & ~flags
    assert (float(result.loss), export(session)) == expected
    lib.mjl_session_close(session)
