# SPDX-License-Identifier: Apache-2.0
"""The pieces of the command line that compute something."""

import ctypes
import struct
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mojolearn import LanguageModelConfig
from mojolearn._cli import doctor
from mojolearn._cli.generate import draw, printable
from mojolearn._cli.plan import initial_parameters
from mojolearn._cli.progress import duration
from mojolearn._cli.text import Text, read_text, splitmix64

UPWARD, DOWNWARD, TOWARD_ZERO = 0x800, 0x400, 0xC00  # of fesetround on x86-64


def test_splitmix64_is_the_published_generator():
    assert [splitmix64(1234567, index) for index in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(st.integers(100, 3000), st.integers(1, 9), st.integers(1, 8), st.integers(0, 10**12), st.integers(0, 2**70))
def test_batches_lie_in_their_part_of_the_text(size, length, rows, step, seed):
    text = Text("counting", np.arange(size, dtype=np.uint16), "")  # each value tells its place
    shape = LanguageModelConfig(batch=rows, length=length)
    ids = text.batch(step, seed, shape)
    assert ids.shape == (rows, length + 1)
    assert ids.dtype == np.int32
    assert ids.min() >= 0
    assert ids.max() < text.train_bytes
    assert (np.diff(ids) == 1).all()
    assert (ids == text.batch(step, seed, shape)).all()
    held_out = text.held_out(shape)
    places = np.concatenate(held_out)
    assert all(batch.shape == (rows, length + 1) for batch in held_out)
    assert text.train_bytes <= places.min()
    assert places.max() == size - 1
    if len(places) > 1:
        assert places.min() == text.train_bytes


def test_batches_cover_the_text_evenly():
    text = Text("counting", np.arange(1000, dtype=np.uint16), "")
    shape = LanguageModelConfig(batch=4, length=20)
    starts = np.concatenate([text.batch(step, 0, shape)[:, 0] for step in range(2000)])
    counts = np.bincount(starts, minlength=880)
    assert len(counts) == 880  # 900 bytes to train on, less a sequence
    assert counts.min() > 0


def test_a_text_that_is_too_short_is_refused():
    text = Text("short", np.zeros(329, np.uint8), "")
    text.require_room(31)
    with pytest.raises(ValueError, match="at least 330"):
        text.require_room(32)


def test_the_shipped_text_is_there():
    text = read_text(None)
    assert len(text.content) == 125_179
    assert text.held_out_opening(20).strip()


def test_initial_parameters_are_those_of_their_seed():
    shape = LanguageModelConfig()
    first, again, other = (initial_parameters(shape, seed) for seed in (0, 0, 1))
    assert tuple(first) == shape.parameter_names
    for name, dimensions in zip(shape.parameter_names, shape.parameter_shapes, strict=True):
        assert first[name].shape == dimensions
        assert first[name].dtype == np.float32
        assert (first[name] == again[name]).all()
        assert "norm" in name or (first[name] != other[name]).any()


def test_draws_have_the_probabilities_of_the_softmax():
    random = Random(0)
    logits = np.log([0.5, 0.3, 0.2])
    counts = np.bincount([draw(logits.tolist(), 1.0, random) for _ in range(20_000)], minlength=3)
    assert counts / 20_000 == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
    sharp = np.bincount([draw(logits.tolist(), 0.5, random) for _ in range(20_000)], minlength=3)
    assert sharp / 20_000 == pytest.approx(np.array([25, 9, 4]) / 38, abs=0.02)
    assert draw([-1e30, 5.0, -1e30], 1e-3, random) == 1


@given(st.binary(max_size=60))
def test_printed_bytes_are_harmless(encoded):
    text = "".join(printable(encoded))
    assert all(char in "\n\t" or char.isprintable() or char == "\ufffd" for char in text)


def test_printed_bytes_are_utf8():
    assert "".join(printable("As you like it ☃\n".encode())) == "As you like it ☃\n"
    assert "".join(printable(b"a\xffb\x1b[2Jc\xe2\x98")) == "a\ufffdb\ufffd[2Jc\ufffd"


def test_durations():
    assert [duration(seconds) for seconds in (0, 59.4, 61, 3725)] == ["0:00", "0:59", "1:01", "1:02:05"]


def test_doctor_reads_the_mode_of_the_thread():
    libm = ctypes.CDLL("libm.so.6")
    saved = ctypes.create_string_buffer(32)
    libm.fegetenv(saved)
    normal = doctor.floating_point_mode()
    rounding = []
    try:
        for mode in (UPWARD, DOWNWARD, TOWARD_ZERO):
            libm.fesetround(mode)
            rounding.append(doctor.floating_point_mode()["rounding"])
        flushing = bytearray(saved.raw)
        struct.pack_into("<I", flushing, 28, struct.unpack_from("<I", flushing, 28)[0] | 0x8040)  # MXCSR: FTZ and DAZ
        libm.fesetenv(bytes(flushing))
        flushed = doctor.floating_point_mode()
    finally:
        libm.fesetenv(saved)
    assert normal == {"rounding": "to nearest", "flushes_subnormal_results": False, "reads_subnormals_as_zero": False}
    assert rounding == ["upward", "downward", "toward zero"]
    assert flushed == {"rounding": "to nearest", "flushes_subnormal_results": True, "reads_subnormals_as_zero": True}
    assert doctor.floating_point_mode() == normal


def test_a_failed_self_test_is_a_finding(monkeypatch):
    mismatch = doctor._verify.VectorResult("some.json", 3, ("loss: expected 1, got 2",))
    monkeypatch.setattr(doctor._verify, "replay_folder", lambda _: iter([mismatch]))
    findings = doctor.examine()
    assert not findings["healthy"]
    assert findings["self_test"]["problems"] == ["some.json, vector 3: loss: expected 1, got 2"]
    assert "FAILED" in doctor._text(findings)
