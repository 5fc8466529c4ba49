# SPDX-License-Identifier: Apache-2.0
"""LanguageModelConfig: its limits, and what follows from a shape."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given

from models import shapes
from mojolearn import ByteLanguageModelConfig, LanguageModelConfig, LanguageModelTrainer

DEFAULTS = {
    "batch": 2,
    "length": 32,
    "d_model": 32,
    "n_heads": 4,
    "n_kv": 2,
    "head_dim": 8,
    "intermediate": 64,
    "n_layers": 2,
    "vocab_size": 256,
    "chunked_lm_head_v2": False,
}
DIMENSIONS = list(DEFAULTS)[:-1]


def test_defaults_and_names():
    shape = LanguageModelConfig()
    assert LanguageModelConfig is ByteLanguageModelConfig
    assert shape.to_dict() == DEFAULTS
    assert repr(shape) == f"ByteLanguageModelConfig({', '.join(f'{key}={value}' for key, value in DEFAULTS.items())})"
    assert shape.native_shape == tuple(DEFAULTS.values())[:-1]
    assert LanguageModelConfig(chunked_lm_head_v2=True).native_shape == (*shape.native_shape, 1)


@pytest.mark.parametrize(
    ("fields", "profile"),
    [
        ({}, "mojolearn.byte-lm.b2-l32-d32-h4-kv2-ff64-v256-blocks2.fp32.v1"),
        ({"batch": 4}, "mojolearn.byte-lm.b4-l32-d32-h4-kv2-hd8-ff64-v256-blocks2.fp32.v2"),
        ({"n_layers": 3}, "mojolearn.byte-lm.b2-l32-d32-h4-kv2-hd8-ff64-v256-blocks3.fp32.v3"),
        ({"vocab_size": 300}, "mojolearn.byte-lm.b2-l32-d32-h4-kv2-hd8-ff64-v300-blocks2.fp32.v3"),
        (
            {"chunked_lm_head_v2": True},
            "mojolearn.byte-lm.b2-l32-d32-h4-kv2-hd8-ff64-v256-blocks2.fp32.v2-lmhead-chunk256-v2",
        ),
        (
            {"n_layers": 3, "chunked_lm_head_v2": True},
            "mojolearn.byte-lm.b2-l32-d32-h4-kv2-hd8-ff64-v256-blocks3.fp32.v3-lmhead-chunk256-v2",
        ),
    ],
)
def test_profile(fields, profile):
    assert LanguageModelConfig(**fields).profile == profile


@pytest.mark.parametrize("name", DIMENSIONS)
@pytest.mark.parametrize("value", [0, -1, 2**20 + 1, 10**30, True, np.True_, 2.0, "2", None, np.float32(2)])
def test_a_dimension_must_be_an_integer_in_range(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be .*\[1, 1048576\]"):
        LanguageModelConfig(**{name: value})


@pytest.mark.parametrize("name", DIMENSIONS)
def test_numpy_integers_become_int(name):
    shape = LanguageModelConfig(**{name: np.int64(DEFAULTS[name])})
    assert type(getattr(shape, name)) is int
    assert shape == LanguageModelConfig()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"length": 8193}, "length must be at most 8192, not 8193"),
        ({"d_model": 33}, r"d_model must equal n_heads \* head_dim = 4 \* 8 = 32, not 33"),
        ({"n_kv": 3}, "n_heads must be a multiple of n_kv = 3, not 4"),
        ({"d_model": 28, "head_dim": 7}, "head_dim must be even, not 7"),
        ({"chunked_lm_head_v2": 1}, "chunked_lm_head_v2 must be True or False, not 1"),
        ({"chunked_lm_head_v2": np.True_}, "chunked_lm_head_v2 must be True or False"),
        ({"chunked_lm_head_v2": True, "vocab_size": 1}, "needs a vocab_size of at least 2"),
    ],
)
def test_fields_must_fit_each_other(fields, text):
    with pytest.raises(ValueError, match=text):
        LanguageModelConfig(**fields)


TINY = LanguageModelConfig(
    batch=1, length=1, d_model=2, n_heads=1, n_kv=1, head_dim=2, intermediate=1, n_layers=1, vocab_size=1
).to_dict()


@pytest.mark.parametrize(
    ("fits", "too_large", "span"),
    [
        ({"d_model": 2**14, "n_heads": 2**13, "vocab_size": 2**15}, {"vocab_size": 2**16}, "n_total"),
        ({"vocab_size": 2**20, "batch": 2**11 - 1}, {"batch": 2**11}, r"batch \* length \* vocab_size"),
        (
            {"batch": 2**20, "length": 2, "d_model": 1022, "head_dim": 1022},
            {"d_model": 1024, "head_dim": 1024},
            r"batch \* length \* d_model",
        ),
        ({"intermediate": 2**20, "batch": 2**11 - 1}, {"batch": 2**11}, r"batch \* length \* intermediate"),
        ({"length": 2**13, "batch": 31}, {"batch": 32}, r"batch \* n_heads \* length \* length"),
    ],
)
def test_no_array_may_pass_signed_32_bit_indexing(fits, too_large, span):
    LanguageModelConfig(**TINY | fits)
    with pytest.raises(ValueError, match=f"signed 32-bit indexing: {span} = [0-9]+, more than 2147483647"):
        LanguageModelConfig(**TINY | fits | too_large)


@given(shapes())
def test_the_registry_follows_from_the_shape(shape):
    names, dimensions, offsets = shape.parameter_names, shape.parameter_shapes, shape.parameter_offsets
    assert len(names) == len(dimensions) == len(set(names)) == shape.n_tensors == len(offsets) - 1
    assert names[0] == "embed"
    assert names[-1] == "lm_head"
    assert offsets[0] == 0
    assert offsets[-1] == shape.n_total
    assert [stop - start for start, stop in itertools.pairwise(offsets)] == list(map(math.prod, dimensions))
    assert shape.offsets == offsets
    assert LanguageModelTrainer.parameter_registry(shape) == [
        {"name": name, "shape": size, "offset": offset, "size": math.prod(size)}
        for name, size, offset in zip(names, dimensions, offsets, strict=False)
    ]


def test_tensors_of_a_layer():
    shape = LanguageModelConfig(n_layers=1)
    assert dict(zip(shape.parameter_names, shape.parameter_shapes, strict=True)) == {
        "embed": (256, 32),
        "block0.norm1_w": (32,),
        "block0.w_q": (32, 32),
        "block0.w_k": (16, 32),
        "block0.w_v": (16, 32),
        "block0.w_o": (32, 32),
        "block0.norm2_w": (32,),
        "block0.w_gate": (64, 32),
        "block0.w_up": (64, 32),
        "block0.w_down": (32, 64),
        "lm_head": (256, 32),
    }


@given(shapes())
def test_a_shape_can_be_rebuilt_and_not_changed(shape):
    assert LanguageModelConfig(**shape.to_dict()) == shape
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.batch = 3


def test_counting_parameters_does_not_take_the_time_to_list_them():
    shape = LanguageModelConfig(**TINY | {"n_layers": 2**20})
    assert shape.n_total == 2 * 2 + 2**20 * (2 + 4 * 4 + 2 + 3 * 2)
