"""The calls that touch the files of a run on a local disk, each in its own function.

An output, its parts and manifest, locks, heartbeats and reports are read and written through these alone, called as
`file_calls.replace_file(...)`. So there is one place where any call of a run can fail, end the process or hang:
`tests/faults` lets them do so one after another. Errors are those of the operating system.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import stat
import tempfile
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_READ_BLOCK = 1 << 20  # bytes


class LocalFile(io.FileIO):
    """An unbuffered file that is read and written by the calls of this module."""

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        return read_into(self.fileno(), buffer)

    def readall(self) -> bytes:
        found, block = bytearray(), bytearray(_READ_BLOCK)
        while size := self.readinto(block):
            found += block[:size]
        return bytes(found)

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        block = bytearray(size)
        return bytes(block[: self.readinto(block)])

    def write(self, data: ReadableBuffer, /) -> int:
        return write_bytes(self.fileno(), data)


def open_to_read(path: str, *, pipes: bool = False) -> IO[bytes]:
    """Open a file for reading, and return it; with `pipes` also a pipe, or the empty `/dev/null`.

    Raises FileNotFoundError, and OSError for anything else that is not a file: a device has no end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer must not block
    try:
        found = os.fstat(handle)
        empty = stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev
        if not (stat.S_ISREG(found.st_mode) or (pipes and (stat.S_ISFIFO(found.st_mode) or empty))):
            kind = (errno.EISDIR, "a folder") if stat.S_ISDIR(found.st_mode) else (errno.ENODEV, "a device or a pipe")
            raise OSError(kind[0], f"it is {kind[1]}, not a file", path)
        os.set_blocking(handle, True)
        return io.BufferedReader(LocalFile(handle, "r"))
    except BaseException:
        os.close(handle)
        raise


def open_to_write(path: str) -> IO[bytes]:
    """Open a new file instead of any older one for writing and reading, and return it."""
    return io.BufferedRandom(LocalFile(path, "w+"))


def open_unnamed() -> IO[bytes]:
    """Open a file in the folder for temporary files for writing and reading; it vanishes when it is closed.

    Until then it has a name, in `name`.
    """
    handle, path = tempfile.mkstemp(prefix="prefill-")
    os.close(handle)
    return _Unnamed(LocalFile(path, "w+"))


class _Unnamed(io.BufferedRandom):
    def close(self) -> None:
        if not self.closed:
            os.unlink(self.name)
        super().close()


def open_lock(path: str) -> int:
    """Open the file that stands for a lock, and return its handle; it is made if it does not exist."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def read_into(handle: int, buffer: WriteableBuffer) -> int:
    """Read as much of a file as fits; returns how many bytes that is, 0 at the end."""
    return os.readv(handle, [buffer])


def write_bytes(handle: int, data: ReadableBuffer) -> int:
    """Write to a file; returns how many bytes were written, which may be less than all."""
    return os.write(handle, data)


def first_bytes(handle: int) -> bytes:
    """Return the beginning of an open file, a hundred bytes at most."""
    return os.pread(handle, 100, 0)


def has_name(handle: int) -> bool:
    """Return whether an open file can still be found in a folder."""
    return os.fstat(handle).st_nlink > 0


def put_content(handle: int, data: bytes) -> None:
    """Replace the whole content of an open file by these few bytes."""
    os.ftruncate(handle, 0)
    os.pwrite(handle, data, 0)


def sync_file(handle: int) -> None:
    """Make the content of a file survive a crash of the machine."""
    os.fsync(handle)


def sync_folder(path: str) -> None:
    """Make the names in a folder survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(source: str, path: str) -> None:
    """Give a file the name `path`, replacing the file that had it."""
    os.replace(source, path)


def move_folder(source: str, path: str) -> None:
    """Give a folder the name `path`, which no other has."""
    os.rename(source, path)


def copy_modes(source: str, path: str) -> None:
    """Give `path` the modes and times of `source`."""
    shutil.copystat(source, path)


def remove_file(path: str) -> None:
    """Remove a file. Raises FileNotFoundError."""
    os.unlink(path)


def remove_tree(path: str) -> None:
    """Remove a folder with its contents. Raises FileNotFoundError."""
    shutil.rmtree(path)


def add_folder(path: str) -> None:
    """Make one folder, unless it exists; its parent must exist."""
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def list_folder(path: str) -> list[os.DirEntry[str]]:
    """Return the names in a folder, sorted. Raises FileNotFoundError."""
    with os.scandir(path) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def is_there(path: str) -> bool:
    """Return whether anything has this name, even a symbolic link that leads nowhere."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_folder(path: str) -> bool:
    """Return whether a folder has this name, or a symbolic link leads to one."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def try_lock(handle: int, *, shared: bool) -> bool:
    """Lock an open file, for this process alone or `shared`; False if another process has locked it."""
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
