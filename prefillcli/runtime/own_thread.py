"""A thread that does the work of others, so that what interrupts them does not strike in the middle of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Event, Lock
from typing import TypeVar

from prefillcli.errors import UsageError

T = TypeVar("T")


class OwnThread:
    """Does one piece of work after the other in one thread, whatever threads ask for it.

    A KeyboardInterrupt, or what another signal's handler raises, strikes in the thread that waits. Settings that torch
    has for each thread (inference mode, the default device) are not those of the caller.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._process = os.getpid()

    def run(self, work: Callable[[Event], T], *, unwanted: Callable[[T], object] | None = None) -> T:
        """What `work` returns or raises.

        If something else is raised here meanwhile, the event that `work` was given is set, and what was raised goes on
        as soon as `work` has ended. With `unwanted` it goes on at once: what `work` returns later is passed to that.
        Raises UsageError in a process that was forked since.
        """
        if os.getpid() != self._process:
            raise UsageError("this Scorer was made before the process was forked\nmake one in each process")
        turn, stopped, begun, ended = Lock(), Event(), Event(), Event()

        def attempt() -> T:
            with turn:
                if stopped.is_set():
                    raise CancelledError
                begun.set()
            try:
                result = work(stopped)
                if unwanted is not None and stopped.is_set():
                    unwanted(result)
                return result
            finally:
                ended.set()

        try:
            return self._executor.submit(attempt).result()
        except BaseException:  # of the work, or while it is submitted or waited for
            with turn:
                stopped.set()
            if unwanted is None and begun.is_set():
                ended.wait()
            raise

    def close(self, *, wait: bool = True) -> None:
        """End the thread as soon as it has no work, and `wait` for that."""
        self._executor.shutdown(wait=wait)
