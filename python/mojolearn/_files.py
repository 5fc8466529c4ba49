# SPDX-License-Identifier: Apache-2.0
"""Files that survive a crash: atomic replacement, and reads that trust no length.

`write_atomically` leaves either the old file or the complete new one under the given name, whatever happens in between.
It writes to a temporary file in the same folder, which it holds locked. A save that was killed leaves that file behind
without its lock: the next save of the same name finds it and removes it.
"""

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FileOperations:
    """Every call that this module makes to the operating system. Tests replace members to inject faults."""

    open: Callable[..., int] = os.open
    stat: Callable[[str], os.stat_result] = os.stat
    fstat: Callable[[int], os.stat_result] = os.fstat
    listdir: Callable[[str], list[str]] = os.listdir
    flock: Callable[[int, int], None] = fcntl.flock
    write: Callable[[int, Any], int] = os.write
    preadv: Callable[[int, list[Any], int], int] = os.preadv
    fsync: Callable[[int], None] = os.fsync
    replace: Callable[[str, str], None] = os.replace
    unlink: Callable[[str], None] = os.unlink
    close: Callable[[int], None] = os.close


operations = FileOperations()


@contextmanager
def _errors_name(path: str) -> Iterator[None]:
    """Makes every OSError name the file that the caller asked for, not a temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def write_atomically(path: str, parts: Sequence["bytes | memoryview"]) -> None:
    """Makes `path` a file that holds the `parts` in order, durably; on any error `path` is as it was before.

    A symbolic link is followed. The one error after which the new file is already in place is that of flushing its
    folder: then the new file is complete, but a power cut may still bring back the old one.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    prefix = f".mojolearn-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}-"
    with _errors_name(path):
        mode = _mode_of(target)
        directory = operations.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _remove_leftovers(folder, prefix)
            temporary, descriptor = _create_temporary(os.path.join(folder, prefix), mode)
            try:
                for part in parts:
                    _write_all(descriptor, memoryview(part))
                operations.fsync(descriptor)
                operations.replace(temporary, target)
            except BaseException:
                with suppress(OSError):
                    operations.unlink(temporary)
                raise
            finally:
                _close(descriptor)
            _flush_folder(directory)
        finally:
            _close(directory)


def _mode_of(target: str) -> int:
    """The permissions for the new file: those of the file it replaces. Refuses to replace a folder, device or pipe."""
    try:
        mode = operations.stat(target).st_mode
    except FileNotFoundError:
        return 0o666
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file")
    return stat.S_IMODE(mode) & 0o777


def _create_temporary(prefix: str, mode: int) -> tuple[str, int]:
    while True:
        temporary = f"{prefix}{os.urandom(16).hex()}.tmp"
        descriptor = operations.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            with suppress(OSError):  # a filesystem without locks: leftovers are then never removed
                operations.flock(descriptor, fcntl.LOCK_EX)
            if operations.fstat(descriptor).st_nlink:
                return temporary, descriptor
        except BaseException:
            with suppress(OSError):
                operations.unlink(temporary)
            _close(descriptor)
            raise
        _close(descriptor)  # another save took the file for a leftover before it was locked


def _remove_leftovers(folder: str, prefix: str) -> None:
    """Removes temporary files whose writers are dead: those on which nobody holds a lock."""
    with suppress(OSError):
        for name in operations.listdir(folder):
            if name.startswith(prefix):
                with suppress(OSError):
                    _remove_unlocked(os.path.join(folder, name))


def _remove_unlocked(leftover: str) -> None:
    descriptor = operations.open(leftover, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        operations.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        operations.unlink(leftover)
    finally:
        _close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    data = data.cast("B")
    while data:
        data = data[operations.write(descriptor, data) :]


def _flush_folder(directory: int) -> None:
    try:
        operations.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # filesystems that cannot flush a folder
            raise


def _close(descriptor: int) -> None:
    with suppress(OSError):  # what matters has been flushed, or is being given up
        operations.close(descriptor)


@dataclass(frozen=True)
class Source:
    """A regular file open for reading."""

    descriptor: int
    size: int

    def read_into(self, buffer: "bytearray | memoryview", offset: int) -> None:
        """Fills the whole buffer from `offset` on; several threads may call this at once."""
        view = memoryview(buffer).cast("B")
        while view:
            count = operations.preadv(self.descriptor, [view], offset)
            if not count:
                raise ValueError("the file became shorter while it was read")
            view, offset = view[count:], offset + count

    def read(self, offset: int, count: int) -> bytearray:
        """The `count` bytes from `offset` on. Compare count with `size` first: it is allocated as given."""
        data = bytearray(count)
        self.read_into(data, offset)
        return data

    def begins_with(self, magic: bytes) -> bool:
        return self.size >= len(magic) and self.read(0, len(magic)) == magic


@contextmanager
def reading(path: str) -> Iterator[Source]:
    """Opens a regular file; a ValueError raised inside names it. Fails if the file is changed meanwhile."""
    with _errors_name(path):
        descriptor = operations.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not block
        try:
            before = operations.fstat(descriptor)
            if stat.S_ISDIR(before.st_mode):
                raise IsADirectoryError(errno.EISDIR, "Is a directory")
            if not stat.S_ISREG(before.st_mode):
                raise OSError(errno.EINVAL, "Not a regular file")
            try:
                yield Source(descriptor, before.st_size)
                after = operations.fstat(descriptor)
                if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                    raise ValueError("the file was changed while it was read")
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        finally:
            _close(descriptor)
