# SPDX-License-Identifier: Apache-2.0
"""Builds the native library into the package and tags the wheel; pyproject.toml has the rest."""

import platform
import re
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

BUILD = [sys.executable, str(Path(__file__).resolve().parent / "native" / "build.py")]


class NativeDistribution(Distribution):
    """A distribution for one platform, although it has no extension module."""

    def has_ext_modules(self) -> bool:
        return True


class BuildPackage(build_py):
    """The package and, in its folder _lib, the native library. An editable install uses the one in the source tree."""

    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib, "mojolearn", "_lib").absolute()
        subprocess.run(BUILD if self.editable_mode else [*BUILD, "--out", str(folder)], check=True)


class Wheel(bdist_wheel):
    """A wheel for any Python 3, since nothing in it uses Python's own ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        library = next(Path(self.bdist_dir).glob("**/_lib/libmojolearn.so"), None)
        return "py3", "none", platform_tag(library) if library else super().get_tag()[2]


def platform_tag(library: Path) -> str:
    """The oldest glibc that has what the library needs; it needs nothing else (see native/build.py --check)."""
    versions = re.findall(rb"\bGLIBC_(\d+)\.(\d+)", library.read_bytes())
    major, minor = max((int(major), int(minor)) for major, minor in versions)
    return f"manylinux_{major}_{minor}_{platform.machine()}"


setup(distclass=NativeDistribution, cmdclass={"build_py": BuildPackage, "bdist_wheel": Wheel})
