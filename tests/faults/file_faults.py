"""One call of a process fails: the n-th of those in `runtime/file_calls.py` that its kind of fault concerns."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from prefillcli.runtime import file_calls

CALLS = {
    name: call
    for name, call in inspect.getmembers(file_calls, inspect.isfunction)
    if not name.startswith("_") and call.__module__ == file_calls.__name__
}
LOOKS = {"open_to_read", "read_into", "first_bytes", "has_name", "list_folder", "is_there", "is_folder"}
CHANGES = frozenset(CALLS.keys() - LOOKS)
FILLS = CHANGES - {"copy_modes", "remove_file", "remove_tree", "try_lock"}
DIVISIBLE = frozenset({"write_bytes", "put_content", "remove_tree"})


class Kind(Enum):
    """What happens at a call, and at which calls it may."""

    KILL_HALF = "kill -9 after half of the effect", DIVISIBLE
    ERROR = "an error before the effect", frozenset(CALLS)
    LATE = "an error after the effect", CHANGES
    FULL = "no space from then on", FILLS
    HALF = "an error after half of the effect", DIVISIBLE
    SHORT = "a short write", frozenset({"write_bytes"})
    KILL = "kill -9 before the effect", CHANGES
    HANG = "a hang", CHANGES

    @property
    def meaning(self) -> str:
        return self.value[0]

    @property
    def hangs(self) -> bool:
        return self is Kind.HANG

    def fault(self, number: int) -> Fault:
        return Fault(self, number)

    def concerns(self, name: str) -> bool:
        return name in self.value[1]


@dataclass(frozen=True)
class Fault:
    kind: Kind
    number: int
    """Of the call that fails, among those that the kind concerns, from 1."""

    def arm(self, report: Callable[[str], None]) -> None:
        """Let one call of this process fail from now on; `report` hears which, before."""
        Failing(self, report)


class Failing:
    """Stands before the calls of this process from now on."""

    def __init__(self, fault: Fault, report: Callable[[str], None]) -> None:
        self._fault = fault
        self._report = report
        self._seen = 0
        for name, call in CALLS.items():
            setattr(file_calls, name, self._guarded(name, call))

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        if name in ("sync_file", "sync_folder"):  # what a killed process has written is there without, in no time
            call = _nothing

        def guarded(*arguments: Any, **options: Any) -> Any:
            fault = self._fault
            if not fault.kind.concerns(name):
                return call(*arguments, **options)
            self._seen += 1
            if self._seen == fault.number:
                self._report(name)
                return _failed(fault.kind, name, call, *arguments, **options)
            if self._seen > fault.number and fault.kind is Kind.FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*arguments, **options)

        return guarded


def _failed(kind: Kind, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What the call does instead."""
    if kind is Kind.LATE:
        call(*arguments, **options)
    if kind in (Kind.HALF, Kind.SHORT, Kind.KILL_HALF):
        done = _half(name, call, *arguments)
        if kind is Kind.SHORT:
            return done
    if kind in (Kind.KILL, Kind.KILL_HALF):
        os.kill(os.getpid(), signal.SIGKILL)
    while kind is Kind.HANG:
        time.sleep(60)
    number = errno.ENOSPC if kind is Kind.FULL or (kind is Kind.HALF and name in FILLS) else errno.EIO
    raise OSError(number, os.strerror(number))


def _half(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Half of what a call does, and what it says then."""
    if name == "remove_tree":
        files = sorted(os.path.join(folder, file) for folder, _, names in os.walk(arguments[0]) for file in names)
        for path in files[: (len(files) + 1) // 2]:
            os.unlink(path)
        return None
    handle, data = arguments
    return call(handle, memoryview(data).cast("B")[: (len(data) + 1) // 2])


def _nothing(_what: Any) -> None:
    pass
