"""A folder of an object store, in which files appear whole or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from prefillcli.data.filesystems import writing
from prefillcli.data.output.locks import LOCK, Lock, ObjectLock
from prefillcli.data.paths import split_path
from prefillcli.errors import PrefillError
from prefillcli.redaction import without_secrets


class RemoteStore:
    """A folder of an object store, where an object appears when its upload is complete."""

    def __init__(self, filesystem: Any, inner: str, location: str) -> None:
        self.location = without_secrets(location)
        self._filesystem = filesystem
        self._inner = inner

    def names(self) -> list[str]:
        with _writing_remote(self.location):
            self._filesystem.invalidate_cache()
            try:
                entries = self._filesystem.ls(self._inner, detail=True)
            except FileNotFoundError:
                return []
            return sorted(split_path(str(e["name"]))[1] for e in entries if e["type"] == "file")

    def folders(self) -> list[str]:
        with _writing_remote(self.location):
            self._filesystem.invalidate_cache()
            try:
                entries = self._filesystem.ls(self._inner, detail=True)
            except FileNotFoundError:
                return []
            return sorted(split_path(str(e["name"]).rstrip("/"))[1] for e in entries if e["type"] == "directory")

    def find(self, into: Callable[[str], bool]) -> list[str]:
        with _writing_remote(self.location):
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
        with writing(f"{self.location}/{name}"), tempfile.NamedTemporaryFile(prefix="prefill-") as file:
            yield file
            file.flush()
            with _writing_remote(f"{self.location}/{name}"):
                self._filesystem.makedirs(split_path(self._path(name))[0], exist_ok=True)
                self._filesystem.put_file(file.name, self._path(name))

    def put_bytes(self, name: str, data: bytes) -> None:
        with _writing_remote(f"{self.location}/{name}"):
            self._filesystem.makedirs(self._inner, exist_ok=True)
            self._filesystem.pipe_file(self._path(name), data)

    def delete(self, name: str) -> None:
        with _writing_remote(f"{self.location}/{name}"), suppress(FileNotFoundError):
            self._filesystem.rm_file(self._path(name))

    def remove(self) -> None:
        """Nothing to do: the folder is there as long as objects are in it, and the lock goes when it is released."""

    def clean(self, ours: Callable[[str], bool], into: Callable[[str], bool] = lambda folder: False) -> None:
        """Nothing to do: an upload that was cut off leaves no object."""

    def in_use(self) -> bool | None:
        with _writing_remote(self.location):
            holder = ObjectLock.holder(self._filesystem, self._path(LOCK))
        return None if holder is None else holder.alive()

    def lock(self) -> Lock:
        with _writing_remote(self.location):
            return ObjectLock(self._filesystem, self._path(LOCK), self.location)

    def _path(self, name: str) -> str:
        return f"{self._inner}/{name}"


@contextmanager
def _writing_remote(path: str) -> Iterator[None]:
    """The same for the clients of object stores, which have exceptions of their own."""
    try:
        with writing(path):
            yield
    except PrefillError:
        raise
    except Exception as error:
        raise PrefillError(f"cannot use {path}: {type(error).__name__}: {error}") from error
