# SPDX-License-Identifier: Apache-2.0
"""Finding and binding the native library."""

import shutil
import subprocess

import pytest

import mojolearn
from mojolearn import _native

USE = """
import mojolearn, numpy
trainer = mojolearn.LanguageModelTrainer(numpy.zeros(34944, numpy.float32), data_schedule={"corpus": "x"})
try:
    trainer.evaluate(numpy.zeros((2, 33), numpy.int32))
except mojolearn.BackendError as error:
    print(error)
else:
    print("loaded", trainer.run_metadata()["library"])
"""


@pytest.fixture
def compile_library(tmp_path):
    def compile_text(text):
        path = tmp_path / "libmojolearn.so"
        compiler = shutil.which("cc") or shutil.which("g++")
        subprocess.run([compiler, "-x", "c", "-", "-shared", "-o", path], input=text, text=True, check=True)
        return path

    return compile_text


def test_import_neither_loads_the_library_nor_cffi(run_python, tmp_path):
    script = "import sys, mojolearn; print('cffi' in sys.modules)"
    assert run_python(script, MOJOLEARN_LIBRARY=str(tmp_path / "missing.so")) == "False\n"


def test_a_missing_library_is_named_with_the_remedy(run_python, tmp_path):
    told = run_python(USE, MOJOLEARN_LIBRARY=str(tmp_path / "missing.so"))
    assert f"there is no file {tmp_path}/missing.so (named by MOJOLEARN_LIBRARY)" in told


def test_a_library_of_another_abi_is_refused(run_python, compile_library):
    path = compile_library("unsigned mjl_abi_version(void) { return 99; }")
    told = run_python(USE, MOJOLEARN_LIBRARY=str(path))
    assert f"{path} has ABI version 99, but this package needs version 1: most likely" in told


@pytest.mark.parametrize("text", ["int other;", None])
def test_a_file_that_is_no_such_library_is_refused(text, run_python, compile_library, tmp_path):
    if text is None:
        path = tmp_path / "libmojolearn.so"
        path.write_text("no library")
    else:
        path = compile_library(text)
    assert f"{path} cannot be loaded as the native library" in run_python(USE, MOJOLEARN_LIBRARY=str(path))


def test_a_library_elsewhere_is_used(run_python, tmp_path):
    elsewhere = tmp_path / "ä folder" / "mine.so"
    elsewhere.parent.mkdir()
    shutil.copy(_native.load().path, elsewhere)
    assert run_python(USE, MOJOLEARN_LIBRARY=str(elsewhere)) == f"loaded {elsewhere}\n"


def test_the_only_numeric_mode_is_identical(run_python):
    assert "the only numeric mode is 'identical'" in run_python(USE, MOJOLEARN_NUMERIC_MODE="fast")
    assert run_python(USE, MOJOLEARN_NUMERIC_MODE="identical").startswith("loaded")


def test_vendors(monkeypatch):
    monkeypatch.delenv("MOJOLEARN_VENDOR", raising=False)
    assert [_native.vendor_number(vendor) for vendor in (None, "cpu", "cuda", "hip")] == [0, 1, 2, 3]
    monkeypatch.setenv("MOJOLEARN_VENDOR", "cpu")
    assert [_native.vendor_number(vendor) for vendor in (None, "cuda")] == [1, 2]
    with pytest.raises(ValueError, match="vendor must be 'cpu', 'cuda' or 'hip', not 'tpu'"):
        _native.vendor_number("tpu")
    with pytest.raises(mojolearn.BackendError, match="vendor is 'metal', for which there is no backend"):
        _native.vendor_number("metal")
    monkeypatch.setenv("MOJOLEARN_VENDOR", "metal")
    with pytest.raises(mojolearn.BackendError, match="MOJOLEARN_VENDOR is 'metal'"):
        _native.vendor_number(None)
    monkeypatch.setenv("MOJOLEARN_VENDOR", "tpu")
    with pytest.raises(ValueError, match="MOJOLEARN_VENDOR must be"):
        _native.vendor_number(None)


def test_vendor_numbers_are_those_of_the_header():
    lib = _native.load().lib
    numbers = [getattr(lib, f"MJL_VENDOR_{vendor.upper()}") for vendor in _native.VENDORS]
    assert numbers == list(range(len(_native.VENDORS)))
    assert lib.MJL_ABI_VERSION == _native.ABI_VERSION


@pytest.mark.parametrize("exception", [*_native._EXCEPTIONS.items()], ids=lambda pair: pair[0])
def test_each_status_is_an_exception(exception):
    library = _native.load()
    status = getattr(library.lib, exception[0])
    with pytest.raises(exception[1]):
        library.call(lambda: status)


def test_each_status_of_the_header_is_known():
    lib = _native.load().lib
    assert {name for name in dir(lib) if name.startswith("MJL_ERROR_")} == set(_native._EXCEPTIONS)


def test_a_device_that_is_not_there():
    with pytest.raises(mojolearn.BackendError, match=r"\w"):
        _native.describe_device(_native.vendor_number("cpu"), 99)


def test_facts_tell_the_library():
    facts = _native.facts()
    assert facts["abi_version"] == _native.ABI_VERSION
    assert facts["version"] == mojolearn.__version__
    assert len(facts["library_sha256"]) == 64
    assert isinstance(facts["build"], dict)
