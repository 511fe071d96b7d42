"""The workers of a job as the driver sees them, wherever they are."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from prefillcli.decode.continuations import DecodingReport
from prefillcli.engines.base import PLAIN, Answer, LabelTokens, ReducedPacks, Treatment, WeightsReport
from prefillcli.engines.memory_plan import Measured
from prefillcli.errors import PrefillError, ResourceError, brief, out_of_resource
from prefillcli.options.score import ScoreSettings
from prefillcli.plan.pack import FreePack, Limits
from prefillcli.plan.trie import TokenArray
from prefillcli.runtime.log import log_of

if TYPE_CHECKING:
    from prefillcli.compress.base import ImportanceEstimate, Overlap

# What the driver of a job and its workers say to each other. All of it can be pickled.


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is made of.

    `settings` are those of the job, with folders for the names of models. `share` is this worker's part of the memory
    that is free on its machine. `plan` is that of an earlier attempt, or, where it is `planned`, of this one: another
    worker has made it. `digests` are those of the folders' contents, where the worker may be on another machine.
    """

    number: int
    settings: ScoreSettings
    keep: float = 1.0
    share: float = 1.0
    plan: Mapping[str, Any] = field(default_factory=dict)
    planned: bool = False
    measured: Measured | None = None
    digests: Mapping[str, str] = field(default_factory=dict)

    def log(self) -> AbstractContextManager[None]:
        """Inside, what the worker says is said as the job's run says it."""
        own = self.settings
        return log_of(own.run_id or "", json_lines=own.log_format == "json", worker=self.number)


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has loaded its models. `limits`, `whole_packs` and `plan` are those of its engine.

    Where it `streams` weights, small packs would wait for them.
    """

    limits: Limits
    whole_packs: bool
    plan: dict[str, Any]
    streams: bool = False


@dataclass(frozen=True, slots=True)
class AnswerTask:
    """A pack to answer. `labels` are the sets of label tokens, `sets` says which of them a prompt has.

    `treatment` says what else is done with the prompts.
    """

    work: FreePack
    labels: tuple[LabelTokens, ...]
    sets: Mapping[int, int]
    treatment: Treatment = PLAIN


@dataclass(frozen=True, slots=True)
class Answered:
    """The answers of a pack. So many tokens were computed again for K,V that the worker did not have."""

    answers: list[Answer]
    refilled_tokens: int


@dataclass(frozen=True, slots=True)
class EstimateTask:
    """Prompts, int32 [tokens] each, whose tokens the draft finds more or less important; `overlaps` as in `Draft`."""

    prompts: list[TokenArray]
    overlaps: list[Overlap] | None = None


@dataclass(frozen=True, slots=True)
class Estimated:
    """One estimate for each prompt. `failure` is what the draft failed with, if it did."""

    estimates: list[ImportanceEstimate]
    draft_tokens: int
    failure: Exception | None = None


@dataclass(frozen=True, slots=True)
class ReportTask:
    """Say what was done so far."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker has done, and what that took.

    `seconds` are those in which it worked on tasks; `own_bytes` is its part of the host's memory, with shared pages
    divided among the processes that have them (proportional set size; None where the system does not tell).
    """

    number: int
    packs: int
    tokens: int
    seconds: float
    host_bytes: int
    device_bytes: int
    own_bytes: int | None
    threads: tuple[int, int] | None
    weights: WeightsReport | None = None
    reduced: ReducedPacks | None = None
    decoded: DecodingReport | None = None


Task = AnswerTask | EstimateTask | ReportTask
Result = Answered | Estimated | WorkerReport


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
