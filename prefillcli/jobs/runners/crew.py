"""The workers of a job as the driver sees them, wherever they are."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Protocol

from prefillcli.errors import PrefillError, ResourceError, brief, out_of_resource
from prefillcli.jobs.runners.tasks import Ready, Result, Task, WorkerSpec


@dataclass(frozen=True, slots=True)
class Started:
    """A worker is ready."""

    worker: int
    ready: Ready


@dataclass(frozen=True, slots=True)
class Advanced:
    """A worker has computed so many tokens more of its first task."""

    worker: int
    tokens: float


@dataclass(frozen=True, slots=True)
class Done:
    """A worker has done its first task."""

    worker: int
    result: Result


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker could not start, or do its first task, for a reason that no other worker would change."""

    worker: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker has ended, with all that it was to do. `why` follows the words \"worker 2\"."""

    worker: int
    why: str


Event = Started | Advanced | Done | Failed | Lost


class Crew(Protocol):
    """Workers by number. Each does the tasks that it is sent in their order. Close it in any case."""

    size: int
    """How many workers there may be."""
    digests_needed: bool
    """The workers may be on other machines: they check what their models' folders hold."""

    def start(self, spec: WorkerSpec) -> None:
        """Begin the worker of this number, or begin it again after it was lost."""

    def send(self, worker: int, task: Task) -> None:
        """Give a started worker one more task. If it is lost meanwhile, `wait` says so."""

    def wait(self, timeout: float) -> list[Event]:
        """What has happened, in order; waits until something has, at most so many seconds."""

    def close(self) -> None:
        """End all workers, at once."""


class WorkerError(Exception):
    """A worker failed, and not for lack of memory: an error in the program. Its traceback is attached as a note."""


def portable(error: BaseException) -> Exception:
    """A worker's error as one that its driver can raise."""
    if isinstance(error, PrefillError):
        return error
    text = f"{type(error).__name__}: {brief(error)}"
    if out_of_resource(error):
        return ResourceError(text)
    failure = WorkerError(text)
    failure.add_note(f"in the worker:\n{''.join(traceback.format_exception(error))}")
    return failure
