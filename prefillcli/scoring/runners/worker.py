"""A worker: the models, loaded once, and its tasks with them, one after the other."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefillcli.core.models import Models
from prefillcli.engines.base import Answer, Engine, WorkerReport
from prefillcli.errors import ContentChangedError, EngineDiedError
from prefillcli.models.open import answer_labels
from prefillcli.plan.behind import LabelSet
from prefillcli.rows.proof import ModelContents
from prefillcli.runtime.extras import quiet_imports
from prefillcli.runtime.memory import peak_memory, prepare_allocator, proportional_memory
from prefillcli.runtime.version import __version__
from prefillcli.scoring.loading import load_models, open_models
from prefillcli.scoring.runners.pool import (
    Answered,
    AnswerTask,
    BesideTask,
    Ready,
    Reported,
    Result,
    Task,
    WorkerSpec,
    portable,
)

Tell = Callable[[float], None]
"""Called with the tokens that a step has advanced by."""


class Worker:
    """Lives in its own process or actor. Close it in any case.

    Raises PrefillError as opening and loading the models do, and ContentChangedError if they are not those of the job.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        settings = spec.settings
        _require_contents(spec)
        opened = open_models(settings, spec.dtypes, spec.read_layers)
        self._threads = opened.threads
        self._models: Models[Engine] = load_models(
            opened,
            settings,
            before=spec.settled,
            measured=spec.measured,
            share=spec.share,
            planned=spec.planned,
            names=answer_labels(opened, settings.answers).names,
        )
        self._number = spec.number
        self._packs = self._tokens = 0
        self._seconds = 0.0

    def ready(self) -> Ready:
        """Return the limits of the loaded models and what they have settled, for the driver."""
        engine = self._models.engine
        weights = engine.weights_report()
        streams = weights is not None and weights.mode != "resident"
        return Ready(engine.limits, engine.whole_packs, self._models.settled, streams)

    def run(self, task: Task, tell: Tell) -> Result:
        """Do a task. Raises ResourceError if the engine cannot go on; other errors of the engine pass through."""
        begun = time.monotonic()
        try:
            match task:
                case AnswerTask():
                    return self._answer(task, tell)
                case BesideTask(name, asked):
                    return self._beside(name, asked, tell)
                case _:
                    return self._report()
        finally:
            self._seconds += time.monotonic() - begun

    def close(self) -> None:
        """Free memory, and end other processes."""
        self._models.close()

    def _answer(self, task: AnswerTask, tell: Tell) -> Answered:
        engine, pack = self._models.engine, task.work.pack
        refilled = 0

        def tick(tokens: float) -> None:
            self._adjust_threads()
            tell(tokens)

        def keep_alive(_tokens: float) -> None:
            tick(0.0)

        self._adjust_threads()
        for refill in task.work.refills:
            if refill.block is not None and not engine.holds(refill.block):
                for _ in engine.answer(refill, _no_labels, keep_alive):
                    pass
                refilled += len(refill.tokens)
        answers: list[Answer] = []
        for found in engine.answer(pack, lambda prompt: task.labels[task.sets[prompt]], tick, task.treatment):
            answers += found
        self._packs += 1
        self._tokens += sum(answer.computed_tokens for answer in answers) - pack.charged_tokens + refilled
        return Answered(answers, refilled)

    def _beside(self, name: str, asked: Any, tell: Tell) -> Any:
        def tick(_tokens: float) -> None:
            self._adjust_threads()
            tell(0.0)

        return asked.answer(self._models.beside[name], tick)

    def _report(self) -> Reported:
        peak, threads = peak_memory(), self._threads
        worker = WorkerReport(
            number=self._number,
            packs=self._packs,
            tokens=self._tokens,
            seconds=self._seconds,
            host_bytes=peak["host"],
            device_bytes=peak["device"],
            own_bytes=proportional_memory(),
            weights=self._models.engine.weights_report(),
            reduced=self._models.engine.reduced(),
            threads=None if threads is None or not threads.ran else (threads.ran[0], threads.ran[1]),
        )
        return Reported(worker, self._models.engine.decoded())

    def _adjust_threads(self) -> None:
        if self._threads is not None:
            self._threads.adjust()


def _no_labels(_prompt: int) -> LabelSet:
    return LabelSet(())


def _require_contents(spec: WorkerSpec) -> None:
    """Raise ContentChangedError unless the folders of the models have the contents that the driver has seen."""
    for folder, digest in spec.digests.items():
        if not Path(folder).exists():
            raise ContentChangedError(
                f"{folder}: not found on the machine of worker {spec.number}\n"
                "the model must have the same path on every machine"
            )
        if ModelContents(Path(folder)).model() != digest:
            raise ContentChangedError(
                f"{folder}: other contents on the machine of worker {spec.number} than on the driver's\n"
                "put the same model on every machine"
            )


TELL = "tell"
"""The concurrency group of `advanced`, which is called while a task runs."""
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
        """Return the version of prefillcli here, and the machine's name."""
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
        """Return how many tokens were computed since the last call, and the number of their task: the first is 1.

        Waits a while until there are any.
        """
        with self._progress:
            self._progress.wait_for(lambda: self._tokens > 0, _ASLEEP)
            told, self._tokens = (self._tasks, self._tokens), 0.0
            return told

    def _opened(self, pickled: bytes) -> object:
        spec = pickle.loads(pickled)  # noqa: S301 - from the driver, not from data
        self._worker = Worker(replace(spec, share=memory_share(spec.settings.lm.device)))
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
    """Return this actor's share of its machine's memory: its share of the CPUs, or of a GPU.

    1 in a process that is not an actor.
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
    except EngineDiedError:  # a worker that starts again loads it again
        return pickle.dumps(("lost", "ended because its engine had died"))
    except BaseException as error:
        return pickle.dumps(("failed", portable(error)))
