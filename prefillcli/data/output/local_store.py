"""A folder on a local disk in which files appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from prefillcli.data.filesystems import writing
from prefillcli.data.output.locks import LOCK, FileLock, Lock, file_lock_held
from prefillcli.data.paths import split_path
from prefillcli.runtime import file_calls

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
                names = [entry.name for entry in file_calls.list_folder(self.location)]
            except FileNotFoundError:
                return []
        return [name for name in names if not name.endswith(_TEMPORARY)]

    def folders(self) -> list[str]:
        with writing(self.location):
            try:
                return [entry.name for entry in file_calls.list_folder(self.location) if entry.is_dir()]
            except FileNotFoundError:
                return []

    def find(self, into: Callable[[str], bool]) -> list[str]:
        with writing(self.location):
            files = [path for path, folder in walk_folder(self.location, into) if not folder]
        return sorted(path for path in files if not path.endswith(_TEMPORARY))

    def exists(self, name: str) -> bool:
        with writing(self._path(name)):
            return file_calls.is_there(self._path(name))

    def read(self, name: str) -> IO[bytes]:
        return file_calls.open_to_read(self._path(name))

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
                with file_calls.open_to_write(temporary) as file:
                    yield file
                    file.flush()
                    file_calls.sync_file(file.fileno())
                file_calls.replace_file(temporary, path)
                file_calls.sync_folder(folder)
        except BaseException:
            with suppress(OSError):
                file_calls.remove_file(temporary)
            raise

    def put_bytes(self, name: str, data: bytes, *, new: bool = False) -> None:
        with self.create(name) as file:
            file.write(data)

    def delete(self, name: str) -> None:
        with writing(self._path(name)), suppress(FileNotFoundError):
            file_calls.remove_file(self._path(name))

    def remove(self) -> None:
        with writing(self.location), suppress(FileNotFoundError):
            file_calls.remove_tree(self.location)

    def delete_all(self, names: Iterable[str]) -> None:
        for name in names:
            self.delete(name)

    def clean(self, ours: Callable[[str], bool], into: Callable[[str], bool] = lambda folder: False) -> None:
        with writing(self.location):
            for path, is_folder in walk_folder(self.location, into):
                folder, name = split_path(path)
                half = not is_folder and name.startswith(".") and name.endswith(_TEMPORARY)
                if half and ours(os.path.normpath(os.path.join(folder, name[1 : -len(_TEMPORARY)]))):
                    file_calls.remove_file(self._path(path))

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
    """Make a local folder and those that it lies in, unless they exist, so that they survive a crash."""
    if not file_calls.is_folder(path):
        parent = os.path.dirname(path)
        make_folder(parent)
        file_calls.add_folder(path)
        file_calls.sync_folder(parent)


def walk_folder(path: str, into: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
    """The paths in a local folder, relative to it, each with whether it is a folder; nothing if there is none.

    What lies in a folder comes too if `into` accepts its name. Symbolic links are not followed. Raises OSError if a
    folder cannot be read: what is in it is not passed over.
    """
    waiting = [""]
    while waiting:
        inner = waiting.pop()
        try:
            entries = file_calls.list_folder(os.path.join(path, inner))
        except FileNotFoundError:
            continue
        for entry in entries:
            found, is_folder = os.path.join(inner, entry.name), entry.is_dir(follow_symlinks=False)
            yield found, is_folder
            if is_folder and into(entry.name):
                waiting.append(found)
