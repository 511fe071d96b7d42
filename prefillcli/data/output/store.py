"""Folders in which files appear whole or not at all, on a local disk or in an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import IO, Protocol

from prefillcli.data.filesystems import filesystem_of, is_local, written_path
from prefillcli.data.output.local_store import LocalStore
from prefillcli.data.output.locks import Lock
from prefillcli.data.output.remote_store import RemoteStore
from prefillcli.data.paths import split_path


class Store(Protocol):
    """A folder. Errors name the path: ResourceError for a full disk or a held lock, else PrefillError."""

    location: str
    beat_seconds: float
    """Seconds between two signs of life that a run leaves in it."""
    at_once: int
    """Files that are read or removed at a time where there are many: in an object store, waiting takes the time."""

    def names(self) -> list[str]:
        """Names of the files in it, sorted; none if the folder does not exist."""

    def folders(self) -> list[str]:
        """Names of the folders in it, sorted; none if it does not exist."""

    def find(self, into: Callable[[str], bool]) -> list[str]:
        """Paths of the files in it and in those of its folders whose names `into` accepts, relative to it, sorted."""

    def exists(self, name: str) -> bool:
        """Whether a file is there now."""

    def read(self, name: str) -> IO[bytes]:
        """A file, open for reading. Raises FileNotFoundError."""

    def read_bytes(self, name: str) -> bytes:
        """A whole file. Raises FileNotFoundError."""

    def create(self, name: str, *, new: bool = False) -> AbstractContextManager[IO[bytes]]:
        """A file to write and read back; it appears (and replaces an older one) when the block ends without exception.

        Folders in `name` are made. A `new` file replaces none: where another run may have written one, and the store
        has conditional writes, OutputBusyError is raised.
        """

    def put_bytes(self, name: str, data: bytes, *, new: bool = False) -> None:
        """Write a whole file; `new` as in `create`."""

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""

    def remove(self) -> None:
        """Remove the folder with what is left in it. A lock in it must be held by who calls this."""

    def delete_all(self, names: Iterable[str]) -> None:
        """Remove files."""

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


def put_text(path: str, text: str) -> None:
    """Write a whole file at a local path or URL; a symbolic link stays one. Raises PrefillError."""
    folder, name = split_path(written_path(path, "cannot write"))
    open_store(folder).put_bytes(name, text.encode())
