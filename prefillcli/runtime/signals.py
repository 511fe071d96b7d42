"""SIGINT and SIGTERM ask a run to stop; it does so at the next safe point."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from prefillcli.errors import Interrupted


class Stop:
    """Whether a signal has asked to stop. A second signal of the kind ends the process at once.

    Use as a context manager in the main thread.
    """

    def __init__(self) -> None:
        self._signum: int | None = None
        self._waiting = False
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self._signum is not None

    def check(self) -> None:
        """A safe point: raises Interrupted if a signal came."""
        if self._signum is not None:
            raise Interrupted(self._signum)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal raises Interrupted where it strikes: for waiting and loading, where nothing is lost."""
        self.check()
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def __enter__(self) -> Stop:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._signum = signum
        signal.signal(signum, signal.SIG_DFL)
        if self._waiting:
            raise Interrupted(signum)
