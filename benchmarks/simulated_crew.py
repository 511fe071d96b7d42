"""Workers on a simulated clock: each takes as many seconds for a task as it has tokens to compute."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping

from prefillcli.engines.base import WorkerReport
from prefillcli.jobs.runners.pool import (
    Answered,
    AnswerTask,
    Done,
    Event,
    Lost,
    Ready,
    Reported,
    Started,
    Task,
    WorkerSpec,
)
from prefillcli.plan.pack import Key, Limits


class SimulatedCrew:
    """Does nothing, in simulated time.

    `dies` says whether a worker is lost on a task that it begins. `speed` is that of each worker, 1 if not given.
    """

    digests_needed = False

    def __init__(
        self,
        size: int,
        *,
        limits: Limits | None = None,
        dies: Callable[[int, Task], bool] = lambda worker, task: False,
        speed: Mapping[int, float] | None = None,
    ) -> None:
        self.size = size
        self.now = 0.0
        self.busy = [0.0] * size
        self.done: list[tuple[int, Task]] = []
        self.refilled = 0
        self._limits = limits or Limits(100, 1 << 30, held_tokens=1 << 30)
        self._dies = dies
        self._speed = speed or {}
        self._waiting: dict[int, deque[Task]] = {}
        self._held: dict[int, set[Key]] = {}
        self._dead: set[int] = set()  # not begun again yet
        self._events: list[tuple[float, int, Event]] = []  # a heap
        self._count = 0

    def start(self, spec: WorkerSpec) -> None:
        self._waiting[spec.number], self._held[spec.number] = deque(), set()
        self._dead.discard(spec.number)
        self._later(0.0, Started(spec.number, Ready(self._limits, True, {})))

    def send(self, worker: int, task: Task) -> None:
        if worker in self._dead:
            return  # `wait` will say so
        self._waiting[worker].append(task)
        if len(self._waiting[worker]) == 1:
            self._begin(worker)

    def wait(self, timeout: float) -> list[Event]:
        if not self._events:
            return []
        self.now, _, event = heapq.heappop(self._events)
        if isinstance(event, Done):
            self.done.append((event.worker, self._waiting[event.worker].popleft()))
            if self._waiting[event.worker]:
                self._begin(event.worker)
        return [event]

    def close(self) -> None:
        self._events.clear()

    def _begin(self, worker: int) -> None:
        task = self._waiting[worker][0]
        if self._dies(worker, task):
            self._dead.add(worker)
            self._later(0.5, Lost(worker, "was ended by signal 9 (SIGKILL)"))
        elif isinstance(task, AnswerTask):
            pack, held = task.work.pack, self._held[worker]
            refills = [refill for refill in task.work.refills if refill.block not in held]
            for refill in refills:
                _require({node.key for node in refill.held} <= held, "a refill lacks K,V")
                held |= set(refill.kept_nodes.values())
            _require({node.key for node in pack.held} <= held, "a pack lacks K,V")
            held |= set(pack.kept_nodes.values())
            held &= pack.keep
            tokens = sum(len(refill.tokens) for refill in refills)
            self.refilled += tokens
            seconds = (tokens + len(pack.tokens)) / self._speed.get(worker, 1.0)
            self.busy[worker] += seconds
            self._later(seconds, Done(worker, Answered([], tokens)))
        else:
            self._later(0.0, Done(worker, Reported(WorkerReport(worker, 0, 0, 0.0, 0, 0, None, None), None)))

    def _later(self, seconds: float, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, event))


def _require(met: bool, otherwise: str) -> None:
    if not met:
        raise RuntimeError(otherwise)
