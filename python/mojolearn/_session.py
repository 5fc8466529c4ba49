# SPDX-License-Identifier: Apache-2.0
"""A native session as a Python object: the state lives in the library, or on its device, until it is closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import _native
from ._array import FLOAT32, AnyArray, Array
from ._config import ByteLanguageModelConfig

_ADAMW_MEMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay")


@dataclass(frozen=True)
class HostState:
    """A training state in host memory: contiguous float32 arrays [n_total] and the number of completed steps."""

    parameters: AnyArray
    m: AnyArray
    v: AnyArray
    completed_steps: int

    def copy(self) -> HostState:
        return HostState(self.parameters.copy(), self.m.copy(), self.v.copy(), self.completed_steps)


class Session:
    """An open native session. Not for several threads at once: the trainer lets in one at a time."""

    def __init__(
        self, shape: ByteLanguageModelConfig, config: dict[str, Any], state: HostState, vendor: int, device: int
    ) -> None:
        library = _native.load()
        ffi, lib = library.ffi, library.lib
        self._library = library
        self._ints = ffi.typeof("int32_t[]")
        self._floats = ffi.typeof("float[]")
        self.n_total = shape.n_total
        self._vocab_size = shape.vocab_size
        self._result = library.struct("mjl_step_result", completed_steps=state.completed_steps)
        options = library.struct("mjl_session_options", vendor=vendor, device=device, poll=library.poll)
        native_shape = library.struct("mjl_shape", **shape.to_dict())
        adamw = library.struct("mjl_adamw", **{name: config[name] for name in _ADAMW_MEMBERS})
        native_state = library.struct(
            "mjl_state",
            parameters=self._float_pointer(state.parameters),
            m=self._float_pointer(state.m),
            v=self._float_pointer(state.v),
            count=self.n_total,
            completed_steps=state.completed_steps,
        )
        handle = ffi.new("mjl_session **")
        library.call(lib.mjl_session_open, options, native_shape, adamw, native_state, handle)
        self._handle = ffi.gc(handle[0], lib.mjl_session_close)

    @property
    def completed_steps(self) -> int:
        """Written by the library when a step succeeds, and only then: no interruption can come between."""
        return int(self._result.completed_steps)

    def step(self, ids: AnyArray) -> float:
        """One training step on ids [batch, length + 1]; the loss before the update."""
        self._call(self._library.lib.mjl_session_step, self._int_pointer(ids), ids.size, self._result)
        return float(self._result.loss)

    def evaluate(self, ids: AnyArray) -> float:
        loss = self._library.ffi.new("float *")
        self._call(self._library.lib.mjl_session_evaluate, self._int_pointer(ids), ids.size, loss)
        return float(loss[0])

    def logits(self, ids: AnyArray, lengths: Sequence[int] | None) -> Array:
        """Logits [rows, length, vocab_size] of ids [rows, length]."""
        out = Array((*ids.shape, self._vocab_size), FLOAT32)
        function = self._library.lib.mjl_session_logits
        self._call(function, *self._rows(ids, lengths), self._float_pointer(out), out.size)
        return out

    def next_tokens(self, ids: AnyArray, lengths: Sequence[int] | None) -> list[int]:
        out = self._library.ffi.new(self._ints, len(ids))
        self._call(self._library.lib.mjl_session_next_tokens, *self._rows(ids, lengths), out)
        return list(out)

    def export_parameters(self) -> Array:
        parameters = Array((self.n_total,), FLOAT32)
        self._export(parameters, None, None)
        return parameters

    def export_state(self) -> HostState:
        parameters, m, v = (Array((self.n_total,), FLOAT32) for _ in range(3))
        self._export(parameters, m, v)
        return HostState(parameters, m, v, self.completed_steps)

    def export_gradients(self, out: Array) -> None:
        """Fills `out` with the flat gradient of the last step."""
        self._call(self._library.lib.mjl_session_export_gradients, self._float_pointer(out), out.size)

    def describe(self) -> dict[str, Any]:
        """The members of mjl_session_info."""
        info = self._library.struct("mjl_session_info")
        self._call(self._library.lib.mjl_session_describe, info)
        return {
            "vendor": _native.VENDORS[info.vendor],
            "device": info.device,
            "device_name": self._library.text(info.device_name),
            "vector_unit": self._library.text(info.vector_unit),
            "threads": info.threads,
            "memory_bytes": info.memory_bytes,
            "attention_bytes": info.attention_bytes,
            "forward_score_cells": info.forward_score_cells,
            "scratch_bytes": info.scratch_bytes,
        }

    def close(self) -> None:
        self._library.ffi.release(self._handle)

    def _call(self, function: Callable[..., int], *arguments: Any) -> None:
        self._library.call(function, self._handle, *arguments)

    def _export(self, parameters: Array, m: Array | None, v: Array | None) -> None:
        pointers = map(self._float_pointer, (parameters, m, v))
        steps = self._library.ffi.new("int64_t *")
        self._call(self._library.lib.mjl_session_export_state, *pointers, self.n_total, steps)

    def _rows(self, ids: AnyArray, lengths: Sequence[int] | None) -> tuple[Any, int, int, Any]:
        null = self._library.ffi.NULL
        return (
            self._int_pointer(ids),
            *ids.shape,
            null if lengths is None else self._library.ffi.new(self._ints, lengths),
        )

    def _int_pointer(self, array: AnyArray) -> Any:
        return self._library.ffi.from_buffer(self._ints, array)

    def _float_pointer(self, array: AnyArray | None) -> Any:
        return self._library.ffi.NULL if array is None else self._library.ffi.from_buffer(self._floats, array)
