# SPDX-License-Identifier: Apache-2.0
"""Exceptions. Each is also the built-in exception that fits, so code that knows only those can catch it."""


class MojolearnError(Exception):
    """Base of the exceptions that only this package raises. Bad arguments are plain ValueError and TypeError."""


class NonFiniteError(MojolearnError, RuntimeError, ValueError):
    """A NaN or an infinity appeared in scores, logits, the loss, a gradient or an update. Nothing was changed."""


class BackendError(MojolearnError, RuntimeError):
    """The native library is missing or of another version, or the vendor or device asked for is not there."""


class DeviceError(MojolearnError, RuntimeError):
    """The device refused a command. Nothing was changed."""


class LostSessionError(MojolearnError, RuntimeError):
    """The device is gone, and with it the state since the last export. Load a state to go on."""


class OutOfMemoryError(MojolearnError, MemoryError):
    """Memory or threads could not be had on the host or on the device. Nothing was changed."""


class InternalError(MojolearnError, RuntimeError):
    """A defect of the native library: please report it."""
