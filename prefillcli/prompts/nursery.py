"""The processes that render templates. On Linux they are forked from one that has imported Jinja, which takes longer
than all else of a start; elsewhere each is started by itself."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

_ENVIRONMENT = ("PATH", "TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")
_START_SECONDS = 120.0  # on the clock
_FORKS = sys.platform == "linux" and hasattr(os, "pidfd_open")


def start_process(setup: Mapping[str, Any]) -> subprocess.Popen[bytes] | Forked:
    """Start a process with this setup of `sandbox.main`, with unbuffered pipes to and from it. Raises OSError."""
    key = (os.getpid(), *_words("nurse"), *sorted(_environment().items()))
    for _ in range(2 if _FORKS else 0):
        try:
            return _nursery(key).fork(setup)
        except OSError:  # it has been killed, or cannot be started
            _NURSERIES.pop(key, None)
    return subprocess.Popen(  # noqa: S603 - this interpreter, with code and folders of this process
        _words("main", json.dumps({**setup, "parent": os.getpid()})),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=_environment(),
    )


class Forked:
    """A process that the nursery has forked, with the part of Popen's interface that its user needs."""

    def __init__(self, nursery: _Nursery, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._nursery = nursery
        self._handle = os.pidfd_open(pid)  # of this process, whoever gets its number later
        self._code: int | None = None
        self._waiting = threading.Lock()
        weakref.finalize(self, os.close, self._handle)

    def kill(self) -> None:
        """End the process; nothing where it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until the process has ended; returns its exit code as Popen does."""
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        ended.poll()
        with self._waiting:
            if self._code is None:
                try:
                    self._code = self._nursery.ask(str(self.pid).encode())
                except OSError:  # both have been killed
                    self._code = -signal.SIGKILL
            return self._code


class _Nursery:
    """The process that forks. It ends with this one, however that ends: then their socket is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with code and folders of this process
                _words("nurse"),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
        self._asked.settimeout(_START_SECONDS)
        atexit.register(self._end, os.getpid())

    def fork(self, setup: Mapping[str, Any]) -> Forked:
        """A process of its own for a template. Raises OSError where there is none."""
        (rows, stdin), (stdout, answers) = os.pipe(), os.pipe()
        with ExitStack() as ours:
            ends = (
                ours.enter_context(open(stdin, "wb", buffering=0)),
                ours.enter_context(open(stdout, "rb", buffering=0)),
            )
            try:
                forked = Forked(self, self.ask(json.dumps(setup).encode(), rows, answers), *ends)
            finally:
                os.close(rows)
                os.close(answers)
            ours.pop_all()
        return forked

    def ask(self, message: bytes, *handles: int) -> int:
        """Send a message of `sandbox.nurse`, and return the number that answers it. Raises OSError."""
        with self._lock:
            socket.send_fds(self._asked, [message], handles)
            number = self._asked.recv(32)
        if not number:
            raise ChildProcessError("the process that forks has ended")
        return int(number)

    def _end(self, owner: int) -> None:
        if owner == os.getpid():
            self._asked.close()
            self._process.kill()
            self._process.wait()


# By what they are started with, and by the process that has started them: a fork of it has its own.
_NURSERIES: dict[tuple[Any, ...], _Nursery] = {}
_STARTING = threading.Lock()


def _nursery(key: tuple[Any, ...]) -> _Nursery:
    with _STARTING:
        if key not in _NURSERIES:
            _NURSERIES[key] = _Nursery()
        return _NURSERIES[key]


def _words(function: str, *more: str) -> list[str]:
    # Without site and environment it starts sooner, takes no code from the working directory and sees no secrets.
    start = f"import sys; sys.path[:] = sys.argv[{1 + len(more)}:]; from prefillcli.prompts.sandbox import {function}"
    folders = [str(Path(__file__).parents[2]), *(path for path in sys.path if path)]
    return [sys.executable, "-I", "-S", "-X", "utf8", "-c", f"{start}; {function}()", *more, *folders]


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"OMP_NUM_THREADS": "1"}
