# SPDX-License-Identifier: Apache-2.0
"""Build and load the two test libraries: the reference (tests/native/reference.cpp) and the product's probe.

Both implement tests/native/probe.h, so a test calls the same function of either and compares the bits.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cffi

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "tests" / "native"
REFERENCE = ROOT / "build" / "tests" / "libreference.so"
PROBE = Path(os.environ.get("MOJOLEARN_PROBE") or ROOT / "build" / "libmojolearn_probe.so")


def _declarations(header: str) -> str:
    """What cffi should read of a header: no preprocessor lines, no C++ guards, no export macros."""
    text = (SOURCES / header).read_text(encoding="utf-8")
    text = re.sub(r"#ifdef __cplusplus\n.*?#endif\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\b(PROBE|REFERENCE)_API\b", "", text)


@functools.cache
def ffi() -> Any:
    """The declarations of probe.h and reference.h."""
    out = cffi.FFI()
    out.cdef(_declarations("probe.h"))
    out.cdef(_declarations("reference.h"))
    return out


def _has_fma() -> bool:
    try:
        return platform.machine() == "x86_64" and " fma " in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


@functools.cache
def reference_library() -> Any:
    """The reference, compiled when its sources are newer than the library."""
    newest = max(path.stat().st_mtime for path in SOURCES.glob("*.[ch]*"))
    if not REFERENCE.exists() or REFERENCE.stat().st_mtime < newest:
        REFERENCE.parent.mkdir(parents=True, exist_ok=True)
        unfinished = REFERENCE.with_suffix(f".{os.getpid()}")
        flags = [
            "-std=c++17",
            "-O2",
            "-ffp-contract=off",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
        ]
        if _has_fma():  # a matter of speed: without it, fma is a function call with the same result
            flags.append("-mfma")
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *flags, "-o", str(unfinished), str(SOURCES / "reference.cpp")], check=True)
        unfinished.replace(REFERENCE)
    return ffi().dlopen(str(REFERENCE))


@functools.cache
def probe_library() -> Any:
    """The product's single operations: the library that MOJOLEARN_PROBE names, else what native/build.py builds."""
    if not os.environ.get("MOJOLEARN_PROBE"):
        build = [sys.executable, str(ROOT / "native" / "build.py"), "--probe"]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    return ffi().dlopen(str(PROBE))
