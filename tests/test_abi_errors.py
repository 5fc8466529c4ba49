# SPDX-License-Identifier: Apache-2.0
"""What the C ABI answers to bad arguments, and every status that can be provoked."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abi import (
    ARGUMENT,
    CANCELLED,
    COUNT,
    IDS,
    NON_FINITE,
    OK,
    STATE,
    UNSUPPORTED,
    WEIGHTS,
    adamw_struct,
    every_call,
    export,
    ffi,
    floats,
    ints,
    last_error,
    lib,
    open_session,
    refused,
    shape_struct,
    state_struct,
    step,
    struct,
)

# ---- Arguments ----


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"batch": 0}, "batch"),
        ({"length": -1}, "length"),
        ({"length": 8193}, "length"),
        ({"d_model": 6}, "d_model"),
        ({"n_kv": 3}, "n_kv"),
        ({"n_heads": 4, "head_dim": 1}, "head_dim"),
        ({"intermediate": 2**20 + 1}, "intermediate"),
        ({"n_layers": 0}, "n_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"chunked_lm_head_v2": 2}, "chunked_lm_head_v2"),
        ({"chunked_lm_head_v2": 1, "vocab_size": 1}, "vocab_size"),
        ({"batch": 2**20, "length": 8192}, "2147483647"),
    ],
)
def test_bad_shape(change: dict[str, int], word: str) -> None:
    refused(open_session(shape=shape_struct(**change))[0], ARGUMENT, word)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("lr", -1e-3),
        ("lr", float("inf")),
        ("lr", float("nan")),
        ("beta1", -0.1),
        ("beta1", 1.0),
        ("beta2", 1.0),
        ("beta2", float("nan")),
        ("eps", 0.0),
        ("eps", float("inf")),
        ("weight_decay", -1e-9),
        ("weight_decay", float("nan")),
    ],
)
def test_bad_hyperparameter(session: Any, field: str, value: float) -> None:
    refused(open_session(adamw=adamw_struct(**{field: value}))[0], ARGUMENT, field)
    before = export(session)
    refused(lib.mjl_session_load_state(session, adamw_struct(**{field: value}), state_struct()), ARGUMENT, field)
    assert export(session) == before


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"count": COUNT - 1}, str(COUNT)),
        ({"count": COUNT + 1}, str(COUNT)),
        ({"count": 2**63}, str(COUNT)),
        ({"parameters": ffi.NULL}, "parameters"),
        ({"completed_steps": -1}, "completed_steps"),
        ({"completed_steps": 3}, "m"),
        ({"reserved": 1}, "reserved"),
        ({"m": floats(WEIGHTS)}, "v"),
        ({"v": floats(abs(WEIGHTS))}, "m"),
    ],
)
def test_bad_state(session: Any, change: dict[str, Any], word: str) -> None:
    refused(open_session(state=state_struct(**change))[0], ARGUMENT, word)
    before = export(session)
    refused(lib.mjl_session_load_state(session, ffi.NULL, state_struct(**change)), ARGUMENT, word)
    assert export(session) == before


@pytest.mark.parametrize("name", ["parameters", "m", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_state(session: Any, name: str, value: float) -> None:
    arrays = {"parameters": WEIGHTS.copy(), "m": WEIGHTS.copy(), "v": abs(WEIGHTS)}
    arrays[name][COUNT // 2] = value
    bad = struct("state", **{key: floats(array) for key, array in arrays.items()}, count=COUNT, completed_steps=1)
    refused(open_session(state=bad)[0], ARGUMENT, name)
    before = export(session)
    refused(lib.mjl_session_load_state(session, ffi.NULL, bad), ARGUMENT, name)
    assert export(session) == before


def test_negative_second_moment(session: Any) -> None:
    v = abs(WEIGHTS)
    v[3] = -1e-3
    bad = state_struct(m=floats(WEIGHTS), v=floats(v), completed_steps=1)
    refused(open_session(state=bad)[0], ARGUMENT, "v[3]")
    before = export(session)
    refused(lib.mjl_session_load_state(session, ffi.NULL, bad), ARGUMENT, "v[3]")
    assert export(session) == before


@pytest.mark.parametrize("missing", range(1, 5))
def test_open_with_null(missing: int) -> None:
    out = ffi.new("mjl_session **")
    arguments = [ffi.NULL, shape_struct(), adamw_struct(), state_struct(), out]
    arguments[missing] = ffi.NULL
    refused(lib.mjl_session_open(*arguments), ARGUMENT, ["shape", "adamw", "state", "out_session"][missing - 1], "NULL")
    assert out[0] == ffi.NULL


# What may be NULL, as the header says.
OPTIONAL = {"lengths", "out_parameters", "out_m", "out_v", "out_completed_steps", "adamw"}


def test_null_arguments(session: Any) -> None:
    step(session)
    before = export(session)
    checked = 0
    for function, arguments in every_call(session).values():
        for name, value in arguments.items():
            if isinstance(value, int) or name in OPTIONAL:
                continue
            refused(function(*{**arguments, name: ffi.NULL}.values()), ARGUMENT, name, "NULL")
            checked += 1
    assert checked == 19
    assert export(session) == before
    refused(lib.mjl_device_probe(0, 0, ffi.NULL), ARGUMENT, "out_info")


def test_optional_arguments(session: Any) -> None:
    step(session)
    for function, arguments in every_call(session).values():
        for name in OPTIONAL & arguments.keys():
            assert function(*{**arguments, name: ffi.NULL}.values()) == OK, last_error()


@pytest.mark.parametrize(
    ("call", "name", "values"),
    [
        ("step", "ids_count", [0, 9, 11, 2**40]),
        ("evaluate", "ids_count", [0, 9, 11, 2**40]),
        ("logits", "rows", [0, -1]),
        ("logits", "length", [0, -1, 5]),
        ("logits", "out_count", [0, 63, 65, 2**40]),
        ("next_tokens", "rows", [0, -1]),
        ("next_tokens", "length", [0, -1, 5]),
        ("export_state", "count", [0, COUNT - 1, COUNT + 1]),
        ("export_gradients", "count", [0, COUNT - 1, COUNT + 1]),
    ],
)
def test_wrong_counts(session: Any, call: str, name: str, values: list[int]) -> None:
    step(session)
    before = export(session)
    for value in values:
        function, arguments = every_call(session)[call]
        outputs = {key: pointer for key, pointer in arguments.items() if key.startswith("out_") and key != "out_count"}
        contents = {key: bytes(ffi.buffer(pointer)) for key, pointer in outputs.items()}
        refused(function(*{**arguments, name: value}.values()), ARGUMENT, name.removesuffix("_count"), str(value))
        assert {key: bytes(ffi.buffer(pointer)) for key, pointer in outputs.items()} == contents
    assert export(session) == before


@pytest.mark.parametrize("token", [-1, 8, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("call", ["step", "evaluate", "logits", "next_tokens"])
def test_ids_out_of_range(session: Any, call: str, token: int) -> None:
    before = export(session)
    function, arguments = every_call(session)[call]
    arguments["ids"][3] = token
    refused(function(*arguments.values()), ARGUMENT, "ids", str(token))
    assert export(session) == before


def test_ids_of_padding_are_not_read(session: Any) -> None:
    function, arguments = every_call(session)["next_tokens"]
    arguments["ids"][7] = -5  # position 3 of the row of length 2
    assert function(*arguments.values()) == OK, last_error()


@pytest.mark.parametrize("length", [0, -1, 5])
def test_bad_lengths(session: Any, length: int) -> None:
    for call in ("logits", "next_tokens"):
        function, arguments = every_call(session)[call]
        arguments["lengths"][1] = length
        refused(function(*arguments.values()), ARGUMENT, "lengths", str(length))


# ---- Every status that can be provoked ----


def test_gradients_before_a_step(session: Any) -> None:
    gradients = np.full(COUNT, 3.0, np.float32)
    refused(lib.mjl_session_export_gradients(session, floats(gradients), COUNT), STATE)
    assert (gradients == 3).all()
    step(session)
    assert lib.mjl_session_export_gradients(session, floats(gradients), COUNT) == OK, last_error()
    assert (gradients != 3).all()
    assert lib.mjl_session_load_state(session, ffi.NULL, state_struct()) == OK, last_error()
    refused(lib.mjl_session_export_gradients(session, floats(gradients), COUNT), STATE)


@pytest.mark.parametrize(
    ("vendor", "device", "word"), [(2, 0, "cuda"), (3, 0, "hip"), (1, 1, "device"), (1, -1, "device"), (2, 999, "cuda")]
)
def test_missing_device(vendor: int, device: int, word: str) -> None:
    info = struct("device_info")
    if lib.mjl_device_probe(vendor, device, info) == OK:
        pytest.skip(f"this machine has {ffi.string(info.name).decode()}")
    refused(lib.mjl_device_probe(vendor, device, info), UNSUPPORTED, word)
    options = struct("session_options", vendor=vendor, device=device)
    refused(open_session(options=options)[0], UNSUPPORTED, word)


@pytest.mark.parametrize("vendor", [-1, 4, 99])
def test_unknown_vendor(vendor: int) -> None:
    refused(lib.mjl_device_probe(vendor, 0, struct("device_info")), ARGUMENT, "vendor", str(vendor))
    refused(open_session(options=struct("session_options", vendor=vendor))[0], ARGUMENT, "vendor", str(vendor))


def test_bad_thread_count() -> None:
    refused(open_session(options=struct("session_options", threads=-1))[0], ARGUMENT, "threads", "-1")


def test_non_finite_logits(session: Any) -> None:
    """Large finite weights whose logits overflow: refused, and nothing changes."""
    huge = np.full(COUNT, 1e30, np.float32)
    assert lib.mjl_session_load_state(session, ffi.NULL, state_struct(huge)) == OK, last_error()
    before = export(session)
    result = struct("step_result", loss=7.0, completed_steps=7)
    refused(lib.mjl_session_step(session, ints(IDS), IDS.size, result), NON_FINITE)
    assert (result.loss, result.completed_steps) == (7.0, 7)
    loss = ffi.new("float *", 7.0)
    refused(lib.mjl_session_evaluate(session, ints(IDS), IDS.size, loss), NON_FINITE)
    assert loss[0] == 7.0
    tokens = np.full(2, 7, np.int32)
    prompt = np.ascontiguousarray(IDS[:, :4])
    refused(lib.mjl_session_next_tokens(session, ints(prompt), 2, 4, ffi.NULL, ints(tokens)), NON_FINITE)
    assert (tokens == 7).all()
    assert export(session) == before
    assert lib.mjl_session_load_state(session, ffi.NULL, state_struct()) == OK, last_error()
    assert step(session) > 0


def test_cancel() -> None:
    """A poll function that says stop ends a long call, from the thread that made it, and nothing has changed."""
    answer, askers = [0], set()

    @ffi.callback("int32_t(void *)")
    def poll(context: Any) -> int:
        askers.add(threading.get_ident())
        assert context == ffi.cast("void *", 1234)
        return answer[0]

    shape = {"batch": 8, "length": 256, "d_model": 256, "n_heads": 4, "n_kv": 4, "head_dim": 64, "intermediate": 1024}
    size = 2 * 256 * 256 + 2 * (2 * 256 + 4 * 256 * 256 + 3 * 1024 * 256)
    weights = np.random.default_rng(0).standard_normal(size, np.float32) * np.float32(0.02)
    ids = np.random.default_rng(1).integers(0, 256, (8, 257), np.int32)
    options = struct("session_options", poll=poll, poll_context=ffi.cast("void *", 1234))
    long_shape = shape_struct(**shape, n_layers=2, vocab_size=256)
    status, session = open_session(shape=long_shape, state=state_struct(weights), options=options)
    assert status == OK, last_error()

    before = export(session, size)
    answer[0] = 1
    result = struct("step_result", loss=7.0)
    refused(lib.mjl_session_step(session, ints(ids), ids.size, result), CANCELLED)
    assert result.loss == 7.0
    loss = ffi.new("float *", 7.0)
    refused(lib.mjl_session_evaluate(session, ints(ids), ids.size, loss), CANCELLED)
    assert loss[0] == 7.0
    assert export(session, size) == before
    assert askers == {threading.get_ident()}

    answer[0] = 0
    assert step(session, ids) > 0
    assert export(session, size)[1] == 1
    lib.mjl_session_close(session)


# For code that must not run in this process.
PRELUDE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from abi import *\n"


def test_out_of_memory(run_python: Callable[[str], str]) -> None:
    """A shape that does not fit into what the process may have is refused at open, saying how much it needs."""
    script = """
        import resource
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (200 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        status, _ = open_session(shape=shape_struct(batch=512, length=1024))
        refused(status, MEMORY, "bytes")
        status, session = open_session()
        assert status == OK, last_error()
        assert step(session) > 0
    """
    run_python(PRELUDE + textwrap.dedent(script))


def test_use_in_a_forked_child_is_refused(run_python: Callable[[str], str]) -> None:
    script = """
        import os
        status, session = open_session()
        expected = step(session)
        child = os.fork()
        if child == 0:
            status = lib.mjl_session_step(session, ints(IDS), IDS.size, struct("step_result"))
            named = "fork" in last_error()
            lib.mjl_session_close(session)
            fresh, own = open_session()
            os._exit(0 if status == STATE and named and fresh == OK and step(own) == expected else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert step(session) > 0
        lib.mjl_session_close(session)
    """
    run_python(PRELUDE + textwrap.dedent(script))
