# SPDX-License-Identifier: Apache-2.0
"""The product's library with tests/native/faults.cpp between it and the system: what it asks for can be refused."""

from __future__ import annotations

import re
from typing import Any

from abi import OK, adamw_struct, ffi, shape_struct, state_struct, struct
from native_build import PROBE, SOURCES, probe_library

BLOCK, OBJECT, THREAD = 0, 1, 2  # FAULTS_...
KINDS = {"block": BLOCK, "object": OBJECT, "thread": THREAD}
CLOCKS = {"right": 0, "still": 1, "back": 2, "wild": 3}

_header = re.sub(r"#ifdef __cplusplus\n.*?#endif\n", "", (SOURCES / "faults.h").read_text("utf-8"), flags=re.DOTALL)
DECLARATIONS = re.sub(r"^#.*$", "", _header, flags=re.MULTILINE).replace("PROBE_API", "")
ffi.cdef(DECLARATIONS + "const char* probe_units(void);")

probe_library()  # builds it
lib: Any = ffi.dlopen(str(PROBE))


def units() -> list[str]:
    """The vector units of this machine."""
    return str(ffi.string(lib.probe_units()).decode()).split(",")


def held(*kinds: int) -> list[int]:
    return [lib.faults_held(kind) for kind in kinds]


def message() -> str:
    return str(ffi.string(lib.mjl_last_error()).decode())


def try_open(threads: int = 1, poll: Any = ffi.NULL, **structs: Any) -> tuple[int, Any]:
    """Status and session."""
    options = struct("session_options", vendor=1, threads=threads, poll=poll)
    structs = {"shape": shape_struct(), "adamw": adamw_struct(), "state": state_struct(), **structs}
    out = ffi.new("mjl_session **")
    status = lib.mjl_session_open(options, structs["shape"], structs["adamw"], structs["state"], out)
    assert (status == OK) == (out[0] != ffi.NULL)
    return status, out[0]
