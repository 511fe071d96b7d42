"""Functions in processes of their own with a fault: forks of a small process that has imported what they need."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from prefillcli.errors import PrefillError

_PATIENCE = 120.0  # seconds


class AnyKind(Protocol):
    """A kind of faults."""

    @property
    def meaning(self) -> str: ...

    @property
    def hangs(self) -> bool:
        """Whether what fails never returns."""

    def fault(self, number: int) -> AnyFault:
        """The one that hits the `number`th call, from 1."""


class AnyFault(Protocol):
    @property
    def kind(self) -> AnyKind: ...

    def arm(self, report: Callable[[str], None]) -> None:
        """Let one call of this process fail from now on; `report` hears which, before."""


@dataclass(frozen=True)
class Outcome:
    """How a process with a fault ended."""

    hit: str | None
    """The call that failed; None if there were fewer."""
    refusal: str | None
    """The message of the error that ended it."""
    killed: bool

    @property
    def done(self) -> bool:
        return self.refusal is None and not self.killed


class Nursery:
    """Use it as a context manager."""

    def __enter__(self) -> Nursery:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._pipe.close()
        self._process.join()

    def run(
        self,
        fault: AnyFault | None,
        function: Callable[..., None],
        *arguments: Any,
        while_hung: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Call a function in a process of its own. One that hangs is killed after `while_hung`."""
        self._pipe.send((fault, function, arguments))
        hit = refusal = bug = None
        killed = False
        while True:
            assert self._pipe.poll(_PATIENCE), f"{fault} does not end"
            kind, what = self._pipe.recv()
            if kind == "hit":
                hit, pid = what
                if fault is not None and fault.kind.hangs:
                    try:
                        while_hung()
                    finally:
                        os.kill(pid, signal.SIGKILL)
            elif kind == "refusal":
                refusal = what
            elif kind == "bug":
                bug = what
            else:
                killed = what
                break
        assert bug is None, f"{fault} at {hit}:\n{bug}"
        return Outcome(hit, refusal, killed)


def _serve(pipe: Connection) -> None:
    while True:
        try:
            fault, function, arguments = pipe.recv()
        except EOFError:
            return
        ours, theirs = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            _run(theirs, fault, function, arguments)
        theirs.close()
        while True:
            try:
                pipe.send(ours.recv())
            except EOFError:
                break
        ours.close()
        _, status = os.waitpid(pid, 0)
        pipe.send(("end", os.WIFSIGNALED(status)))


def _run(pipe: Connection, fault: AnyFault | None, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    sys.stderr = io.StringIO()
    try:
        if fault is not None:
            fault.arm(lambda name: pipe.send(("hit", (name, os.getpid()))))
        function(*arguments)
    except PrefillError as error:
        pipe.send(("refusal", str(error)))
    except BaseException:
        pipe.send(("bug", traceback.format_exc()))
    finally:
        os._exit(0)
