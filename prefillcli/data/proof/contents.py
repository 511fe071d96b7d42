"""Digests of the files of a job, and the proof that they do not change while it runs.

A stamp tells cheaply whether a file may have changed; digests are remembered by it, so a file is hashed once.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from blake3 import blake3

from prefillcli.data.filesystems import is_local, patiently, reading
from prefillcli.errors import ContentChangedError, PrefillError
from prefillcli.runtime.user_cache import KeptEntries

SETTLED_NS = 5_000_000_000
"""A file whose last change is younger could change again without a trace: times move in steps of up to 2 seconds, and
the clock of a file server may be a little off."""

# What stands for the content of an object, by the names that fsspec's filesystems give it.
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "blob_id", "xet_hash", "sha")


@dataclass(frozen=True, slots=True)
class Stamp:
    """A version of a file. Equal stamps mean equal content, unless the file was still young: see `settled`."""

    size: int
    """Bytes."""
    identity: tuple[int | str, ...]
    """Of a local file device, inode, size and time of modification; else what the store says of the object."""
    changed_ns: int = 0
    """When the inode changed, which no program can set; 0 for a remote file. It also changes with name and rights."""
    version: str | None = None
    """What a remote store says in place of a digest: an ETag or a generation."""

    def settled(self, at_ns: int) -> bool:
        """Whether any change after `at_ns` makes another stamp."""
        return at_ns - self.changed_ns > SETTLED_NS


class Stamped(Protocol):
    """A file, and its stamp when it was found."""

    @property
    def path(self) -> str: ...
    @property
    def filesystem(self) -> Any: ...
    @property
    def inner(self) -> str: ...
    @property
    def stamp(self) -> Stamp: ...


def stamp_of(filesystem: Any, inner: str, *, fresh: bool = False) -> Stamp:
    """The stamp of a file now; `fresh` asks a remote store again, whatever was listed before.

    Raises FileNotFoundError, OSError, or what the client of an object store raises.
    """
    if is_local(filesystem):
        found = os.stat(inner)
        identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        return Stamp(found.st_size, identity, found.st_ctime_ns)
    if fresh:
        filesystem.invalidate_cache(inner)
    info = patiently(lambda: filesystem.info(inner))
    size = int(info.get("size") or 0)
    version = next((f"{name} {info[name]}" for name in _VERSIONS if _proves(info.get(name))), None)
    if version is not None:
        return Stamp(size, (size, version), version=version)
    times = [str(info[name]) for name in ("mtime", "LastModified", "last_modified", "created") if info.get(name)]
    return Stamp(size, (size, *times))


def now_ns() -> int:
    """Nanoseconds since the epoch, as stamps count them."""
    return time.time_ns()


def _proves(version: object) -> bool:
    """Whether it is there, and not a weak ETag, which two contents may share."""
    return bool(version) and not str(version).startswith("W/")


MOST = 4096


class DigestCache:
    """Digests of local files by path and stamp, in `$XDG_CACHE_HOME/prefillcli/digests.json`.

    It is only ever replaced as a whole: of two processes that write at once, the new entries of one are lost, and its
    files are read once more. A cache that is damaged, missing or cannot be written counts as empty.
    """

    def __init__(self, most: int = MOST) -> None:
        self._kept = KeptEntries("digests.json")
        self._most = most
        self._entries: dict[str, list[Any]] | None = None
        self._new: dict[str, list[Any]] = {}

    def get(self, path: str, stamp: Stamp) -> str | None:
        """The digest of this version of the file, if it is known."""
        if self._entries is None:
            self._entries = self._kept.read()
        entry = self._entries.get(_key(path, stamp))
        if entry is None:
            return None
        self._new[_key(path, stamp)] = [entry[0], int(time.time())]
        return str(entry[0])

    def put(self, path: str, stamp: Stamp, digest: str) -> None:
        """Remember a digest; the caller vouches that the stamp was settled before the file was read."""
        self._new[_key(path, stamp)] = [digest, int(time.time())]

    def save(self) -> None:
        """Add what is new to the file, of which the `most` entries used last stay.

        Never raises for a folder that cannot be written.
        """
        if not self._new:
            return
        entries = self._kept.read() | self._new
        self._kept.write(dict(sorted(entries.items(), key=lambda item: -item[1][1])[: self._most]))
        self._new = {}


def _key(path: str, stamp: Stamp) -> str:
    return json.dumps([path, *stamp.identity, stamp.changed_ns])


_BLOCK = 4 << 20
_THREADS = 4


class FileContents:
    """A digest of every file, made in background threads, and later whether the files are still the same.

    `what` names them in messages. `find` lists the paths anew, to notice files that come or go.
    """

    def __init__(self, files: Sequence[Stamped], what: str, find: Callable[[], Sequence[str]]) -> None:
        self._files = tuple(files)
        self._what = what
        self._find = find
        self._stamps = [file.stamp for file in files]
        self._results: list[Future[tuple[str, bool]]] = []
        self._cache = DigestCache()
        self._digests: list[str] | None = None
        self._proven: list[bool] = []  # whether an equal stamp proves equal content

    def begin(self) -> None:
        """Start to hash, in the background."""
        if self._results:
            return
        self._results = [Future() for _ in self._files]
        todo = deque(enumerate(self._files))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if not todo:
                        return
                    number, file = todo.popleft()
                try:
                    self._results[number].set_result(self._known(file, lock))
                except BaseException as error:  # raised again where the digest is asked for
                    self._results[number].set_exception(error)

        for _ in range(min(_THREADS, os.cpu_count() or 1, len(self._files))):
            # a daemon: a run that is stopped need not wait for it
            threading.Thread(target=work, name="prefill-hash", daemon=True).start()

    def digests(self) -> list[str]:
        """The digests in the order of the files; of a remote file the version that its store gives.

        Waits for them. Raises ContentChangedError if a file is another than when it was found, PrefillError if it
        cannot be read.
        """
        if self._digests is None:
            self.begin()
            found = [result.result() for result in self._results]
            self._proven = [proven for _, proven in found]
            self._digests = [digest for digest, _ in found]
            self._cache.save()
        return self._digests

    def require_unchanged(self, numbers: Iterable[int] | None = None) -> None:
        """Raise ContentChangedError unless the files contain what they did when they were found.

        Of the files with these `numbers`; without them of all, and there must be the same ones. Costs a look at each
        file's times. Read again are files that were hashed right after a change, and those that were renamed or whose
        rights changed. Remote files whose store gives neither version nor time are not proven.
        """
        if numbers is None:
            self._require_same_files()
        for number in range(len(self._files)) if numbers is None else numbers:
            self._require(number)

    def _known(self, file: Stamped, lock: threading.Lock) -> tuple[str, bool]:
        """`content_digest`, remembered for local files whose stamp proves it."""
        local = is_local(file.filesystem)
        if local:
            with lock:
                remembered = self._cache.get(file.inner, file.stamp)
            if remembered is not None and current(file, self._what) == file.stamp:
                return remembered, True
        digest, proven = content_digest(file, file.stamp, self._what)
        if local and proven:
            with lock:
                self._cache.put(file.inner, file.stamp, digest)
        return digest, proven

    def _require(self, number: int) -> None:
        file, before = self._files[number], self._stamps[number]
        now = current(file, self._what)
        if now.identity != before.identity:
            raise changed(file.path, self._what)
        if self._digests is None or (now == before and self._proven[number]):
            return
        digest, proven = content_digest(file, now, self._what)
        if digest != self._digests[number]:
            raise changed(file.path, self._what)
        self._stamps[number], self._proven[number] = now, proven

    def _require_same_files(self) -> None:
        before = [file.path for file in self._files]
        try:
            now = list(self._find())
        except PrefillError as error:
            raise ContentChangedError(f"{error}\n{_ADVICE}") from None
        if now != before:
            came, went = set(now) - set(before), set(before) - set(now)
            told = [f"{path} is new" for path in sorted(came)[:1]] + [f"{path} is gone" for path in sorted(went)[:1]]
            raise ContentChangedError(f"while the job ran, {' and '.join(told) or 'files changed places'}\n{_ADVICE}")


_ADVICE = "nothing was written from what changed: put it back and go on with --resume, or start anew with --overwrite"


def changed(path: str, what: str) -> ContentChangedError:
    """The error for a file that has changed."""
    return ContentChangedError(f"{path} changed while the job ran; its fingerprint names another {what}\n{_ADVICE}")


def require_same(file: Stamped) -> None:
    """Raise ContentChangedError if a local path leads to another file, or version of it, than was found.

    Called right after opening it, this shows that the open file is the one that was found.
    """
    if is_local(file.filesystem) and current(file, "input").identity != file.stamp.identity:
        raise changed(file.path, "input")


def current(file: Stamped, what: str) -> Stamp:
    """The stamp of a file now. Raises ContentChangedError if it is gone, PrefillError if it cannot be looked at."""
    try:
        with reading(file.path):
            return stamp_of(file.filesystem, file.inner, fresh=True)
    except PrefillError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise ContentChangedError(f"{file.path} is gone while the job ran\n{_ADVICE}") from None
        raise


def content_digest(file: Stamped, stamp: Stamp, what: str) -> tuple[str, bool]:
    """The BLAKE3 digest of a file of this stamp, and whether an equal stamp proves it from now on.

    Raises ContentChangedError if the file is another one, before or after it was read.
    """
    if stamp.version is not None:
        return stamp.version, True
    started = now_ns()
    hasher = blake3()
    block = memoryview(bytearray(min(_BLOCK, max(stamp.size, 1) + 1)))
    with reading(file.path), _open(file) as stream:
        while size := stream.readinto(block):
            hasher.update(block[:size])
    after = current(file, what)
    if after.identity != stamp.identity:
        raise changed(file.path, what)
    return hasher.hexdigest(), after == stamp and stamp.settled(started)


def _open(file: Stamped) -> Any:
    if is_local(file.filesystem):
        return open(file.inner, "rb", buffering=0)
    return file.filesystem.open(file.inner, "rb")
