# SPDX-License-Identifier: Apache-2.0
"""Trains decoder-only language models in float32, with the same bits on every backend."""

from ._array import Array
from ._config import ByteLanguageModelConfig, LanguageModelConfig
from ._errors import (
    BackendError,
    DeviceError,
    InternalError,
    LostSessionError,
    MojolearnError,
    NonFiniteError,
    OutOfMemoryError,
)
from ._trainer import LanguageModelTrainer, SmallByteLanguageModelTrainer

__version__ = "0.1.0"

__all__ = [
    "Array",
    "BackendError",
    "ByteLanguageModelConfig",
    "DeviceError",
    "InternalError",
    "LanguageModelConfig",
    "LanguageModelTrainer",
    "LostSessionError",
    "MojolearnError",
    "NonFiniteError",
    "OutOfMemoryError",
    "SmallByteLanguageModelTrainer",
    "__version__",
]
