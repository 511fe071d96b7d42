"""Workers as actors on Ray: of a cluster, or on this machine."""

from __future__ import annotations

import os
import pickle
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from prefillcli.errors import PrefillError, ResourceError, UsageError, brief
from prefillcli.models.open import Opened, small_models, with_small
from prefillcli.options.settings import JobSettings
from prefillcli.runtime import log
from prefillcli.runtime.cores import allowed
from prefillcli.runtime.extras import require_extra
from prefillcli.runtime.log import stdout_to_stderr
from prefillcli.runtime.version import __version__
from prefillcli.scoring.runners.pool import Advanced, Done, Event, Failed, Lost, Started, Task, WorkerError, WorkerSpec
from prefillcli.scoring.runners.worker import TELL, WorkerActor

# The Ray cluster that a job's actors run on: joining or starting it, and the share of each actor.


_STORE_BYTES = 256 << 20  # of a Ray of our own: tasks are some MB
_PATIENCE = 10.0  # seconds for an address to answer
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}
"""Set before Ray is imported, unless the environment sets it."""


class RayCluster:
    """A cluster at an address, or a Ray of this machine's own, which ends with this process.

    `resources` are those that every worker asks for, by the names that users know; missing ones are chosen here.
    """

    def __init__(
        self, address: str | None, resources: Mapping[str, float], *, workers: int, device: str, quiet: bool
    ) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS") or "local"
        if self.address.startswith("ray://"):
            raise UsageError(
                f"--ray-address {self.address}: prefill is not a Ray client\n"
                "run it on a machine of the cluster, with ray job submit for example, and take --ray-address auto"
            )
        self._workers = workers
        self._asked = dict(resources)
        self._device = device
        self._quiet = quiet
        self._joined = False
        self.ray: Any = None

    @property
    def own(self) -> bool:
        """True if this Ray is started for the job."""
        return self.address == "local"

    def join(self) -> None:
        """Join or start it. Raises ResourceError, and UsageError without Ray.

        Outside the main thread it leaves Python's signal handlers alone.
        """
        for name, value in {**_VARIABLES, **self._said()}.items():
            os.environ.setdefault(name, value)
        require_extra("ray", "--runner ray")
        try:
            import ray
        except ImportError as error:  # a package that Ray needs
            raise UsageError(f"--runner ray: Ray cannot be imported: {brief(error)}") from None
        if not ray.is_initialized():
            self._refuse_silence()
            try:
                ray.init(**self._arguments())
            except Exception as error:
                what = "Ray does not start here" if self.own else f"--ray-address {self.address}: cannot be joined"
                raise ResourceError(f"{what}: {brief(error)}") from None
            self._joined = True
        self.ray = ray
        if self.own:
            self._refuse_what_never_fits()

    def leave(self) -> None:
        """Leave the cluster; the job's actors end. A Ray that this process had joined before stays."""
        if self._joined:
            import ray

            ray.shutdown()
            self._joined = False

    def options(self) -> dict[str, Any]:
        """Return the resources that Ray sets aside for an actor, by Ray's names."""
        asked = self._choice()
        found: dict[str, Any] = {name: asked.pop(name) for name in ("num_cpus", "num_gpus") if name in asked}
        if "memory" in asked:
            found["memory"] = int(asked.pop("memory"))
        return {**found, "resources": asked} if asked else found

    def wish(self) -> str:
        """Return the resources that a worker asks for, as text."""
        return ", ".join(f"{name}={amount:g}" for name, amount in self._choice().items() if amount)

    def room(self) -> str:
        """Return the resources of the cluster's machines, as text."""
        have = self.ray.cluster_resources()
        shown = {name: have[name] for name in ("CPU", "GPU", *self._asked) if name in have}
        nodes = sum(bool(node["Alive"]) for node in self.ray.nodes())
        return f"{nodes} machines with {', '.join(f'{name} {amount:g}' for name, amount in shown.items())} in all"

    def _refuse_silence(self) -> None:
        """Raise ResourceError where nothing answers: Ray itself waits for minutes."""
        host, colon, port = self.address.rpartition(":")
        if not colon or not port.isdigit():
            return  # auto, local
        try:
            socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
        except (OSError, OverflowError) as error:
            raise ResourceError(f"--ray-address {self.address}: cannot be joined: {brief(error)}") from None

    def _said(self) -> dict[str, str]:
        """Return settings of Ray's own messages on stderr: no colours in a file, few when asked to be quiet."""
        said = {} if sys.stderr.isatty() else {"RAY_COLOR_PREFIX": "0"}
        return {**said, "RAY_SCHEDULER_EVENTS": "0"} if self._quiet or self.own else said

    def _arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = {"address": self.address, "log_to_driver": True, "logging_level": "ERROR"}
        if self.own:
            cores = max(allowed(), 0 if "num_cpus" in self._asked else self._workers)
            custom = {name: amount * self._workers for name, amount in self._asked.items() if name not in _KNOWN}
            found |= {"include_dashboard": False, "num_cpus": cores, "object_store_memory": _STORE_BYTES}
            found |= {"resources": custom} if custom else {}
        return found

    def _choice(self) -> dict[str, float]:
        """Return amounts by name, including those that were not asked for."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        asked = dict(self._asked)
        if "num_gpus" not in asked and self._device != "cpu":
            some = any(node.get("GPU", 0) for node in nodes)
            asked["num_gpus"] = 1.0 if some or self._device == "cuda" else 0.0
        if "num_cpus" not in asked:
            asked["num_cpus"] = even_part(nodes, self._workers, asked.get("num_gpus", 0.0))
        return asked

    def _refuse_what_never_fits(self) -> None:
        have = self.ray.cluster_resources()
        for name, amount in self._choice().items():
            found = have.get({"num_cpus": "CPU", "num_gpus": "GPU"}.get(name, name), 0.0)
            if amount * self._workers > found:
                raise ResourceError(
                    f"--worker-resources {name}={amount:g}: {self._workers} workers ask for more than the "
                    f"{found:g} of this machine\ntake fewer --workers, or less for each"
                )


_KNOWN = frozenset({"num_cpus", "num_gpus", "memory"})


def even_part(nodes: Sequence[Mapping[str, float]], workers: int, gpus: float = 0.0) -> float:
    """Return the most whole CPUs that every worker can have on machines with these resources; 1 if they have no room
    for all workers. Each worker takes `gpus` as well."""
    for cpus in range(int(max((node.get("CPU", 0.0) for node in nodes), default=0)), 0, -1):
        places = 0
        for node in nodes:
            here = int(node.get("CPU", 0.0) // cpus)
            places += min(here, int(node.get("GPU", 0.0) // gpus)) if gpus else here
        if places >= workers:
            return float(cpus)
    return 1.0


_END_SECONDS = 20.0  # for Ray to end
_SILENCE = 15.0  # seconds of waiting for room before a message
_KINDS: dict[str, Callable[[int, Any], Event]] = {"started": Started, "done": Done, "failed": Failed, "lost": Lost}


@dataclass(eq=False, slots=True)
class _Actor:
    """A worker's actor. Events of an earlier one of its number do not count."""

    number: int
    handle: Any
    begun: float = field(default_factory=time.monotonic)
    placed: bool = False
    lost: bool = False
    done: int = 0
    """Tasks."""


class RayCrew:
    """Actors that end with this process, however it does. Each gets its tasks from Ray's object store.

    All calls of Ray come from one thread: in the main one Ray would swallow exceptions of signal handlers.
    """

    digests_needed = True

    def __init__(self, settings: JobSettings, opened: Opened) -> None:
        device = settings.lm.device
        if device.startswith("cuda:"):
            raise UsageError(f"--device {device}: Ray gives each worker its own device\ntake --device cuda")
        self.size = settings.processes.workers
        self._cluster = RayCluster(
            settings.processes.ray_address,
            settings.processes.worker_resources,
            workers=settings.processes.workers,
            device=device,
            quiet=settings.run.quiet,
        )
        self._patience = settings.processes.ray_timeout
        self._quiet = settings.run.quiet
        self._actors: dict[int, _Actor] = {}
        self._told: set[int] = set()  # workers whose lack of room was reported
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams = ExitStack()
        self._streams.enter_context(stdout_to_stderr())  # Ray prints its own messages and its actors'
        self._thread = threading.Thread(target=self._call, name="prefill-ray", daemon=True)
        self._thread.start()

    def start(self, spec: WorkerSpec) -> None:
        self._calls.put(lambda: self._start(spec))

    def send(self, worker: int, task: Task) -> None:
        self._calls.put(lambda: self._send(worker, task))

    def wait(self, timeout: float) -> list[Event]:
        events: list[Event | None] = []
        with suppress(queue.Empty):
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        if None in events:
            take_signals_back()
        self._calls.put(self._look_for_room)
        return [event for event in events if event is not None]

    def close(self) -> None:
        self._calls.put(self._end)
        self._calls.put(None)
        self._thread.join(_END_SECONDS)
        self._streams.close()

    # In the thread that calls Ray.

    def _call(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except PrefillError as error:
                self._events.put(Failed(-1, error))
            except Exception as error:  # Ray's own, of many kinds
                self._events.put(Failed(-1, ResourceError(f"Ray: {brief(error)}")))

    def _start(self, spec: WorkerSpec) -> None:
        cluster = self._cluster
        if cluster.ray is None:
            try:
                cluster.join()
            finally:
                self._events.put(None)
        ray = cluster.ray
        self._kill(spec.number)
        kind = ray.remote(concurrency_groups={TELL: 1})(WorkerActor)
        handle = kind.options(max_restarts=0, scheduling_strategy="SPREAD", **cluster.options()).remote()
        actor = self._actors[spec.number] = _Actor(spec.number, handle)
        self._hear(actor, handle.place.remote(), self._placed)
        self._hear(actor, handle.open.remote(ray.put(pickle.dumps(self._anywhere(spec)))), self._said)
        self._ask(actor)

    def _anywhere(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the same for a worker on another machine: with whole paths."""
        settings = spec.settings
        changes: dict[str, Any] = {"model": settings.lm.model and os.path.abspath(settings.lm.model)}
        changes |= with_small(settings, [os.path.abspath(name) for name in small_models(settings)[1]])
        digests = {os.path.abspath(folder): digest for folder, digest in spec.digests.items()}
        return replace(spec, settings=settings.with_options(changes), digests=digests)

    def _send(self, worker: int, task: Task) -> None:
        actor = self._actors.get(worker)
        if actor is not None and not actor.lost:
            stored = self._cluster.ray.put(pickle.dumps(task))
            self._hear(actor, actor.handle.run.remote(stored), self._said)

    def _ask(self, actor: _Actor) -> None:
        """Ask for the actor's progress; it answers when there is any."""
        if not actor.lost:
            asked = actor.handle.advanced.options(concurrency_group=TELL).remote()
            self._hear(actor, asked, self._advanced)

    def _hear(self, actor: _Actor, answer: Any, take: Callable[[_Actor, Any], None]) -> None:
        """Pass the answer to `take`, in this thread, or note that the actor is lost."""

        def ready(future: Any) -> None:  # in a thread of Ray
            error = future.exception()
            value = None if error else future.result()
            self._calls.put(lambda: self._missed(actor, error) if error else take(actor, value))

        answer.future().add_done_callback(ready)

    def _placed(self, actor: _Actor, where: tuple[str, str]) -> None:
        version, machine = where
        actor.placed = True
        if version != __version__:
            raise ResourceError(f"{machine} has prefillcli {version}, not {__version__}: install the same everywhere")

    def _said(self, actor: _Actor, answer: bytes) -> None:
        if not actor.lost:
            kind, value = pickle.loads(answer)  # noqa: S301 - from our own actor
            actor.done += kind == "done"
            if kind == "lost":
                self._kill(actor.number)
            self._events.put(_KINDS[kind](actor.number, value))

    def _advanced(self, actor: _Actor, told: tuple[int, float]) -> None:
        task, tokens = told
        if tokens and task == actor.done + 1 and not actor.lost:
            self._events.put(Advanced(actor.number, tokens))
        self._ask(actor)

    def _missed(self, actor: _Actor, error: BaseException) -> None:
        """Note an answer that will not come."""
        if actor.lost:
            return
        actor.lost = True
        self._kill(actor.number)
        exceptions = self._cluster.ray.exceptions
        if isinstance(error, exceptions.RayTaskError | exceptions.RuntimeEnvSetupError) or getattr(
            error, "actor_init_failed", False
        ):
            self._events.put(Failed(actor.number, WorkerError(f"worker {actor.number}: {brief(error)}")))
        else:
            self._events.put(Lost(actor.number, why_lost(str(error))))

    def _kill(self, number: int) -> None:
        actor = self._actors.pop(number, None)
        if actor is not None:
            actor.lost = True
            with suppress(Exception):  # it is already dead
                self._cluster.ray.kill(actor.handle)

    def _look_for_room(self) -> None:
        """Report the workers that wait for room; if none gets any for long, the job cannot go on."""
        now, actors = time.monotonic(), list(self._actors.values())
        waiting = [actor for actor in actors if not actor.placed]
        since = min((actor.begun for actor in waiting), default=now)
        if len(waiting) == len(actors) and now - since > self._patience:
            self._kill(waiting[0].number)
            raise ResourceError(
                f"Ray has had no room for a worker for {self._patience:g} s: it asks for {self._cluster.wish()}; "
                f"the cluster is {self._cluster.room()}\ntake less --worker-resources, or a longer --set ray_timeout"
            )
        for actor in waiting:
            if now - actor.begun > _SILENCE and actor.number not in self._told and not self._quiet:
                self._told.add(actor.number)
                wish = self._cluster.wish()
                log.info(f"worker {actor.number} waits until Ray has room for {wish}")

    def _end(self) -> None:
        for number in list(self._actors):
            self._kill(number)
        self._cluster.leave()


def take_signals_back() -> None:
    """Let Python handle the signals that ask a run to stop. Ray has replaced its handler by one that ends the
    process."""
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.getsignal(signum))


def why_lost(text: str) -> str:
    """Return why a worker ended, by Ray's message about its actor: words that follow "worker 2"."""
    if re.search(r"low on memory|OutOfMemory|memory monitor", text):
        return "was ended by Ray, for its machine had too little memory left (RAY_memory_usage_threshold)"
    if re.search(r"node has died|node died|NodeDied|Node.{0,40}(dead|died)|preempted", text, re.IGNORECASE):
        return "was lost with its machine"
    if re.search(r"unavailable", text, re.IGNORECASE):
        return "cannot be reached"
    detail = re.search(r"Worker exit detail: (.+?)(?: Some common causes| If the process|\n|$)", text)
    return f"has ended ({detail.group(1).rstrip('.')})" if detail else f"has ended ({brief(Exception(text))})"
