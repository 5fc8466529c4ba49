# SPDX-License-Identifier: Apache-2.0
"""`mojolearn doctor`: tell what the installation consists of and whether it works."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, _native, _verify
from .._errors import MojolearnError

DESCRIPTION = """\
Tell what the installation consists of, which devices it finds, and whether it computes the recorded bits.

The exit status is 0 if the library loads and its self-test passes, otherwise 1."""

SELF_TEST_SECONDS = 2.0
CPU_FEATURES = ("sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512dq", "avx512bw", "avx512vl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings. 0: all is well; 1: it is not."""
    findings = examine()
    print(json.dumps(findings, indent=1) if arguments.json else _text(findings))
    return 0 if findings["healthy"] else 1


def examine() -> dict[str, Any]:
    """All findings. Problems are findings too: nothing is raised."""
    findings: dict[str, Any] = {
        "version": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}, numpy {np.__version__}",
        "system": platform.platform(),
        "cpu_features": cpu_features(),
        "floating_point_mode": floating_point_mode(),
    }
    try:
        findings["library"] = _native.facts()
    except (MojolearnError, OSError) as error:
        return findings | {"library": {"error": str(error)}, "backends": {}, "healthy": False}
    findings["backends"] = {name: _probe(name) for name in _native.VENDORS[1:]}
    findings["self_test"] = self_test()
    return findings | {"healthy": findings["self_test"]["passed"]}


def cpu_features() -> list[str]:
    """The vector instructions that the system reports, as far as they matter here; empty if it does not say."""
    try:
        reported = set(Path("/proc/cpuinfo").read_text("utf-8", "replace").split())
    except OSError:
        return []
    return [name for name in CPU_FEATURES if name in reported]


def floating_point_mode() -> dict[str, Any]:
    """How this thread computes, found by computing. The library sets its own mode, whatever this one is."""
    tiny, one = sys.float_info.min, 1.0
    up, down = one + 2.0**-60 > one, -one - 2.0**-60 < -one
    rounding = {(False, False): "to nearest", (True, False): "upward", (False, True): "downward"}
    if (one + (2.0**-52 - 2.0**-60)) == one:
        rounding[False, False] = "toward zero"
    return {
        "rounding": rounding.get((up, down), "unknown"),
        "flushes_subnormal_results": tiny * 0.5 == 0.0,
        "reads_subnormals_as_zero": tiny * 2.0**-10 * 2.0**20 == 0.0,
    }


def self_test() -> dict[str, Any]:
    """Replays the vectors of the package, for two seconds at most."""
    began = time.monotonic()
    replayed, problems = 0, []
    try:
        for result in _verify.replay_folder(_verify.PACKAGED_VECTORS):
            replayed += 1
            problems += [f"{result.file}, vector {result.index}: {difference}" for difference in result.differences]
            if time.monotonic() - began > SELF_TEST_SECONDS:
                break
    except (MojolearnError, MemoryError, ValueError) as error:
        problems.append(str(error))
    return {"passed": bool(replayed) and not problems, "vectors": replayed, "problems": problems}


def _probe(vendor: str) -> dict[str, Any]:
    try:
        return {"usable": True, **_native.describe_device(_native.vendor_number(vendor), 0)}
    except (MojolearnError, ValueError) as error:
        return {"usable": False, "reason": str(error)}


def _text(findings: dict[str, Any]) -> str:
    library, mode = findings["library"], findings["floating_point_mode"]
    rows = [
        ("mojolearn", f"{findings['version']} on {findings['python']}"),
        ("system", findings["system"]),
        ("cpu features", " ".join(findings["cpu_features"]) or "unknown"),
        ("this thread", _mode_text(mode)),
    ]
    if "error" in library:
        rows.append(("library", library["error"]))
    else:
        build = library["build"]
        rows += [
            ("library", library["library"]),
            ("", f"SHA-256 {library['library_sha256']}"),
            ("", f"version {library['version']}, ABI {library['abi_version']}, numerics {library['numerics_version']}"),
            ("built with", f"{build['compiler']} {build['flags']}"),
        ]
    for vendor, backend in findings["backends"].items():
        rows.append((vendor, _backend_text(backend)))
    if "self_test" in findings:
        test = findings["self_test"]
        rows.append(
            ("self-test", f"{test['vectors']} vectors, " + ("every bit matches" if test["passed"] else "FAILED"))
        )
        rows += [("", problem) for problem in test["problems"][:5]]
    return "\n".join(f"{name:<14}{value}" for name, value in rows)


def _mode_text(mode: dict[str, Any]) -> str:
    changes = {"flushes_subnormal_results": "flushed", "reads_subnormals_as_zero": "read as zero"}
    subnormals = " and ".join(text for key, text in changes.items() if mode[key]) or "kept"
    return f"rounds {mode['rounding']}, subnormals {subnormals}; the library sets a mode of its own"


def _backend_text(backend: dict[str, Any]) -> str:
    if not backend["usable"]:
        return f"not usable: {backend['reason']}"
    memory = f"{backend['memory_bytes'] / 2**30:.1f} GiB"
    threads = f", {backend['threads']} threads" if backend["threads"] else ""
    return f"{backend['name']}, {memory}{threads}; {backend['detail']}"
