"""Workers on a simulated clock: each takes as many seconds for a task as it has tokens to compute."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import AutoTokenizer

from prefillcli.core.run import Run
from prefillcli.core.windows import MAX_ROWS
from prefillcli.engines.base import WorkerReport
from prefillcli.models.files import sample_model
from prefillcli.models.law import PACK_TOKENS
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.blocks import BLOCK_TOKENS
from prefillcli.plan.pack import Key, Limits
from prefillcli.plan.plan import Plan
from prefillcli.prompts.labels import ClassLabels
from prefillcli.prompts.questions import Label
from prefillcli.report.run import RunReport
from prefillcli.rows.records import Prompt, Window
from prefillcli.runtime.clock import Clock
from prefillcli.runtime.signals import Stop
from prefillcli.scoring.loop import ScoringLoop, ScoringOptions
from prefillcli.scoring.recorder import Recorder
from prefillcli.scoring.runners.pool import (
    Answered,
    AnswerTask,
    Done,
    Event,
    Lost,
    Pool,
    Ready,
    Reported,
    Started,
    Task,
    WorkerSpec,
)
from prefillcli.stats.arrays import Int32Array
from prefillcli.stats.labels import Measure


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


_VOCABULARY = 32_000
#: Outputs of a head, whose probability nobody looks at.
_CLASSES = ClassLabels([Label("Yes"), Label("No")], ((0,), (1,)), Measure.SHARES)


class _NoSink:
    """Keeps nothing."""

    def done(self, window: int) -> set[int]:
        return set()

    def window_before(self, window: int) -> int:
        return window - 1

    def carried_into(self, window: int) -> list[tuple[int, str]]:
        return []

    def write(self, *_arguments: Any, **_options: Any) -> None:
        pass


def _short(draw: np.random.Generator) -> Iterator[Int32Array]:
    while True:
        yield draw.integers(0, _VOCABULARY, draw.integers(20, 200), dtype=np.int32)


def _instruction(draw: np.random.Generator) -> Iterator[Int32Array]:
    start = draw.integers(0, _VOCABULARY, 300, dtype=np.int32)
    for own in _short(draw):
        yield np.concatenate([start, own])


def _users(draw: np.random.Generator) -> Iterator[Int32Array]:
    while True:
        history = draw.integers(0, _VOCABULARY, draw.integers(200, 4_000), dtype=np.int32)
        for _ in range(draw.integers(5, 100)):
            yield np.concatenate([history, draw.integers(0, _VOCABULARY, 40, dtype=np.int32)])


WORKLOADS: dict[str, Callable[[np.random.Generator], Iterator[Int32Array]]] = {
    "20 to 200 tokens": _short,
    "the same after one instruction of 300": _instruction,
    "5 to 100 posts after histories of 200 to 4,000": _users,
}


def _windows(rows: int, workload: str) -> Iterator[Window]:
    tokens = WORKLOADS[workload](np.random.default_rng(0))
    for index, start in enumerate(range(0, rows, MAX_ROWS)):
        numbers = np.arange(start, min(start + MAX_ROWS, rows))
        prompts = [Prompt(int(row), next(tokens), LabelSet(())) for row in numbers]
        yield Window(index, numbers, prompts, {}, pa.table({}))


@dataclass(frozen=True, slots=True)
class Balance:
    """How a job was shared out. `ratio` is its time over that of the best balance without computing anything again."""

    tokens: float
    ratio: float
    again: float
    windows: int


def share_out(rows: int, workers: int, pack_tokens: int, workload: str) -> Balance:
    """Plan and dispatch a job of so many rows to simulated workers."""
    crew = SimulatedCrew(workers, limits=Limits(PACK_TOKENS["cuda"], 1 << 30, held_tokens=1 << 20))
    settings = load_settings(ScoreSettings, {"inputs": ["rows.parquet"], "quiet": True}, environment={})
    with Stop() as stop:
        pool = Pool(
            crew, WorkerSpec(0, settings), lambda spec, number: WorkerSpec(number, settings),
            cost=_tokens, stop=stop,
        )  # fmt: skip
        pool.begin(plans=True, pack_tokens=pack_tokens)
        opened = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(sample_model()))
        unchanged = SimpleNamespace(require_unchanged=lambda *rows: None)
        inputs: Any = SimpleNamespace(settings=settings, labels=_CLASSES, opened=opened, source=unchanged)
        parts: Any = SimpleNamespace(probabilities=None)
        sink: Any = _NoSink()
        models: Any = unchanged
        recorder = Recorder(Run(RunReport(), Clock(), stop, inputs, sink), parts, models, lambda: None)
        options = ScoringOptions(BLOCK_TOKENS)
        scoring = ScoringLoop(pool, options, recorder)
        scoring.score(_windows(rows, workload), lambda: True)
    least = (sum(crew.busy) - crew.refilled) / workers
    return Balance(sum(crew.busy), crew.now / least, crew.refilled / sum(crew.busy), scoring.most_open)


def _tokens(plan: Plan) -> float:
    return float(plan.computed_tokens)
