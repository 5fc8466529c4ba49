# SPDX-License-Identifier: Apache-2.0
"""Odd and bad inputs get the recorded answers (tests/vectors/behaviours.json), or better ones."""

import builtins
import json
import pathlib

import numpy as np
import pytest

from models import weights
from mojolearn import LanguageModelConfig, LanguageModelTrainer

RECORD = pathlib.Path(__file__).parent / "vectors" / "behaviours.json"
ROWS = [row for row in json.loads(RECORD.read_text())["rows"] if not row["call"].startswith("AdamW ")]

# Where the answer is another one, and why that is better.
DIFFERENCES = {
    "load_state_dict completed_steps 1000000": "accepted",  # a small model makes a million steps in a few minutes
}

SHAPE = LanguageModelConfig(
    batch=1, length=5, d_model=16, n_heads=2, n_kv=1, head_dim=8, intermediate=24, n_layers=1, vocab_size=33
)
WEIGHTS = weights(SHAPE)
NAMED = {
    row["name"]: WEIGHTS[row["offset"] : row["offset"] + row["size"]].reshape(row["shape"])
    for row in LanguageModelTrainer.parameter_registry(SHAPE)
}
IDS = np.random.default_rng(1).integers(0, 33, (1, 6)).astype(np.int32)
ROW = IDS[:, :-1]


def make(parameters=WEIGHTS, **options):
    return LanguageModelTrainer(parameters, **{"data_schedule": {"corpus": "x"}, "shape": SHAPE} | options)


def logits(ids, **options):
    return lambda: make().logits(ids, **options)


def step(ids):
    return lambda: make().train_step(ids)


def load(**changes):
    def call():
        trainer = make()
        return trainer.load_state_dict(trainer.state_dict() | changes)

    return call


def load_without(key):
    def call():
        state = make().state_dict()
        del state[key]
        return make().load_state_dict(state)

    return call


def gradients(steps):
    def call():
        trainer = make()
        for _ in range(steps):
            trainer.train_step(IDS)
        return trainer.export_gradients()

    return call


def config(**fields):
    return lambda: LanguageModelConfig(**fields)


def options(**given):
    return lambda: make(**given)


FULL = np.full(SHAPE.n_total, 1, np.float32)
CALLS = {
    "config length=8193": config(length=8193),
    "config d_model != n_heads*head_dim": config(d_model=33),
    "config n_heads not divisible by n_kv": config(n_kv=3),
    "config odd head_dim": config(d_model=28, head_dim=7),
    "config batch=0": config(batch=0),
    "config batch=True": config(batch=True),
    "config batch=2.0": config(batch=2.0),
    "config batch=numpy.int64(2)": lambda: LanguageModelConfig(batch=np.int64(2)).batch,
    "config vocab_size=2**20+1": config(vocab_size=2**20 + 1),
    "config exceeding signed 32-bit indexing": config(batch=64, length=8192, vocab_size=50257),
    "config chunked_lm_head_v2=1": config(chunked_lm_head_v2=1),
    "config chunked_lm_head_v2=True, vocab_size=1": config(chunked_lm_head_v2=True, vocab_size=1),
    "trainer parameters float64": lambda: make(WEIGHTS.astype(np.float64)),
    "trainer parameters one short": lambda: make(WEIGHTS[:-1]),
    "trainer parameters 2-D": lambda: make(WEIGHTS.reshape(1, -1)),
    "trainer parameters with NaN": lambda: make(WEIGHTS * np.float32("nan")),
    "trainer parameters list of float": lambda: make(WEIGHTS.tolist()),
    "trainer parameters dict of named tensors": lambda: make(NAMED),
    "trainer parameters dict missing one": lambda: make({k: v for k, v in NAMED.items() if k != "embed"}),
    "trainer parameters dict with an unknown name": lambda: make(NAMED | {"x": WEIGHTS[:1]}),
    "trainer parameters dict with a wrong shape": lambda: make(NAMED | {"embed": NAMED["embed"].T}),
    "trainer shape=dict": options(shape={"batch": 1}),
    "trainer lr=0.0": options(lr=0.0),
    "trainer lr=-0.001": options(lr=-0.001),
    "trainer lr=nan": options(lr=float("nan")),
    "trainer lr=True": options(lr=True),
    "trainer lr='a'": options(lr="a"),
    "trainer eps=0.0": options(eps=0.0),
    "trainer eps=1e-100": options(eps=1e-100),
    "trainer weight_decay=-0.1": options(weight_decay=-0.1),
    "trainer betas=(0.9, 1.0)": options(betas=(0.9, 1.0)),
    "trainer betas=(-0.1, 0.9)": options(betas=(-0.1, 0.9)),
    "trainer betas=(0.9,)": options(betas=(0.9,)),
    "trainer betas=0.9": options(betas=0.9),
    "trainer resident=1": options(resident=1),
    "trainer step_result='x'": options(step_result="x"),
    "trainer step_result='lean' with resident=False": options(step_result="lean", resident=False),
    "trainer without data_schedule": lambda: LanguageModelTrainer(WEIGHTS, shape=SHAPE),
    "trainer data_schedule={}": options(data_schedule={}),
    "trainer data_schedule={'a': nan}": options(data_schedule={"a": float("nan")}),
    "trainer data_schedule={'a': 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx": options(data_schedule={"a": "x" * 20000}),
    "trainer data_schedule={1: 2}": options(data_schedule={1: 2}),
    "trainer data_schedule={'a': (1, 2)}": options(data_schedule={"a": (1, 2)}),
    "trainer data_schedule={'a': {1, 2}}": options(data_schedule={"a": {1, 2}}),
    "trainer data_schedule=[1]": options(data_schedule=[1]),
    "trainer data_schedule={'n_vocab': 999}": options(data_schedule={"n_vocab": 999}),
    "trainer data_schedule={'vocabulary': {'n_vocab': 999, 'sha256'": options(
        data_schedule={"vocabulary": {"n_vocab": 999, "sha256": "x"}}
    ),
    "trainer data_schedule={'vocabulary': {'n_vocab': 33, 'sha256':": options(
        data_schedule={"vocabulary": {"n_vocab": 33, "sha256": "x"}}
    ),
    "train_step int64 ids": step(IDS.astype(np.int64)),
    "train_step float ids": step(IDS.astype(np.float32)),
    "train_step ids of length, not length+1": step(ROW),
    "train_step 1-D ids": step(IDS[0]),
    "train_step id = vocab_size": step(np.full_like(IDS, 33)),
    "train_step id = -1": step(np.full_like(IDS, -1)),
    "train_step list of lists": step(IDS.tolist()),
    "train_step Fortran-order ids": step(np.asfortranarray(IDS)),
    "train_step strided ids": step(np.repeat(IDS, 2, 1)[:, ::2]),
    "train_step ids batch 2": step(np.repeat(IDS, 2, 0)),
    "logits batch 3 of the configured 1": logits(np.repeat(ROW, 3, 0)),
    "logits shorter length": logits(ROW[:, :2]),
    "logits longer than the configured length": logits(np.repeat(ROW, 2, 1)),
    "logits lengths too many": logits(ROW, lengths=[1, 2]),
    "logits lengths zero": logits(ROW, lengths=[0]),
    "logits lengths over": logits(ROW, lengths=[6]),
    "logits lengths float": logits(ROW, lengths=[1.0]),
    "logits empty": logits(ROW[:0]),
    "logits id out of range": logits(ROW + 33),
    "logits padding ids out of range under lengths": logits(np.array([[1, 2, 3, 40, 40]], np.int32), lengths=[3]),
    "export_gradients before any step, resident unset": gradients(0),
    "export_gradients after a step, resident unset": gradients(1),
    "load_state_dict missing m": load_without("m"),
    "load_state_dict extra key": load(zz=1),
    "load_state_dict wrong profile": load(profile="x"),
    "load_state_dict negative v": load(v=-FULL),
    "load_state_dict NaN m": load(m=FULL * np.float32("nan")),
    "load_state_dict steps and next_batch_index differ": load(next_batch_index=3),
    "load_state_dict float64 parameters": load(parameters=WEIGHTS.astype(np.float64)),
    "load_state_dict flags 2": load(flags=np.full(SHAPE.n_tensors, 2, np.int32)),
    "load_state_dict completed_steps 1000000": load(completed_steps=1000000, next_batch_index=1000000),
    "load_state_dict unchanged": load(),
    "from_checkpoint_bytes bytearray": lambda: LanguageModelTrainer.from_checkpoint_bytes(bytearray(b"{}")),
    "from_checkpoint_bytes empty object": lambda: LanguageModelTrainer.from_checkpoint_bytes(b"{}"),
    "from_checkpoint_bytes not JSON": lambda: LanguageModelTrainer.from_checkpoint_bytes(b"\xff"),
    "from_checkpoint missing file": lambda: LanguageModelTrainer.from_checkpoint("/nonexistent/x.json"),
}


def test_every_row_is_asked():
    assert {row["call"] for row in ROWS} == set(CALLS)
    assert DIFFERENCES.keys() <= CALLS.keys()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["call"])
def test_answer(row):
    answer = DIFFERENCES.get(row["call"], row["answer"])
    call = CALLS[row["call"]]
    if answer.startswith("accepted"):
        value = call()
        assert answer in ("accepted", f"accepted: {value!r}")
    else:
        with pytest.raises(getattr(builtins, answer)) as raised:
            call()
        assert str(raised.value)
