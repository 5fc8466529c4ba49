# SPDX-License-Identifier: Apache-2.0
"""The checkpoint codec: recorded files, what survives, what is accepted, and hostile bytes."""

import ast
import contextlib
import hashlib
import json
import os
import pathlib
import re
import struct
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from checkpoint_files import MANIFEST, RECORDED, TINY_BINARY, TINY_JSON, large_state, same
from mojolearn import LanguageModelTrainer, _checkpoint
from mojolearn._schedule import canonical_json

DOCUMENTATION = pathlib.Path(__file__).parent.parent / "docs" / "checkpoints.md"

recorded = pytest.mark.parametrize("row", MANIFEST, ids=lambda row: row["tag"])


def refusal(function, *arguments):
    """The message of the ValueError that the call must end in."""
    with pytest.raises(ValueError, match=r"\w") as raised:
        function(*arguments)
    return str(raised.value)


def sha(array):
    return hashlib.sha256(np.ascontiguousarray(array)).hexdigest()


# ---- recorded files --------------------------------------------------------------------------------------------------


@recorded
def test_recorded_files_hold_the_recorded_arrays(row):
    for state in (
        _checkpoint.read_json_file(RECORDED / row["json"]),
        _checkpoint.read_binary(str(RECORDED / row["binary"])),
    ):
        assert {name: sha(state[name]) for name in ("parameters", "m", "v")} == row["at_checkpoint"]
        assert state["completed_steps"] == row["completed_steps"]
        assert state["data_schedule"]["note"] == "sämple ☃"


@recorded
def test_recorded_files_are_written_again_to_the_byte(row, tmp_path):
    from_json, from_binary = RECORDED / row["json"], RECORDED / row["binary"]
    _checkpoint.write_json(tmp_path / "json", _checkpoint.read_binary(from_binary))
    assert (tmp_path / "json").read_bytes() == from_json.read_bytes()
    digest = _checkpoint.write_binary(tmp_path / "binary", _checkpoint.read_json(from_json.read_bytes()))
    assert (tmp_path / "binary").read_bytes() == from_binary.read_bytes()
    assert digest == row["binary_sha256"]


@recorded
@pytest.mark.parametrize("kind", ["json", "binary"])
def test_training_continues_from_a_recorded_file(row, kind, tmp_path):
    restore = LanguageModelTrainer.from_checkpoint if kind == "json" else LanguageModelTrainer.from_checkpoint_binary
    trainer = restore(RECORDED / row[kind])
    for batch in row["next_batches"]:
        loss = trainer.train_step(np.array(batch, np.int32))["loss"]
    assert format(struct.unpack("<I", struct.pack("<f", loss))[0], "08x") == row["last_loss"]
    state = trainer.state_dict()
    assert {name: sha(state[name]) for name in ("parameters", "m", "v")} == row["after_two_more"]
    trainer.export_checkpoint_binary(tmp_path / "again")
    assert same(
        _checkpoint.read_binary(tmp_path / "again"),
        {key: np.asarray(v) if key in _checkpoint.ARRAYS else v for key, v in state.items()},
    )


@recorded
def test_the_reader_in_the_documentation_reads_the_recorded_files(row, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    assert len(blocks) == 1
    assert len(ast.unparse(ast.parse(blocks[0])).splitlines()) <= 45
    namespace = {}
    exec(blocks[0], namespace)
    for kind in ("json", "binary"):
        state = namespace["read_checkpoint"](RECORDED / row[kind])
        assert {name: sha(state[name]) for name in ("parameters", "m", "v")} == row["at_checkpoint"]
        assert state["config"]["kind"] == 2
    damaged = bytearray((RECORDED / row["binary"]).read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    assert refusal(namespace["read_checkpoint"], tmp_path / "damaged") == "damaged flags"


# ---- what survives, and what is accepted -----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_every_float32_survives(tmp_path_factory, words):
    special = [0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800001, 0x7FC12345, *words]
    state = _checkpoint.read_json(TINY_JSON)
    state |= {name: np.array(special, "<u4").view("<f4") for name in ("parameters", "m", "v")}
    path = tmp_path_factory.mktemp("floats") / "file"
    _checkpoint.write_json(path, state)
    assert same(_checkpoint.read_json_file(path), state)
    _checkpoint.write_binary(path, state)
    assert same(_checkpoint.read_binary(path), state)


def with_header(change, encode=canonical_json, tail=None):
    (length,) = struct.unpack_from("<Q", TINY_BINARY, 19)
    header = json.loads(TINY_BINARY[27 : 27 + length])
    change(header)
    encoded = encode(header)
    digest = hashlib.sha256(encoded).digest()
    return TINY_BINARY[:19] + struct.pack("<Q", len(encoded)) + encoded + digest + (tail or TINY_BINARY[59 + length :])


def with_payload(change, encode=canonical_json):
    document = json.loads(TINY_JSON)
    change(document["payload"])
    document["payload_sha256"] = hashlib.sha256(canonical_json(document["payload"])).hexdigest()
    return encode(document)


def loose(value):
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b" \n\n"


def nothing(_):
    pass


def without_chunked(state):
    del state["model_shape"]["chunked_lm_head_v2"]


@pytest.mark.parametrize(
    "encoded",
    [
        with_payload(nothing),
        with_payload(nothing, loose),
        b"\xef\xbb\xbf" + TINY_JSON,
        with_payload(lambda payload: payload["m"].update(hex=payload["m"]["hex"].upper())),
    ],
    ids=["no newline", "not canonical", "byte order mark", "capital hex"],
)
def test_json_spelled_differently_is_accepted(encoded):
    assert same(_checkpoint.read_json(encoded), _checkpoint.read_json(TINY_JSON))


def test_a_header_spelled_differently_is_accepted(tmp_path):
    (tmp_path / "file").write_bytes(with_header(nothing, loose))
    assert same(_checkpoint.read_binary(tmp_path / "file"), _checkpoint.read_json(TINY_JSON))


def test_older_model_shapes_are_accepted(tmp_path):
    (tmp_path / "file").write_bytes(with_header(lambda header: without_chunked(header["state"])))
    assert LanguageModelTrainer.from_checkpoint_binary(tmp_path / "file").step_ == 1
    assert LanguageModelTrainer.from_checkpoint_bytes(with_payload(without_chunked)).step_ == 1
    state = _checkpoint.read_json((RECORDED / "default.json").read_bytes())
    shape = {"batch": 2, "length": 32, "d_model": 32, "n_heads": 4, "n_kv": 2, "head_dim": 8, "intermediate": 64}
    _checkpoint.write_binary(tmp_path / "file", state | {"model_shape": shape})
    assert LanguageModelTrainer.from_checkpoint_binary(tmp_path / "file").step_ == 2


def test_steps_beyond_a_million_are_ours_to_accept():
    many = with_payload(lambda payload: payload.update(completed_steps=10**9, next_batch_index=10**9))
    assert LanguageModelTrainer.from_checkpoint_bytes(many).step_ == 10**9


# ---- hostile bytes ---------------------------------------------------------------------------------------------------

JSON_REFUSALS = {
    "empty": (b"", "not JSON"),
    "not an object": (b"[]", "must be a JSON object"),
    "missing": (b"{}", "lacks 'payload'"),
    "trailing bytes": (TINY_JSON + b"\0", "not JSON: Extra data"),
    "not UTF-8": (b'{"\xff":1}', "byte 2 is not UTF-8"),
    "deep": (b"[" * 1_000_000, "nested more than 32 deep"),
    "deep in an object": (b'{"a":' * 100_000, "nested more than 32 deep"),
    "long integer": (b'{"a":' + b"9" * 1_000_000 + b"}", "too long"),
    "NaN": (b'{"a":NaN}', "NaN is not a JSON number"),
    "duplicate key": (TINY_JSON.replace(b'{"payload":', b'{"schema":0,"payload":'), "'schema' appears twice"),
    "duplicate inside": (TINY_JSON.replace(b'"kind":2', b'"kind":2,"kind":2'), "'kind' appears twice"),
    "other schema": (TINY_JSON.replace(b"checkpoint.v1", b"checkpoint.v2"), "schema"),
    "unknown key": (with_payload(lambda payload: payload.update(extra=1)), "unknown key 'extra'"),
    "missing key": (with_payload(lambda payload: payload.pop("profile")), "lacks 'profile'"),
    "damaged payload": (TINY_JSON.replace(b'"kind":2', b'"kind":3'), "damaged"),
    "capital digest": (TINY_JSON.replace(b"8ef73b86615876d0", b"8EF73B86615876D0"), "damaged"),
    "not hex": (with_payload(lambda payload: payload["m"].update(hex="x" * 1088)), "not hex digits"),
    "hex of another length": (with_payload(lambda payload: payload["m"].update(hex="00")), "8 hex digits"),
    "hex with a space": (with_payload(lambda payload: payload["m"].update(hex=" " + payload["m"]["hex"])), "8 hex"),
    "another dtype": (with_payload(lambda payload: payload["m"].update(dtype="<f8")), "dtype of m"),
    "two dimensions": (with_payload(lambda payload: payload["m"].update(shape=[2, 68])), "shape of m"),
    "infinite number": (with_payload(nothing).replace(b'"kind":2', b'"kind":1e999'), "not JSON compliant"),
    "too large": (b" " * (2**21 + 1), "at most 2097152 bytes"),
}


@pytest.mark.parametrize(("encoded", "message"), JSON_REFUSALS.values(), ids=JSON_REFUSALS)
def test_json_refusals(encoded, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        _checkpoint.read_json(encoded)
    (tmp_path / "file").write_bytes(encoded)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'file'}: ") + ".*" + re.escape(message)):
        _checkpoint.read_json_file(tmp_path / "file")


def describe(**changes):
    return lambda header: header["arrays"][0].update(changes)


BINARY_REFUSALS = {
    "empty": (b"", "not a binary checkpoint"),
    "JSON": (TINY_JSON, "not a binary checkpoint"),
    "version 2": (TINY_BINARY[:17] + b"\x02" + TINY_BINARY[18:], "not a binary checkpoint"),
    "no header": (TINY_BINARY[:27], "bytes are missing"),
    "length 0": (TINY_BINARY[:19] + bytes(8) + TINY_BINARY[27:], "length is 0"),
    "length 2^64 - 1": (TINY_BINARY[:19] + b"\xff" * 8 + TINY_BINARY[27:], "length is 18446744073709551615"),
    "a byte less": (TINY_BINARY[:-1], "bytes are missing"),
    "a byte more": (TINY_BINARY + b"\0", "bytes after the end"),
    "header damaged": (TINY_BINARY.replace(b"identical", b"identicaL"), "the header does not have its digest"),
    "array damaged": (TINY_BINARY[:-50] + b"\1" + TINY_BINARY[-49:], "v does not have the digest"),
    "other order": (with_header(lambda header: header["arrays"].reverse()), "in this order"),
    "three arrays": (with_header(lambda header: header["arrays"].pop()), "list of 4"),
    "unknown key": (with_header(describe(extra=1)), "unknown key 'extra'"),
    "key in state": (with_header(lambda header: header["state"].update(m=[])), "unknown key 'm'"),
    "nbytes too large": (with_header(describe(nbytes=2**60)), "does not fit its shape"),
    "exabytes": (with_header(describe(nbytes=2**60, shape=[2**58])), "bytes are missing"),
    "negative": (with_header(describe(nbytes=-4, shape=[-1])), "positive integer"),
    "boolean length": (with_header(describe(nbytes=4, shape=[True])), "positive integer"),
    "no name": (with_header(describe(name=None)), "found None"),
    "no object": (with_header(lambda header: header.update(state=[])), "state must be a JSON object"),
    "deep": (with_header(nothing, lambda _: b"[" * 100_000), "nested more than 32 deep"),
    "large value": (with_header(describe(dtype="x" * 500_000)), "dtype of parameters"),
}


@pytest.mark.parametrize(("encoded", "message"), BINARY_REFUSALS.values(), ids=BINARY_REFUSALS)
def test_binary_refusals(encoded, message, tmp_path):
    (tmp_path / "file").write_bytes(encoded)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'file'}: ") + ".*" + re.escape(message)) as refusal:
        _checkpoint.read_binary(tmp_path / "file")
    assert len(str(refusal.value)) < 400 + len(str(tmp_path))


def test_every_truncation_of_a_binary_file_is_refused(tmp_path):
    for length in range(0, len(TINY_BINARY), 7):
        (tmp_path / "file").write_bytes(TINY_BINARY[:length])
        refusal(_checkpoint.read_binary, tmp_path / "file")


def test_every_truncation_of_a_json_file_is_refused():
    for length in range(0, len(TINY_JSON) - 1, 7):
        refusal(_checkpoint.read_json, TINY_JSON[:length])


@given(st.integers(0, len(TINY_BINARY) - 1), st.integers(1, 255))
@settings(max_examples=300, deadline=None)
def test_any_flipped_byte_of_a_binary_file_is_refused(tmp_path_factory, position, change):
    damaged = bytearray(TINY_BINARY)
    damaged[position] ^= change
    path = tmp_path_factory.mktemp("flip") / "file"
    path.write_bytes(damaged)
    refusal(_checkpoint.read_binary, path)


@given(st.integers(0, len(TINY_JSON) - 2), st.integers(1, 255))
@settings(max_examples=300, deadline=None)
@example(TINY_JSON.index(b"\\u00e4") + 4, 0x20)  # the same letter, spelled \u00E4
def test_any_flipped_byte_of_a_json_file_is_refused_or_changes_nothing(position, change):
    damaged = bytearray(TINY_JSON)
    damaged[position] ^= change
    with contextlib.suppress(ValueError):
        assert same(_checkpoint.read_json(bytes(damaged)), _checkpoint.read_json(TINY_JSON))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=8,
)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_mutations_with_right_digests_load_or_are_refused_as_values(data):
    """Whatever stands anywhere in a payload whose digest fits: a trainer or a ValueError."""

    def mutate(node):
        while True:
            keys = sorted(node) if isinstance(node, dict) else range(len(node))
            key = data.draw(st.sampled_from(list(keys)))
            if isinstance(node[key], (dict, list)) and node[key] and data.draw(st.booleans()):
                node = node[key]
                continue
            if isinstance(node, dict) and data.draw(st.booleans()):
                del node[key]
            else:
                node[key] = data.draw(values)
            return

    with contextlib.suppress(ValueError):
        trainer = LanguageModelTrainer.from_checkpoint_bytes(with_payload(mutate))
        assert trainer.step_ == trainer.state_dict()["completed_steps"]


@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,\\0e-', max_size=200).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_noise_is_refused(noise):
    refusal(_checkpoint.read_json, noise)


def test_formats_are_told_apart_by_content(tmp_path):
    answers = {TINY_BINARY: "binary", TINY_JSON: "json", b"\xef\xbb\xbf \n{": "json"}
    for content, answer in answers.items():
        (tmp_path / "file").write_bytes(content)
        assert _checkpoint.format_of(tmp_path / "file") == answer
    for content in (b"", b"text", TINY_BINARY[:17]):
        (tmp_path / "file").write_bytes(content)
        assert "not a checkpoint" in refusal(_checkpoint.format_of, tmp_path / "file")


def test_bytes_must_be_bytes():
    with pytest.raises(TypeError, match="bytearray"):
        _checkpoint.read_json(bytearray(TINY_JSON))


LARGE_TEXTS = {
    "open brackets": b"[" * 2**21,
    "many lists": b"[]," * (2**21 // 3),
    "escapes": b'"' + b"\\" * (2**21 - 1),
    "one integer": b'{"a":' + b"1" * (2**21 - 6) + b"}",
    "one fraction": b'{"a":0.' + b"1" * (2**21 - 8) + b"}",
    "many keys": b"{" + b",".join(b'"%d":0' % number for number in range(150_000)) + b"}",
}


@pytest.mark.parametrize("text", LARGE_TEXTS.values(), ids=LARGE_TEXTS)
def test_large_hostile_json_is_refused_quickly(text):
    start = time.process_time()
    refusal(_checkpoint.read_json, text)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "content",
    [with_header(describe(nbytes=2**40, shape=[2**38])), TINY_BINARY[:19] + b"\xff" * 8],
    ids=["arrays", "header"],
)
def test_huge_lengths_are_not_allocated(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    tracemalloc.start()
    refusal(_checkpoint.read_binary, tmp_path / "file")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_memory_is_bounded_by_the_arrays(tmp_path):
    state = large_state(4_000_000)
    arrays = 3 * 16_000_000
    tracemalloc.start()
    _checkpoint.write_binary(tmp_path / "file", state)
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.reset_peak()
    again = _checkpoint.read_binary(tmp_path / "file")
    assert tracemalloc.get_traced_memory()[1] < arrays + 8_000_000
    tracemalloc.stop()
    assert same(again, state)


# ---- limits and paths ------------------------------------------------------------------------------------------------


def test_json_is_refused_before_it_is_written(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(ValueError, match="2 MiB"):
        _checkpoint.write_json(tmp_path / "file", large_state(90_000))
    with pytest.raises(ValueError, match="holds at most 2097152 bytes and this one needs 2098"):
        _checkpoint.write_json(tmp_path / "file", large_state(87_370))
    assert (tmp_path / "file").read_bytes() == b"old"
    _checkpoint.write_json(tmp_path / "file", large_state(87_200))
    assert _checkpoint.read_json_file(tmp_path / "file")["m"].size == 87_200


def test_a_header_beyond_its_limit_is_refused_before_it_is_written(tmp_path):
    state = _checkpoint.read_json(TINY_JSON) | {"parameter_names": ["x" * 100] * 11_000}
    with pytest.raises(ValueError, match="too many layers"):
        _checkpoint.write_binary(tmp_path / "file", state)
    assert list(tmp_path.iterdir()) == []


def test_paths(tmp_path):
    state = _checkpoint.read_json(TINY_JSON)
    odd = tmp_path / "mit Leerzeichen ☃"
    odd.mkdir()
    longest = odd / ("x" * 255)
    for path in (longest, str(longest)):
        _checkpoint.write_binary(path, state)
        assert _checkpoint.format_of(path) == "binary"
        assert same(_checkpoint.read_binary(path), state)
    link = tmp_path / "link"
    link.symlink_to(longest)
    longest.chmod(0o600)
    _checkpoint.write_json(link, state)
    assert link.is_symlink()
    assert longest.read_bytes() == TINY_JSON
    assert longest.stat().st_mode & 0o777 == 0o600
    os.mkfifo(tmp_path / "pipe")
    for refused, kind in (
        (tmp_path, IsADirectoryError),
        (tmp_path / "pipe", OSError),
        (tmp_path / "no" / "x", FileNotFoundError),
    ):
        for function in (
            _checkpoint.read_binary,
            _checkpoint.read_json_file,
            lambda path: _checkpoint.write_json(path, state),
        ):
            with pytest.raises(kind) as refusal:
                function(refused)
            assert str(refused) in str(refusal.value)
    with pytest.raises(TypeError):
        _checkpoint.read_binary(3)
