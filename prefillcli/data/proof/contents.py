"""Digests of the files of a job, and the proof that they do not change while it runs."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from blake3 import blake3

from prefillcli.data.filesystems import is_local, reading
from prefillcli.data.proof.digest_cache import DigestCache
from prefillcli.data.proof.stamps import Stamp, Stamped, now_ns, stamp_of
from prefillcli.errors import ContentChangedError, PrefillError

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
