"""Workers as processes on this machine: each has a device, or some of the cores, for itself."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from prefillcli.errors import EngineDiedError, ResourceError, brief
from prefillcli.runtime.cores import allowed, core_groups
from prefillcli.runtime.log import survive_closed_streams
from prefillcli.scoring.runners.pool import Advanced, Done, Event, Failed, Lost, Started, Task, WorkerSpec, portable

_PRELOADED = [
    "prefillcli.scoring.runners.quiet_server",
    "prefillcli.scoring.runners.worker",
    "prefillcli.engines.loader",
]
_TELL_SECONDS = 0.2  # seconds between two messages on a worker's progress
ENGINE_DIED = 75
"""Exit code of a worker whose engine has died."""
_END_SECONDS = 5.0  # seconds for a worker to end when it is asked to


@dataclass(slots=True)
class _Process:
    process: Any
    pipe: Connection


class ProcessCrew:
    """Processes that end with this one, however it does.

    On CUDA worker i has device i. On the CPU the cores are shared out evenly; if `threads` is a number, each worker
    has that many threads.
    """

    digests_needed = False

    def __init__(self, size: int, *, device: str, engine: str, threads: int | None = None) -> None:
        self.size = size
        self._device = device
        self._engine = engine
        self._threads = threads
        self._running: dict[int, _Process] = {}
        self._context = multiprocessing.get_context("forkserver")

    def start(self, spec: WorkerSpec) -> None:
        self._end(spec.number)
        here, there = self._context.Pipe()
        cores, changes, environment = self._place(spec.number)
        spec = replace(spec, settings=spec.settings.with_options(changes))
        # A fork of a server that has imported torch and computed nothing: it starts at once, and does not hang.
        self._context.set_forkserver_preload(_PRELOADED)
        process = self._context.Process(
            target=_work, args=(there, pickle.dumps(spec), cores, environment), name=f"prefill-worker-{spec.number}"
        )
        try:
            process.start()
        except (OSError, EOFError) as error:  # EOFError: the server was killed
            raise ResourceError(f"cannot start worker {spec.number}: {brief(error)}") from error
        finally:
            there.close()
        self._running[spec.number] = _Process(process, here)

    def send(self, worker: int, task: Task) -> None:
        with suppress(OSError, KeyError):  # it has just ended
            self._running[worker].pipe.send(task)

    def wait(self, timeout: float) -> list[Event]:
        pipes = {each.pipe: number for number, each in self._running.items()}
        events: list[Event] = []
        for pipe in wait(list(pipes), timeout):
            events += self._receive(pipes[pipe])  # type: ignore[index]  # no other objects are waited for
        return events

    def close(self) -> None:
        for worker in self._running.values():
            with suppress(OSError):
                worker.pipe.close()  # it ends when it sees that
        end = time.monotonic() + _END_SECONDS
        for worker in self._running.values():
            worker.process.join(max(0.0, end - time.monotonic()))
        for number in list(self._running):
            self._end(number)

    def _place(self, number: int) -> tuple[Sequence[int], dict[str, Any], dict[str, str]]:
        """Return cores, settings and environment of a worker."""
        if self._device == "cuda":
            if self._engine == "vllm":  # it takes the first device that it sees
                return (), {}, {"CUDA_VISIBLE_DEVICES": _visible(number)}
            return (), {"device": f"cuda:{number}"}, {}
        cores = core_groups(self.size)[number]
        threads = self._threads or len(cores) or max(1, allowed() // self.size)
        if threads == 1 and self._engine != "vllm":
            return (), {"threads": 1}, {}  # the kernel moves it when another program takes its core
        if self._engine == "vllm":
            bind = ",".join(map(str, cores))
            return cores, {}, {"VLLM_CPU_OMP_THREADS_BIND": bind} if bind else {}
        return cores, {"threads": threads if self._threads or not cores else "auto"}, {}

    def _receive(self, number: int) -> list[Event]:
        """Return all messages that a worker has sent by now."""
        worker, events = self._running[number], []
        try:
            while worker.pipe.poll():
                kind, value = worker.pipe.recv()
                events.append(_EVENTS[kind](number, value))
        except (EOFError, OSError):
            worker.process.join(_END_SECONDS)
            events.append(Lost(number, _why_ended(worker.process.exitcode)))
            self._end(number)
        return events

    def _end(self, number: int) -> None:
        worker = self._running.pop(number, None)
        if worker is not None:
            worker.pipe.close()
            worker.process.kill()
            worker.process.join()


_EVENTS: Mapping[str, Any] = {"started": Started, "advanced": Advanced, "done": Done, "failed": Failed}


def _visible(number: int) -> str:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[number] if given else str(number)


def _work(pipe: Connection, spec: bytes, cores: Sequence[int], environment: Mapping[str, str]) -> None:
    """Live as a worker process."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the driver ends it
    survive_closed_streams()
    os.dup2(2, 1)  # stdout is for the driver's own line
    os.environ.update(environment)
    if cores:
        os.sched_setaffinity(0, cores)
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, tasks), daemon=True).start()
    from prefillcli.scoring.runners.worker import Worker

    try:
        own: WorkerSpec = pickle.loads(spec)  # noqa: S301 - from the driver, not from data
        with own.log():
            worker = Worker(own)
            pipe.send(("started", worker.ready()))
            while True:
                task = tasks.get()
                pipe.send(("done", worker.run(task, _Teller(pipe))))
    except EngineDiedError:
        os._exit(ENGINE_DIED)  # a worker that starts again loads it again
    except BaseException as error:
        with suppress(OSError):
            pipe.send(("failed", portable(error)))


class _Teller:
    """Sends the progress of a task now and then."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._tokens = 0.0
        self._told = time.monotonic()

    def __call__(self, tokens: float) -> None:
        self._tokens += tokens
        if time.monotonic() - self._told > _TELL_SECONDS:
            self._pipe.send(("advanced", self._tokens))
            self._tokens, self._told = 0.0, time.monotonic()


def _listen(pipe: Connection, tasks: queue.SimpleQueue[Task]) -> None:
    """Receive tasks; when the driver has gone, end this process at any point."""
    try:
        while True:
            tasks.put(pipe.recv())
    except BaseException:
        os._exit(0)


def _why_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return "ended because its engine had died" if code == ENGINE_DIED else f"ended with exit code {code}"


def usable_devices(device: str) -> int | None:
    """Return the number of workers that can have a device of this kind for themselves; None where cores are shared
    out."""
    if device != "cuda":
        return None
    torch = sys.modules["torch"]
    return int(torch.cuda.device_count())
