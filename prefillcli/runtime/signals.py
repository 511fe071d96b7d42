"""Identifying processes, as ids are reused and each machine and container has its own; the signals that stop a run."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock
from types import FrameType
from typing import Any, NoReturn, TypeVar

from prefillcli.errors import Interrupted, UsageError


def start_of(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; empty if there is none, or off Linux."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def process_space() -> str:
    """Return the name of the space in which process ids are unique: this start of the machine, and its namespace.
    Empty off Linux."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


GRACE_SECONDS = 5.0  # the time after a signal in which a run comes to a safe point
AGAIN_SECONDS = 1.0  # the time that each step of closing down may take after that
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """A signal's request to stop the run. A second signal, of either kind, ends the process at once.

    A run that has not stopped after `GRACE_SECONDS` is interrupted wherever it is. Any waiting while it closes down is
    interrupted `AGAIN_SECONDS` later. That loses no more than killing the run would. Use it as a context manager in
    the main thread.
    """

    def __init__(self) -> None:
        self._signum: int | None = None
        self._waiting = False
        self._held = False
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """True if a signal came."""
        return self._signum is not None

    def check(self) -> None:
        """Raise Interrupted if a signal came: this is a safe point."""
        if self._signum is not None:
            raise Interrupted(self._signum)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal raise Interrupted at once, inside the block: for waiting and loading, where nothing is lost."""
        self.check()
        before, self._waiting = self._waiting, True
        try:
            yield
        finally:
            self._waiting = before

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """Interrupt nothing inside the block: for work that takes an instant. A second signal still ends the
        process."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    @contextmanager
    def last_step(self) -> Iterator[None]:
        """Run the last step of a run, stopped or not: after a signal it has `GRACE_SECONDS`."""
        if self._signum is not None:
            _interrupt_in(GRACE_SECONDS)
        try:
            yield
        finally:
            _interrupt_in(0)

    def __enter__(self) -> Stop:
        for signum in _SIGNALS:
            self._before[signum] = signal.signal(signum, self._handle)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._insist)
        return self

    def __exit__(self, *exc: object) -> None:
        _interrupt_in(0)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._signum = signum
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        _interrupt_in(GRACE_SECONDS)
        if self._waiting:
            raise Interrupted(signum)

    def _insist(self, signum: int, frame: FrameType | None) -> None:
        if self._signum is not None and not self._held:
            raise Interrupted(self._signum)


def stop_before_the_job() -> None:
    """Until there is a `Stop`, let SIGTERM raise Interrupted, as SIGINT raises KeyboardInterrupt."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _stop_early)


def stop_no_more() -> None:
    """Let SIGTERM end the process: the job is over and reported."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _stop_early:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_process(code: int) -> NoReturn:
    """End this process after a signal, without waiting for its threads: one may be in the middle of a long file."""
    last = threading.Timer(GRACE_SECONDS, os._exit, [code])
    last.daemon = True
    last.start()
    with suppress(Exception):
        atexit._run_exitfuncs()  # temporary folders, and processes that were started
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    os._exit(code)


def _stop_early(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_DFL)
    raise Interrupted(signum)


def _interrupt_in(seconds: float) -> None:
    # Send SIGALRM after this many seconds, and then again and again; 0 for never.
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS if seconds else 0)


# A thread that does the work of others, so that their interruptions do not strike in the middle of it.


T = TypeVar("T")


class OwnThread:
    """Does one piece of work after the other in one thread, for any threads that ask.

    A KeyboardInterrupt, or an exception of another signal's handler, strikes in the waiting thread. Torch's settings
    per thread (inference mode, the default device) are not the caller's.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._process = os.getpid()

    def run(self, work: Callable[[Event], T], *, unwanted: Callable[[T], object] | None = None) -> T:
        """Do `work`, and return its result or raise its error.

        If another exception strikes here meanwhile, the event given to `work` is set, and the exception propagates as
        soon as `work` has ended. With `unwanted` it propagates at once, and `unwanted` gets the later result of
        `work`. Raises UsageError in a process that was forked since.
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
        except BaseException:  # from the work, or while submitting it or waiting for it
            with turn:
                stopped.set()
            if unwanted is None and begun.is_set():
                ended.wait()
            raise

    def close(self, *, wait: bool = True) -> None:
        """End the thread as soon as it has no work; with `wait`, wait for that."""
        self._executor.shutdown(wait=wait)
