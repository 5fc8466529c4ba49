# SPDX-License-Identifier: Apache-2.0
"""Threads, signals, forks and floating-point modes around a trainer."""

import ctypes
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from models import batches, bits, trainer, weights
from mojolearn import LanguageModelConfig

# A shape whose step takes one thread long enough to be interrupted, and ends soon enough to be waited for.
LONG = LanguageModelConfig(
    batch=2, length=512, d_model=256, n_heads=4, n_kv=2, head_dim=64, intermediate=768, n_layers=4, vocab_size=256
)

# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [None, False])
def test_threads_that_train_one_trainer_take_turns(resident):
    model, ids = trainer(resident=resident), batches(32)
    done = {}

    def work(mine):
        for index in mine:
            result = model.train_step(ids[index])
            done[result["step"]] = index, result["loss"], bits(result["flat_gradients"])

    threads = [threading.Thread(target=work, args=(range(first, 32, 4),)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = trainer()
    assert sorted(done) == list(range(1, 33))
    for step in sorted(done):
        index, loss, gradient = done[step]
        result = alone.train_step(ids[index])
        assert (loss, gradient) == (result["loss"], bits(result["flat_gradients"]))
    assert bits(model.state_dict()) == bits(alone.state_dict())


def test_threads_that_do_different_things():
    model, ids = trainer(), batches(1)[0]
    other = trainer(LanguageModelConfig()).state_dict()
    mine = model.state_dict()
    failures = []

    def work(call, expected):
        for _ in range(20):
            try:
                call()
            except expected:
                pass
            except BaseException as error:
                failures.append(error)

    calls = [
        (lambda: model.train_step(ids), ValueError),  # the shape may just be the other one
        (model.close, ()),
        (lambda: model.load_state_dict(other), ()),
        (lambda: model.load_state_dict(mine), ()),
        (model.export_gradients, RuntimeError),
        (model.export_state, ()),
    ]
    threads = [threading.Thread(target=work, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    model.load_state_dict(mine)
    assert bits(model.state_dict()) == bits(mine)


def test_a_thread_other_than_the_main_one_can_train_long():
    result = []
    thread = threading.Thread(target=lambda: result.append(long_trainer().train_step(long_ids())["loss"]))
    thread.start()
    thread.join()
    assert math.isfinite(result[0])


# ---- signals ---------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("MOJOLEARN_VENDOR", "cpu")
    monkeypatch.setenv("MOJOLEARN_THREADS", "1")


def long_trainer(**options):
    return trainer(LONG, weights(LONG), **options)


def long_ids():
    return batches(1, LONG)[0]


@pytest.fixture
def alarm():
    """Calls a handler in the main thread after a while."""
    before = signal.getsignal(signal.SIGALRM)

    def set_alarm(handler, seconds=0.05):
        signal.signal(signal.SIGALRM, lambda number, frame: handler())
        signal.setitimer(signal.ITIMER_REAL, seconds)

    yield set_alarm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupt():
    raise Interrupted


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("method", ["train_step", "evaluate", "logits", "next_bytes"])
def test_what_a_signal_handler_raises_ends_the_call_and_changes_nothing(method, resident, alarm):
    model, ids = long_trainer(resident=resident), long_ids()
    argument = ids if method in ("train_step", "evaluate") else ids[:, :-1]
    model.logits(ids[:1, :1])  # so that a session is open
    before = bits(model.state_dict())
    alarm(interrupt)
    started = time.perf_counter()
    with pytest.raises(Interrupted):
        getattr(model, method)(argument)
    assert time.perf_counter() - started < 2
    assert model.step_ == 0
    assert bits(model.state_dict()) == before
    if resident:
        with pytest.raises(RuntimeError, match="no gradient"):
            model.export_gradients()


def test_a_trainer_goes_on_after_an_interruption(alarm):
    model, ids = long_trainer(resident=True), long_ids()
    alarm(interrupt)
    with pytest.raises(Interrupted):
        model.train_step(ids)
    assert model.train_step(ids) | {"flags": None} == long_trainer(resident=True).train_step(ids) | {"flags": None}


def test_a_signal_handler_that_returns_lets_the_call_go_on(alarm):
    handled = []
    model = long_trainer(resident=True)
    alarm(lambda: handled.append(model.step_))
    model.train_step(long_ids())
    assert handled == [0]
    assert model.step_ == 1


def test_a_signal_handler_cannot_use_the_trainer_amid_a_call(alarm):
    refused = []
    model, other, ids = long_trainer(resident=True), trainer(), batches(1)[0]

    def handler():
        for call in (model.close, model.state_dict, lambda: model.evaluate(long_ids())):
            with pytest.raises(RuntimeError, match="in the middle of a call"):
                call()
            refused.append(call)
        other.train_step(ids)  # another trainer is no matter

    alarm(handler)
    model.train_step(long_ids())
    assert len(refused) == 3
    assert (model.step_, other.step_) == (1, 1)


CONTROL_C = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
from test_surroundings import bits, long_ids, long_trainer

model, ids = long_trainer(resident=True), long_ids()
model.logits(ids[:1, :1])
before = bits(model.state_dict())
pressed = []
def press():
    time.sleep(0.05)
    pressed.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press).start()
try:
    model.train_step(ids)
except KeyboardInterrupt:
    assert time.perf_counter() - pressed[0] < 2
    assert model.step_ == 0 and bits(model.state_dict()) == before
    model.train_step(ids)
    print("rolled back, then step", model.step_)
"""


def test_control_c_rolls_a_long_step_back(run_python):
    assert run_python(CONTROL_C, os.path.dirname(__file__)) == "rolled back, then step 1\n"


# ---- forks -----------------------------------------------------------------------------------------------------------

FORK = """
import os, sys, threading, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore", DeprecationWarning)  # some Pythons warn of forks in processes with threads
from test_surroundings import batches, bits, long_ids, long_trainer, trainer

def child(work):
    process = os.fork()
    if process == 0:
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0

def refused(call):
    try:
        call()
    except RuntimeError as error:
        assert "forked" in str(error) and "load_state_dict" in str(error), error
    else:
        raise AssertionError("not refused")

ids = batches(3)
for resident in (None, False):
    model = trainer(resident=resident)
    model.train_step(ids[0])
    state = model.export_state()

    def work():
        for call in (model.close, model.export_state, model.export_gradients, model.run_metadata,
                     model.attention_stage_report, lambda: model.parameters_, lambda: model.train_step(ids[1]),
                     lambda: model.evaluate(ids[1]), lambda: model.logits(ids[1][:, :3])):
            refused(call)
        assert model.step_ == 1 and model.data_schedule == {"corpus": "made up"}
        fresh = trainer()
        fresh.train_step(ids[0])
        assert bits(fresh.state_dict()) == bits(state)
        model.load_state_dict(state)
        model.train_step(ids[1])
        model.train_step(ids[2])
        fresh.train_step(ids[1])
        fresh.train_step(ids[2])
        assert bits(model.state_dict()) == bits(fresh.state_dict())
        child(lambda: refused(model.close))

    child(work)
    assert bits(model.export_state()) == bits(state)
    model.train_step(ids[1])

# A fork while another thread is amid a call: its lock is held for ever in the child.
busy = long_trainer(resident=True)
busy.logits(long_ids()[:1, :1])
state = busy.export_state()
thread = threading.Thread(target=lambda: busy.train_step(long_ids()))
thread.start()
while not busy._turns._owner:
    pass

def work():
    refused(busy.close)
    busy.load_state_dict(state)
    assert bits(busy.export_state()) == bits(state)

child(work)
thread.join()
assert busy.step_ == 1
print("as it should be")
"""


def test_a_forked_child_is_refused_and_told_what_to_do(run_python):
    assert run_python(FORK, os.path.dirname(__file__)) == "as it should be\n"


# ---- memory and threads ----------------------------------------------------------------------------------------------

LITTLE_MEMORY = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from test_surroundings import LanguageModelConfig, batches, bits, np, trainer

shape = LanguageModelConfig(
    batch=2**20, length=1, d_model=512, n_heads=1, n_kv=1, head_dim=512, intermediate=1, n_layers=1, vocab_size=2
)
model = trainer(shape)
before = bits(model.state_dict())
resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
try:
    model.evaluate(np.zeros((2**20, 2), np.int32))
except MemoryError as error:
    print(type(error).__name__, error)
assert bits(model.state_dict()) == before
small = trainer()
small.train_step(batches(1)[0])
assert small.step_ == 1
"""


def test_a_shape_that_does_not_fit_is_refused_with_the_bytes_it_needs(run_python):
    told = run_python(LITTLE_MEMORY, os.path.dirname(__file__))
    assert re.match(r"OutOfMemoryError .*needs \d{10,} bytes", told)


def count_threads():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux shows them")
def test_threads_end_with_their_session(monkeypatch):
    monkeypatch.setenv("MOJOLEARN_THREADS", "4")
    before = count_threads()
    endings = [lambda model: model.close(), lambda model: model.load_state_dict(model.state_dict()), lambda model: None]
    for ending in endings:
        model = trainer()
        assert count_threads() == before
        model.evaluate(batches(1)[0])
        assert count_threads() == before + 3
        ending(model)
        del model
        assert count_threads() == before
    stateless = trainer(resident=False)
    stateless.train_step(batches(1)[0])
    assert count_threads() == before


# ---- floating-point modes --------------------------------------------------------------------------------------------

MODE = """
#include <xmmintrin.h>
unsigned get_mode(void) { return _mm_getcsr(); }
void set_mode(unsigned mode) { _mm_setcsr(mode); }
"""
FLUSH, DENORMALS_ARE_ZERO, ROUND_TO_ZERO, STICKY_FLAGS = 1 << 15, 1 << 6, 3 << 13, 0x3F


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    if platform.machine() != "x86_64":
        pytest.skip("sets the mode in a register that only x86-64 has")
    path = tmp_path_factory.mktemp("mode") / "mode.so"
    compiler = shutil.which("cc") or shutil.which("g++")
    subprocess.run([compiler, "-x", "c", "-", "-shared", "-fPIC", "-o", path], input=MODE, text=True, check=True)
    return ctypes.CDLL(str(path))


def edge_run():
    """Parameters and ids near the edge of the subnormals, where a mode would show; and a run, to be started later."""
    flat = weights()
    flat[::3] = (flat[::3].astype(np.float64) * 2.0**-120).astype(np.float32)
    model, ids = trainer(parameters=flat, eps=1e-30), batches(4)

    def run():
        results = [model.train_step(batch) for batch in ids]
        return results, model.evaluate(ids[0]), model.logits(ids[0][:, :-1]), model.export_state()

    return run


@pytest.mark.parametrize("mode", [FLUSH, DENORMALS_ARE_ZERO, FLUSH | DENORMALS_ARE_ZERO, ROUND_TO_ZERO])
def test_the_floating_point_mode_of_the_caller_does_not_matter(mode, processor):
    wanted = edge_run()()
    run = edge_run()
    before = processor.get_mode()
    processor.set_mode(before | mode)
    try:
        results = run()
        after = processor.get_mode()
    finally:
        processor.set_mode(before)
    assert bits(list(results[0])) == bits(list(wanted[0]))
    assert bits(list(results[1:])) == bits(list(wanted[1:]))
    assert after & ~STICKY_FLAGS == (before | mode) & ~STICKY_FLAGS


def test_the_modes_set_here_do_something(processor):
    tiny, before = np.full(4, 1e-40, np.float32), processor.get_mode()
    processor.set_mode(before | FLUSH | DENORMALS_ARE_ZERO)
    try:
        flushed = tiny * np.float32(1)
    finally:
        processor.set_mode(before)
    assert not flushed.any()
    assert (tiny * np.float32(1)).all()
