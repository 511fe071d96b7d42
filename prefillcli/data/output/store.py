"""Folders in which files appear whole or not at all, on a local disk or in an object store."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO, Any, Protocol

from prefillcli.data.filesystems import filesystem_of, is_local
from prefillcli.data.output.locks import LOCK, FileLock, Lock, ObjectLock, file_lock_held
from prefillcli.errors import PrefillError, ResourceError
from prefillcli.redaction import without_secrets

_TEMPORARY = ".prefill-tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Store(Protocol):
    """A folder. Errors name the path: ResourceError for a full disk or a held lock, else PrefillError."""

    location: str

    def names(self) -> list[str]:
        """Names of the files in it, sorted; none if the folder does not exist."""

    def find(self, into: Callable[[str], bool]) -> list[str]:
        """Paths of the files in it and in those of its folders whose names `into` accepts, relative to it, sorted."""

    def read(self, name: str) -> IO[bytes]:
        """A file, open for reading. Raises FileNotFoundError."""

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A file to write and read back; it appears (and replaces an older one) when the block ends without exception.

        Folders in `name` are made.
        """

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write a whole file."""

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""

    def clean(self, ours: Callable[[str], bool], into: Callable[[str], bool] = lambda folder: False) -> None:
        """Remove what killed runs left of half-written files whose name is `ours`, here and in folders like `find`."""

    def in_use(self) -> bool | None:
        """Whether a run holds the lock; None if that cannot be known from here, or there is no lock to hold."""

    def lock(self) -> Lock:
        """Keep other processes out. Raises OutputBusyError if one is in."""


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
        with using(self.location):
            try:
                return sorted(name for name in os.listdir(self.location) if not name.endswith(_TEMPORARY))
            except FileNotFoundError:
                return []

    def find(self, into: Callable[[str], bool]) -> list[str]:
        found = []
        with using(self.location):
            for folder, folders, names in os.walk(self.location):
                folders[:] = filter(into, folders)
                inner = os.path.relpath(folder, self.location)
                found += [os.path.normpath(os.path.join(inner, n)) for n in names if not n.endswith(_TEMPORARY)]
        return sorted(found)

    def read(self, name: str) -> IO[bytes]:
        return open(self._path(name), "rb")

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        path = self._path(name)
        folder, base = os.path.split(path)
        temporary = os.path.join(folder, f".{base}{_TEMPORARY}")
        try:
            with using(path):
                make_folder(folder)
                with open(temporary, "w+b") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
                sync_folder(folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def put_bytes(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    def delete(self, name: str) -> None:
        with using(self._path(name)), suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def clean(self, ours: Callable[[str], bool], into: Callable[[str], bool] = lambda folder: False) -> None:
        with using(self.location):
            for folder, folders, names in os.walk(self.location):
                folders[:] = filter(into, folders)
                inner = os.path.relpath(folder, self.location)
                for name in names:
                    if name.startswith(".") and name.endswith(_TEMPORARY):
                        whole = os.path.normpath(os.path.join(inner, name[1 : -len(_TEMPORARY)]))
                        if ours(whole):
                            os.unlink(os.path.join(folder, name))

    def in_use(self) -> bool | None:
        with using(self._path(LOCK)):
            return file_lock_held(self._path(LOCK))

    def lock(self) -> Lock:
        path = self._path(LOCK)
        with using(path):
            make_folder(self.location)
            return FileLock(path, self.location)

    def _path(self, name: str) -> str:
        return os.path.join(self.location, name)


class RemoteStore:
    """A folder of an object store, where an object appears when its upload is complete."""

    def __init__(self, filesystem: Any, inner: str, location: str) -> None:
        self.location = without_secrets(location)
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

    def find(self, into: Callable[[str], bool]) -> list[str]:
        with _using_remote(self.location):
            self._filesystem.invalidate_cache()
            root = str(self._filesystem._strip_protocol(self._inner)).rstrip("/") + "/"
            try:
                found = sorted(str(name).removeprefix(root) for name in self._filesystem.find(self._inner))
            except FileNotFoundError:
                return []
        return [name for name in found if all(map(into, name.split("/")[:-1]))]

    def read(self, name: str) -> IO[bytes]:
        file: IO[bytes] = self._filesystem.open(self._path(name), "rb")
        return file

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        with using(f"{self.location}/{name}"), tempfile.NamedTemporaryFile(prefix="prefill-") as file:
            yield file
            file.flush()
            with _using_remote(f"{self.location}/{name}"):
                self._filesystem.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
                self._filesystem.put_file(file.name, self._path(name))

    def put_bytes(self, name: str, data: bytes) -> None:
        with _using_remote(f"{self.location}/{name}"):
            self._filesystem.makedirs(self._inner, exist_ok=True)
            self._filesystem.pipe_file(self._path(name), data)

    def delete(self, name: str) -> None:
        with _using_remote(f"{self.location}/{name}"), suppress(FileNotFoundError):
            self._filesystem.rm_file(self._path(name))

    def clean(self, ours: Callable[[str], bool], into: Callable[[str], bool] = lambda folder: False) -> None:
        """Nothing to do: an upload that was cut off leaves no object."""

    def in_use(self) -> bool | None:
        with _using_remote(self.location):
            holder = ObjectLock.holder(self._filesystem, self._path(LOCK))
        return None if holder is None else holder.alive()

    def lock(self) -> Lock:
        with _using_remote(self.location):
            return ObjectLock(self._filesystem, self._path(LOCK), self.location)

    def _path(self, name: str) -> str:
        return f"{self._inner}/{name}"


@contextmanager
def using(path: str) -> Iterator[None]:
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
        with using(path):
            yield
    except PrefillError:
        raise
    except Exception as error:
        raise PrefillError(f"cannot use {path}: {type(error).__name__}: {error}") from error


def make_folder(path: str) -> None:
    """Make a local folder that is not there, so that it stays."""
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)
        sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    """Make the names in a local folder stay."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
