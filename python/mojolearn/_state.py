# SPDX-License-Identifier: Apache-2.0
"""Training states as dicts: what makes one valid, and the pieces they are made of."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ._array import FLOAT32, INT32, AnyArray, Array, read_array
from ._config import ByteLanguageModelConfig
from ._schedule import validate_schedule

SCHEMA = "mojolearn.small-byte-lm-state.v1"
NUMERIC_MODE = "identical"

_KEYS = (
    "schema",
    "profile",
    "numeric_mode",
    "parameter_names",
    "parameter_shapes",
    "parameter_offsets",
    "parameters",
    "m",
    "v",
    "flags",
    "completed_steps",
    "next_batch_index",
    "config",
    "data_schedule",
)
_FIXED_CONFIG = {"kind": 2, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "max_norm": 0.0}
_CONFIG_KEYS = ("lr", "beta1", "beta2", "eps", "weight_decay", *_FIXED_CONFIG)
_OPTIONAL_DIMENSIONS = (
    {"chunked_lm_head_v2"},
    {"n_layers", "vocab_size"},
    {"n_layers", "vocab_size", "chunked_lm_head_v2"},
)


@dataclass(frozen=True)
class ValidState:
    """A state that has passed every check. Arrays are contiguous: float32 [n_total], flags int32 [n_tensors]."""

    shape: ByteLanguageModelConfig
    parameters: AnyArray
    m: AnyArray
    v: AnyArray
    flags: AnyArray
    completed_steps: int
    config: dict[str, Any]
    data_schedule: dict[str, Any]


def validate_state(state: Mapping[str, Any]) -> ValidState:
    """Checks a state dict; ValueError or TypeError names the key that is wrong. Arrays are not copied."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict as export_state() returns it, not {type(state).__name__}")
    _check_keys("state", state, _KEYS, optional=("model_shape",))
    if state["schema"] != SCHEMA:
        raise ValueError(f"state['schema'] must be {SCHEMA!r}, not {state['schema']!r}")
    if state["numeric_mode"] != NUMERIC_MODE:
        raise ValueError(
            f"state['numeric_mode'] must be {NUMERIC_MODE!r}, the only mode, not {state['numeric_mode']!r}"
        )
    shape = _model_shape(state.get("model_shape"))
    if state["profile"] != shape.profile:
        raise ValueError(f"state['profile'] must be {shape.profile!r}, as the shape has it, not {state['profile']!r}")
    for key, expected in _registry(shape).items():
        if not isinstance(state[key], list) or state[key] != expected:
            raise ValueError(
                f"state[{key!r}] does not fit the shape: a model of this shape has {len(expected)} entries there"
            )
    steps = _count("state['completed_steps']", state["completed_steps"])
    if _count("state['next_batch_index']", state["next_batch_index"]) != steps:
        raise ValueError(
            f"state['next_batch_index'] must equal completed_steps = {steps}, not {state['next_batch_index']}"
        )
    arrays = {key: _vector(f"state[{key!r}]", state[key], FLOAT32, shape.n_total) for key in ("parameters", "m", "v")}
    check_numbers("state", **arrays)
    flags = _vector("state['flags']", state["flags"], INT32, shape.n_tensors)
    if flags.min() < 0 or flags.max() > 1:
        raise ValueError("state['flags'] must hold only 0 and 1")
    config = _validate_config(state["config"])
    return ValidState(
        shape,
        **arrays,
        flags=flags,
        completed_steps=steps,
        config=config,
        data_schedule=validate_schedule(state["data_schedule"], shape.vocab_size),
    )


def state_dict_of(state: ValidState) -> dict[str, Any]:
    """The dict of a state; it shares the arrays."""
    shape = state.shape
    model_shape = {} if shape == ByteLanguageModelConfig() else {"model_shape": shape.to_dict()}
    return {
        "schema": SCHEMA,
        "profile": shape.profile,
        "numeric_mode": NUMERIC_MODE,
        **_registry(shape),
        "parameters": state.parameters.view(Array),
        "m": state.m.view(Array),
        "v": state.v.view(Array),
        "flags": state.flags.view(Array),
        "completed_steps": state.completed_steps,
        "next_batch_index": state.completed_steps,
        "config": dict(state.config),
        "data_schedule": state.data_schedule,
        **model_shape,
    }


def adamw_config(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> dict[str, Any]:
    """The `config` of a state. Each number is rounded to float32, once; ValueError if it is then out of its range."""
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise ValueError(f"betas must be two numbers in [0, 1), not {betas!r}") from None
    return {
        "lr": _float32("lr", lr, above=True),
        "beta1": _float32("betas[0]", beta1, below_one=True),
        "beta2": _float32("betas[1]", beta2, below_one=True),
        "eps": _float32("eps", eps, above=True),
        "weight_decay": _float32("weight_decay", weight_decay),
        **_FIXED_CONFIG,
    }


def flat_parameters(parameters: Any, shape: ByteLanguageModelConfig) -> AnyArray:
    """A new flat float32 vector from one, or from a dict of named tensors."""
    if isinstance(parameters, Mapping):
        _check_keys("parameters", parameters, shape.parameter_names)
        flat = np.empty(shape.n_total, FLOAT32)
        offsets = shape.parameter_offsets
        for name, dimensions, start, stop in zip(
            shape.parameter_names, shape.parameter_shapes, offsets, offsets[1:], strict=False
        ):
            tensor = read_array(f"parameters[{name!r}]", parameters[name], FLOAT32)
            if tensor.shape != dimensions:
                raise ValueError(f"parameters[{name!r}] must have shape {dimensions}, not {tensor.shape}")
            flat[start:stop] = tensor.reshape(-1)
    else:
        flat = _vector("parameters", parameters, FLOAT32, shape.n_total).copy()
    _check_finite("parameters", flat)
    return flat


def check_numbers(name: str, parameters: AnyArray, m: AnyArray, v: AnyArray) -> None:
    """Parameters and moments must be finite, and v must not be negative: ValueError if not."""
    for key, array in (("parameters", parameters), ("m", m), ("v", v)):
        _check_finite(f"{key} of {name}", array)
    if v.min() < 0:
        where = int(v.argmin())
        raise ValueError(f"v of {name} is {v[where]} at {where}: second moments cannot be negative")


def _check_finite(name: str, array: AnyArray) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        where = int(finite.argmin())
        raise ValueError(f"{name} is {array[where]} at {where}: it must be finite")


def _check_keys(name: str, given: Mapping[str, Any], required: Iterable[str], optional: Iterable[str] = ()) -> None:
    missing = [key for key in required if key not in given]
    if missing:
        raise ValueError(f"{name} lacks {_listed(missing)}")
    known = {*required, *optional}
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(f"{name} has unknown keys: {_listed(unknown)}")


def _listed(keys: list[Any]) -> str:
    return ", ".join(map(repr, keys[:4])) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


def _model_shape(dimensions: Any) -> ByteLanguageModelConfig:
    """The shape of a state; without one it is the default. Files of older versions may lack the newer dimensions."""
    if dimensions is None:
        return ByteLanguageModelConfig()
    if not isinstance(dimensions, dict):
        raise ValueError(f"state['model_shape'] must be a dict, not {type(dimensions).__name__}")
    names = {field.name for field in fields(ByteLanguageModelConfig)}
    missing, unknown = names - set(dimensions), set(dimensions) - names
    if unknown or (missing and missing not in _OPTIONAL_DIMENSIONS):
        raise ValueError(f"state['model_shape'] must have the keys {sorted(names)}, not {sorted(map(str, dimensions))}")
    return ByteLanguageModelConfig(**dimensions)


def _registry(shape: ByteLanguageModelConfig) -> dict[str, list[Any]]:
    return {
        "parameter_names": list(shape.parameter_names),
        "parameter_shapes": [list(dimensions) for dimensions in shape.parameter_shapes],
        "parameter_offsets": list(shape.parameter_offsets),
    }


def _count(name: str, value: Any) -> int:
    try:
        count = -1 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        count = -1
    if not 0 <= count <= 1 << 53:  # what every reader of JSON takes for the same integer
        raise ValueError(f"{name} must be an integer in [0, 2**53], not {value!r}")
    return count


def _vector(name: str, value: Any, dtype: np.dtype[Any], count: int) -> AnyArray:
    array = read_array(name, value, dtype)
    if array.shape != (count,):
        raise ValueError(f"{name} must have shape ({count},), not {array.shape}")
    return array


def _validate_config(config: Any) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        raise ValueError(f"state['config'] must be a dict, not {type(config).__name__}")
    _check_keys("state['config']", config, _CONFIG_KEYS)
    for key, only in _FIXED_CONFIG.items():
        value = config[key]
        if isinstance(value, bool) != isinstance(only, bool) or not isinstance(value, (int, float)) or value != only:
            raise ValueError(f"state['config'][{key!r}] must be {only!r}, as AdamW has it, not {value!r}")
    try:
        return adamw_config(config["lr"], (config["beta1"], config["beta2"]), config["eps"], config["weight_decay"])
    except ValueError as error:
        raise ValueError(f"state['config']: {error}") from None


def _float32(name: str, value: Any, *, above: bool = False, below_one: bool = False) -> float:
    """`value` rounded to float32; it must then be >= 0, with `above` > 0, with `below_one` < 1."""
    accepted = "a finite number " + ("> 0" if above else "in [0, 1)" if below_one else ">= 0")
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be {accepted}, not {value!r}")
    try:
        with np.errstate(over="ignore", under="ignore"):
            number = float(np.float32(float(value)))
    except OverflowError:
        number = float("inf")
    if not 0 <= number < float("inf") or (above and number == 0) or (below_one and number >= 1):
        raise ValueError(f"{name} must be {accepted}, as float32, not {value!r}")
    return number
