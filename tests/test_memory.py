# SPDX-License-Identifier: Apache-2.0
"""Memory, threads and file descriptors: as many as stated, and no more with time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from models import trainer, weights
from mojolearn import LanguageModelConfig, LanguageModelTrainer

SMALL = {
    "batch": 8,
    "length": 256,
    "d_model": 256,
    "n_heads": 8,
    "n_kv": 4,
    "head_dim": 32,
    "intermediate": 768,
    "n_layers": 2,
    "vocab_size": 256,
}
ONE_ID = np.ones((1, 1), np.int32)
SHAPES = {
    "small": {},
    "chunked head": {"vocab_size": 4000, "chunked_lm_head_v2": True, "n_layers": 1},
    "long": {"batch": 1, "length": 3000},
    "large vocabulary": {"batch": 1, "vocab_size": 6000},
}

# Opens a trainer, trains a little in several ways, and tells what it states and by how much the process has grown.
# What a thread or the code of a function takes at its first use is no matter of the session: a tiny one goes first.
MEASURE = """
import ctypes, json, sys
import numpy as np
from mojolearn import LanguageModelConfig, LanguageModelTrainer

def resident():
    ctypes.CDLL(None).malloc_trim(0)  # gives back what was freed
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def run(shape, steps):
    rng = np.random.default_rng(1)
    weights = (rng.standard_normal(shape.n_total) * 0.02).astype(np.float32)
    ids = rng.integers(0, shape.vocab_size, (shape.batch, shape.length + 1)).astype(np.int32)
    before = resident()
    model = LanguageModelTrainer(
        weights, data_schedule={"corpus": "made up"}, shape=shape, vendor="cpu", resident=True, step_result="lean"
    )
    for _ in range(steps):
        model.train_step(ids)
    return {"stated": model.run_metadata()["device"]["memory_bytes"], "used": resident() - before}

run(LanguageModelConfig(), 1)
print(json.dumps(run(LanguageModelConfig(**json.loads(sys.argv[1])), 2)))
"""


@pytest.mark.parametrize("name", SHAPES)
def test_a_process_uses_what_is_stated(name, run_python):
    measured = json.loads(run_python(MEASURE, json.dumps(SMALL | SHAPES[name])))
    assert measured["stated"] > 40e6  # otherwise the process itself shows
    assert measured["used"] == pytest.approx(measured["stated"], rel=0.05)


def test_attention_keeps_no_square_of_the_length():
    def stated(length):
        shape = LanguageModelConfig(**SMALL | {"batch": 1, "length": length, "d_model": 64, "head_dim": 8})
        model = trainer(shape, weights(shape), vendor="cpu", resident=True)
        model.logits(ONE_ID)
        memory = model.run_metadata()["device"]["memory_bytes"]
        model.close()
        return memory

    short, middle, long = map(stated, (1024, 2048, 4096))
    assert long - middle < 2.1 * (middle - short)


# What a process holds after some rounds of work, and after many more.
GROWTH = """
import os, sys
import numpy as np
from mojolearn import LanguageModelConfig, LanguageModelTrainer

def held():
    memory = int(open("/proc/self/statm").read().split()[1]) * 4096
    return memory, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

shape = LanguageModelConfig(n_layers=1)
weights = (np.random.default_rng(1).standard_normal(shape.n_total) * 0.02).astype(np.float32)
ids = np.random.default_rng(2).integers(0, 256, (shape.batch, shape.length + 1)).astype(np.int32)

def open_model():
    return LanguageModelTrainer(
        weights, data_schedule={"corpus": "made up"}, shape=shape, vendor="cpu", resident=True, step_result="lean"
    )

model = open_model()

def steps(count):
    for _ in range(count):
        model.train_step(ids)

def rounds(count):
    for _ in range(count):
        other = open_model()
        other.train_step(ids)
        other.next_bytes(ids[:, :-1])
        other.close()

work, warm_up, count = {"steps": (steps, 1000, 10_000), "rounds": (rounds, 100, 1000)}[sys.argv[1]]
work(warm_up)
before = held()
work(count)
after = held()
print(*(b - a for a, b in zip(before, after)))
"""


@pytest.mark.parametrize("what", ["steps", "rounds"])
def test_nothing_grows(what, run_python):
    memory, threads, files = map(int, run_python(GROWTH, what, MOJOLEARN_THREADS="2").split())
    assert memory < 500_000  # a thousand leaks of 500 bytes
    assert (threads, files) == (0, 0)


def test_a_shape_that_cannot_fit_is_refused_with_the_bytes_it_needs():
    shape = LanguageModelConfig(
        batch=30, length=8192, d_model=2, n_heads=1, n_kv=1, head_dim=2, intermediate=8000, n_layers=1000, vocab_size=2
    )
    assert 4 * shape.n_total < 1e9
    model = LanguageModelTrainer(
        weights(shape), data_schedule={"corpus": "made up"}, shape=shape, vendor="cpu", resident=True
    )
    gate = 4 * 30 * 8192 * 8000  # one of many tensors
    with pytest.raises(MemoryError, match=r"needs (\d+) bytes") as refused:
        model.logits(ONE_ID)
    needed = int(str(refused.value).split("needs ")[1].split()[0])
    assert needed > 1000 * 3 * gate
