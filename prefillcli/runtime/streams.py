"""Standard streams that are closed, or whose reader has gone."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from prefillcli.runtime.cores import choose_waiting


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


# What other libraries do while they are imported, of no use to who runs a command.
#
# They log, they look for code to fetch, and they import one another. A run loads nothing from a hub but the model
# and adapters that it is told.


#: torchao says which of its kernels this machine cannot load, torch which of torchao's types it knows already, and
#: bitsandbytes that it has fetched no kernels.
_TALKATIVE = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")

FETCHES = "kernels"
"""The package by which transformers, bitsandbytes and others fetch compiled code from a hub and load it."""
ALLOWED = "USE_HUB_KERNELS"
"""transformers' own variable of the environment that allows it: here only where somebody has set it."""
#: transformers imports these wherever they are installed: for metrics, losses on images and quantised weights, and by
#: way of accelerate for Amazon's training service. That takes longer than the rest of it.
_UNUSED = ("sklearn", "scipy", "torchao", "boto3")
_own = False  # whether this process is this program's own
_ABSENT: Any = object()
_found: Any = _ABSENT  # what was imported under that name before the first thread came inside
_inside = 0
_lock = threading.Lock()


def quiet_imports() -> None:
    """Only errors of these libraries are logged from now on, and none of them fetches code.

    To be called before they are imported, in processes that are this program's own.
    """
    global _own
    _own = True
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not _allowed():
        sys.modules.setdefault(FETCHES, None)  # type: ignore[arg-type]  # who imports it is told that it is not there


@contextmanager
def light_imports() -> Iterator[None]:
    """Inside, torch and transformers are imported without what no causal language model needs; for the main thread.

    Nothing changes in a process that is not this program's own: there, others may need it of transformers.
    """
    if not _own or "transformers" in sys.modules:
        yield
        return
    choose_waiting()
    hidden = [name for name in _UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    gc.disable()  # a million objects are made, and nearly all of them stay
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in hidden:
            del sys.modules[name]
        if found := sys.modules.get("transformers.utils.import_utils"):
            found.is_torchao_available.cache_clear()  # for a model whose weights are torchao's


def _allowed() -> bool:
    return os.environ.get(ALLOWED, "").upper() in ("1", "ON", "YES", "TRUE")


@contextmanager
def without_fetched_code() -> Iterator[None]:
    """For a library: inside, that package is not there for whoever imports it; afterwards it is as it was.

    Any number of threads may be inside.
    """
    global _inside, _found
    if _allowed():
        yield
        return
    with _lock:
        if not _inside:
            _found = sys.modules.get(FETCHES, _ABSENT)
            sys.modules[FETCHES] = None  # type: ignore[assignment]
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _found is _ABSENT:
                del sys.modules[FETCHES]
            elif not _inside:
                sys.modules[FETCHES] = _found
