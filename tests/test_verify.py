# SPDX-License-Identifier: Apache-2.0
"""The recorded vectors, bit for bit, and the command that replays them."""

import argparse
import copy
import json
import pathlib

import pytest

from mojolearn import _verify

FOLDER = pathlib.Path(__file__).parent / "vectors"
COUNTS = {
    "language_model": 34,
    "language_model_chunked": 5,
    "language_model_edge": 14,
    "language_model_large": 12,
}
VECTORS = {name: json.loads((FOLDER / f"{name}.json").read_text())["vectors"] for name in COUNTS}


def test_all_vectors_are_here():
    assert {name: len(vectors) for name, vectors in VECTORS.items()} == COUNTS


@pytest.mark.parametrize(("name", "index"), [(name, index) for name in COUNTS for index in range(COUNTS[name])])
def test_vector(name, index):
    assert _verify.replay(VECTORS[name][index]) == []


def verify(*arguments):
    parser = argparse.ArgumentParser()
    _verify.add_arguments(parser)
    return _verify.run(parser.parse_args([str(argument) for argument in arguments]))


def test_the_packaged_vectors_match(capsys):
    assert verify() == 0
    output = capsys.readouterr().out
    assert "every bit matches" in output
    assert "11 of 11" in output


def test_the_packaged_vectors_are_among_the_recorded_ones():
    for path in _verify.PACKAGED_VECTORS.iterdir():
        assert all(vector in VECTORS[path.stem] for vector in json.loads(path.read_text())["vectors"])


@pytest.fixture
def folder(tmp_path):
    """Writes vectors into a folder as language_model.json."""

    def write(*vectors):
        (tmp_path / "language_model.json").write_text(json.dumps({"vectors": vectors}))
        return tmp_path

    return write


SAMPLE = VECTORS["language_model"][1]


def corrupted(*path, value="0" * 8):
    vector = copy.deepcopy(SAMPLE)
    inner = vector
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return vector


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (("expected", "steps", 1, "loss"), "step 2 loss: expected 00000000, got "),
        (("expected", "steps", 0, "gradient_sha256"), "step 1 gradient_sha256: expected 00000000"),
        (("expected", "steps", 2, "ids_sha256"), "step 3 ids_sha256: expected 00000000"),
        (("expected", "profile"), "profile: expected 00000000, got mojolearn"),
        (("expected", "n_total"), "n_total: expected 00000000, got"),
        (("expected", "initial_sha256"), "initial_sha256: expected"),
        (("expected", "final", "v"), "final v: expected"),
        (("expected", "evaluate"), "evaluate: expected"),
        (("expected", "logits_sha256"), "logits_sha256: expected"),
        (("expected", "ragged", "logits_sha256"), "ragged logits_sha256: expected"),
        (("expected", "ragged", "next"), "ragged next: expected"),
        (("case", "steps"), "could not be replayed: TypeError"),
        (("case", "plant"), "could not be replayed: ValueError: unknown plant"),
        (("case", "shape"), "could not be replayed: ValueError"),
        (("case", "hyper"), "could not be replayed: TypeError"),
    ],
    ids=lambda value: "/".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_corrupted_vector_is_found_and_located(path, told, folder, capsys):
    assert verify("--vectors", folder(SAMPLE, corrupted(*path))) == 1
    output = capsys.readouterr().out
    assert "language_model.json, vector 1: 1 differences" in output
    assert told in output
    assert "language_model.json: 1 of 2 vectors match" in output


@pytest.mark.parametrize(
    ("vector", "told"),
    [
        (corrupted("expected", "steps", value=SAMPLE["expected"]["steps"][:2]), "steps: expected 2, got 3"),
        (corrupted("expected", "steps", value=[]), "steps: expected 0, got 3"),
        (corrupted("expected", value={}), "profile: expected nothing"),
        (corrupted("expected", "more"), "more: not among what is replayed"),
        ({"case": SAMPLE["case"]}, "could not be replayed: KeyError: 'expected'"),
    ],
)
def test_a_vector_that_does_not_say_everything_does_not_pass(vector, told, folder, capsys):
    assert verify("--vectors", folder(vector)) == 1
    assert told in capsys.readouterr().out


def test_json(folder, capsys):
    path = folder(SAMPLE, corrupted("expected", "evaluate"))
    (path / "optimizer.json").write_text("{}")
    assert verify("--vectors", path, "--vendor", "cpu", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["matched"], document["mismatched"]) == (1, 1)
    assert document["not_replayed"] == ["optimizer.json"]
    assert document["device"]["vendor"] == "cpu"
    assert document["vectors"][1]["differences"][0].startswith("evaluate: expected 00000000, got ")


def test_files_of_other_kinds_are_named(folder, capsys):
    path = folder(SAMPLE)
    (path / "optimizer.json").write_text("{}")
    report = _verify.verify_folder(path)
    assert report.not_replayed == ("optimizer.json",)
    assert not report.mismatches
    assert verify("--vectors", path) == 0
    assert "optimizer.json: not replayed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "no vectors"),
        ("{", "is not a file of vectors"),
        ("[]", "is not a file of vectors"),
        ('{"vectors": []}', "is not a file of vectors"),
        ('{"vectors": [1]}', "is not a file of vectors"),
    ],
)
def test_misuse(text, told, tmp_path, capsys):
    if text is not None:
        (tmp_path / "language_model.json").write_text(text)
    assert verify("--vectors", tmp_path) == 2
    assert told in capsys.readouterr().err
    assert verify("--vectors", tmp_path / "missing") == 2
    assert "there is no folder" in capsys.readouterr().err


SCRIPT = """
import argparse, sys
from mojolearn import _verify
parser = argparse.ArgumentParser()
_verify.add_arguments(parser)
sys.exit(_verify.run(parser.parse_args(sys.argv[1:])))
"""


def test_it_says_when_it_could_not_run(run_python, tmp_path):
    run_python(SCRIPT, status=4, MOJOLEARN_LIBRARY=str(tmp_path / "libmojolearn.so"))
    run_python(SCRIPT, status=4, MOJOLEARN_VENDOR="metal")
    run_python(SCRIPT, "--vendor", "cpu", "--device", 99, status=4)
