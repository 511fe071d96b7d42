"""Standard streams that are closed, or whose reader has gone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


def survive_closed_streams() -> None:
    """Let what is written to a stream that is closed, to a pipe without a reader, or to a log on a full disk, be lost
    instead of ending the run. Each process of a command calls this before it opens anything.

    A scheduler that stops a task closes its pipes at once; the run still has rows and a report to write.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # else the next file would get this number, and what libraries write to stderr
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(number, True)
    # Python has None for a stream that was closed
    sys.stdout, sys.stderr = _Lossy(sys.stdout or _nowhere()), _Lossy(sys.stderr or _nowhere())


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Inside, what this process and those it starts print goes to stderr: stdout is for the run's own line."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(own, 1)
        os.close(own)


def _nowhere() -> TextIO:
    return open(os.devnull, "w")


class _Lossy:
    """A text stream whose writes never fail: after the first failure they go nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
