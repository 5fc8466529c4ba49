# SPDX-License-Identifier: Apache-2.0
"""What happens when memory, threads or time fail, or a number overflows: an error, and nothing else."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import abi
import faults
from abi import CANCELLED, COUNT, IDS, MEMORY, NON_FINITE, OK, SHAPE, ffi, floats, ints, struct
from faults import BLOCK, OBJECT, THREAD, held, lib, message, try_open
from native_build import PROBE

PROMPT = np.ascontiguousarray(IDS[:, :-1])


@contextmanager
def opened(**options: Any) -> Iterator[Any]:
    status, session = try_open(**options)
    assert status == OK, message()
    try:
        yield session
    finally:
        lib.mjl_session_close(session)


def state(session: Any, count: int = COUNT) -> tuple[bytes, int]:
    arrays, steps = np.zeros((3, count), np.float32), ffi.new("int64_t *")
    assert lib.mjl_session_export_state(session, *map(floats, arrays), count, steps) == OK, message()
    return arrays.tobytes(), steps[0]


def step(session: Any, ids: np.ndarray = IDS) -> int:
    return int(lib.mjl_session_step(session, ints(ids), ids.size, struct("step_result")))


def evaluate(session: Any, ids: np.ndarray = IDS) -> int:
    return int(lib.mjl_session_evaluate(session, ints(ids), ids.size, ffi.new("float *")))


def logits(session: Any) -> int:
    out = np.zeros(PROMPT.size * SHAPE["vocab_size"], np.float32)
    return int(lib.mjl_session_logits(session, ints(PROMPT), *PROMPT.shape, ffi.NULL, floats(out), out.size))


def next_tokens(session: Any) -> int:
    out = ffi.new("int32_t[2]")
    return int(lib.mjl_session_next_tokens(session, ints(PROMPT), *PROMPT.shape, ffi.NULL, out))


def load(session: Any) -> int:
    weights = abi.WEIGHTS[::-1].copy()
    return int(lib.mjl_session_load_state(session, ffi.NULL, abi.state_struct(weights)))


def wrong_ids(session: Any) -> int:
    """A call that fails anyway, with a long message."""
    return step(session, IDS + SHAPE["vocab_size"])


CALLS: dict[str, Callable[[Any], int]] = {
    "step": step,
    "evaluate": evaluate,
    "logits": logits,
    "next_tokens": next_tokens,
    "load": load,
}


@pytest.fixture(autouse=True)
def system() -> Iterator[None]:
    """Everything works before and after a test, nothing is left behind, and the place for error texts is there."""
    lib.mjl_session_step(ffi.NULL, ffi.NULL, 0, ffi.NULL)
    with opened() as session:
        assert wrong_ids(session) == abi.ARGUMENT
    before = held(BLOCK, OBJECT, THREAD)
    yield
    for kind in faults.KINDS.values():
        lib.faults_plan(kind, 0, 0)
    lib.faults_clock(faults.CLOCKS["right"])
    deadline = time.monotonic() + 10  # Python does not wait for the last moments of a thread
    while held(BLOCK, OBJECT, THREAD) != before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert held(BLOCK, OBJECT, THREAD) == before


def each_fault(kind: int, persistent: bool, call: Callable[[], int], expected: int = OK) -> Iterator[int]:
    """Makes the first, second, ... request of a kind fail during a call, until it asks for no more; yields statuses."""
    for n in itertools.count(1):
        lib.faults_plan(kind, n, persistent)
        status = call()
        reached = lib.faults_requests(kind) >= n
        lib.faults_plan(kind, 0, 0)
        yield status
        if not reached:
            assert status == expected
            return


@pytest.fixture(scope="module")
def trained() -> tuple[bytes, int]:
    """The state of the tiny model after a step without faults."""
    with opened() as session:
        assert step(session) == OK
        return state(session)


# ---- Memory and threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistently"])
@pytest.mark.parametrize("kind", faults.KINDS)
def test_a_fault_while_opening_leaves_nothing_behind(kind, persistent, trained):
    refused, sessions = 0, []

    def call():
        status, session = try_open(threads=4)
        sessions.append(session)
        return status

    with opened() as other:  # an open session does not notice
        assert step(other) == OK
        before = held(BLOCK, OBJECT, THREAD)
        for status in each_fault(faults.KINDS[kind], persistent, call):
            session = sessions.pop()
            if status == OK:  # nothing failed, or something that can be done without
                assert step(session) == OK
                assert state(session) == trained
                lib.mjl_session_close(session)
            else:
                refused += 1
                assert status == MEMORY
                assert message()
            assert held(BLOCK, OBJECT, THREAD) == before
            assert state(other) == trained
    assert refused >= (3 if kind == "thread" else 1)


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistently"])
@pytest.mark.parametrize("kind", faults.KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_a_fault_during_a_call_changes_nothing(name, kind, persistent):
    refused = 0
    with opened(threads=2) as session:
        before, resources = state(session), held(BLOCK, THREAD)
        for status in each_fault(faults.KINDS[kind], persistent, lambda: CALLS[name](session)):
            assert held(BLOCK, THREAD) == resources
            if status != OK:
                refused += 1
                assert status == MEMORY
                assert message()
                assert state(session) == before
        assert CALLS[name](session) == OK
    # The first request for next tokens makes room for them; no other call asks for anything.
    assert (refused > 0) == (name == "next_tokens" and kind == "object")


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistently"])
def test_a_fault_while_an_error_is_told(persistent):
    statuses = set()

    def call():
        """In a thread of its own, which has no room for an error text yet."""
        with ThreadPoolExecutor(1) as executor:
            status, text = executor.submit(lambda: (wrong_ids(session), message())).result()
        assert text
        statuses.add(status)
        return status

    with opened() as session:
        before = state(session)
        assert len(list(each_fault(OBJECT, persistent, call, abi.ARGUMENT))) > 2
        assert statuses == {MEMORY, abi.ARGUMENT}
        assert state(session) == before
        assert step(session) == OK


@pytest.mark.parametrize("name", ["step", "evaluate", "logits", "next_tokens"])
def test_calls_that_repeat_ask_for_no_memory(name):
    with opened(threads=2) as session:
        if name not in ("step", "evaluate"):
            assert CALLS[name](session) == OK
        for kind in (BLOCK, OBJECT, THREAD):
            lib.faults_plan(kind, 0, 0)
        for _ in range(3):
            assert CALLS[name](session) == OK
        assert [lib.faults_requests(kind) for kind in (BLOCK, OBJECT, THREAD)] == [0, 0, 0]


def test_a_trainer_stays_usable(run_python):
    """The same through Python: MemoryError, and then as if nothing had happened."""
    script = f"""
import cffi, numpy as np
from mojolearn import LanguageModelConfig, LanguageModelTrainer
ffi = cffi.FFI()
ffi.cdef('''{faults.DECLARATIONS}''')
lib = ffi.dlopen({str(PROBE)!r})
shape = LanguageModelConfig(**{SHAPE!r})
weights = np.random.default_rng(1).standard_normal(shape.n_total).astype(np.float32)
ids = np.array({IDS.tolist()!r}, np.int32)

def run(kind, persistent):
    failures = 0
    model = LanguageModelTrainer(weights, data_schedule={{"corpus": "made up"}}, shape=shape, vendor="cpu")
    for call in (lambda: model.train_step(ids), lambda: model.evaluate(ids), lambda: model.train_step(ids)):
        for n in range(1, 10**6):
            before = model.state_dict()
            lib.faults_plan(kind, n, persistent)
            try:
                call()
            except MemoryError:
                failures += 1
                after = model.state_dict()
                assert all(np.array_equal(before[k], after[k]) for k in ("parameters", "m", "v", "completed_steps"))
            else:
                if lib.faults_requests(kind) < n:
                    break
            finally:
                lib.faults_plan(kind, 0, 0)
            model.close()  # the next call opens the device again
    model.close()
    return failures

for kind in (0, 1, 2):
    for persistent in (0, 1):
        assert run(kind, persistent) > 0, (kind, persistent)
print("done")
"""
    assert "done" in run_python(script, MOJOLEARN_LIBRARY=str(PROBE), MOJOLEARN_THREADS="3")


# ---- Time ------------------------------------------------------------------------------------------------------------

# Long enough to be asked during a step even when the clock stands still.
LONG = {**SHAPE, "length": 256, "d_model": 64, "n_heads": 4, "n_kv": 2, "head_dim": 16, "intermediate": 128}
LONG_IDS = np.random.default_rng(2).integers(0, 8, (2, 257)).astype(np.int32)


@pytest.mark.parametrize("answer", [0, 1])
@pytest.mark.parametrize("clock", faults.CLOCKS)
def test_no_clock_breaks_steps_or_cancelling(clock, answer):
    asked, answering = [], []

    @ffi.callback("int32_t(void *)")
    def poll(context):
        asked.extend(answering)
        return answer if answering else 0

    count = 2 * 8 * 64 + 4 * (2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    weights = (np.random.default_rng(3).standard_normal(count) * 0.1).astype(np.float32)
    options = {"shape": abi.shape_struct(**{**LONG, "n_layers": 4}), "state": abi.state_struct(weights)}
    with opened(**options) as session:
        before = state(session, count)
        assert step(session, LONG_IDS) == OK
        right = state(session, count)
    lib.faults_clock(faults.CLOCKS[clock])
    with opened(poll=poll, **options) as session:
        answering.append(True)
        for _ in range(200):
            status = step(session, LONG_IDS)
            if asked:
                break
            assert status == OK
            assert lib.mjl_session_load_state(session, ffi.NULL, options["state"]) == OK
        assert asked
        assert status == (CANCELLED if answer else OK)
        answering.clear()
        assert state(session, count) == (before if answer else right)


# ---- Numbers that overflow -------------------------------------------------------------------------------------------

TENSORS = {"embed": 32, "norm1": 4, "q": 16, "k": 8, "v": 8, "o": 16, "norm2": 4, "gate": 24, "up": 24, "down": 24}
FAR_APART = np.kron(np.resize([2e38, -2e38], 8), [1, 0, 0, 0])  # a row of the head is 2e38 or -2e38 and zeros
EVERYWHERE = {"step", "evaluate", "logits", "next_tokens"}

# Finite states in which a stage overflows: (what the message names, calls that meet it, tensors, hyperparameters).
OVERFLOWS = {
    "scores": ("the attention scores", EVERYWHERE, {"q": 1e30, "k": 1e30}, {}),
    "values": ("the logits", EVERYWHERE, {"v": 3e38, "o": 3e38}, {}),
    "gate": ("the logits", EVERYWHERE, {"gate": 3e38, "up": 3e38, "down": 3e38}, {}),
    "logits": ("the logits", EVERYWHERE, {"embed": 3e38, "lm_head": 3e38}, {}),
    "loss": ("the loss", {"step", "evaluate"}, {"embed": 1.0, "v": 0.0, "down": 0.0, "lm_head": FAR_APART}, {}),
    "gradient": (
        "the gradient",
        {"step"},
        {"embed": 0.0, "down": 1e30, "lm_head": np.resize([1e38, -1e38, 1e38], 32)},
        {},
    ),
    "decay": ("the updated parameters", {"step"}, {}, {"lr": 1e30, "weight_decay": 1e30}),
    "rate": ("the updated parameters", {"step"}, {}, {"lr": 3e38}),
    "square": ("the updated second moment", {"step"}, {"embed": 1e25, "lm_head": 0.0}, {}),
}


def overflowing(tensors: dict[str, Any]) -> np.ndarray:
    weights = abi.WEIGHTS.copy()
    offset = 0
    for name, size in {**TENSORS, "lm_head": 32}.items():
        if name in tensors:
            weights[offset : offset + size] = tensors[name]
        offset += size
    assert offset == COUNT
    assert np.isfinite(weights).all()
    return weights


@pytest.mark.parametrize("unit", faults.units())
@pytest.mark.parametrize("case", OVERFLOWS)
def test_an_overflow_is_caught_before_anything_changes(case, unit, monkeypatch):
    monkeypatch.setenv("MOJOLEARN_CPU", unit)
    stage, calls, tensors, hyper = OVERFLOWS[case]
    good, bad = abi.state_struct(), abi.state_struct(overflowing(tensors))
    with opened(state=bad, adamw=abi.adamw_struct(**hyper)) as session:
        before = state(session)
        for name in sorted(EVERYWHERE):
            status = CALLS[name](session)
            if name in calls:
                assert status == NON_FINITE, name
                assert stage in message()
            elif name != "step":
                assert status == OK, message()
            assert state(session) == before
        # It is the state that was at fault, not the session.
        assert lib.mjl_session_load_state(session, abi.adamw_struct(), good) == OK
        with opened() as other:
            assert step(session) == step(other) == OK
            assert state(session) == state(other)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["parameters", "m", "v"])
def test_a_state_that_is_not_finite_is_not_taken(name, value):
    arrays = {key: np.ones(COUNT, np.float32) for key in ("parameters", "m", "v")}
    arrays[name][COUNT - 1] = value
    bad = struct("state", **{key: floats(array) for key, array in arrays.items()}, count=COUNT, completed_steps=1)
    assert try_open(state=bad)[0] == abi.ARGUMENT
    with opened() as session:
        before = state(session)
        assert lib.mjl_session_load_state(session, ffi.NULL, bad) == abi.ARGUMENT
        assert f"{name}[{COUNT - 1}]" in message()
        assert state(session) == before
