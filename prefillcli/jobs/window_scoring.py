"""Scoring a window: prompts in, scored rows out. It writes nothing and reports nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from prefillcli.core.feature import Feature
from prefillcli.core.request import AuditDraw, Request, kept_tokens, plan_requests, thinning_of
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.prompts.sections import MOST_SECTIONS
from prefillcli.data.rows import ErrorCode, Float64Array, RowError, ScoredRow, Window
from prefillcli.decode.continuations import Beginning, Continuation
from prefillcli.engines.base import PLAIN, Answer, PlanEngine, Treatment
from prefillcli.jobs.wanted_rows import ChosenByScores, GivenContinuations, JobRationales, WeighedRow, scored_row
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import Plan
from prefillcli.report.run import Tokens
from prefillcli.runtime.clock import Phase

if TYPE_CHECKING:
    pass

# What an engine has to answer for the rows of a window, and the rows that its answers finish.


@dataclass(slots=True)
class Finished:
    """Rows of a window that are finished since the last ones, and the tokens that took.

    `carried` are the blocks that the window hands to the next one; None where that is not said.
    """

    rows: list[ScoredRow] = field(default_factory=list)
    errors: dict[int, RowError] = field(default_factory=dict)
    tokens: Tokens = field(default_factory=Tokens)
    carried: tuple[CarriedBlock, ...] | None = None

    def add(self, other: Finished) -> None:
        """Rows that are finished as well, with their tokens."""
        self.rows += other.rows
        self.errors |= other.errors
        self.tokens.add(other.tokens)
        self.carried = self.carried if other.carried is None else other.carried


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
        features: Sequence[Feature],
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
        self._features = features
        self._in_limit = False
        self._numbers = 0  # of packs, that later plans begin behind
        self._by_row = {request.prompt.row: request for request in requests}

    @property
    def done_prompts(self) -> list[int]:
        return [number for number, each in enumerate(self.requests) if each.prompt.row in self.done]

    def treatment(self, pack: Pack) -> Treatment:
        thinning = thinning_of({prompt: self.requests[prompt] for prompt in pack.prompts})
        treatments = [each.treatment(self.in_full) for each in self._features]
        treatment = replace(next(filter(None, treatments), PLAIN), thinning=thinning)
        if treatment.exits is None and thinning is None:  # else nothing is kept of the rows' ways through all layers
            treatment = replace(treatment, continuations=self._continuations(pack))
        return treatment

    def take(self, pack: Pack, answers: Sequence[Answer]) -> Finished:
        finished = Finished()
        unanswered = [answer for answer in answers if answer.failure is not None]
        if unanswered:
            answers = [answer for answer in answers if answer.failure is None]
            finished.add(failed_prompts(self, unanswered))
        elif answers:
            for each in self._features:
                each.answered(pack, answers)
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


# What is done for rows of a window after all of them are scored: their texts are written, their sections are
# weighed.
#
# Wanted rows whose texts could not be written behind their first reading are read once more. Together with the
# prompts that evidence needs they make one more plan, so that what they share is computed once.


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
    found.plan = replace(found.plan, packs=work.after(found.plan))
    found.finished += [each.scored for each in past_limit]
    return found


def _whole(request: Request) -> Request:
    """How a row is read to be written about: what the model's own layers leave out of it is read as well."""
    return request if request.thinning is None else Request(request.prompt)


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """How windows are scored.

    `audit` says which compressed prompts are read in full as well, with `features` that flip answers which of all.
    `rationales` says which rows are written about, or have their sections weighed. `adjust_threads` is called often
    while something is computed. `block_tokens` as in `make_plan`.
    Where a feature says how prompts are read, `requests` is `Scorer.requests`.
    """

    labels: Labels
    schedule: str
    block_tokens: int = 0
    requests: Callable[..., tuple[list[Request], int]] | None = None
    audit: AuditDraw | None = None
    features: Sequence[Feature] = ()
    rationales: JobRationales | None = None
    adjust_threads: Callable[[], None] = lambda: None


class Listener(Protocol):
    """Hears how scoring a window goes. `step` may raise Interrupted to stop it."""

    def phase(self, name: Phase, *, waits: bool = False) -> AbstractContextManager[None]:
        """Time spent on something. While it only `waits` for other processes, a signal may end it anywhere."""

    def planned(self, packs: list[Pack], rows: int) -> None:
        """So many rows will be computed as these packs."""

    def pack_begins(self, pack: Pack) -> None: ...

    def step(self, pack: Pack | None, rows: float, tokens: float, share: float) -> None:
        """So many `rows` (also parts of one), prompt `tokens` and this `share` of the pack more are computed."""

    def pack_ends(self, pack: Pack) -> None: ...


def begin_window(
    window: Window,
    done: set[int],
    carried: Sequence[CarriedBlock],
    engine: PlanEngine,
    options: ScoringOptions,
    listener: Listener,
    *,
    rows_open: int = 0,
) -> tuple[WindowWork, Finished]:
    """What an engine has to answer for the rows of `window` that are not `done`, and what is known before.

    `carried` are the blocks that the window before hands on, whether or not the engine still holds them. A row
    that is read both ways is finished when both are answered. The
    window's own error rows are not repeated. Of windows before, `rows_open` are not written yet.
    """
    requests, finished = _requests(window, done, options, listener)
    known = {row: scored for each in options.features for row, scored in each.known().items()}
    found_before = [each for each in requests if each.prompt.row in known.keys() - done]
    requests = [request for request in requests if request.prompt.row not in known]
    requests, too_large = _fitting(requests, engine.limits.max_tokens)
    if not engine.whole_packs:
        requests = [request for request in requests if request.prompt.row not in done]
    audited = _audited(window, requests, engine, options)
    rationales = options.rationales
    limited = engine.limits.reads_again or (
        rationales is not None and not rationales.has_room(rows_open + len(window.rows))
    )
    work = WindowWork(window, requests, audited, done, options.features, rationales, limited=limited)
    if found_before:
        _add_known(finished, work, found_before, known)
        listener.step(None, len(found_before), finished.tokens.prompt, 0)
    with listener.phase("plan"):
        work.plan = plan_requests(
            work.requests, engine.limits, options.schedule, carried=carried, block_tokens=options.block_tokens
        )
    finished.errors, finished.tokens.unique = too_large, work.plan.unique_tokens
    finished.carried = work.plan.carried
    return work, finished


def _add_known(
    finished: Finished, work: WindowWork, requests: Sequence[Request], known: Mapping[int, ScoredRow]
) -> None:
    """Add the rows of requests that were answered before the first window."""
    rows = [known[each.prompt.row] for each in requests]
    finished.rows = work.settle_known(requests, rows)
    finished.tokens.prompt = sum(len(each.prompt.tokens) for each in requests)
    finished.tokens.kept = sum(len(each.tokens) for each in requests)
    finished.tokens.shared = sum(row.shared_tokens for row in rows)


def _requests(
    window: Window, done: set[int], options: ScoringOptions, listener: Listener
) -> tuple[list[Request], Finished]:
    """How the model will read the prompts of a window, and what finding that out took."""
    if options.requests is None:
        return [Request(prompt) for prompt in window.prompts], Finished()
    options.adjust_threads()
    with listener.phase("draft"):
        requests, tokens = options.requests(
            window.prompts, lambda tokens: listener.step(None, 0, 0, 0), window=window, done=done
        )
    return requests, Finished(tokens=Tokens(draft=tokens))


def _fitting(requests: Sequence[Request], most: int) -> tuple[list[Request], dict[int, RowError]]:
    """The requests that the memory budget holds, of at most `most` tokens; the others' rows are error rows."""
    fitting, errors = [], {}
    for request in requests:
        tokens = len(request.tokens)
        if tokens <= most:
            fitting.append(request)
        else:
            detail = f"{tokens} tokens; the memory budget holds {most}"
            errors[request.prompt.row] = RowError(ErrorCode.EXCEEDS_MEMORY, detail)
    return fitting, errors


def _audited(window: Window, requests: Sequence[Request], engine: PlanEngine, options: ScoringOptions) -> list[int]:
    """Numbers of the requests whose prompts are read in full as well, or to the end where others may leave."""
    if options.audit is None:
        return []
    most = engine.limits.max_tokens
    flips = any(each.flips and not each.rewrites for each in options.features)
    able = [
        number
        for number, request in enumerate(requests)
        if (request.compressed or flips) and len(request.prompt.tokens) <= most
    ]
    return options.audit.draw(window, able)
