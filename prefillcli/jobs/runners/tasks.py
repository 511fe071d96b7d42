"""What the driver of a job and its workers say to each other. All of it can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prefillcli.decode.continuations import DecodingReport
from prefillcli.engines.base import PLAIN, Answer, LabelTokens, ReducedPacks, Treatment, WeightsReport
from prefillcli.engines.memory_plan import Measured
from prefillcli.options.score import ScoreSettings
from prefillcli.plan.pack import Limits
from prefillcli.plan.refills import FreePack
from prefillcli.plan.trie import TokenArray
from prefillcli.runtime.log import log_of

if TYPE_CHECKING:  # takes torch along
    from prefillcli.compress.base import ImportanceEstimate
    from prefillcli.compress.overlap import Overlap


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
