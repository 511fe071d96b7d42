"""A folder on a local disk in which files appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from prefillcli.data.filesystems import writing
from prefillcli.data.output.locks import LOCK, FileLock, Lock, file_lock_held
from prefillcli.data.paths import split_path

_TEMPORARY = ".prefill-tmp"


class LocalStore:
    """A folder on a local disk: temporary file, fsync, rename, fsync of the folder.

    The operating system holds its lock, so that no other run writes here: `new` files need no care of their own.
    """

    beat_seconds = 5.0
    at_once = 1

    def __init__(self, location: str) -> None:
        self.location = location

    def names(self) -> list[str]:
        with writing(self.location):
            try:
                return sorted(name for name in os.listdir(self.location) if not name.endswith(_TEMPORARY))
            except FileNotFoundError:
                return []

    def folders(self) -> list[str]:
        with writing(self.location):
            try:
                return sorted(entry.name for entry in os.scandir(self.location) if entry.is_dir())
            except FileNotFoundError:
                return []

    def find(self, into: Callable[[str], bool]) -> list[str]:
        found = []
        with writing(self.location):
            for folder, folders, names in os.walk(self.location):
                folders[:] = filter(into, folders)
                inner = os.path.relpath(folder, self.location)
                found += [os.path.normpath(os.path.join(inner, n)) for n in names if not n.endswith(_TEMPORARY)]
        return sorted(found)

    def exists(self, name: str) -> bool:
        return os.path.lexists(self._path(name))

    def read(self, name: str) -> IO[bytes]:
        return open(self._path(name), "rb")

    def read_bytes(self, name: str) -> bytes:
        with self.read(name) as file:
            return file.read()

    @contextmanager
    def create(self, name: str, *, new: bool = False) -> Iterator[IO[bytes]]:
        path = self._path(name)
        folder, base = split_path(path)
        temporary = os.path.join(folder, f".{base}{_TEMPORARY}")
        try:
            with writing(path):
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

    def put_bytes(self, name: str, data: bytes, *, new: bool = False) -> None:
        with self.create(name) as file:
            file.write(data)

    def delete(self, name: str) -> None:
        with writing(self._path(name)), suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def remove(self) -> None:
        with writing(self.location), suppress(FileNotFoundError):
            shutil.rmtree(self.location)

    def delete_all(self, names: Iterable[str]) -> None:
        for name in names:
            self.delete(name)

    def clean(self, ours: Callable[[str], bool], into: Callable[[str], bool] = lambda folder: False) -> None:
        with writing(self.location):
            for folder, folders, names in os.walk(self.location):
                folders[:] = filter(into, folders)
                inner = os.path.relpath(folder, self.location)
                for name in names:
                    if name.startswith(".") and name.endswith(_TEMPORARY):
                        whole = os.path.normpath(os.path.join(inner, name[1 : -len(_TEMPORARY)]))
                        if ours(whole):
                            os.unlink(os.path.join(folder, name))

    def in_use(self) -> bool | None:
        with writing(self._path(LOCK)):
            return file_lock_held(self._path(LOCK))

    def lock(self) -> Lock:
        path = self._path(LOCK)
        with writing(path):
            while True:
                make_folder(self.location)
                lock = FileLock(path, self.location)
                if lock.stands:
                    return lock
                lock.release()

    def _path(self, name: str) -> str:
        return os.path.join(self.location, name)


def make_folder(path: str) -> None:
    """Make a local folder unless it exists, so that it survives a crash."""
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)
        sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    """Make the names in a local folder survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
