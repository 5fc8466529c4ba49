# SPDX-License-Identifier: Apache-2.0
"""The native library, bound one to one: finding it, its declarations, its statuses as exceptions, and Ctrl-C.

The library is loaded by the first call that needs it, not at import. Its declarations are read from the mojolearn.h
that lies beside it, so nothing of the C ABI is written down twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ._errors import (
    BackendError,
    DeviceError,
    InternalError,
    LostSessionError,
    NonFiniteError,
    OutOfMemoryError,
)

ABI_VERSION = 1
PACKAGED_LIBRARY = Path(__file__).resolve().parent / "_lib" / "libmojolearn.so"
VENDORS = ("any", "cpu", "cuda", "hip")  # in the order of MJL_VENDOR_...

_EXCEPTIONS: dict[str, type[BaseException]] = {
    "MJL_ERROR_ARGUMENT": ValueError,
    "MJL_ERROR_STATE": RuntimeError,
    "MJL_ERROR_CANCELLED": KeyboardInterrupt,
    "MJL_ERROR_NON_FINITE": NonFiniteError,
    "MJL_ERROR_UNSUPPORTED": BackendError,
    "MJL_ERROR_MEMORY": OutOfMemoryError,
    "MJL_ERROR_DEVICE": DeviceError,
    "MJL_ERROR_LOST": LostSessionError,
    "MJL_ERROR_IO": OSError,
    "MJL_ERROR_INTERNAL": InternalError,
}

# What a signal handler raised during a native call, by thread, until that call has returned.
_raised: dict[int, BaseException] = {}


class Library:
    """The loaded library: `ffi` and `lib` are cffi's objects for the declarations and for the functions."""

    def __init__(self, path: Path) -> None:
        import cffi  # here, so that importing mojolearn stays quick

        _check_abi_version(path)
        self.path = path
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(_declarations(path))
        self.lib: Any = self.ffi.dlopen(str(path))
        self._exceptions = {getattr(self.lib, name): exception for name, exception in _EXCEPTIONS.items()}
        self.poll: Any = self.ffi.callback("mjl_poll_fn", _let_signals_in, error=1, onerror=_remember)

    def call(self, function: Callable[..., int], *arguments: Any) -> None:
        """Calls a function that returns a status; raises what the status means, or what a signal handler raised."""
        if _raised:
            _raised.pop(threading.get_ident(), None)
        status = function(*arguments)
        if status or _raised:
            interruption = _raised.pop(threading.get_ident(), None)
            if interruption is not None:
                raise interruption
            if status:
                raise self._exceptions.get(status, InternalError)(self.text(self.lib.mjl_last_error()))

    def struct(self, name: str, **members: Any) -> Any:
        """A new struct with its `struct_size` set; the members not named are zero."""
        return self.ffi.new(f"{name} *", {"struct_size": self.ffi.sizeof(name), **members})

    def text(self, characters: Any) -> str:
        encoded: bytes = self.ffi.string(characters)
        return encoded.decode("utf-8", "replace")


@cache
def load() -> Library:
    """The library: the one that MOJOLEARN_LIBRARY names, else the one in the package."""
    mode = os.environ.get("MOJOLEARN_NUMERIC_MODE") or "identical"
    if mode != "identical":
        raise BackendError(f"MOJOLEARN_NUMERIC_MODE is {mode!r}: the only numeric mode is 'identical'")
    chosen = os.environ.get("MOJOLEARN_LIBRARY")
    path = Path(chosen).absolute() if chosen else PACKAGED_LIBRARY
    if not path.is_file():
        raise BackendError(
            f"the native library is missing: there is no file {path}"
            + (
                " (named by MOJOLEARN_LIBRARY)"
                if chosen
                else "; in a source tree build it with `make build`, otherwise install the package again"
            )
        )
    return Library(path)


@cache
def facts() -> dict[str, Any]:
    """What tells this library from another: path, digest, versions and build."""
    library = load()
    return {
        "library": str(library.path),
        "library_sha256": hashlib.sha256(library.path.read_bytes()).hexdigest(),
        "version": library.text(library.lib.mjl_version()),
        "abi_version": int(library.lib.mjl_abi_version()),
        "numerics_version": library.text(library.lib.mjl_numerics_version()),
        "build": json.loads(library.text(library.lib.mjl_build_info())),
    }


def describe_device(vendor: int, device: int) -> dict[str, Any]:
    """Describes a device without opening it; BackendError says what was looked for."""
    library = load()
    info = library.struct("mjl_device_info")
    library.call(library.lib.mjl_device_probe, vendor, device, info)
    return {
        "vendor": VENDORS[info.vendor],
        "device": info.device,
        "name": library.text(info.name),
        "detail": library.text(info.detail),
        "threads": info.threads,
        "memory_bytes": info.memory_bytes,
    }


def vendor_number(vendor: str | None) -> int:
    """The MJL_VENDOR_... of 'cpu', 'cuda', 'hip', or of None: then MOJOLEARN_VENDOR decides, else any will do."""
    name, source = vendor, "vendor"
    if vendor is None:
        name, source = os.environ.get("MOJOLEARN_VENDOR") or "any", "MOJOLEARN_VENDOR"
    if name == "metal":
        raise BackendError(f"{source} is 'metal', for which there is no backend: use 'cpu', 'cuda' or 'hip'")
    if name not in VENDORS or vendor == "any":
        raise ValueError(f"{source} must be 'cpu', 'cuda' or 'hip', not {name!r}")
    return VENDORS.index(name)


def _let_signals_in(context: Any) -> int:
    """Called from native code every 20 ms or so, in the thread that made the call: 0 lets the call go on.

    Python runs signal handlers between bytecodes of the main thread. The loop's jump is such a place.
    If a handler raises, cffi hands the exception to `_remember` and answers 1, which cancels the call.
    """
    for _ in (0, 1):
        pass
    return 0


def _remember(kind: Any, error: BaseException, traceback: Any) -> None:
    _raised[threading.get_ident()] = error


def _check_abi_version(path: Path) -> None:
    import cffi

    ffi: Any = cffi.FFI()
    ffi.cdef("uint32_t mjl_abi_version(void);")
    try:
        version = ffi.dlopen(str(path)).mjl_abi_version()
    except (OSError, AttributeError) as error:
        raise BackendError(f"{path} cannot be loaded as the native library: {error}") from error
    if version != ABI_VERSION:
        raise BackendError(
            f"{path} has ABI version {version}, but this package needs version {ABI_VERSION}: "
            "most likely it was built from the sources of another release. Build it again with `make build`, install "
            "the package again, or correct MOJOLEARN_LIBRARY"
        )


def _declarations(path: Path) -> str:
    """The header's text as cffi takes it: without preprocessor lines other than `#define NAME <integer>`."""
    headers = [path.with_name("mojolearn.h"), PACKAGED_LIBRARY.with_name("mojolearn.h")]
    header = next((header for header in headers if header.is_file()), None)
    if header is None:
        raise BackendError(f"mojolearn.h is missing: it must lie beside the library, in {path.parent}")
    text = re.sub(r"^#ifdef __cplusplus\n.*?^#endif\n", "", header.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith("#") or re.match(r"#define \w+ \d+\s*$", line)]
    return "\n".join(lines).replace("MJL_API ", "")
