"""What is done for rows of a window after all of them are scored: their texts are written, their sections are weighed.

Wanted rows whose texts could not be written behind their first reading are read once more. Together with the prompts
that evidence needs they make one more plan, so that what they share is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefillcli.compress.answers import plan_requests
from prefillcli.compress.request import Request
from prefillcli.data.prompts.sections import MOST_SECTIONS
from prefillcli.data.rows import RowError, ScoredRow, Window
from prefillcli.decode.continuations import Beginning, Continuation
from prefillcli.engines.base import Answer, Treatment
from prefillcli.jobs.evidence import WeighedRow
from prefillcli.jobs.wanted_rows import GivenContinuations, JobRationales
from prefillcli.jobs.window_work import Finished, WantedRow, WindowWork, failed_prompts
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import Plan

GROUP_TOKENS = 4 << 20
"""Tokens of the prompts that are made together without their sections, at most."""
UNREAD = Continuation((), "memory", float("inf"))
"""Of a prompt whose K,V of all layers do not fit."""
FAILED = Continuation((), "error", float("inf"))


@dataclass(slots=True)
class _Row:
    """A wanted row, and the requests that it still waits for, by number: `places` are those of its evidence."""

    wanted: WantedRow
    weighed: WeighedRow | None = None
    places: dict[int, int] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)


class FollowUp:
    """The requests of a window's wanted rows, as `PlannedWork`. Rows that need none are `finished` at once."""

    def __init__(
        self,
        window: Window,
        wanted: Sequence[WantedRow],
        job: JobRationales,
        limits: Limits,
        schedule: str,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.requests: list[Request] = []
        self.plan = Plan([], 0)
        self.finished: list[ScoredRow] = []
        self._window = window
        self._job = job
        self._rows: dict[int, _Row] = {}  # by the numbers of their requests
        self._written: dict[int, Beginning] = {}
        for each in wanted:
            self._add(each, limits)
            tick()
        if self.requests:
            self.plan = plan_requests(self.requests, limits.for_texts() if self._written else limits, schedule)

    @property
    def done_prompts(self) -> list[int]:
        return []

    def treatment(self, pack: Pack) -> Treatment:
        own = {prompt: self._written[prompt] for prompt in pack.prompts if prompt in self._written}
        writing = self._job.writing
        return Treatment(continuations=GivenContinuations(writing, own) if own and writing is not None else None)

    def take(self, pack: Pack, answers: Sequence[Answer]) -> Finished:
        finished = failed_prompts(self, [answer for answer in answers if answer.failure is not None])
        for answer in answers:
            if answer.failure is not None:
                continue
            finished.tokens.computed += answer.computed_tokens
            finished.tokens.follow_up += answer.computed_tokens
            row = self._rows[answer.prompt]
            row.wanted.scored.seconds += answer.seconds
            if answer.prompt in self._written:
                self._write(row, answer.continuation or UNREAD)
            elif row.weighed is not None:
                row.weighed.take(row.places[answer.prompt], answer)
            finished.rows += self._done(row, answer.prompt)
        return finished

    def fail(self, prompt: int, error: RowError) -> Finished:
        """A row keeps its score: it gets no text, or its evidence lacks a section."""
        row = self._rows[prompt]
        if prompt in self._written:
            self._write(row, FAILED)
        return Finished(rows=self._done(row, prompt))

    def share(self, pack: Pack) -> tuple[float, float]:
        return 0.0, 0.0

    def _add(self, wanted: WantedRow, limits: Limits) -> None:
        row, job = _Row(wanted), self._job
        if job.writing is not None and wanted.scored.rationale is None:
            request = _whole(wanted.request)
            if limits.kept_size(len(request.tokens), 1) > limits.kept_tokens:
                self._write(row, UNREAD)
            else:
                number = self._ask(row, request)
                self._written[number] = job.beginning(self._window, request, wanted.label)
        if job.evidence is not None:
            row.weighed = job.evidence.weigh(wanted.request, wanted.scored)
            for place, request in enumerate(row.weighed.requests):
                if len(request.tokens) <= limits.max_tokens:
                    row.places[self._ask(row, request)] = place
        if not row.open:
            self.finished += self._complete(row)

    def _ask(self, row: _Row, request: Request) -> int:
        number = len(self.requests)
        self.requests.append(request)
        self._rows[number] = row
        row.open.add(number)
        return number

    def _write(self, row: _Row, written: Continuation) -> None:
        request = _whole(row.wanted.request)
        row.wanted.scored.rationale = self._job.rationale(request, row.wanted.label, written)

    def _done(self, row: _Row, prompt: int) -> list[ScoredRow]:
        row.open.discard(prompt)
        return [] if row.open else self._complete(row)

    def _complete(self, row: _Row) -> list[ScoredRow]:
        if row.weighed is not None:
            row.wanted.scored.evidence = row.weighed.effects() or ()
        return [row.wanted.scored]


def follow_up(
    work: WindowWork, limits: Limits, schedule: str, tick: Callable[[], None] = lambda: None
) -> FollowUp | None:
    """What is left to do for some of the wanted rows of a window whose packs are all answered; None if nothing is.

    The others wait for the next call: there may be many prompts without a section. Where rows are limited, those that
    come first in the input are taken, and the others are finished as they are. `tick` is called after each row, and
    may raise to stop.
    """
    job = work.rationales
    if job is None or not work.wanted:
        return None
    past_limit = work.past_limit()
    group: list[WantedRow] = []
    tokens, each = 0, 1 if job.evidence is None else MOST_SECTIONS
    while work.wanted and (not group or tokens + each * len(work.wanted[0].request.prompt.tokens) <= GROUP_TOKENS):
        group.append(work.wanted.pop(0))
        tokens += each * len(group[-1].request.prompt.tokens)
    found = FollowUp(work.window, group, job, limits, schedule, tick)
    found.finished += [each.scored for each in past_limit]
    return found


def _whole(request: Request) -> Request:
    """How a row is read to be written about: what the model's own layers leave out of it is read as well."""
    return request if request.thinning is None else Request(request.prompt)
