#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds libmojolearn.so. Needs Python >= 3.10 and a C++17 compiler, nothing else.

A family of sources is a function that lists `Object`s: what to compile, with which flags. There are three today:

  - CUDA kernels (native/kernels) are compiled by nvcc, a file at a time, to images for all of CUDA_ARCHITECTURES, which
    become read-only data of the library (native/cuda/images.cpp). Without nvcc, and in builds for debuggers and
    sanitizers, there are none; mjl_build_info says so;
  - generic code runs on any processor of the architecture;
  - vector-unit code (native/cpu/unit) is compiled once for each unit in UNITS, in a namespace of the unit's name, and
    chosen at run time. `--check` proves that no function compiled for AVX can be reached from generic code by accident.

No flag may change the bits of a result: no fast-math, no contraction, no reassociation.
"""

from __future__ import annotations

import argparse
import fcntl
import filecmp
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Every command runs in ROOT and all paths are relative to it, so that objects are the same wherever it is.
NATIVE = Path("native")
UNIT_SOURCES = NATIVE / "cpu" / "unit"
KERNEL_SOURCES = NATIVE / "kernels"
IMAGES_SOURCE = NATIVE / "cuda" / "images.cpp"
PROBE_SOURCES = Path("tests", "native")
HEADER = NATIVE / "include" / "mojolearn.h"
EXPORTS = NATIVE / "exports.txt"
LIBRARY = "libmojolearn.so"
PROBE = "libmojolearn_probe.so"

# Vector units of each architecture, best first, with the flags that switch them on.
UNITS = {
    "x86_64": {
        "avx512": "-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mavx2 -mprefer-vector-width=512",
        "avx2": "-mavx2 -mfma",
        "plain": "",
    },
    "aarch64": {"neon": ""},
}

# Machine code for these, and compute_ code from which drivers make machine code for what comes later.
CUDA_ARCHITECTURES = "sm_80 sm_86 sm_89 sm_90 sm_100 sm_120 compute_120"
CUDA_FLAGS = (
    "-std=c++17 -O3 --expt-relaxed-constexpr -fmad=false -ftz=false -prec-div=true -prec-sqrt=true "
    "-Xfatbin -compress-all --compress-mode=size"
)

FLAGS = (
    "-std=c++17 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -ffp-contract=off -fno-math-errno "
    "-Wall -Wextra -Werror -Wno-psabi -pthread"
)
INCLUDES = "-I native -I native/include"
# The C++ runtime is linked in, without its unused parts: all that the library needs is a glibc that is new enough.
LINK_FLAGS = "-shared -pthread -ldl -Wl,--exclude-libs,ALL -Wl,--gc-sections -static-libstdc++ -static-libgcc"
# What the library may need: parts of glibc.
SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libpthread|libdl|ld-linux-[\w-]+)\.so\.\d")


class BuildError(Exception):
    """The message says all there is to say."""


@dataclass(frozen=True)
class Config:
    """What the command line asks for."""

    cxx: str
    debug: bool
    sanitize: str
    jobs: int
    nvcc: str = ""  # "" leaves the CUDA kernels out
    cuda_architectures: str = ""

    @property
    def name(self) -> str:
        cross = self.architecture if self.is_cross else ""
        return "-".join(filter(None, ["debug" if self.debug else "release", self.sanitize.replace(",", "-"), cross]))

    @property
    def directory(self) -> Path:
        return Path("build", "native", self.name)

    @property
    def extra(self) -> str:
        symbols = "-g -fno-omit-frame-pointer" if self.debug or self.sanitize else ""
        sanitizers = f"-fsanitize={self.sanitize} -fno-sanitize-recover=all" if self.sanitize else ""
        return f"{symbols} {sanitizers}".strip()

    def optimize(self, level: str) -> str:
        return "-Og" if self.debug else "-O1" if self.sanitize else level

    @cached_property
    def architecture(self) -> str:
        return run([self.cxx, "-dumpmachine"]).split("-")[0]

    @property
    def is_cross(self) -> bool:
        return self.architecture != platform.machine()

    @property
    def is_product(self) -> bool:
        """True for what the package loads, which goes into the package."""
        return not (self.debug or self.sanitize or self.is_cross)

    @property
    def units(self) -> dict[str, str]:
        if self.architecture not in UNITS:
            raise BuildError(f"{self.cxx} compiles for {self.architecture}; known architectures: {', '.join(UNITS)}")
        return UNITS[self.architecture]

    @property
    def nvcc_version(self) -> str:
        found = re.search(r"release [\d.]+, V([\d.]+)", run([self.nvcc, "--version"]))
        return found[1] if found else "unknown"

    @property
    def build_info(self) -> str:
        """What mjl_build_info() returns: neither paths nor dates, so that builds are reproducible."""
        info = {
            "compiler": run([self.cxx, "--version"]).splitlines()[0],
            "flags": " ".join(f"{self.optimize('-O2')} {FLAGS} {self.extra}".split()),
            "backends": ["cpu", "cuda"] if self.nvcc else ["cpu"],
            "units": list(self.units),
            "cuda": f"nvcc {self.nvcc_version}: {self.cuda_architectures}"
            if self.nvcc
            else "left out: built without nvcc",
        }
        return json.dumps(info)


@dataclass(frozen=True)
class Object:
    """One compilation."""

    source: Path
    path: Path
    command: list[str]
    unit: str = ""
    inputs: tuple[Path, ...] = ()  # what it reads beside what the compiler lists

    @property
    def dependencies(self) -> Path:
        return self.path.with_suffix(".d")

    def is_current(self) -> bool:
        """True if the command is the one that made the object and nothing that it read is newer."""
        return (
            same_command(self.path, self.command)
            and self.dependencies.exists()
            and is_newer(self.path, self.read_files())
        )

    def read_files(self) -> list[Path]:
        _, _, names = self.dependencies.read_text().replace("\\\n", " ").partition(":")
        return [*map(Path, shlex.split(names)), *self.inputs]

    def compile(self) -> None:
        compiler = "NVCC" if self.source.suffix == ".cu" else "CXX"
        say(f"{compiler} {self.source}" + (f" [{self.unit}]" if self.unit else ""))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        started = time.time()
        run(self.command)
        os.utime(self.path, (started, started))  # a source saved while it was being compiled is newer than its object
        write_command(self.path, self.command)


def generic_objects(config: Config) -> Iterator[Object]:
    defines = [unit_list(config), f"-DMJL_BUILD_INFO={json.dumps(config.build_info)}"]
    for source in sorted(NATIVE.rglob("*.cpp")):
        if source.parent != UNIT_SOURCES and source != IMAGES_SOURCE:
            yield compilation(config, source, config.optimize("-O2"), defines)


def cuda_images(config: Config) -> Iterator[Object]:
    if not config.nvcc:
        return
    targets = []
    for name in config.cuda_architectures.split():
        kind, number = name.split("_")
        targets.append(f"-gencode=arch=compute_{number},code={kind}_{number}")
    for source in sorted(
        KERNEL_SOURCES.glob("*.cu"), key=lambda path: -path.stat().st_size
    ):  # what takes longest first
        path = config.directory / source.with_suffix(".fatbin")
        files = ["-MMD", "-MF", str(path.with_suffix(".d")), "-fatbin", str(source), "-o", str(path)]
        yield Object(source, path, [config.nvcc, *f"{CUDA_FLAGS} {INCLUDES}".split(), *targets, *files])


def images_object(config: Config, images: list[Object]) -> Object:
    """The data of native/cuda/images.cpp."""
    listed = " ".join(f'X({image.path.stem}, "{image.path}")' for image in sorted(images, key=lambda image: image.path))
    defines = [f"-DMJL_CUDA_IMAGES={listed}", f'-DMJL_CUDA_ARCHITECTURES="{config.cuda_architectures}"']
    item = compilation(config, IMAGES_SOURCE, "-O2", defines)
    return Object(item.source, item.path, item.command, inputs=tuple(image.path for image in images))


def unit_objects(config: Config, sources: Iterable[Path]) -> Iterator[Object]:
    for source in sources:
        for unit, flags in config.units.items():
            yield compilation(config, source, f"{config.optimize('-O3')} {flags}", [f"-DMJL_UNIT={unit}"], unit)


def probe_objects(config: Config) -> Iterator[Object]:
    for name in ("probe.cpp", "faults.cpp"):
        yield compilation(config, PROBE_SOURCES / name, config.optimize("-O2"), [unit_list(config)])
    yield from unit_objects(config, [PROBE_SOURCES / "probe_unit.cpp"])


def unit_list(config: Config) -> str:
    return "-DMJL_UNIT_LIST=" + " ".join(f"X({name})" for name in config.units)


def compilation(config: Config, source: Path, flags: str, defines: list[str], unit: str = "") -> Object:
    path = config.directory / source.with_suffix(f".{unit}.o" if unit else ".o")
    options = f"{flags} {FLAGS} {INCLUDES} {config.extra}".split()
    files = ["-MMD", "-MF", str(path.with_suffix(".d")), "-c", str(source), "-o", str(path)]
    return Object(source, path, [config.cxx, *options, *defines, *files], unit)


def build(objects: Iterable[Object], jobs: int) -> None:
    stale = [item for item in objects if not item.is_current()]
    with ThreadPoolExecutor(jobs) as pool:
        pending = [pool.submit(item.compile) for item in stale]
        try:
            for future in pending:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def link(config: Config, objects: Iterable[Object], name: str, *flags: str) -> Path:
    path = config.directory / name
    inputs = [item.path for item in objects]
    if not config.sanitize:
        flags += ("-Wl,-z,defs",)  # a sanitizer may leave its own functions to the program
    command = [config.cxx, *LINK_FLAGS.split(), *config.extra.split(), *flags, *map(str, inputs), "-o", str(path)]
    if not (same_command(path, command) and is_newer(path, inputs)):
        say(f"LINK {path}")
        run(command)
        write_command(path, command)
    return path


def install(source: Path, directory: Path) -> None:
    """Copies a file so that others see either the old one or the new one: processes may have the old one mapped."""
    target = directory / source.name
    if target.exists() and filecmp.cmp(source, target, shallow=False):
        return
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{source.name}.{os.getpid()}"
    shutil.copy(source, temporary)
    temporary.replace(target)
    say(f"INSTALL {target}")


def check(library: Path, objects: Iterable[Object]) -> None:
    """Checks what no compiler does: exported symbols, needed libraries, and the isolation of vector-unit code."""
    problems = []
    declared = set(re.findall(r"^MJL_API\b[^;(]*?\b(mjl_\w+)\(", HEADER.read_text(), re.MULTILINE))
    exported = set(run(["nm", "-D", "--defined-only", "--format=just-symbols", str(library)]).split())
    listed = set(EXPORTS.read_text().split())
    for one, one_name, other, other_name in (
        (exported, str(library), listed, str(EXPORTS)),
        (declared, str(HEADER), listed, str(EXPORTS)),
    ):
        problems += [f"{name}: in {one_name}, not in {other_name}" for name in sorted(one - other)]
        problems += [f"{name}: in {other_name}, not in {one_name}" for name in sorted(other - one)]

    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", run(["readelf", "-d", str(library)])))
    problems += [f"{name}: needed by {library}" for name in sorted(needed) if not SYSTEM_LIBRARIES.fullmatch(name)]

    for item in objects:
        if item.unit and item.unit not in ("plain", "neon"):
            problems += [f"{item.path}: {symbol}" for symbol in escaping_symbols(item)]
    if problems:
        raise BuildError("\n".join(["check failed:", *problems]))
    say(f"CHECK {library}: {len(exported)} functions exported, vector-unit code isolated")


def escaping_symbols(item: Object) -> Iterator[str]:
    """What could run on a processor without the unit: a definition that the linker may pick for generic code as well
    (an inline function or template outside the unit's namespace), and code that runs when the library is loaded."""
    for line in run(["nm", "--defined-only", "--format=posix", str(item.path)]).splitlines():
        symbol, kind = line.split()[:2]
        if symbol.startswith("_GLOBAL__sub_I"):
            yield f"{symbol} runs at load time"
        elif (kind.isupper() or kind in "uvw") and item.unit not in symbol and not symbol.startswith("DW.ref."):
            yield f"{symbol} ({kind}) is visible outside the namespace {item.unit}"


def same_command(output: Path, command: list[str]) -> bool:
    record = output.with_name(output.name + ".cmd")
    return output.exists() and record.exists() and record.read_text() == shlex.join(command)


def write_command(output: Path, command: list[str]) -> None:
    output.with_name(output.name + ".cmd").write_text(shlex.join(command))


def is_newer(output: Path, inputs: Iterable[Path]) -> bool:
    made = output.stat().st_mtime_ns
    return all(path.exists() and path.stat().st_mtime_ns < made for path in inputs)


def say(text: str) -> None:
    sys.stdout.write(f"  {text}\n")  # one write: compilations talk at the same time
    sys.stdout.flush()


def run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError:
        raise BuildError(f"{command[0]}: not found (on Debian or Ubuntu: apt-get install g++)") from None
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}exit status {done.returncode}")
    return done.stdout


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build libmojolearn.so.")
    add = parser.add_argument
    add("--out", type=Path, help="where the library and its header go (default: python/mojolearn/_lib)")
    add("--probe", action="store_true", help="also build the library of the operation-level tests")
    add("--check", action="store_true", help="then check exported symbols and the isolation of vector-unit code")
    add("--debug", action="store_true", help="for a debugger; without --out it goes to build/native/<config>/lib")
    add("--sanitize", default="", metavar="LIST", help="such as address,undefined or thread; goes where --debug goes")
    add(
        "--cxx",
        default=os.environ.get("CXX", "g++"),
        help="the compiler, for this machine or another (default: $CXX, else g++)",
    )
    add("--nvcc", default=os.environ.get("NVCC", "nvcc"), help='CUDA\'s compiler (default: $NVCC, else nvcc); "": none')
    add("--cuda", default=CUDA_ARCHITECTURES, metavar="LIST", help=f"for these (default: {CUDA_ARCHITECTURES})")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time (default: all processors)")
    return parser.parse_args()


def build_all(arguments: argparse.Namespace) -> None:
    config = Config(arguments.cxx, arguments.debug, arguments.sanitize, arguments.jobs)
    if config.is_product and arguments.nvcc and (nvcc := shutil.which(arguments.nvcc)):
        config = replace(config, nvcc=nvcc, cuda_architectures=arguments.cuda)
    out = arguments.out or (Path("python", "mojolearn", "_lib") if config.is_product else config.directory / "lib")
    config.directory.mkdir(parents=True, exist_ok=True)
    with open(config.directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # builds of one configuration take turns
        images = list(cuda_images(config))
        objects = [*generic_objects(config), *unit_objects(config, sorted(UNIT_SOURCES.glob("*.cpp")))]
        build([*images, *objects], config.jobs)
        objects.append(images_object(config, images))
        build(objects[-1:], config.jobs)
        library = link(config, objects, LIBRARY, f"-Wl,--version-script={NATIVE / 'mojolearn.map'}")
        install(library, out)
        install(HEADER, out)
        if arguments.check:
            check(library, objects)
        if arguments.probe:
            probe = list(probe_objects(config))
            build(probe, config.jobs)
            # Bound to itself, so that it calls its own `operator new`, whatever else is loaded.
            library = link(config, [*objects, *probe], PROBE, "-Wl,-Bsymbolic-functions")
            install(library, Path("build") if config.is_product else out)


def main() -> int:
    arguments = parse_arguments()
    if arguments.out:
        arguments.out = arguments.out.absolute()
    os.chdir(ROOT)
    try:
        build_all(arguments)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
