"""One run at a time: the lock of a work folder, on a local disk and in an object store.

On a local disk the operating system holds the lock and releases it however the run ends. In an object store the
lock is an object that only one of several writers can create, and that stays when its run is killed.
"""

from __future__ import annotations

import datetime
import inspect
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem

from prefillcli.data.filesystems import Failure, patiently
from prefillcli.errors import OutputBusyError, PrefillError
from prefillcli.runtime import file_calls, log
from prefillcli.runtime.processes import process_space, start_of

LOCK = "lock"
_HOPELESS = {Failure.PASSING, Failure.REFUSED, Failure.MISSING}  # no other write would succeed either
_PATIENCE = 0.5  # seconds: a process that only checks for a run holds the lock for an instant


class Lock(Protocol):
    """A lock that this process holds."""

    def check(self) -> None:
        """Raise OutputBusyError if another process has taken the lock."""

    def release(self) -> None:
        """Give it back; a second call does nothing."""


@dataclass(frozen=True)
class Owner:
    """A process, told apart from all others, also from earlier ones with the same number."""

    host: str
    pid: int
    started: str
    """When the process began, as the system counts it; empty if not known."""
    machine: str
    """The machine since its last start, with the namespace of its processes; empty if not known."""
    token: str
    since: str

    @classmethod
    def this(cls) -> Owner:
        """This process, with a token of its own."""
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(socket.gethostname(), os.getpid(), start_of(os.getpid()), process_space(), uuid.uuid4().hex, since)

    @classmethod
    def of_json(cls, content: Any) -> Owner | None:
        """The owner that `dataclasses.asdict` and JSON wrote; None for anything else."""
        try:
            owner = cls(**content)
        except TypeError:
            return None
        return owner if isinstance(owner.pid, int) and isinstance(owner.started, str) else None

    def alive(self) -> bool | None:
        """Whether the process still runs; None if that cannot be known from here."""
        here = process_space()
        if not here or self.machine != here or not self.started:
            return None
        return start_of(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class FileLock:
    """A lock on a local file; it ends with the process that holds it."""

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
        """Whether its file is still there; a folder may be removed by who held the lock before."""
        return self._handle is not None and file_calls.has_name(self._handle)

    def check(self) -> None:
        """Nothing to do: no other process can take it."""

    def release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def file_lock_held(path: str) -> bool:
    """Whether some process holds the lock on a local file."""
    try:
        file = file_calls.open_to_read(path)
    except FileNotFoundError:
        return False
    with file:
        return not _locked(file.fileno(), shared=True, patience=0)


class ObjectLock:
    """A lock that is an object, in a store that can refuse to create one that exists already.

    Where it cannot, a warning says so and nothing is locked.
    """

    def __init__(self, filesystem: Any, path: str, location: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self._location = location
        self._owner = Owner.this()
        self._held = False
        holder = self.holder(filesystem, path)
        if holder is not None and holder.alive() is False:
            self._delete()  # this may delete a new lock of another run, whose `check` finds out
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
        """The owner that a lock names; None if there is no lock."""
        try:
            filesystem.invalidate_cache()
            owner = Owner.of_json(json.loads(patiently(lambda: filesystem.cat_file(path))))
        except FileNotFoundError:
            return None
        except ValueError:
            owner = None
        return owner or Owner("an unknown host", 0, "", "", "", "an unknown time")

    def check(self) -> None:
        mine = True
        if self._held:
            with suppress(Exception):  # a store that cannot be read says so at the next write
                mine = self._mine()
        if not mine:
            self._held = False
            raise OutputBusyError(
                f"the lock of {self._location} was taken away while this run held it\n"
                "see which other run writes this output, then go on with --resume"
            )

    def release(self) -> None:
        with suppress(Exception):  # a lock that stays is found dead later
            if self._held and self._mine():
                self._delete()
        self._held = False

    def _create(self, create: Callable[[str, bytes], None]) -> bool:
        """Take the lock. False if the store cannot refuse; raises OutputBusyError if another run holds it."""
        data = json.dumps(asdict(self._owner)).encode()
        failed = self._attempt(create, data)
        if not self._mine():  # whatever a client raises to refuse: what counts is whose object is there
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
    """`pipe_file(path, data)` or `put_file(local, path)` of a filesystem, for objects that are not there yet.

    What it raises if one is there depends on the client. None if the filesystem cannot do that in one step; the store
    behind it may ignore the wish all the same.
    """
    options = _options(type(filesystem), method)
    if options is None:
        return None
    call = getattr(filesystem, method)
    return lambda first, second: call(first, second, **options)


def _options(kind: type, method: str) -> dict[str, Any] | None:
    base: type = AbstractFileSystem
    if issubclass(kind, AsyncFileSystem):
        base, method = AsyncFileSystem, f"_{method}"
    own = getattr(kind, method)
    if own is getattr(base, method):  # fsspec's own looks first and then writes: two runs may both find nothing
        return None
    parameters = inspect.signature(own).parameters
    if "mode" in parameters:  # s3fs, gcsfs
        return {"mode": "create"}
    return {"overwrite": False} if "overwrite" in parameters else None  # adlfs
