# SPDX-License-Identifier: Apache-2.0
"""Saving and loading while the system fails: every call that can fail does, saves are killed, the disk is full."""

import dataclasses
import errno
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from checkpoint_files import RECORDED, TINY_BINARY, TINY_JSON, large_state, same
from mojolearn import _checkpoint, _files

OPERATIONS = [field.name for field in dataclasses.fields(_files.FileOperations)]


def failing(name, call, persistent, error):
    """The operations of the system, of which one fails from the given call on, or at that call only."""
    real = getattr(_files.FileOperations(), name)
    count = 0

    def operation(*arguments):
        nonlocal count
        count += 1
        if count < call or (count > call and not persistent):
            return real(*arguments)
        if name == "close":
            real(*arguments)
        raise error

    operations = dataclasses.replace(_files.FileOperations(), **{name: operation})
    return operations, lambda: count >= call


def test_a_save_is_flushed_before_the_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    system = _files.FileOperations()
    log, opened = [], {}

    def opens(path, flags, mode=0):
        descriptor = system.open(path, flags, mode)
        opened[descriptor] = path
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            assert os.path.dirname(path) == str(tmp_path)
            log.append("create")
        return descriptor

    def writes(descriptor, data):
        log.append("write")
        return system.write(descriptor, data)

    def flushes(descriptor):
        log.append("flush folder" if opened[descriptor] == str(tmp_path) else "flush file")
        system.fsync(descriptor)

    def renames(source, target):
        log.append("rename")
        system.replace(source, target)

    replaced = {"open": opens, "write": writes, "fsync": flushes, "replace": renames}
    monkeypatch.setattr(_files, "operations", dataclasses.replace(system, **replaced))
    _checkpoint.write_json(tmp_path / "file", _checkpoint.read_json(TINY_JSON))
    assert log == ["create", "write", "flush file", "rename", "flush folder"]


def attempt(function, *arguments):
    """What the call raises, or None."""
    try:
        function(*arguments)
    except (OSError, KeyboardInterrupt) as error:
        return error
    return None


@pytest.mark.parametrize("write", [_checkpoint.write_json, _checkpoint.write_binary])
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["EIO", "Ctrl-C"]
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_failing_save_leaves_the_old_file(name, error, persistent, write, tmp_path, monkeypatch):
    path = tmp_path / "file"
    old, new = large_state(1000), large_state(2000)
    write(tmp_path / "new", new)
    complete = (tmp_path / "new").read_bytes()
    (tmp_path / "new").unlink()
    write(path, old)
    before = path.read_bytes()
    failures = 0
    while True:
        operations, reached = failing(name, failures + 1, persistent, error)
        monkeypatch.setattr(_files, "operations", operations)
        result = attempt(write, path, new)
        monkeypatch.undo()
        after_rename = (name == "fsync" and failures == 1) or (
            name == "close" and isinstance(result, KeyboardInterrupt)
        )
        if result is None or after_rename:
            assert path.read_bytes() == complete
        else:
            assert path.read_bytes() == before
            assert isinstance(result, KeyboardInterrupt) or str(path) in str(result)
        assert os.listdir(tmp_path) == ["file"]
        write(path, old)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["file"]
        if not reached():
            break
        failures += 1
    assert result is None
    assert (failures > 0) == (name not in ("preadv", "unlink"))  # a save that succeeds makes no such calls


@pytest.mark.parametrize("name", ["open", "fstat", "preadv"])
def test_a_failing_load_names_the_file(name, monkeypatch):
    operations, _ = failing(name, 1, True, OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(_files, "operations", operations)
    for read, path in (
        (_checkpoint.read_binary, RECORDED / "tiny.mjl"),
        (_checkpoint.read_json_file, RECORDED / "tiny.json"),
    ):
        with pytest.raises(OSError, match="tiny"):
            read(path)


def test_debris_that_cannot_be_removed_is_removed_by_the_next_save(tmp_path, monkeypatch):
    path, state = tmp_path / "file", _checkpoint.read_json(TINY_JSON)
    system = _files.FileOperations()

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(_files, "operations", dataclasses.replace(system, fsync=fails, unlink=fails))
    for count in (1, 2):
        with pytest.raises(OSError, match=re.escape(str(path))):
            _checkpoint.write_json(path, state)
        assert len(os.listdir(tmp_path)) == count
    monkeypatch.undo()
    (tmp_path / ".mojolearn-of-another-file.tmp").touch()
    _checkpoint.write_json(path, state)
    assert sorted(os.listdir(tmp_path)) == [".mojolearn-of-another-file.tmp", "file"]


def test_short_reads_and_writes_are_continued(tmp_path, monkeypatch):
    system = _files.FileOperations()
    short = dataclasses.replace(
        system,
        write=lambda descriptor, data: system.write(descriptor, data[:999]),
        preadv=lambda descriptor, views, offset: system.preadv(descriptor, [views[0][:999]], offset),
    )
    monkeypatch.setattr(_files, "operations", short)
    digest = _checkpoint.write_binary(tmp_path / "file", large_state(5000))
    assert hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest() == digest
    assert same(_checkpoint.read_binary(tmp_path / "file"), large_state(5000))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(TINY_BINARY)
    system = _files.FileOperations()

    def shrinking(descriptor, views, offset):
        os.truncate(path, 100)
        return system.preadv(descriptor, views, offset)

    monkeypatch.setattr(_files, "operations", dataclasses.replace(system, preadv=shrinking))
    with pytest.raises(ValueError, match="became shorter"):
        _checkpoint.read_binary(path)

    path.write_bytes(TINY_BINARY)
    os.utime(path, ns=(0, 0))

    def touching(descriptor, views, offset):
        count = system.preadv(descriptor, views, offset)
        with open(path, "r+b") as file:
            file.write(b"M")
        return count

    monkeypatch.setattr(_files, "operations", dataclasses.replace(system, preadv=touching))
    with pytest.raises(ValueError, match="changed while it was read"):
        _checkpoint.read_binary(path)


def test_a_living_save_is_not_taken_for_a_leftover(tmp_path, monkeypatch):
    system = _files.FileOperations()
    state = large_state(1000)

    def saves_meanwhile(descriptor, data):
        monkeypatch.setattr(_files, "operations", system)
        _checkpoint.write_json(tmp_path / "file", state)  # another save of the same name, while this one is not done
        return system.write(descriptor, data)

    monkeypatch.setattr(_files, "operations", dataclasses.replace(system, write=saves_meanwhile))
    _checkpoint.write_binary(tmp_path / "file", state)
    assert same(_checkpoint.read_binary(tmp_path / "file"), state)
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_taken_for_a_leftover_before_it_was_locked_is_replaced(tmp_path, monkeypatch):
    system = _files.FileOperations()
    removed = []

    def removes_first(descriptor, operation):
        if not removed:
            removed.extend(tmp_path.glob(".mojolearn-*"))
            removed[0].unlink()
        system.flock(descriptor, operation)

    monkeypatch.setattr(_files, "operations", dataclasses.replace(system, flock=removes_first))
    _checkpoint.write_json(tmp_path / "file", _checkpoint.read_json(TINY_JSON))
    assert (tmp_path / "file").read_bytes() == TINY_JSON
    assert len(removed) == 1
    assert os.listdir(tmp_path) == ["file"]


SAVES_FOREVER = """
import sys
from mojolearn import _checkpoint
states = [_checkpoint.read_binary(path) for path in sys.argv[2:]]
print("ready", flush=True)
while True:
    for state in states:
        _checkpoint.write_binary(sys.argv[1], state)
"""


def kill_while_saving(path, sources, delay):
    with subprocess.Popen([sys.executable, "-c", SAVES_FOREVER, path, *sources], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def test_killed_at_any_time_the_file_is_whole_and_the_next_save_succeeds(tmp_path):
    folder, path = tmp_path / "saves", tmp_path / "saves" / "file"
    folder.mkdir()
    sources = [tmp_path / "a", tmp_path / "b"]
    for source, count in zip(sources, (200_000, 150_000), strict=True):
        _checkpoint.write_binary(source, large_state(count))
    whole = {source.read_bytes() for source in sources}
    path.write_bytes(sources[0].read_bytes())
    leftovers = 0
    rng = random.Random(1)
    for _ in range(20):
        kill_while_saving(path, sources, rng.uniform(0, 0.03))
        assert path.read_bytes() in whole
        names = os.listdir(folder)
        assert len(names) <= 2  # each run removed what the run before it left
        leftovers += len(names) - 1
    assert leftovers  # else the loop never killed a save
    _checkpoint.write_binary(path, large_state(200_000))
    assert os.listdir(folder) == ["file"]
    assert path.read_bytes() in whole


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"a small filesystem cannot be mounted here: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_on_a_full_disk_the_old_file_stays(small_disk, tmp_path):
    path, small, large = small_disk / "file", large_state(50_000), large_state(150_000)
    _checkpoint.write_binary(path, small)
    before = path.read_bytes()
    for _ in range(3):
        with pytest.raises(OSError, match=re.escape(str(path))) as refusal:
            _checkpoint.write_binary(path, large)
        assert refusal.value.errno == errno.ENOSPC
        assert path.read_bytes() == before
    assert os.listdir(small_disk) == ["file"]
    source = tmp_path / "source"
    _checkpoint.write_binary(source, large_state(80_000))
    path.unlink()
    for _ in range(5):  # old file, one leftover and the new file do not fit together: leftovers must go first
        kill_while_saving(path, [source], 0.01)
    _checkpoint.write_binary(path, large_state(80_000))
    assert path.read_bytes() == source.read_bytes()
    assert os.listdir(small_disk) == ["file"]
