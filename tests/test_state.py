# SPDX-License-Identifier: Apache-2.0
"""What a state is made of: hyperparameters, data_schedule, and the checks of a state dict."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import SCHEDULE, SMALL, bits, trainer, weights
from mojolearn import LanguageModelConfig
from mojolearn._schedule import canonical_json, validate_schedule
from mojolearn._state import adamw_config, flat_parameters, state_dict_of, validate_state

# ---- hyperparameters -------------------------------------------------------------------------------------------------


def test_hyperparameters_are_rounded_to_float32():
    assert adamw_config(1e-3, (0.9, 0.999), 1e-8, 0.01) == {
        "lr": 0.0010000000474974513,
        "beta1": 0.8999999761581421,
        "beta2": 0.9990000128746033,
        "eps": 9.99999993922529e-09,
        "weight_decay": 0.009999999776482582,
        "kind": 2,
        "momentum": 0.0,
        "dampening": 0.0,
        "nesterov": False,
        "max_norm": 0.0,
    }
    assert adamw_config(1, [0, np.float32(0.5)], np.float64(1e-40), 0)["beta2"] == 0.5


@pytest.mark.parametrize("value", [True, np.True_, "1e-3", None, float("nan"), float("inf"), 1e39, 10**400, -1e-3, 1j])
@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "betas[0]", "betas[1]"])
def test_what_no_hyperparameter_may_be(name, value):
    arguments = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0, "betas": (0.9, 0.999)}
    if name.startswith("betas"):
        arguments["betas"] = (value, 0.9) if name == "betas[0]" else (0.9, value)
    else:
        arguments[name] = value
    with pytest.raises(ValueError, match=name.replace("[", r"\[") + " must be a finite number"):
        adamw_config(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0), ("lr", 1e-100), ("eps", 0.0), ("eps", 1e-100), ("betas", (0.9, 1.0)), ("betas", (1 - 1e-10, 0.9))],
)
def test_ranges_hold_after_rounding(name, value):
    with pytest.raises(ValueError, match=rf"{name}(\[[01]\])? must be a finite number (> 0|in \[0, 1\)), as float32"):
        trainer(**{name: value})


@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, 0.99, 0.999), None, "ab"])
def test_betas_must_be_two_numbers(betas):
    with pytest.raises(ValueError, match="betas"):
        trainer(betas=betas)


# ---- parameters ------------------------------------------------------------------------------------------------------


def named(shape=SMALL):
    flat = weights(shape)
    offsets = shape.parameter_offsets
    rows = zip(shape.parameter_names, shape.parameter_shapes, offsets, offsets[1:], strict=False)
    return {name: flat[start:stop].reshape(dimensions) for name, dimensions, start, stop in rows}


def test_named_parameters_are_the_flat_ones():
    tensors = named()
    tensors["lm_head"] = np.asfortranarray(tensors["lm_head"])
    assert bits(flat_parameters(dict(reversed(tensors.items())), SMALL)) == bits(weights())


def test_parameters_are_copied():
    flat = weights()
    model = trainer(parameters=flat)
    flat[:] = 0
    assert bits(np.asarray(model.parameters_)) == bits(weights())
    model.parameters_[:] = 0
    assert bits(np.asarray(model.parameters_)) == bits(weights())


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda tensors: tensors.pop("embed"), ValueError, "parameters lacks 'embed'"),
        (lambda tensors: tensors.update(bias=weights()), ValueError, "unknown keys: 'bias'"),
        (
            lambda tensors: tensors.update(embed=tensors["embed"].T),
            ValueError,
            r"must have shape \(33, 16\), not \(16, 33\)",
        ),
        (
            lambda tensors: tensors.update(embed=tensors["embed"].tolist()),
            TypeError,
            r"parameters\['embed'\] must be an",
        ),
        (lambda tensors: tensors.update(embed=tensors["embed"] * np.float32("inf")), ValueError, "must be finite"),
    ],
)
def test_named_parameters_that_do_not_fit(change, error, text):
    tensors = named()
    change(tensors)
    with pytest.raises(error, match=text):
        trainer(parameters=tensors)


@pytest.mark.parametrize(
    ("parameters", "error", "text"),
    [
        (weights()[:-1], ValueError, rf"parameters must have shape \({SMALL.n_total},\), not \({SMALL.n_total - 1},\)"),
        (weights().reshape(1, -1), ValueError, "must have shape"),
        (weights().astype(np.float64), TypeError, "must have dtype float32, not float64"),
        (np.where(np.arange(SMALL.n_total) == 7, np.float32("nan"), weights()), ValueError, r"parameters is nan at 7"),
    ],
)
def test_flat_parameters_that_do_not_fit(parameters, error, text):
    with pytest.raises(error, match=text):
        trainer(parameters=parameters)


# ---- data_schedule ---------------------------------------------------------------------------------------------------


def nested(depth):
    inner = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


SNOW = "☃" * 2048
ROOM = 16384 - len(canonical_json({"a": SNOW, "b": "x" * 2048, "c": ""}))


@pytest.mark.parametrize(
    "schedule",
    [
        SCHEDULE,
        nested(8),
        {str(index): 1 for index in range(128)},
        {"a": [1] * 128, "b": [1] * 125},
        {"a": "x" * 2048, "x" * 2048: None},
        {"a": SNOW, "b": "x" * 2048, "c": "x" * ROOM},
        {"": "", "a": [[], {}, True, -0.0, 1e308, 2**64, "\ud800"]},
        {"n_vocab": 999},
        {"vocabulary": None},
        {"vocabulary": {"n_vocab": 33, "sha256": "x", "more": 1}},
    ],
    ids=lambda schedule: str(schedule)[:30],
)
def test_a_schedule_within_the_limits(schedule):
    kept = validate_schedule(schedule, 33)
    assert kept == schedule
    assert canonical_json(kept) == canonical_json(schedule)
    assert kept is not schedule


class Subclass(dict):
    pass


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ({}, "data_schedule must be a non-empty dict"),
        ([1], "must be a non-empty dict, not list"),
        (None, "must be a non-empty dict"),
        (Subclass(a=1), "must be a non-empty dict"),
        (nested(9), "more than 8 levels"),
        ({str(index): 1 for index in range(129)}, "has 129 entries, more than 128"),
        ({"a": [1] * 129}, r"data_schedule\['a'\] has 129 entries"),
        ({"a": [1] * 128, "b": [1] * 126}, "more than 256 values"),
        ({"a": "x" * 2049}, r"data_schedule\['a'\] has 2049 characters"),
        ({"x" * 2049: 1}, "a key of data_schedule has 2049 characters"),
        ({"a": SNOW, "b": "x" * 2048, "c": "x" * (ROOM + 1)}, "takes 16385 bytes as JSON, more than 16384"),
        ({"a": float("nan")}, r"data_schedule\['a'\] is nan: it must be finite"),
        ({"a": [float("inf")]}, r"data_schedule\['a'\]\[0\] is inf"),
        ({1: 2}, "key of type int"),
        ({"a": (1, 2)}, "of type tuple"),
        ({"a": {1, 2}}, "of type set"),
        ({"a": b"x"}, "of type bytes"),
        ({"a": np.int64(3)}, "of type int64"),
        ({"vocabulary": {"n_vocab": 999, "sha256": "x"}}, r"'n_vocab'\] is 999, but shape.vocab_size is 33"),
        ({"vocabulary": {"n_vocab": 33}}, "must hold an int 'n_vocab' and a str 'sha256'"),
        ({"vocabulary": {"n_vocab": True, "sha256": "x"}}, "must hold an int"),
        ({"vocabulary": "bytes"}, "must hold an int"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_schedule_outside_the_limits(schedule, text):
    with pytest.raises(ValueError, match=text):
        trainer(data_schedule=schedule)


def test_a_schedule_that_holds_itself_is_refused():
    schedule = {"a": []}
    schedule["a"].append(schedule["a"])
    with pytest.raises(ValueError, match="more than 8 levels"):
        validate_schedule(schedule, 33)


def test_the_schedule_is_copied_in_and_out():
    schedule = {"a": [1]}
    model = trainer(data_schedule=schedule)
    schedule["a"].append(2)
    model.data_schedule["a"].append(3)
    model.state_dict()["data_schedule"]["a"].append(4)
    assert model.data_schedule == {"a": [1]}


def test_canonical_json():
    assert canonical_json({"b": [1, 1e-8, 0.0], "a": "ä😀\n"}) == rb'{"a":"\u00e4\ud83d\ude00\n","b":[1,1e-08,0.0]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


# ---- state dicts -----------------------------------------------------------------------------------------------------


def state():
    return trainer().state_dict()


def test_a_state_passes_through():
    given = state()
    assert bits(state_dict_of(validate_state(given))) == bits(given)


def test_the_default_shape_is_not_written_out_but_may_be():
    given = trainer(LanguageModelConfig()).state_dict()
    assert "model_shape" not in given
    assert validate_state(given | {"model_shape": LanguageModelConfig().to_dict()}).shape == LanguageModelConfig()


def test_older_states_lack_the_newer_dimensions():
    given = state()
    del given["model_shape"]["chunked_lm_head_v2"]
    assert validate_state(given).shape == SMALL
    wide = LanguageModelConfig(batch=3)
    given = trainer(wide).state_dict()
    for name in ("n_layers", "vocab_size"):
        del given["model_shape"][name]
    assert validate_state(given).shape == wide


@pytest.mark.parametrize("key", [key for key in state() if key != "model_shape"])
def test_each_key_is_needed(key):
    given = state()
    del given[key]
    with pytest.raises(ValueError, match=f"state lacks '{key}'"):
        validate_state(given)


def changed(key, value):
    given = state()
    given[key] = value(given[key]) if callable(value) else value
    return given


@pytest.mark.parametrize(
    ("key", "value", "error", "text"),
    [
        ("zz", 1, ValueError, "unknown keys: 'zz'"),
        ("schema", "x", ValueError, "'schema'"),
        ("numeric_mode", "fast", ValueError, "the only mode"),
        ("profile", "x", ValueError, "'profile'"),
        ("model_shape", [1], ValueError, "'model_shape'"),
        ("model_shape", lambda shape: shape | {"depth": 3}, ValueError, "'model_shape'"),
        ("model_shape", lambda shape: {k: v for k, v in shape.items() if k != "batch"}, ValueError, "'model_shape'"),
        ("model_shape", lambda shape: shape | {"batch": 0}, ValueError, "batch must be"),
        ("parameter_names", tuple, ValueError, "'parameter_names'"),
        ("parameter_names", lambda names: names[::-1], ValueError, "'parameter_names'"),
        ("parameter_shapes", lambda shapes: shapes[1:], ValueError, "'parameter_shapes'"),
        ("parameter_offsets", np.array, ValueError, "'parameter_offsets'"),
        ("parameters", lambda array: array.astype(np.float64), TypeError, r"'parameters'\] must have dtype float32"),
        ("m", lambda array: array[1:], ValueError, r"'m'\] must have shape"),
        ("m", lambda array: array.tolist(), TypeError, r"'m'\] must be an array"),
        ("m", lambda array: array + np.float32("nan"), ValueError, "m of state is nan at 0: it must be finite"),
        ("v", lambda array: array - 1, ValueError, "v of state is -1.0 at 0: second moments cannot be negative"),
        ("flags", lambda array: array + 2, ValueError, "'flags'"),
        ("flags", lambda array: array.astype(np.int64), TypeError, "'flags'"),
        ("flags", lambda array: array[1:], ValueError, "'flags'"),
        ("completed_steps", 3, ValueError, "'next_batch_index'.* must equal completed_steps = 3"),
        ("completed_steps", -1, ValueError, "'completed_steps'"),
        ("completed_steps", False, ValueError, "'completed_steps'"),
        ("completed_steps", 0.0, ValueError, "'completed_steps'"),
        ("completed_steps", 2**53 + 1, ValueError, "'completed_steps'"),
        ("config", None, ValueError, "'config'"),
        ("config", lambda config: config | {"zz": 1}, ValueError, "unknown keys: 'zz'"),
        ("config", lambda config: config | {"lr": 0.0}, ValueError, "'config'.*lr must be"),
        ("config", lambda config: config | {"beta2": 1.0}, ValueError, "'config'"),
        ("config", lambda config: config | {"kind": 1}, ValueError, "'kind'.* must be 2"),
        ("config", lambda config: config | {"kind": True}, ValueError, "'kind'"),
        ("config", lambda config: config | {"momentum": 0.5}, ValueError, "'momentum'"),
        ("config", lambda config: config | {"max_norm": 1.0}, ValueError, "'max_norm'"),
        ("config", lambda config: config | {"nesterov": 0}, ValueError, "'nesterov'"),
        ("data_schedule", {}, ValueError, "data_schedule"),
        ("data_schedule", {"vocabulary": {"n_vocab": 7, "sha256": "x"}}, ValueError, "n_vocab"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(key, value, error, text):
    model = trainer()
    before = bits(model.state_dict())
    with pytest.raises(error, match=text):
        model.load_state_dict(changed(key, value))
    assert bits(model.state_dict()) == before


def test_a_state_must_be_a_dict():
    with pytest.raises(TypeError, match="state must be a dict"):
        trainer().load_state_dict([1])


@given(st.integers(1_000_000, 2**53))
def test_a_state_may_have_very_many_steps(steps):
    given_state = changed("completed_steps", np.int64(steps)) | {"next_batch_index": steps}
    model = trainer().load_state_dict(given_state)
    assert model.step_ == steps
    assert type(model.step_) is int
