# SPDX-License-Identifier: Apache-2.0
"""The trainer: what a user of the package holds in hand."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from . import _checkpoint, _native
from ._array import FLOAT32, INT32, AnyArray, Array
from ._config import ByteLanguageModelConfig
from ._errors import LostSessionError
from ._inputs import read_batch, read_rows
from ._schedule import validate_schedule
from ._session import HostState, Session
from ._state import (
    NUMERIC_MODE,
    ValidState,
    adamw_config,
    check_numbers,
    flat_parameters,
    state_dict_of,
    validate_state,
)
from ._turns import Turns

Result = TypeVar("Result")
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class _Lost:
    """What remains of a session whose device is gone."""

    message: str
    completed_steps: int


class SmallByteLanguageModelTrainer:
    """Trains a decoder-only language model in float32 with AdamW, with the same bits on every backend.

    The model: token embedding; per layer RMSNorm, causal attention with rotary positions and grouped key/value heads,
    RMSNorm and a SiLU-gated MLP, each with a residual; an untied output head. No biases, dropout or final norm. The
    loss is the mean cross-entropy over all ``batch * length`` targets. ``LanguageModelTrainer`` is the same class.

    Nothing is random in here: the caller brings the initial parameters and the token ids of every step.

    A step is a transaction. One that fails (a bad id, a number that is not finite, Ctrl-C, no memory) changes nothing.
    Several threads may use one trainer: their calls queue. After ``os.fork`` the child must not use a trainer of its
    parent, except to read `step_` and `data_schedule` or to give it a state of its own with :meth:`load_state_dict`.

    Args:
        parameters: the initial parameters: one flat float32 array of ``shape.n_total`` values, or a dict of the tensors
            that :meth:`parameter_registry` names. "Array" means anything with the buffer protocol or NumPy's array
            interface and exactly this dtype; it is copied.
        data_schedule: a dict that describes the data and its order, kept with the state and in checkpoints. It must be
            non-empty and survive JSON, with at most 16,384 bytes, 256 values, 128 entries in a dict or list, 8 levels
            and 2,048 characters in a string. A ``'vocabulary'`` in it must hold ``'sha256'`` and an ``'n_vocab'`` equal
            to ``shape.vocab_size``. Nothing else in it is compared with anything.
        lr: learning rate, above 0.
        betas: decay rates of the two moments, each in [0, 1).
        eps: AdamW's epsilon, above 0.
        weight_decay: decoupled weight decay, at least 0.
        shape: the dimensions; by default those of ``LanguageModelConfig()``.
        resident: whether the state stays in an open session between calls (None and True), or is carried into and out
            of a new one at each call (False). The bits are the same.
        step_result: what :meth:`train_step` returns: ``"full"`` with gradients, ``"lean"`` without (which
            needs ``resident=True``). None means ``"lean"`` with ``resident=True`` and ``"full"`` otherwise.
        vendor: ``"cpu"``, ``"cuda"`` or ``"hip"``; None takes the one in the environment variable MOJOLEARN_VENDOR,
            else a GPU if there is one, else the CPU.
        device: index among the vendor's devices; None means 0.

    The hyperparameters are rounded to float32 once, and must then be in their ranges.

    Raises:
        ValueError: a value or shape is not acceptable.
        TypeError: an argument is of the wrong type, or an array of another dtype.
        BackendError: the vendor is one for which there is no backend. (Whether a device is there shows at the first
            call that needs it: nothing is opened before.)

    >>> import numpy as np, mojolearn
    >>> shape = mojolearn.LanguageModelConfig()
    >>> rng = np.random.default_rng(0)
    >>> weights = (rng.standard_normal(shape.n_total) * 0.02).astype(np.float32)
    >>> trainer = mojolearn.LanguageModelTrainer(weights, data_schedule={"corpus": "demo"}, shape=shape)
    >>> ids = rng.integers(0, 256, (shape.batch, shape.length + 1), dtype=np.int32)
    >>> result = trainer.train_step(ids)
    >>> result["step"], result["flat_gradients"]
    (1, Array(shape=(34944,), dtype='<f4'))
    >>> trainer.evaluate(ids) < result["loss"]
    True
    """

    _state: HostState | Session | _Lost  # where the training state is now
    _turns: Turns

    def __init__(
        self,
        parameters: Any,
        *,
        data_schedule: dict[str, Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        shape: ByteLanguageModelConfig | None = None,
        resident: bool | None = None,
        step_result: str | None = None,
        vendor: str | None = None,
        device: int | None = None,
    ) -> None:
        shape = _require_shape(shape)
        config = adamw_config(lr, betas, eps, weight_decay)
        schedule = validate_schedule(data_schedule, shape.vocab_size)
        self._choose(resident, step_result, vendor, device)
        flat = flat_parameters(parameters, shape)
        state = HostState(flat, np.zeros_like(flat), np.zeros_like(flat), 0)
        self._adopt(shape, config, schedule, np.zeros(shape.n_tensors, INT32), state)

    # ---- Training and looking ----------------------------------------------------------------------------------------

    def train_step(self, ids: Any) -> dict[str, Any]:
        """One step: the loss of these ids, its gradient, and an AdamW update.

        Args:
            ids: int32 array [batch, length + 1] of token ids in [0, vocab_size). In each row the first `length` ids
                predict the last `length`. Nothing may write to it during the call.

        Returns:
            dict: ``loss`` (float; before the update), ``step``, ``completed_steps`` and ``next_batch_index`` (all three
            the number of steps completed, this one included); with full results ``flat_gradients`` (float32 [n_total])
            and ``gradients`` (by tensor name, views of it): the gradient before the update; with lean results
            ``flags`` (int32 [n_tensors]).

        Raises:
            TypeError: ids is not an int32 array.
            ValueError: ids has another shape, or an id is out of range.
            NonFiniteError: a NaN or infinity appeared. Nothing was changed.
            LostSessionError: the device is gone.
        """
        ids = read_batch(ids, self._shape)

        def step(session: Session) -> dict[str, Any]:
            # The gradient's memory is taken first: to fail for lack of it after the step would be too late.
            gradient = Array((session.n_total,), FLOAT32) if self._step_result == "full" else None
            loss = session.step(ids)
            steps = session.completed_steps
            result = {"loss": loss, "step": steps, "completed_steps": steps, "next_batch_index": steps}
            if gradient is None:
                return {**result, "flags": self._flags.copy()}
            session.export_gradients(gradient)
            return {**result, "flat_gradients": gradient, "gradients": self._named(gradient)}

        return self._use(step, changes_state=True)

    def evaluate(self, ids: Any) -> float:
        """The mean loss on ids (as for :meth:`train_step`, which lists the errors). Changes no state."""
        ids = read_batch(ids, self._shape)
        return self._use(lambda session: session.evaluate(ids))

    def logits(self, ids: Any, *, lengths: Iterable[int] | None = None) -> Array:
        """The logits at every position. Changes no state.

        Each row starts at position 0, and its logits do not depend on the other rows.

        Args:
            ids: int32 array [rows, length] of token ids in [0, vocab_size), with 1 to 1024 rows, a length from 1 to
                ``shape.length`` and at most 268,435,456 cells ``rows * length * vocab_size``.
            lengths: an int in [1, length] for each row. Row i is then real at its first ``lengths[i]`` positions and
                padding after them: padding ids are not read.

        Returns:
            Array: float32 [rows, length, vocab_size]; +0.0 at padding positions.

        Raises:
            TypeError, ValueError: ids or lengths are not as above.
            NonFiniteError: a logit is NaN or infinite.
        """
        ids, lengths = read_rows(ids, lengths, self._shape)
        return self._use(lambda session: session.logits(ids, lengths))

    def next_bytes(self, ids: Any, *, lengths: Iterable[int] | None = None) -> list[int]:
        """The token with the highest logit after each row's last (real) position; the lowest id on ties.

        Arguments, limits and errors are those of :meth:`logits`.
        """
        ids, lengths = read_rows(ids, lengths, self._shape)
        return self._use(lambda session: session.next_tokens(ids, lengths))

    # ---- State -------------------------------------------------------------------------------------------------------

    @property
    def step_(self) -> int:
        """The number of completed steps."""
        return self._state.completed_steps

    @property
    def data_schedule(self) -> dict[str, Any]:
        """A copy of the data_schedule."""
        return copy.deepcopy(self._schedule)

    @property
    def parameters_(self) -> Array:
        """A copy of the parameters, flat: float32 [n_total]."""

        def read() -> Array:
            state = self._held()
            return state.export_parameters() if isinstance(state, Session) else state.parameters.copy().view(Array)

        return self._exclusively(read)

    @staticmethod
    def parameter_registry(shape: ByteLanguageModelConfig | None = None) -> list[dict[str, Any]]:
        """The tensors of the flat parameter vector, in order: ``name``, ``shape``, ``offset`` and ``size`` of each.

        >>> LanguageModelTrainer.parameter_registry()[1]
        {'name': 'block0.norm1_w', 'shape': (32,), 'offset': 8192, 'size': 32}
        """
        shape = _require_shape(shape)
        offsets = shape.parameter_offsets
        rows = zip(shape.parameter_names, shape.parameter_shapes, offsets, offsets[1:], strict=False)
        return [
            {"name": name, "shape": dimensions, "offset": start, "size": stop - start}
            for name, dimensions, start, stop in rows
        ]

    def export_state(self) -> dict[str, Any]:
        """The complete training state, in new arrays: what :meth:`load_state_dict` takes.

        Returns:
            dict: ``parameters``, ``m`` and ``v`` (float32 [n_total]), ``flags`` (int32 [n_tensors]),
            ``completed_steps``, ``next_batch_index``, ``config`` (the hyperparameters), ``data_schedule``, the names,
            shapes and offsets of the tensors, ``profile``, ``numeric_mode``, ``schema``, and, unless it is the default,
            ``model_shape``.
        """

        def export() -> dict[str, Any]:
            state = self._held()
            state = self._download(state) if isinstance(state, Session) else state.copy()
            return state_dict_of(
                ValidState(
                    self._shape,
                    state.parameters,
                    state.m,
                    state.v,
                    self._flags.copy(),
                    state.completed_steps,
                    self._config,
                    self.data_schedule,
                )
            )

        return self._exclusively(export)

    def state_dict(self) -> dict[str, Any]:
        """The same as :meth:`export_state`."""
        return self.export_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> SmallByteLanguageModelTrainer:
        """Replaces the whole state: shape, parameters, moments, counters, hyperparameters and data_schedule.

        It is checked first: a state that is refused changes nothing. An open session is released, and the next call
        opens a new one. This also ends the state of being lost, and makes a trainer usable in a forked child.

        Args:
            state: a dict as :meth:`export_state` returns it. Its arrays are copied.

        Returns:
            the trainer itself.

        Raises:
            ValueError: a key is missing, unknown or has a value that does not fit; the message names it.
            TypeError: an array is not one of the right dtype.
        """
        valid = validate_state(state)
        host = HostState(valid.parameters, valid.m, valid.v, valid.completed_steps).copy()
        if not self._turns.belong_here():
            self._turns = Turns()

        def load() -> None:
            old = self._state
            self._adopt(valid.shape, valid.config, valid.data_schedule, valid.flags.copy(), host)
            if isinstance(old, Session):
                old.close()

        self._exclusively(load)
        return self

    def export_gradients(self, named: bool = True) -> dict[str, Any]:
        """The gradient of the last step, before its update, until the next :meth:`train_step` starts.

        Args:
            named: also give it by tensor name.

        Returns:
            dict: ``flat_gradients`` (float32 [n_total]) and, if named, ``gradients`` (views of it).

        Raises:
            RuntimeError: no session is open (as always with ``resident=False``), or it has completed no step since it
                was opened or since a step failed.
        """

        def export() -> dict[str, Any]:
            state = self._held()
            if not isinstance(state, Session):
                reason = "no session is open" if self._resident else "with resident=False train_step() returns it"
                raise RuntimeError(f"there is no gradient to export: {reason}")
            gradient = Array((state.n_total,), FLOAT32)
            state.export_gradients(gradient)
            return {"flat_gradients": gradient, **({"gradients": self._named(gradient)} if named else {})}

        return self._exclusively(export)

    def close(self) -> None:
        """Takes the state into host memory and releases the session with its threads and device memory.

        The next call that needs a session opens one again. A lost trainer stays lost.
        """

        def close() -> None:
            session = self._state
            if isinstance(session, Session):
                self._state = self._download(session)
                session.close()

        self._exclusively(close)

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    def export_checkpoint(self, path: PathLike) -> None:
        """Writes the complete state as a JSON checkpoint of at most 2 MiB (about 87,000 parameters).

        The file is replaced atomically. A larger state is a ValueError, before anything is written.
        """
        _checkpoint.write_json(path, self.export_state())

    def save_checkpoint(self, path: PathLike) -> None:
        """The same as :meth:`export_checkpoint`."""
        self.export_checkpoint(path)

    def export_checkpoint_binary(self, path: PathLike) -> str:
        """Writes the complete state, of any size, as a binary checkpoint; returns the SHA-256 of the file in hex.

        The file is replaced atomically, and every bit of the arrays is kept.
        """
        return _checkpoint.write_binary(path, self.export_state())

    @classmethod
    def from_checkpoint(
        cls, path: PathLike, *, resident: bool | None = None, vendor: str | None = None, device: int | None = None
    ) -> SmallByteLanguageModelTrainer:
        """A trainer that goes on from a JSON checkpoint. The other arguments are those of the constructor.

        Raises:
            ValueError: the file is damaged, or its state is not valid.
            OSError: the file cannot be read.
        """
        return cls._from_state(_checkpoint.read_json_file(path), resident, vendor, device)

    @classmethod
    def from_checkpoint_bytes(
        cls, encoded: bytes, *, resident: bool | None = None, vendor: str | None = None, device: int | None = None
    ) -> SmallByteLanguageModelTrainer:
        """As :meth:`from_checkpoint`, from the file's contents: exactly bytes, anything else is a TypeError."""
        return cls._from_state(_checkpoint.read_json(encoded), resident, vendor, device)

    @classmethod
    def from_checkpoint_binary(
        cls, path: PathLike, *, resident: bool | None = None, vendor: str | None = None, device: int | None = None
    ) -> SmallByteLanguageModelTrainer:
        """As :meth:`from_checkpoint`, from a binary checkpoint. All of it is verified before anything is allocated."""
        return cls._from_state(_checkpoint.read_binary(path), resident, vendor, device)

    # ---- About this run ----------------------------------------------------------------------------------------------

    def attention_stage_report(self) -> dict[str, int] | None:
        """The memory that attention holds in the open session; None if none is open.

        Returns:
            dict: ``forward_aexp_cells``: cells of attention weights kept for the backward pass (0: it computes them
            again); ``forward_eager_cells`` and ``backward_eager_cells``: cells of scratch for tiles of scores, which
            the backward pass shares with the forward pass and so counts as 0; the ``*_bytes`` of each; ``eager_bytes``:
            all scratch; ``total_bytes``: scratch and whatever is kept between the passes; ``layers``.
        """

        def report() -> dict[str, int] | None:
            session = self._held()
            if not isinstance(session, Session):
                return None
            info = session.describe()
            kept, scratch = info["forward_score_cells"], info["scratch_bytes"]
            return {
                "forward_eager_cells": scratch // 4,
                "forward_aexp_cells": kept,
                "backward_eager_cells": 0,
                "forward_eager_bytes": scratch,
                "forward_aexp_bytes": 4 * kept,
                "backward_eager_bytes": 0,
                "eager_bytes": scratch,
                "total_bytes": info["attention_bytes"] + scratch,
                "layers": self._shape.n_layers,
            }

        return self._exclusively(report)

    def run_metadata(self) -> dict[str, Any]:
        """What to keep with recorded results: the library (file, digest, versions, build), the device, the profile, the
        configuration, the data_schedule and the counters. Computes nothing.

        While a session is open, ``device`` tells of it (threads, vector unit, memory); otherwise of what would be used.
        """

        def read() -> dict[str, Any]:
            state = self._state
            device = state.describe() if isinstance(state, Session) else None
            return {
                "schema": "mojolearn.run-metadata.v1",
                **_native.facts(),
                "device": device or _native.describe_device(self._vendor, self._device),
                "numeric_mode": NUMERIC_MODE,
                "profile": self._shape.profile,
                "model_shape": self._shape.to_dict(),
                "device_state_lifetime": "resident" if self._resident else "call",
                "step_result": self._step_result,
                "config": dict(self._config),
                "data_schedule": self.data_schedule,
                "completed_steps": self.step_,
                "next_batch_index": self.step_,
                "last_export_step": self._last_export,
            }

        return self._exclusively(read)

    # ---- Inside ------------------------------------------------------------------------------------------------------

    @classmethod
    def _from_state(
        cls, state: Mapping[str, Any], resident: bool | None, vendor: str | None, device: int | None
    ) -> SmallByteLanguageModelTrainer:
        valid = validate_state(state)
        trainer = cls.__new__(cls)
        trainer._choose(resident, None, vendor, device)
        host = HostState(valid.parameters, valid.m, valid.v, valid.completed_steps)
        trainer._adopt(valid.shape, valid.config, valid.data_schedule, valid.flags, host)
        return trainer

    def _choose(self, resident: bool | None, step_result: str | None, vendor: str | None, device: int | None) -> None:
        if resident is not None and not isinstance(resident, bool):
            raise TypeError(f"resident must be True, False or None, not {resident!r}")
        if step_result not in (None, "full", "lean"):
            raise ValueError(f"step_result must be 'full', 'lean' or None, not {step_result!r}")
        if step_result == "lean" and not resident:
            raise ValueError("step_result='lean' leaves the gradient in the session: it needs resident=True")
        self._resident = resident is not False
        self._step_result = step_result or ("lean" if resident else "full")
        self._vendor = _native.vendor_number(vendor)
        self._device = _device_index(device)
        self._turns = Turns()

    def _adopt(
        self,
        shape: ByteLanguageModelConfig,
        config: dict[str, Any],
        schedule: dict[str, Any],
        flags: AnyArray,
        state: HostState,
    ) -> None:
        tensors = [
            (row["name"], row["offset"], row["offset"] + row["size"], row["shape"])
            for row in self.parameter_registry(shape)
        ]
        flags = flags.view(Array)
        self._shape = shape
        self._tensors = tensors
        self._config = config
        self._schedule = schedule
        self._flags = flags
        self._last_export = state.completed_steps
        self._state = state

    def _exclusively(self, operation: Callable[[], Result]) -> Result:
        """Runs the operation when no other one runs. If the device proves to be gone, the trainer is lost."""

        def run() -> Result:
            try:
                return operation()
            except LostSessionError as error:
                if not isinstance(self._state, Session):
                    raise
                raise self._lose(self._state, error) from error

        return self._turns.run(run)

    def _use(self, call: Callable[[Session], Result], *, changes_state: bool = False) -> Result:
        """Runs `call` with an open session: the resident one, or one for this call alone."""

        def use() -> Result:
            state = self._held()
            if isinstance(state, Session):
                return call(state)
            session = Session(self._shape, self._config, state, self._vendor, self._device)
            if self._resident:
                self._state = session
                return call(session)
            try:
                result = call(session)
                if changes_state:
                    self._state = session.export_state()
                    self._last_export = self._state.completed_steps
                return result
            finally:
                session.close()

        return self._exclusively(use)

    def _held(self) -> HostState | Session:
        if isinstance(self._state, _Lost):
            raise LostSessionError(self._state.message)
        return self._state

    def _lose(self, session: Session, error: LostSessionError) -> LostSessionError:
        """Marks the trainer as lost: the device of its session is gone."""
        steps = session.completed_steps
        message = (
            f"session lost at step {steps}; the last exported state is that of step {self._last_export}: "
            f"give it to load_state_dict() to go on ({error})"
        )
        self._state = _Lost(message, steps)
        session.close()
        return LostSessionError(message)

    def _download(self, session: Session) -> HostState:
        state = session.export_state()
        check_numbers("the exported state", state.parameters, state.m, state.v)
        self._last_export = state.completed_steps
        return state

    def _named(self, flat: Array) -> dict[str, AnyArray]:
        return {name: flat[start:stop].reshape(dimensions) for name, start, stop, dimensions in self._tensors}


LanguageModelTrainer = SmallByteLanguageModelTrainer


def _require_shape(shape: Any) -> ByteLanguageModelConfig:
    if shape is None:
        return ByteLanguageModelConfig()
    if not isinstance(shape, ByteLanguageModelConfig):
        raise TypeError(f"shape must be a LanguageModelConfig or None, not {type(shape).__name__}")
    return shape


def _device_index(device: Any) -> int:
    if device is None:
        return 0
    if isinstance(device, bool) or not hasattr(device, "__index__"):
        raise TypeError(f"device must be an int or None, not {device!r}")
    index = operator.index(device)
    if not 0 <= index < 1 << 31:
        raise ValueError(f"device must be an index in [0, 2**31), not {index}")
    return index
