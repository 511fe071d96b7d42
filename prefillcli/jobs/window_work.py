"""What an engine has to answer for the rows of a window, and the rows that its answers finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from prefillcli.compress.answers import kept_tokens, thinning_of
from prefillcli.compress.request import Request
from prefillcli.data.rows import ErrorCode, Float64Array, RowError, ScoredRow, Window
from prefillcli.engines.base import Answer, Treatment
from prefillcli.jobs.job_exits import JobExits, Spared
from prefillcli.jobs.scored_rows import scored_row
from prefillcli.jobs.wanted_rows import ChosenByScores, JobRationales
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Pack
from prefillcli.plan.plan import Plan
from prefillcli.report.run import Tokens


@dataclass(slots=True)
class Finished:
    """Rows of a window that are finished since the last ones, and the tokens that took.

    `carried` are the blocks that the window hands to the next one; None where that is not said. `spared` is what
    exits have spared a pack, where there are any.
    """

    rows: list[ScoredRow] = field(default_factory=list)
    errors: dict[int, RowError] = field(default_factory=dict)
    tokens: Tokens = field(default_factory=Tokens)
    carried: tuple[CarriedBlock, ...] | None = None
    spared: Spared | None = None

    def add(self, other: Finished) -> None:
        """Rows that are finished as well, with their tokens."""
        self.rows += other.rows
        self.errors |= other.errors
        self.tokens.add(other.tokens)


class PlannedWork(Protocol):
    """Requests that are planned and answered together."""

    requests: list[Request]
    plan: Plan

    @property
    def done_prompts(self) -> list[int]:
        """The prompts whose rows need no answer any more."""

    def treatment(self, pack: Pack) -> Treatment:
        """What is done with the prompts of a pack, beside reading their labels."""

    def take(self, pack: Pack, answers: Sequence[Answer]) -> Finished:
        """The rows that these answers of a pack finish."""

    def fail(self, prompt: int, error: RowError) -> Finished:
        """What becomes of a row whose prompt cannot be answered."""

    def share(self, pack: Pack) -> tuple[float, float]:
        """Rows and prompt tokens that progress counts for each of the pack's tokens."""


def failed_prompts(work: PlannedWork, unanswered: Sequence[Answer]) -> Finished:
    """What becomes of rows whose prompts have no answer because memory ran out on them."""
    finished = Finished()
    for answer in unanswered:
        finished.add(work.fail(answer.prompt, RowError(ErrorCode.EXCEEDS_MEMORY, answer.failure or "")))
    return finished


@dataclass(frozen=True, slots=True)
class WantedRow:
    """A scored row that waits for more: for a text, unless it has one, and for evidence where the job weighs it.

    `label` is the number of the one that it has got.
    """

    request: Request
    scored: ScoredRow
    label: int


class WindowWork:
    """The requests of a window: first the `ordinary` ones, then those of audited prompts in full.

    Of the prompts that are `audited`, those that are compressed have a second request. Their rows wait in `scored` or
    `audits` for their other half. The others are read to the end. Scored rows that are wanted for more than a score
    wait in `wanted` until all packs are answered. With `limited` rationales, it is not known before who is, or
    what is kept of packs has no room.
    """

    def __init__(
        self,
        window: Window,
        requests: list[Request],
        audited: Sequence[int],
        done: set[int],
        exits: JobExits,
        rationales: JobRationales | None = None,
        *,
        limited: bool = False,
    ) -> None:
        self.ordinary = len(requests)
        compressed = [number for number in audited if requests[number].compressed]
        self.requests = requests + [Request(requests[number].prompt) for number in compressed]
        self.audited = {requests[number].prompt.row for number in compressed}
        second = range(self.ordinary, len(self.requests))
        self.in_full = frozenset(second) | frozenset(audited).difference(compressed)
        """The requests that no exit may end."""
        self.done = set(done)
        """Numbers of the rows that need no answer any more."""
        self.scored: dict[int, ScoredRow] = {}
        self.audits: dict[int, Float64Array] = {}
        self.wanted: list[WantedRow] = []
        self.plan = Plan([], 0)
        self.window = window
        self.rationales = rationales
        self.limited = limited
        self._exits = exits
        self._in_limit = False
        self._numbers = 0  # of packs, that later plans begin behind
        self._by_row = {request.prompt.row: request for request in requests}

    @property
    def done_prompts(self) -> list[int]:
        return [number for number, each in enumerate(self.requests) if each.prompt.row in self.done]

    def treatment(self, pack: Pack) -> Treatment:
        thinning = thinning_of({prompt: self.requests[prompt] for prompt in pack.prompts})
        treatment = replace(self._exits.treatment(self.in_full), thinning=thinning)
        if treatment.exits is None and thinning is None:  # else nothing is kept of the rows' ways through all layers
            treatment = replace(treatment, continuations=self._continuations(pack))
        return treatment

    def take(self, pack: Pack, answers: Sequence[Answer]) -> Finished:
        finished = Finished()
        unanswered = [answer for answer in answers if answer.failure is not None]
        if unanswered:
            answers = [answer for answer in answers if answer.failure is None]
            finished.add(failed_prompts(self, unanswered))
        else:
            finished.spared = self._exits.spared(pack, answers)
        complete: list[ScoredRow] = []
        texts: dict[int, Answer] = {}
        for answer in answers:
            finished.tokens.computed += answer.computed_tokens
            finished.tokens.skipped += answer.skipped
            request = self.requests[answer.prompt]
            row = request.prompt.row
            if row in self.done:
                continue  # computed again only for the K,V that a later pack holds
            if answer.prompt >= self.ordinary:
                finished.tokens.audit += answer.computed_tokens
                self.audits[row] = answer.logprobs
            else:
                finished.tokens.prompt += len(request.prompt.tokens)
                finished.tokens.kept += kept_tokens(request, answer)
                finished.tokens.shared += answer.shared_tokens
                self.scored[row] = scored_row(request, answer, audited=answer.prompt in self.in_full)
                texts[row] = answer
            if row in self.scored and (row in self.audits or row not in self.audited):
                scored = self.scored.pop(row)
                scored.audit = self.audits.pop(row, scored.audit)
                complete.append(scored)
        finished.rows += self.settle(complete, texts)
        return finished

    def fail(self, prompt: int, error: RowError) -> Finished:
        """A prompt that cannot be answered makes its row an error row; where only its audit fails, there is none."""
        row = self.requests[prompt].prompt.row
        if row in self.done:
            return Finished()
        if prompt >= self.ordinary:
            self.audited.discard(row)
            scored = self.scored.pop(row, None)
            return Finished() if scored is None else Finished(rows=self.settle([scored], {}))
        self.done.add(row)
        self.scored.pop(row, None)
        self.audits.pop(row, None)
        return Finished(errors={row: error})

    def share(self, pack: Pack) -> tuple[float, float]:
        ordinary = [i for i in pack.prompts if i < self.ordinary]
        tokens = sum(len(self.requests[i].prompt.tokens) for i in ordinary)
        return len(ordinary) / len(pack.tokens), tokens / len(pack.tokens)

    def settle(self, rows: Sequence[ScoredRow], answers: Mapping[int, Answer]) -> list[ScoredRow]:
        """Of rows that are scored, those that are finished; the others wait. `answers` by row may have their texts."""
        if self.rationales is None or not rows:
            return list(rows)
        choice = self.rationales.choice
        part = self.window.only((self._by_row[scored.row].prompt for scored in rows), choice.rows.columns)
        labels = choice.wanted(part, rows)
        finished = []
        for scored in rows:
            label = labels.get(scored.row)
            if label is None:
                finished.append(scored)
                continue
            request, answer = self._by_row[scored.row], answers.get(scored.row)
            if answer is not None and answer.continuation is not None:
                scored.rationale = self.rationales.rationale(request, label, answer.continuation)
            if self._complete(scored):
                finished.append(scored)
            else:
                self.wanted.append(WantedRow(request, scored, label))
        return finished

    def settle_known(self, requests: Sequence[Request], rows: Sequence[ScoredRow]) -> list[ScoredRow]:
        """`settle` for rows that were scored before, and their requests."""
        self._by_row |= {request.prompt.row: request for request in requests}
        return self.settle(rows, {})

    def past_limit(self) -> list[WantedRow]:
        """Take out the wanted rows that are past the job's limit; the others wait in the order of the input. To be
        asked when all windows before are written; asked again, it takes none."""
        job = self.rationales
        self.wanted.sort(key=lambda each: each.scored.row)
        if job is None or job.limit is None or self._in_limit:
            return []
        self._in_limit = True
        left = max(job.limit - job.chosen(), 0)
        self.wanted, past = self.wanted[:left], self.wanted[left:]
        return past

    def after(self, plan: Plan) -> list[Pack]:
        """The packs of a plan that comes after this one and those that came after it. They keep what the next window
        takes over."""
        own = max((pack.index for pack in (*self.plan.given, *self.plan.packs)), default=-1)
        first = max(own + 1, self._numbers)
        self._numbers = first + len(plan.packs)
        keys = frozenset(key for _, key in self.plan.carried)
        packs = [pack.shifted(first) for pack in plan.packs]
        return [replace(pack, keep=pack.keep | keys) for pack in packs]

    def _complete(self, scored: ScoredRow) -> bool:
        job = self.rationales
        return job is None or (job.evidence is None and (job.writing is None or scored.rationale is not None))

    def _continuations(self, pack: Pack) -> ChosenByScores | None:
        """Which prompts of a pack are written on as soon as they are scored."""
        job = self.rationales
        if job is None or self.limited:
            return None
        able = {
            number: self.requests[number]
            for number in pack.prompts
            if number < self.ordinary and self.requests[number].prompt.row not in self.done
        }
        return job.continuations(self.window, able)
