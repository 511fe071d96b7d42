"""A worker in a Ray actor, asked by method calls. Importing this module needs no Ray."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prefillcli import __version__
from prefillcli.errors import EngineDiedError
from prefillcli.jobs.runners.pool import portable
from prefillcli.runtime.extras import quiet_imports
from prefillcli.runtime.memory import prepare_allocator

if TYPE_CHECKING:  # takes torch along
    from prefillcli.jobs.runners.worker import Worker

TELL = "tell"
"""The concurrency group of `advanced`, which is asked while a task runs."""
_ASLEEP = 5.0  # seconds that `advanced` waits at most


class WorkerActor:
    """Lives as long as its driver. Arguments and results are pickled here: arrays of Ray's store are read-only.

    `open` and `run` return a pair: the name of an event of the crew, and its value. They raise nothing.
    """

    def __init__(self) -> None:
        os.dup2(2, 1)  # stdout is for the driver's own line
        prepare_allocator()  # this process is the worker's own
        quiet_imports()
        self._worker: Worker | None = None
        self._progress = threading.Condition()
        self._tasks = 0
        self._tokens = 0.0

    def place(self) -> tuple[str, str]:
        """The version of prefillcli here, and the machine's name."""
        return __version__, os.uname().nodename

    def open(self, spec: bytes) -> bytes:
        """Load the models."""
        return _answer("started", lambda: self._opened(spec))

    def run(self, task: bytes) -> bytes:
        """Do a task."""
        with self._progress:
            self._tasks += 1
            self._tokens = 0.0
        return _answer("done", lambda: self._done(task))

    def advanced(self) -> tuple[int, float]:
        """Tokens that have been computed since this was asked last, and of which task: the first is 1.

        Waits a while until there are any.
        """
        with self._progress:
            self._progress.wait_for(lambda: self._tokens > 0, _ASLEEP)
            told, self._tokens = (self._tasks, self._tokens), 0.0
            return told

    def _opened(self, pickled: bytes) -> object:
        from prefillcli.jobs.runners.worker import Worker

        spec = pickle.loads(pickled)  # noqa: S301 - from the driver, not from data
        self._worker = Worker(replace(spec, share=memory_share(spec.settings.device)))
        return self._worker.ready()

    def _done(self, pickled: bytes) -> object:
        if self._worker is None:
            raise RuntimeError("a task came before the models were loaded")
        return self._worker.run(pickle.loads(pickled), self._tell)  # noqa: S301 - from the driver

    def _tell(self, tokens: float) -> None:
        with self._progress:
            self._tokens += tokens
            self._progress.notify()


def memory_share(device: str) -> float:
    """The part of its machine's memory that is this actor's: as much as it has of the CPUs, or of a GPU.

    1 in a process that is no actor.
    """
    ray: Any = sys.modules.get("ray")
    if not hasattr(ray, "is_initialized") or not ray.is_initialized():  # vLLM leaves an empty module of this name
        return 1.0
    context = ray.get_runtime_context()
    assigned = context.get_assigned_resources()
    if "GPU" in assigned and device != "cpu":
        return float(min(assigned["GPU"], 1.0))
    here = [node["Resources"].get("CPU", 1.0) for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
    return float(min(assigned.get("CPU", 1.0) / max([*here, 1.0]), 1.0))


def _answer(name: str, work: Callable[[], object]) -> bytes:
    try:
        return pickle.dumps((name, work()))
    except EngineDiedError:  # a worker that is begun again loads it again
        return pickle.dumps(("lost", "ended because its engine had died"))
    except BaseException as error:
        return pickle.dumps(("failed", portable(error)))
