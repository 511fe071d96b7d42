"""Folders in which files appear whole or not at all, on a local disk or in an object store."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO, Any, Protocol

from prefillcli.data.filesystems import filesystem_of, is_local
from prefillcli.errors import OutputBusyError, PrefillError, ResourceError

LOCK = "lock"
_TEMPORARY = ".prefill-tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Store(Protocol):
    """A folder. Errors name the path: ResourceError for a full disk or a held lock, else PrefillError."""

    location: str

    def names(self) -> list[str]:
        """Names of the files in it, sorted; none if the folder does not exist."""

    def read(self, name: str) -> IO[bytes]:
        """A file, open for reading. Raises FileNotFoundError."""

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A file to write; it appears (and replaces an older one) when the block ends without exception."""

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write a whole file."""

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""

    def clean(self, ours: Callable[[str], bool]) -> None:
        """Remove what killed runs left of half-written files whose name is `ours`."""

    def lock(self) -> Callable[[], None]:
        """Keep other processes out; the result gives the lock back. Raises ResourceError if one is in."""


def open_store(url: str) -> Store:
    """The folder at a local path or URL; it need not exist yet. Raises UsageError for an unknown protocol."""
    filesystem, inner = filesystem_of(url)
    if is_local(filesystem):
        return LocalStore(inner)
    return RemoteStore(filesystem, inner, url)


class LocalStore:
    """A folder on a local disk: temporary file, fsync, rename, fsync of the folder."""

    def __init__(self, location: str) -> None:
        self.location = location

    def names(self) -> list[str]:
        with _using(self.location):
            try:
                return sorted(name for name in os.listdir(self.location) if not name.endswith(_TEMPORARY))
            except FileNotFoundError:
                return []

    def read(self, name: str) -> IO[bytes]:
        return open(self._path(name), "rb")

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        path, temporary = self._path(name), self._path(f".{name}{_TEMPORARY}")
        try:
            with _using(path):
                self._make()
                with open(temporary, "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
                _sync_folder(self.location)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def put_bytes(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    def delete(self, name: str) -> None:
        with _using(self._path(name)), suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def clean(self, ours: Callable[[str], bool]) -> None:
        with _using(self.location), suppress(FileNotFoundError):
            for name in os.listdir(self.location):
                if name.startswith(".") and name.endswith(_TEMPORARY) and ours(name[1 : -len(_TEMPORARY)]):
                    os.unlink(self._path(name))

    def lock(self) -> Callable[[], None]:
        path = self._path(LOCK)
        with _using(path):
            self._make()
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 100, 0).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise OutputBusyError(
                f"{self.location} is in use by process {holder}\nwait for its end, or choose another --output"
            ) from None
        except OSError as error:
            os.close(handle)
            raise PrefillError(f"cannot lock {path}: {error.strerror}") from None
        with _using(path):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        return lambda: os.close(handle)

    def _path(self, name: str) -> str:
        return os.path.join(self.location, name)

    def _make(self) -> None:
        if not os.path.isdir(self.location):
            os.makedirs(self.location, exist_ok=True)
            _sync_folder(os.path.dirname(self.location))


class RemoteStore:
    """A folder of an object store, where an object appears when its upload is complete. It has no lock."""

    def __init__(self, filesystem: Any, inner: str, location: str) -> None:
        self.location = location
        self._filesystem = filesystem
        self._inner = inner

    def names(self) -> list[str]:
        with _using_remote(self.location):
            self._filesystem.invalidate_cache()
            try:
                entries = self._filesystem.ls(self._inner, detail=True)
            except FileNotFoundError:
                return []
            return sorted(str(e["name"]).rpartition("/")[2] for e in entries if e["type"] == "file")

    def read(self, name: str) -> IO[bytes]:
        file: IO[bytes] = self._filesystem.open(self._path(name), "rb")
        return file

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        with _using(f"{self.location}/{name}"), tempfile.NamedTemporaryFile(prefix="prefill-") as file:
            yield file
            file.flush()
            with _using_remote(f"{self.location}/{name}"):
                self._filesystem.makedirs(self._inner, exist_ok=True)
                self._filesystem.put_file(file.name, self._path(name))

    def put_bytes(self, name: str, data: bytes) -> None:
        with _using_remote(f"{self.location}/{name}"):
            self._filesystem.makedirs(self._inner, exist_ok=True)
            self._filesystem.pipe_file(self._path(name), data)

    def delete(self, name: str) -> None:
        with _using_remote(f"{self.location}/{name}"), suppress(FileNotFoundError):
            self._filesystem.rm_file(self._path(name))

    def clean(self, ours: Callable[[str], bool]) -> None:
        """Nothing to do: an upload that was cut off leaves no object."""

    def lock(self) -> Callable[[], None]:
        return lambda: None

    def _path(self, name: str) -> str:
        return f"{self._inner}/{name}"


@contextmanager
def _using(path: str) -> Iterator[None]:
    """Turn what a disk or an object store raises into an error that names `path`."""
    try:
        yield
    except PrefillError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise ResourceError(
                f"no space left on the device for {path}\nmake room, then run again with --resume"
            ) from error
        raise PrefillError(f"cannot use {path}: {error.strerror or error}") from error


@contextmanager
def _using_remote(path: str) -> Iterator[None]:
    """The same for the clients of object stores, which have exceptions of their own."""
    try:
        with _using(path):
            yield
    except PrefillError:
        raise
    except Exception as error:
        raise PrefillError(f"cannot use {path}: {type(error).__name__}: {error}") from error


def _sync_folder(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
