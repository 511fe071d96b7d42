"""Folders of an output on a disk or in an object store, their locks, and the signs of life of a run.

Also small files with a checksum, which commands write and options name.
"""

from __future__ import annotations

import datetime
import inspect
import io
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from pydantic import TypeAdapter

from prefillcli.errors import OutputBusyError, PrefillError, ResourceError, UsageError, run_again, without_secrets
from prefillcli.rows.filesystems import (
    Failure,
    explained,
    filesystem_of,
    impatiently,
    is_local,
    patiently,
    read_given,
    split_path,
    writing,
    written_path,
)
from prefillcli.rows.proof import sealed_text, take_checksum
from prefillcli.runtime import file_calls, log
from prefillcli.runtime.clock import Pace
from prefillcli.runtime.signals import process_space, start_of

LOCK = "lock"
_HOPELESS = {Failure.PASSING, Failure.REFUSED, Failure.MISSING}  # no other write would succeed either
_PATIENCE = 0.5  # seconds: a process that only checks for a run holds the lock just for an instant


class Lock:
    """A lock that this process holds. This one is of nothing."""

    def check(self) -> None:
        """Raise OutputBusyError if another process has taken the lock."""

    def release(self) -> None:
        """Give it back; a second call does nothing."""


@dataclass(frozen=True)
class Owner:
    """A process, distinct from all others, even from earlier ones with the same number."""

    host: str
    pid: int
    started: str  # start of the process, as the system counts it; empty if not known
    machine: str  # this start of the machine, with the namespace of its processes; empty if not known
    token: str
    since: str

    @classmethod
    def this(cls) -> Owner:
        """Return this process, with its own token."""
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(socket.gethostname(), os.getpid(), start_of(os.getpid()), process_space(), uuid.uuid4().hex, since)

    def alive(self) -> bool | None:
        """Return whether the process still runs; None if this machine cannot know."""
        here = process_space()
        if not here or self.machine != here or not self.started:
            return None
        return start_of(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


_OWNER = TypeAdapter(Owner)


class FileLock(Lock):
    """A lock on a local file; it ends with the process that holds it, and no other process can take it."""

    def __init__(self, path: str, location: str) -> None:
        handle = file_calls.open_lock(path)
        try:
            if not _locked(handle, shared=False, patience=_PATIENCE):
                holder = file_calls.first_bytes(handle).decode(errors="replace").strip() or "unknown"
                raise OutputBusyError(
                    f"{location} is in use by process {holder}\nwait for its end, or choose another --output"
                )
            file_calls.put_content(handle, f"{os.getpid()}\n".encode())
        except OSError as error:
            os.close(handle)
            raise PrefillError(f"cannot lock {path}: {error.strerror}") from None
        except BaseException:
            os.close(handle)
            raise
        self._handle: int | None = handle

    @property
    def stands(self) -> bool:
        """Return whether its file still exists; the earlier holder of the lock may have removed the folder."""
        return self._handle is not None and file_calls.has_name(self._handle)

    def release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


class ObjectLock(Lock):
    """A lock that is an object, in a store that can refuse to create an object twice.

    If the store cannot, a warning is logged and nothing is locked.
    """

    def __init__(self, filesystem: Any, path: str, location: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self._location = location
        self._owner = Owner.this()
        self._held = False
        holder = self.holder(filesystem, path)
        if holder is not None and holder.alive() is False:
            self._delete()  # this may delete a new lock of another run; its `check` notices that
        create = exclusive_put(filesystem)
        if create is None:
            self._refuse_if_held()
        if create is None or not self._create(create):
            log.warning(
                f"{location} cannot be locked: its filesystem has no exclusive writes\n"
                "make sure that no two runs write this output at a time"
            )

    @staticmethod
    def holder(filesystem: Any, path: str) -> Owner | None:
        """Return the owner that a lock names; None if there is no lock."""
        try:
            filesystem.invalidate_cache()
            return _OWNER.validate_json(patiently(lambda: filesystem.cat_file(path)))
        except FileNotFoundError:
            return None
        except ValueError:
            return Owner("an unknown host", 0, "", "", "", "an unknown time")

    def check(self) -> None:
        mine = True
        if self._held:
            with suppress(Exception):  # a store that cannot be read raises an error at the next write
                mine = self._mine()
        if not mine:
            self._held = False
            raise OutputBusyError(
                f"the lock of {self._location} was taken away while this run held it\n"
                f"see which other run writes this output, then {run_again()}"
            )

    def release(self) -> None:
        with suppress(Exception):  # a lock that stays is later recognised as dead
            if self._held and self._mine():
                self._delete()
        self._held = False

    def _create(self, create: Callable[[str, bytes], None]) -> bool:
        # Take the lock. False if the store cannot refuse; raises OutputBusyError if another run holds it.
        data = json.dumps(asdict(self._owner)).encode()
        failed = self._attempt(create, data)
        if not self._mine():  # clients refuse with various errors; only the owner of the object counts
            self._refuse_if_held()
            if failed is not None and Failure.of(failed) in _HOPELESS:
                raise failed
            return False
        if self._attempt(create, data) is not None:  # it refuses
            self._held = True
            return True
        self._delete()
        return False

    def _attempt(self, create: Callable[[str, bytes], None], data: bytes) -> Exception | None:
        try:
            patiently(lambda: create(self._path, data))
        except Exception as error:
            return error
        return None

    def _refuse_if_held(self) -> None:
        holder = self.holder(self._filesystem, self._path)
        if holder is None:
            return
        raise OutputBusyError(
            f"{self._location} is in use by {holder}; `prefill status` shows when it was last seen\n"
            f"wait for its end; if it is dead, delete {self._location}/{LOCK}"
        )

    def _mine(self) -> bool:
        holder = self.holder(self._filesystem, self._path)
        return holder is not None and holder.token == self._owner.token

    def _delete(self) -> None:
        with suppress(Exception):
            patiently(lambda: self._filesystem.rm_file(self._path))


def _locked(handle: int, *, shared: bool, patience: float) -> bool:
    end = time.monotonic() + patience
    while not file_calls.try_lock(handle, shared=shared):
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


def exclusive_put(filesystem: Any, method: str = "pipe_file") -> Callable[[Any, Any], None] | None:
    """Return `pipe_file(path, data)` or `put_file(local, path)` of a filesystem, for objects that are not there yet.

    The error that it raises if the object exists depends on the client. None if the filesystem cannot do that in one
    step. Even if it can, the store may ignore the request.
    """
    kind, call = type(filesystem), getattr(filesystem, method)
    base: type = AbstractFileSystem
    if issubclass(kind, AsyncFileSystem):
        base, method = AsyncFileSystem, f"_{method}"
    own = getattr(kind, method)
    if own is getattr(base, method):  # fsspec's own method looks first and then writes: two runs may both find nothing
        return None
    parameters = inspect.signature(own).parameters
    if "mode" in parameters:  # s3fs, gcsfs
        return partial(call, mode="create")
    return partial(call, overwrite=False) if "overwrite" in parameters else None  # adlfs


# A folder on a local disk in which files appear whole or not at all.


_TEMPORARY = ".prefill-tmp"


class LocalStore:
    """A folder on a local disk: temporary file, fsync, rename, fsync of the folder.

    The operating system holds its lock, so no other run writes here and `new` files need no special care.
    Errors name the path: ResourceError for a full disk or a held lock, else PrefillError.
    """

    beat_seconds = 5.0  # seconds between two signs of life that a run leaves in it
    # Files that are read or removed at a time: in an object store most of the time is waiting.
    at_once = 1

    def __init__(self, location: str) -> None:
        self.location = location

    def names(self) -> list[str]:
        """Return the names of the files in it, sorted; none if the folder does not exist."""
        return [entry.name for entry in self._entries() if not entry.name.endswith(_TEMPORARY)]

    def folders(self) -> list[str]:
        """Return the names of the folders in it, sorted; none if it does not exist."""
        return [entry.name for entry in self._entries() if entry.is_dir()]

    def find(self, into: Callable[[str], bool]) -> list[str]:
        """Return the paths of the files in it and in those of its folders whose names `into` accepts, relative to it,
        sorted."""
        with writing(self.location):
            files = [path for path, folder in walk_folder(self.location, into) if not folder]
        return sorted(path for path in files if not path.endswith(_TEMPORARY))

    def exists(self, name: str) -> bool:
        """Return whether a file exists now."""
        with writing(self._path(name)):
            return file_calls.is_there(self._path(name))

    def read(self, name: str) -> IO[bytes]:
        """Open a file for reading. Raises FileNotFoundError."""
        return file_calls.open_to_read(self._path(name))

    def read_bytes(self, name: str) -> bytes:
        """Read a whole file. Raises FileNotFoundError."""
        with self.read(name) as file:
            return file.read()

    @contextmanager
    def create(self, name: str, *, new: bool = False) -> Iterator[IO[bytes]]:
        """Make a file to write and read back; it appears (and replaces an older one) when the block ends without an
        exception.

        Folders in `name` are made. A `new` file replaces no other: if another run may have written one, and the store
        has conditional writes, OutputBusyError is raised.
        """
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
        """Write a whole file; `new` as in `create`."""
        with self.create(name) as file:
            file.write(data)

    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""
        with writing(self._path(name)), suppress(FileNotFoundError):
            file_calls.remove_file(self._path(name))

    def remove(self) -> None:
        """Remove the folder with its contents. The caller must hold any lock in it."""
        with writing(self.location), suppress(FileNotFoundError):
            file_calls.remove_tree(self.location)

    def delete_all(self, names: Iterable[str]) -> None:
        """Remove files."""
        for name in names:
            self.delete(name)

    def clean(self, ours: Callable[[str], bool], into: Callable[[str], bool] = lambda folder: False) -> None:
        """Remove half-written files of killed runs whose name is `ours`, here and in the folders that `find` looks
        into."""
        with writing(self.location):
            for path, is_folder in walk_folder(self.location, into):
                folder, name = split_path(path)
                half = not is_folder and name.startswith(".") and name.endswith(_TEMPORARY)
                if half and ours(os.path.normpath(os.path.join(folder, name[1 : -len(_TEMPORARY)]))):
                    file_calls.remove_file(self._path(path))

    def in_use(self) -> bool | None:
        """Return whether a run holds the lock; None if this machine cannot know, or there is no lock to hold."""
        with writing(self._path(LOCK)), suppress(FileNotFoundError), self.read(LOCK) as file:
            return not _locked(file.fileno(), shared=True, patience=0)
        return False

    def lock(self) -> Lock:
        """Keep other processes out. Raises OutputBusyError if another one holds the lock."""
        path = self._path(LOCK)
        with writing(path):
            while True:
                make_folder(self.location)
                lock = FileLock(path, self.location)
                if lock.stands:
                    return lock
                lock.release()

    def _entries(self) -> list[Any]:
        with writing(self.location), suppress(FileNotFoundError):
            return file_calls.list_folder(self.location)
        return []

    def _path(self, name: str) -> str:
        return os.path.join(self.location, name)


def make_folder(path: str) -> None:
    """Make a local folder and its parents, unless they exist, so that they survive a crash."""
    if not file_calls.is_folder(path):
        parent = os.path.dirname(path)
        make_folder(parent)
        file_calls.add_folder(path)
        file_calls.sync_folder(parent)


def walk_folder(path: str, into: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
    """Yield the paths in a local folder, relative to it, each with whether it is a folder; nothing if there is none.

    The contents of a folder come too if `into` accepts its name. Symbolic links are not followed. Raises OSError if a
    folder cannot be read: its contents are not skipped silently.
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


# A folder of an object store, in which files appear whole or not at all.


_S3 = {"s3", "s3a"}
_FOLDERLESS = _S3 | {"gs", "gcs", "abfs", "abfss", "az", "hf"}  # here, making a folder may mean making a bucket
_READ_BLOCK = 8 << 20  # bytes
_TAIL = 1 << 16  # bytes compared to distinguish one file from another
_AT_ONCE = 8  # requests
_BEAT_SECONDS, _COMMIT_BEAT_SECONDS = 30.0, 600.0  # a request costs money, a commit also a line of history


class RemoteStore:
    """A folder of an object store, with the methods of `LocalStore`. An object appears when its upload is complete.

    Requests that fail temporarily are sent again.
    """

    def __init__(self, filesystem: Any, inner: str, location: str) -> None:
        self.location = without_secrets(location)
        self._protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
        self._reading = filesystem
        self._filesystem = _client(filesystem) if self._protocols & _S3 else filesystem
        self._inner = inner
        self.beat_seconds = _COMMIT_BEAT_SECONDS if self._commits else _BEAT_SECONDS
        self.at_once = 1 if self._commits else _AT_ONCE

    def names(self) -> list[str]:
        return self._entries("file")

    def folders(self) -> list[str]:
        return self._entries("directory")

    def find(self, into: Callable[[str], bool]) -> list[str]:
        root = str(self._filesystem._strip_protocol(self._inner)).rstrip("/") + "/"
        found = [str(path).removeprefix(root) for path in self._listed(lambda: self._filesystem.find(self._inner))]
        return sorted(name for name in found if all(map(into, name.split("/")[:-1])))

    def exists(self, name: str) -> bool:
        with requesting(f"{self.location}/{name}"):
            return self._size(name) is not None

    def read(self, name: str) -> IO[bytes]:
        path = self._path(name)
        with requesting(f"{self.location}/{name}", may_miss=True):
            self._reading.invalidate_cache(path)
            file: IO[bytes] = patiently(lambda: self._reading.open(path, "rb", block_size=_READ_BLOCK))
        return file

    def read_bytes(self, name: str) -> bytes:
        with requesting(f"{self.location}/{name}", may_miss=True):
            return bytes(patiently(lambda: self._filesystem.cat_file(self._path(name))))

    @contextmanager
    def create(self, name: str, *, new: bool = False) -> Iterator[IO[bytes]]:
        path = self._path(name)
        place = f"{tempfile.gettempdir()} (for {self.location}/{name}, before its upload)"
        with writing(place), file_calls.open_unnamed() as file:
            yield file
            size = file.seek(0, io.SEEK_END)
            file.seek(max(size - _TAIL, 0))
            tail = file.read()

            def arrived() -> bool:
                return self._size(name) == size and self._filesystem.tail(path, _TAIL) == tail

            put = exclusive_put(self._filesystem, "put_file") if new else None
            with requesting(f"{self.location}/{name}"):
                self._put(name, put, self._filesystem.put_file, (file.name, path), arrived)
                if (found := self._size(name)) != size:
                    raise PrefillError(
                        f"{self.location}/{name} has {found} bytes in the store, but {size} were written\n"
                        f"another program writes there, or the store is damaged: {run_again()}"
                    )

    def put_bytes(self, name: str, data: bytes, *, new: bool = False) -> None:
        path = self._path(name)
        put = exclusive_put(self._filesystem) if new else None
        with requesting(f"{self.location}/{name}"):
            overwrite = self._filesystem.pipe_file
            self._put(name, put, overwrite, (path, data), lambda: self._filesystem.cat_file(path) == data)

    def delete(self, name: str) -> None:
        with requesting(f"{self.location}/{name}"), suppress(FileNotFoundError):
            patiently(lambda: self._filesystem.rm_file(self._path(name)))

    def delete_all(self, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(self.at_once) as pool:
            list(pool.map(self.delete, names))

    def remove(self) -> None:
        """Do nothing: the folder exists as long as it holds objects, and the lock goes when it is released."""

    def clean(self, ours: Callable[[str], bool], into: Callable[[str], bool] = lambda folder: False) -> None:
        """Abort multipart uploads that a killed run has begun: until then S3 charges for their parts.

        Other stores drop them by themselves, and an interrupted upload in one request leaves nothing.
        """
        if not self._protocols & _S3:
            return
        with suppress(Exception):  # the right to list uploads is seldom granted, and nothing depends on it
            bucket, folder, _ = self._filesystem.split_path(self._inner)
            folder = f"{folder.rstrip('/')}/" if folder else ""
            request = self._filesystem.call_s3
            found = request("list_multipart_uploads", Bucket=bucket, Prefix=folder)
            for upload in found.get("Uploads", []):
                name = str(upload["Key"]).removeprefix(folder)
                if ours(name) and all(map(into, name.split("/")[:-1])):
                    request("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def in_use(self) -> bool | None:
        with requesting(self.location):
            holder = ObjectLock.holder(self._filesystem, self._path(LOCK))
        return None if holder is None else holder.alive()

    def lock(self) -> Lock:
        with requesting(self.location):
            return ObjectLock(self._filesystem, self._path(LOCK), self.location)

    @property
    def _commits(self) -> bool:
        # Whether each write is a commit of a git repository.
        return "hf" in self._protocols and not self._inner.removeprefix("hf://").startswith("buckets/")

    def _put(
        self,
        name: str,
        exclusive: Callable[[Any, Any], None] | None,
        overwrite: Callable[[Any, Any], None],
        arguments: tuple[Any, Any],
        arrived: Callable[[], bool],
    ) -> None:
        # Write an object, with `exclusive` if it is given and the store supports it. Whatever the store answers, if it
        # answers at all, the object is written if it has `arrived`. Raises OutputBusyError if another object is there.
        def put() -> None:
            try:
                (exclusive or overwrite)(*arguments)
            except Exception as error:
                failure = Failure.of(error)
                if failure in (Failure.PASSING, Failure.REFUSED):
                    raise
                if failure is Failure.MISSING and not self._protocols & _FOLDERLESS:
                    self._filesystem.makedirs(split_path(self._path(name))[0], exist_ok=True)
                    overwrite(*arguments)
                    return
                with suppress(Exception):  # an object that cannot be looked at may be missing
                    if arrived():
                        return
                if exclusive is None:
                    raise
                if self._size(name) is not None:
                    raise OutputBusyError(
                        f"{self.location}/{name} was written by another run meanwhile, and is left as it is\n"
                        "see which run that was; `prefill status` shows its state"
                    ) from error
                overwrite(*arguments)  # a store without conditional writes

        patiently(put)

    def _size(self, name: str) -> int | None:
        # Bytes of an object, by a request now; None if there is none.
        def ask() -> int | None:
            self._filesystem.invalidate_cache(self._path(name))
            try:
                found = self._filesystem.info(self._path(name))
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

        return patiently(ask)

    def _entries(self, kind: str) -> list[str]:
        entries = self._listed(lambda: self._filesystem.ls(self._inner, detail=True))
        return sorted(split_path(str(each["name"]).rstrip("/"))[1] for each in entries if each["type"] == kind)

    def _listed(self, ask: Callable[[], Any]) -> list[Any]:
        # A fresh listing, not one from a client's memory; nothing if the folder does not exist.
        def listed() -> list[Any]:
            self._filesystem.invalidate_cache()
            return list(ask())

        with requesting(self.location), suppress(FileNotFoundError):
            return patiently(listed)
        return []

    def _path(self, name: str) -> str:
        return f"{self._inner}/{name}"


def _client(filesystem: Any) -> Any:
    # The same S3 without cached listings; botocore and we retry, s3fs does not do so in addition. Without concurrent
    # requests an object is read by one request, not by two, and of a file that is sent in parts one part is in memory,
    # not ten.
    options = filesystem.storage_options | {"use_listings_cache": False, "max_concurrency": 1}
    own = type(filesystem)(*filesystem.storage_args, **options)
    own.retries = 1
    return own


@contextmanager
def requesting(path: str, *, may_miss: bool = False) -> Iterator[None]:
    """Turn errors of the clients of object stores into errors that name a remedy.

    Where the object `may_miss`, FileNotFoundError stays.
    """
    try:
        yield
    except PrefillError:
        raise
    except Exception as error:
        if may_miss and isinstance(error, FileNotFoundError):
            raise
        raise PrefillError(f"cannot use {path}: {explained(error)}") from error


Store = LocalStore | RemoteStore


def open_store(url: str) -> Store:
    """Open the folder at a local path or URL; it need not exist yet. Raises UsageError for an unknown protocol."""
    filesystem, inner = filesystem_of(url)
    if is_local(filesystem):
        return LocalStore(inner)
    return RemoteStore(filesystem, inner, url)


def put_text(path: str, text: str) -> None:
    """Write a whole file at a local path or URL; a symbolic link stays one. Raises PrefillError."""
    folder, name = split_path(written_path(path, "cannot write"))
    open_store(folder).put_bytes(name, text.encode())


def read_sealed(option: str, path: str, again: str) -> tuple[bytes, bool]:
    """Read the JSON that a command of prefill has written, without its checksum; also return whether it had one. Reads
    as `read_given`.

    Raises UsageError if it has changed since. The caller refuses a text that is not JSON.
    """
    data = read_given(option, path, again)
    try:
        content = json.loads(data)
        right = take_checksum(content)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return data, False
    if right is False:
        raise UsageError(f"{option} {without_secrets(path)}: it is not as prefill wrote it\n{again}")
    return json.dumps(content).encode(), right is not None


def write_sealed(path: str, text: str) -> None:
    """Write JSON to a local path or URL with a checksum of it. Raises PrefillError."""
    try:
        put_text(path, sealed_text(text))
    except OSError as error:
        raise ResourceError(f"{path}: cannot write: {error.strerror or error}") from None


NAME = "heartbeat.json"
_MISSED = 3  # beats that may be late before a run counts as dead
_JOIN_SECONDS = 5.0  # seconds for writing the last sign


@dataclass(frozen=True)
class Beat:
    """One sign of life."""

    owner: Owner
    pace: Pace
    running: bool  # false in the last one
    updated: datetime.datetime  # UTC
    seconds: float  # between two beats

    @classmethod
    def last(cls, store: Store) -> Beat | None:
        """Return the last sign of life in a work folder; None if there is no readable one."""
        try:
            return _BEAT.validate_json(store.read_bytes(NAME))
        except (OSError, ValueError):
            return None

    @property
    def age(self) -> float:
        """Seconds since then, by the clock of this machine."""
        return (datetime.datetime.now(datetime.UTC) - self.updated).total_seconds()

    def alive(self) -> bool:
        """Return whether the run still goes on: certain if it runs on this machine, else judged by the age of the
        beat."""
        known = self.owner.alive()
        return self.running and (self.age < _MISSED * self.seconds if known is None else known)


_BEAT = TypeAdapter(Beat)


class Heartbeat:
    """Leaves signs of life in a work folder from a thread; use it as a context manager.

    A sign that cannot be written is left out: no run fails because of it or waits for it.
    """

    def __init__(self, store: Store, pace: Callable[[], Pace], *, seconds: float | None = None) -> None:
        self._store = store
        self._pace = pace
        self._seconds = seconds or store.beat_seconds
        self._owner = Owner.this()
        self._stopped = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._work, name="prefill-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        self._failed = kind is not None
        self._stopped.set()
        self._thread.join(_JOIN_SECONDS)  # a disk that hangs holds up its thread, not the run

    def _work(self) -> None:
        while not self._stopped.is_set():
            self._beat(running=True)
            self._stopped.wait(self._seconds)
        if self._failed:
            self._beat(running=False)
            return
        with suppress(Exception), impatiently():  # the manifest records it anyway
            self._store.delete(NAME)

    def _beat(self, *, running: bool) -> None:
        with suppress(Exception), impatiently():
            now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
            beat = Beat(self._owner, self._pace(), running, now, self._seconds)
            self._store.put_bytes(NAME, _BEAT.dump_json(beat))
