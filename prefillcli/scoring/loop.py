"""The loop that scores windows: it asks a pool, in this process or with workers, and passes on the rows."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from prefillcli.core.further import FurtherQuestions, GivenContinuations, WantedRow
from prefillcli.core.request import AuditDraw, Request, kept_tokens, plan_requests, scored_row, thinning_of
from prefillcli.core.scorer import ScoringPool
from prefillcli.engines.base import (
    PLAIN,
    Answer,
    Continuations,
    EarlyAnswer,
    Engine,
    PlanEngine,
    PoolUse,
    Treatment,
)
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import Plan, packs_to_run
from prefillcli.report.run import Tokens
from prefillcli.rows.records import (
    BEFORE,
    ErrorCode,
    Prompt,
    PromptKey,
    RowError,
    ScoredRow,
    Window,
    joined_row,
    unasked,
)
from prefillcli.runtime.clock import Phase
from prefillcli.stats.arrays import Float64Array

if TYPE_CHECKING:
    from prefillcli.core.request import Tick

# The questions for the rows of a window, and the rows that their answers finish.


@dataclass(slots=True)
class Finished:
    """Rows of a window that were finished since the last ones, and the tokens that this took.

    `carried` are the blocks that the window hands to the next one; None: these rows leave that open.
    """

    rows: list[ScoredRow] = field(default_factory=list)
    errors: dict[int, RowError] = field(default_factory=dict)
    tokens: Tokens = field(default_factory=Tokens)
    carried: tuple[CarriedBlock, ...] | None = None

    def add(self, other: Finished) -> None:
        """Add more finished rows, with their tokens."""
        self.rows += other.rows
        self.errors |= other.errors
        self.tokens.add(other.tokens)
        self.carried = self.carried if other.carried is None else other.carried


class PlannedWork(Protocol):
    """Questions that are planned and answered together."""

    requests: list[Request]
    plan: Plan

    @property
    def done_prompts(self) -> list[int]:
        """The prompts whose rows no longer need an answer."""

    def treatment(self, pack: Pack) -> Treatment:
        """Return the treatment of the prompts of a pack, besides reading their labels."""

    def take(self, pack: Pack, answers: Sequence[Answer]) -> Finished:
        """Return the rows that these answers of a pack finish."""

    def fail(self, prompt: int, error: RowError) -> Finished:
        """Return the outcome for a row whose prompt cannot be answered."""

    def share(self, pack: Pack) -> tuple[float, float]:
        """Return how many rows and prompt tokens progress counts for each of the pack's tokens."""


def failed_prompts(work: PlannedWork, unanswered: Sequence[Answer]) -> Finished:
    """Return the outcome for rows whose prompts have no answer because memory ran out on them."""
    finished = Finished()
    for answer in unanswered:
        finished.add(work.fail(answer.prompt, RowError(ErrorCode.EXCEEDS_MEMORY, answer.failure or "")))
    return finished


class WindowWork:
    """The questions of a window: first the `ordinary` ones, then those of audited prompts in full.

    `audited` prompts that are compressed have a second question. Their rows wait in `scored` or `audits` for their
    other half. The other audited prompts are read to the end. Scored rows with further questions wait in `wanted`
    until all packs are answered. With `limited` these rows are not known in advance, or there is no room to keep the
    K,V of packs. `next_tokens` is the number of likeliest tokens to return after each prompt. Conditional prompts that
    have `failed` are not among the questions.
    """

    def __init__(
        self,
        window: Window,
        requests: list[Request],
        audited: Sequence[int],
        done: set[int],
        leaving: EarlyReading | None,
        further: FurtherQuestions | None = None,
        *,
        limited: bool = False,
        next_tokens: int = 0,
        failed: Mapping[PromptKey, RowError] = {},
    ) -> None:
        self.ordinary = len(requests)
        compressed = [number for number in audited if requests[number].compressed]
        self.requests = requests + [Request(requests[number].prompt) for number in compressed]
        self.audited = {requests[number].prompt.key for number in compressed}
        second = range(self.ordinary, len(self.requests))
        self.in_full = frozenset(second) | frozenset(audited).difference(compressed)
        """The questions that no exit may end."""
        self.done = set(done)
        """Numbers of the rows that need no answer any more."""
        self.scored: dict[PromptKey, ScoredRow] = {}
        self.audits: dict[PromptKey, Float64Array] = {}
        self.wanted: list[WantedRow] = []
        self.plan = Plan([], 0)
        self.window = window
        self.further = further
        self.limited = limited
        self.next_tokens = next_tokens
        self.leaving = leaving
        self._in_limit = False
        self._numbers = 0  # blocks of packs, after which later plans begin
        self._by_row: dict[int, dict[int, Request]] = {}
        """The questions about each row, in the order of its prompts."""
        self._remember(requests)
        self._asked = Counter(request.prompt.row for request in requests)
        """Prompts of each row."""
        self._failed = {
            (prompt.row, part): why
            for prompt in window.prompts
            if prompt.failed
            for part, why in prompt.failed.items()
        }
        self._made = Counter([prompt.row for prompt in window.prompts] + [row for row, _ in self._failed])
        """Prompts of each row, those that wait until the row is scored, and those that failed."""
        self._failed |= failed
        self._parts: dict[int, dict[int, ScoredRow]] = {}
        """Of rows with several prompts, the answers so far."""

    @property
    def done_prompts(self) -> list[int]:
        return [number for number, each in enumerate(self.requests) if each.prompt.row in self.done]

    def treatment(self, pack: Pack) -> Treatment:
        thinning = thinning_of({prompt: self.requests[prompt] for prompt in pack.prompts})
        found = PLAIN
        if self.leaving is not None:
            found = self.leaving.treatment({number: self.requests[number] for number in pack.prompts}, self.in_full)
        treatment = replace(found, thinning=thinning, next_tokens=self.next_tokens)
        if treatment.exits is None and thinning is None:  # else nothing is kept of the rows' ways through all layers
            treatment = replace(treatment, continuations=self._continuations(pack))
        return treatment

    def take(self, pack: Pack, answers: Sequence[Answer]) -> Finished:
        finished = Finished()
        unanswered = [answer for answer in answers if answer.failure is not None]
        if unanswered:
            answers = [answer for answer in answers if answer.failure is None]
            finished.add(failed_prompts(self, unanswered))
        elif answers and self.leaving is not None:
            self.leaving.answered(pack, answers, self.requests)
        complete: list[ScoredRow] = []
        texts: dict[int, Answer] = {}
        for answer in answers:
            finished.tokens.computed += answer.computed_tokens
            finished.tokens.skipped += answer.skipped
            request = self.requests[answer.prompt]
            row = request.prompt.row
            if row in self.done:
                continue  # computed again only for the K,V that a later pack holds
            key = request.prompt.key
            if answer.prompt >= self.ordinary:
                finished.tokens.audit += answer.computed_tokens
                self.audits[key] = answer.logprobs
            else:
                finished.tokens.prompt += len(request.prompt.whole)
                finished.tokens.kept += kept_tokens(request, answer)
                finished.tokens.shared += answer.shared_tokens
                self.scored[key] = scored_row(request, answer, audited=answer.prompt in self.in_full)
                texts[row] = answer
            if key in self.scored and (key in self.audits or key not in self.audited):
                scored = self.scored.pop(key)
                scored.audit = self.audits.pop(key, scored.audit)
                complete += self._whole(scored, request.prompt.part)
        finished.rows += self.settle(complete, texts)
        return finished

    def _whole(self, scored: ScoredRow, part: int) -> list[ScoredRow]:
        """Return the row that the answer to one of its prompts completes; none where others are missing."""
        row = scored.row
        if self._made[row] == 1:
            return [scored]
        found = self._parts.setdefault(row, {})
        found[part] = scored
        if len(found) < self._asked[row]:
            return []
        del self._parts[row]
        parts = range(self._made[row])
        return [joined_row([found.get(number) or unasked(row, self._failed.get((row, number))) for number in parts])]

    def fail(self, prompt: int, error: RowError) -> Finished:
        """Return what a prompt that cannot be answered finishes: its row becomes an error row, unless only its audit
        fails, or the prompt is conditional and counts as not asked."""
        own = self.requests[prompt].prompt
        row, key, error = own.row, own.key, error.of_question(own.question)
        if row in self.done:
            return Finished()
        if prompt >= self.ordinary:
            self.audited.discard(key)
            scored = self.scored.pop(key, None)
            return Finished() if scored is None else Finished(rows=self.settle(self._whole(scored, own.part), {}))
        if own.conditional:
            return Finished(rows=self.settle(self._whole(unasked(row, error), own.part), {}))
        self.done.add(row)
        self._parts.pop(row, None)
        for each in [each for each in (*self.scored, *self.audits) if each[0] == row]:
            self.scored.pop(each, None)
            self.audits.pop(each, None)
        return Finished(errors={row: error})

    def share(self, pack: Pack) -> tuple[float, float]:
        ordinary = [i for i in pack.prompts if i < self.ordinary]
        prompts = [self.requests[i].prompt for i in ordinary]
        tokens = sum(len(prompt.whole) for prompt in prompts)
        return self.rows_of(prompts) / len(pack.tokens), tokens / len(pack.tokens)

    def rows_of(self, prompts: Sequence[Prompt]) -> float:
        """Return the rows that these prompts are, each a part of its row."""
        return sum(1 / self._asked[prompt.row] for prompt in prompts)

    def settle(self, rows: Sequence[ScoredRow], answers: Mapping[int, Answer]) -> list[ScoredRow]:
        """Return the finished ones of the scored rows; the others wait. `answers` by row may have their texts."""
        further = self.further
        if further is None or not rows:
            return list(rows)
        prompts = (request.prompt for scored in rows for request in self._by_row[scored.row].values())
        part = self.window.only(prompts, further.choice.columns)
        labels = further.choice.wanted(part, rows)
        finished = []
        for scored in rows:
            if scored.row not in labels:
                finished.append(scored)
                continue
            asked = [
                WantedRow(self._by_row[scored.row][number], scored.answers[number], label)
                for number, label in labels[scored.row].items()
            ]
            wanted = replace(asked[0], scored=scored, parts=tuple(asked) if scored.parts else ())
            if scored.row in answers:
                for each in further.askers:
                    each.scored(wanted, answers[scored.row])
            if any(each.lacks(scored) for each in further.askers):
                self.wanted.append(wanted)
            else:
                finished.append(scored)
        return finished

    def settle_known(self, requests: Sequence[Request], rows: Sequence[ScoredRow]) -> list[ScoredRow]:
        """Do as `settle` does, for rows that were scored before, and their questions."""
        self._remember(requests)
        return self.settle(rows, {})

    def settle_ahead(self, decided: Sequence[tuple[Request, ScoredRow]]) -> list[ScoredRow]:
        """Do as `settle` does, for questions that were decided before the model. The rows of some have others, which
        the model answers."""
        self._remember([request for request, _ in decided])
        self._asked.update(request.prompt.row for request, _ in decided)
        complete = [row for request, own in decided for row in self._whole(own, request.prompt.part)]
        return self.settle(complete, {})

    def _remember(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._by_row.setdefault(request.prompt.row, {})[request.prompt.part] = request

    def past_limit(self) -> list[WantedRow]:
        """Take out the wanted rows past the job's limit; the others wait in the order of the input. To be called when
        all earlier windows are written; another call takes none."""
        job = self.further
        self.wanted.sort(key=lambda each: each.scored.row)
        if job is None or job.limit is None or self._in_limit:
            return []
        self._in_limit = True
        left = max(job.limit - job.chosen(), 0)
        self.wanted, past = self.wanted[:left], self.wanted[left:]
        return past

    def after(self, plan: Plan) -> list[Pack]:
        """Return the packs of a plan that follows this one and its earlier followers. They keep the K,V that the next
        window takes over."""
        own = max((pack.index for pack in (*self.plan.given, *self.plan.packs)), default=-1)
        first = max(own + 1, self._numbers)
        self._numbers = first + len(plan.packs)
        keys = frozenset(key for _, key in self.plan.carried)
        packs = [pack.shifted(first) for pack in plan.packs]
        return [replace(pack, keep=pack.keep | keys) for pack in packs]

    def _continuations(self, pack: Pack) -> Continuations | None:
        """Return the prompts of a pack that get a text as soon as they are scored."""
        if self.further is None or self.limited:
            return None
        able = {
            number: self.requests[number]
            for number in pack.prompts
            if number < self.ordinary and self.requests[number].prompt.row not in self.done
        }
        found = (each.continuations(self.window, able) for each in self.further.askers if able)
        return next(filter(None, found), None)


NEXT_TOKENS = 5
"""The number of likeliest tokens that are returned after each prompt of the first window."""
GROUP_TOKENS = 4 << 20
"""The most prompt tokens of questions that are asked together."""


class FollowUpWork:
    """The further questions about a window's wanted rows, as `PlannedWork`. They make one plan, so that
    prefixes they share are computed once. Rows that have none are `finished` at once."""

    def __init__(
        self,
        window: Window,
        wanted: Sequence[WantedRow],
        further: FurtherQuestions,
        limits: Limits,
        tick: Callable[[], None] = lambda: None,
        next_tokens: int = 0,
        leaving: EarlyReading | None = None,
    ) -> None:
        self.plan = Plan([], 0)
        self._next_tokens, self._leaving = next_tokens, leaving
        self.finished: list[ScoredRow] = []
        self.requests: list[Request] = []
        self._rows: list[ScoredRow] = []
        """The row of each question."""
        self._open: Counter[int] = Counter()
        """Questions without an answer, by row."""
        for each in wanted:
            askers = [asker for asker in further.askers if asker.lacks(each.scored)]
            found = [request for asker in askers for request in asker.requests(window, each, limits)]
            self.requests += found
            self._rows += [each.scored] * len(found)
            self._open[each.scored.row] = len(found)
            if not found:
                self.finished.append(each.scored)
            tick()
        if self.requests:
            writes = any(each.text for each in self.requests)
            self.plan = plan_requests(self.requests, limits.for_texts() if writes else limits)

    @property
    def done_prompts(self) -> list[int]:
        return []

    def treatment(self, pack: Pack) -> Treatment:
        texts = {prompt: text for prompt in pack.prompts if (text := self.requests[prompt].text) is not None}
        if not texts:
            found = PLAIN
            if self._leaving is not None:  # of rows as they are: others ask about changed ones
                whole = {number: own for number in pack.prompts if (own := self.requests[number]).required}
                found = self._leaving.treatment(whole, frozenset()) if whole else PLAIN
            return replace(found, next_tokens=self._next_tokens)
        writing = next(iter(texts.values()))[0]
        beginnings = {prompt: beginning for prompt, (_, beginning) in texts.items()}
        return Treatment(continuations=GivenContinuations(writing, beginnings))

    def take(self, pack: Pack, answers: Sequence[Answer]) -> Finished:
        finished = failed_prompts(self, [answer for answer in answers if answer.failure is not None])
        if self._leaving is not None and any(answer.readings for answer in answers):
            self._leaving.answered(pack, answers, self.requests)
        for answer in answers:
            if answer.failure is None:
                finished.tokens.computed += answer.computed_tokens
                finished.tokens.follow_up += answer.computed_tokens
                self._rows[answer.prompt].seconds += answer.seconds
                finished.rows += self._answered(answer.prompt, answer)
        return finished

    def fail(self, prompt: int, error: RowError) -> Finished:
        """Return what a question that cannot be answered finishes: the row keeps its score without the answer, unless
        it needs one."""
        if not self.requests[prompt].required:
            return Finished(rows=self._answered(prompt, None))
        row, error = self._rows[prompt].row, error.of_question(self.requests[prompt].prompt.question)
        return Finished(errors={row: error}) if self._open.pop(row, 0) > 0 else Finished()

    def share(self, pack: Pack) -> tuple[float, float]:
        return 0.0, 0.0

    def _answered(self, prompt: int, answer: Answer | None) -> list[ScoredRow]:
        row = self._rows[prompt]
        if (take := self.requests[prompt].take) is not None:
            take(answer)
        self._open[row.row] -= 1
        return [] if self._open[row.row] else [row]


def follow_up(work: WindowWork, limits: Limits, tick: Callable[[], None] = lambda: None) -> FollowUpWork | None:
    """Return the next questions about some of a window's wanted rows, after all its packs are answered; None if none
    are left.

    The others wait for the next call: there may be many questions about a row. Where rows are limited, the first ones
    in the input are taken, and the others are finished as they are. `tick` is called after each row, and may raise to
    stop.
    """
    further = work.further
    if further is None or not work.wanted:
        return None
    past_limit = work.past_limit()
    group: list[WantedRow] = []
    tokens, each = 0, max(asker.most for asker in further.askers)
    while work.wanted and (not group or tokens + each * work.wanted[0].prompt_tokens <= GROUP_TOKENS):
        group.append(work.wanted.pop(0))
        tokens += each * group[-1].prompt_tokens
    found = FollowUpWork(work.window, group, further, limits, tick, work.next_tokens, work.leaving)
    found.plan = replace(found.plan, packs=work.after(found.plan))
    found.finished += [each.scored for each in past_limit]
    return found


class EarlyReading(Protocol):
    """A reading by which rows are answered before the model's last layer."""

    @property
    def known(self) -> Mapping[int, ScoredRow]:
        """Return the rows, by number, that were scored before the first window."""

    def ahead(self, requests: Sequence[Request], tick: Tick) -> tuple[dict[int, ScoredRow], int]:
        """Return the answers, by the places of these questions, that the model need not be asked for, and the tokens
        that were computed to find them."""

    def treatment(self, requests: Mapping[int, Request], in_full: frozenset[int]) -> Treatment:
        """Return the treatment between layers of the prompts with these `requests`. Those `in_full` go through all
        layers."""

    def answered(self, pack: Pack, answers: Sequence[Answer], requests: Sequence[Request]) -> None:
        """Take the answers of a pack whose prompts are all answered: numbers among these `requests`."""


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """The options by which windows are scored.

    `audit` chooses the compressed prompts that are also read in full; with `leaving` it chooses among all prompts.
    `further` are the questions about rows that are scored. `adjust_threads` is called often while something is
    computed. `block_tokens` as in `make_plan`. Where prompts are compressed, `requests` are those of `ModelScorer`.
    """

    block_tokens: int = 0
    requests: Callable[..., tuple[list[Request], int]] | None = None
    audit: AuditDraw | None = None
    leaving: EarlyReading | None = None
    further: FurtherQuestions | None = None
    adjust_threads: Callable[[], None] = lambda: None


class Listener(Protocol):
    """Follows the scoring of a window. `step` may raise Interrupted to stop it."""

    def phase(self, name: Phase, *, waits: bool = False) -> AbstractContextManager[None]:
        """Count the time inside as spent on this phase. While it only `waits` for other processes, a signal may end it
        anywhere."""

    def planned(self, packs: list[Pack], rows: int) -> None:
        """Take the packs in which this many rows will be computed."""

    def pack_begins(self, pack: Pack) -> None: ...

    def step(self, pack: Pack | None, rows: float, tokens: float, share: float) -> None:
        """Take progress: this many more `rows` (parts of one included) and prompt `tokens`, and this `share` of the
        pack."""

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
    next_tokens: int = 0,
) -> tuple[WindowWork, Finished]:
    """Return the questions for the rows of `window` that are not `done`, and the rows that are finished without an
    answer.

    `carried` are the blocks that the window before hands on, whether or not the engine still holds them. A row that is
    read both ways is finished when both are answered. The window's own error rows are not repeated. `rows_open` is the
    number of unwritten rows of earlier windows; `next_tokens` as for `WindowWork`.
    """
    requests, finished = _requests(window, done, options, listener)
    known = {} if options.leaving is None else options.leaving.known
    found_before = [each for each in requests if each.prompt.row in known.keys() - done]
    requests = [request for request in requests if request.prompt.row not in known]
    requests, too_large, failed = _fitting(requests, engine.limits.max_tokens)
    if not engine.whole_packs:
        requests = [request for request in requests if request.prompt.row not in done]
    further, waiting = options.further, 0
    for asker in further.askers if further is not None else ():
        later = asker.later(window, requests)
        prompts = (requests[number].prompt for number in later)
        waiting += sum(len(prompt.whole) for prompt in prompts if prompt.row not in done)
        requests = [request for number, request in enumerate(requests) if number not in later]
    audited = _audited(window, requests, engine, options)
    requests, audited, ahead = _ahead(requests, audited, options, listener, finished)
    limited = engine.limits.reads_again or (further is not None and not further.has_room(rows_open + len(window.rows)))
    work = WindowWork(
        window,
        requests,
        audited,
        done,
        options.leaving,
        further,
        limited=limited,
        next_tokens=next_tokens,
        failed=failed,
    )
    if ahead:
        _add_ahead(finished, work, ahead, done, listener)
    if found_before:
        _add_known(finished, work, found_before, known)
        rows = len({each.prompt.row for each in found_before})
        listener.step(None, rows, sum(len(each.prompt.whole) for each in found_before), 0)
    if waiting:  # progress counts what is read for a row in the first place
        finished.tokens.prompt += waiting
        listener.step(None, 0, waiting, 0)
    with listener.phase("plan"):
        work.plan = plan_requests(work.requests, engine.limits, carried=carried, block_tokens=options.block_tokens)
    finished.errors, finished.tokens.unique = too_large, work.plan.unique_tokens
    finished.carried = work.plan.carried
    return work, finished


def _ahead(
    requests: list[Request],
    audited: list[int],
    options: ScoringOptions,
    listener: Listener,
    finished: Finished,
) -> tuple[list[Request], list[int], list[tuple[Request, ScoredRow]]]:
    """Return the questions that are left for the model, the numbers of the audited ones among them, and those that
    first models answer without it. An audited one is left to the model too: its answer so far is for the
    comparison."""
    if options.leaving is None:
        return requests, audited, []
    with listener.phase("draft"):
        found, tokens = options.leaving.ahead(requests, lambda tokens: listener.step(None, 0, 0, 0))
    finished.tokens.draft += tokens
    if not found:
        return requests, audited, []
    both = found.keys() & set(audited)
    left = [number for number in range(len(requests)) if number not in found or number in both]
    place = {number: at for at, number in enumerate(left)}
    asked = [replace(requests[number], early=_early(found[number]) if number in both else None) for number in left]
    known = [(requests[number], own) for number, own in sorted(found.items()) if number not in both]
    return asked, [place[number] for number in audited], known


def _early(row: ScoredRow) -> EarlyAnswer:
    return EarlyAnswer(BEFORE if row.exit_layer is None else row.exit_layer - 1, row.logprobs)


def _add_ahead(
    finished: Finished,
    work: WindowWork,
    ahead: Sequence[tuple[Request, ScoredRow]],
    done: set[int],
    listener: Listener,
) -> None:
    """Add the questions that first models answer without the model."""
    new = [(request, row) for request, row in ahead if row.row not in done]
    tokens = sum(len(request.prompt.whole) for request, _ in new)
    finished.rows += work.settle_ahead(new)
    finished.tokens.prompt += tokens
    listener.step(None, work.rows_of([request.prompt for request, _ in new]), tokens, 0)


def _add_known(
    finished: Finished, work: WindowWork, requests: Sequence[Request], known: Mapping[int, ScoredRow]
) -> None:
    """Add the rows of questions that were answered before the first window."""
    rows = [known[row] for row in dict.fromkeys(each.prompt.row for each in requests)]
    finished.rows += work.settle_known(requests, rows)
    finished.tokens.prompt += sum(len(each.prompt.whole) for each in requests)
    finished.tokens.kept += sum(len(each.tokens) for each in requests)
    finished.tokens.shared += sum(row.shared_tokens for row in rows)


def _requests(
    window: Window, done: set[int], options: ScoringOptions, listener: Listener
) -> tuple[list[Request], Finished]:
    """Return how the model will read the prompts of a window, and the tokens that a draft computed to decide that."""
    if options.requests is None:
        return [Request(prompt) for prompt in window.prompts], Finished()
    options.adjust_threads()
    with listener.phase("draft"):
        requests, tokens = options.requests(
            window.prompts, lambda tokens: listener.step(None, 0, 0, 0), window=window, done=done
        )
    return requests, Finished(tokens=Tokens(draft=tokens))


def _fitting(
    requests: Sequence[Request], most: int
) -> tuple[list[Request], dict[int, RowError], dict[PromptKey, RowError]]:
    """Return the questions of at most `most` tokens, which fit the memory budget. The others' rows are error rows;
    conditional ones of them count as failed."""
    fitting, errors, failed = [], dict[int, RowError](), dict[PromptKey, RowError]()
    for request in requests:
        tokens, prompt = request.size, request.prompt
        if tokens <= most:
            fitting.append(request)
            continue
        detail = f"{tokens} tokens; the memory budget holds {most}"
        error = RowError(ErrorCode.EXCEEDS_MEMORY, detail).of_question(prompt.question)
        if prompt.conditional:
            failed[prompt.key] = error
        else:
            errors[prompt.row] = error
    return [each for each in fitting if each.prompt.row not in errors], errors, failed


def _audited(window: Window, requests: Sequence[Request], engine: PlanEngine, options: ScoringOptions) -> list[int]:
    """Return the numbers of the questions whose prompts are also read in full, or to the end where others may
    leave."""
    if options.audit is None:
        return []
    most = engine.limits.max_tokens
    able = [
        number
        for number, request in enumerate(requests)
        if (request.compressed or options.leaving is not None) and Request(request.prompt).size <= most
    ]
    drawn = {requests[number].prompt.row for number in options.audit.draw(window, _firsts(requests, able))}
    return [number for number in able if requests[number].prompt.row in drawn]


def _firsts(requests: Sequence[Request], numbers: Sequence[int]) -> list[int]:
    """Return the first of these questions about each row."""
    return list({requests[number].prompt.row: number for number in reversed(numbers)}.values())[::-1]


# The loop.


class Receiver(Listener, Protocol):
    """Takes the rows of windows. Several windows may be open at a time; they end in any order."""

    @property
    def listens(self) -> bool:
        """True if it wants the likeliest tokens after the prompts of the windows that begin."""

    def done(self, window: int) -> set[int]:
        """Return the numbers of the rows of a window that an earlier run has scored."""

    def window_before(self, window: int) -> int:
        """Return the window that is scored before this one."""

    def carried_into(self, window: int) -> Sequence[CarriedBlock]:
        """Return the blocks that an earlier run has handed to a window."""

    def begin(self, window: Window, done: set[int]) -> None:
        """Begin a window, of which these rows are done."""

    def take(self, window: Window, finished: Finished) -> None:
        """Take finished rows of an open window."""

    def end(self, window: Window) -> None:
        """End a window whose rows are all finished."""

    def written_if_stopped(self) -> AbstractContextManager[None]:
        """Keep the finished rows, whatever stops the scoring inside."""


@dataclass(slots=True)
class _OpenWindow:
    """A window with the work that is answered now: first its own rows, then further questions about some of them."""

    window: Window
    work: PlannedWork
    first: WindowWork
    left: int = 0
    """Packs that are not answered."""


class Asked:
    """The packs of a plan that a pool answers. The pool calls these methods, from the thread of the loop."""

    def __init__(self, loop: ScoringLoop, opened: _OpenWindow, rows: int) -> None:
        self.work = opened.work
        self._loop = loop
        self._receiver = loop.receiver
        self._opened = opened
        self._rows = rows
        self._shares: dict[int, tuple[float, float]] = {}  # of packs that have begun, by their identity

    def planned(self, packs: Sequence[Pack]) -> None:
        """Take the packs that will be answered, before any of them begins."""
        self._receiver.planned(list(packs), self._rows)
        self._opened.left += len(packs)

    def begun(self, pack: Pack) -> None:
        self._receiver.pack_begins(pack)

    def advanced(self, pack: Pack, tokens: float) -> None:
        """Take progress: this many more tokens of the pack are computed; negative for tokens lost with a worker."""
        if id(pack) not in self._shares:  # it looks at each of the pack's prompts, and there are many ticks
            self._shares[id(pack)] = self.work.share(pack)
        rows, prompt_tokens = self._shares[id(pack)]
        self._receiver.step(pack, rows * tokens, prompt_tokens * tokens, tokens / len(pack.tokens))

    def answered(self, pack: Pack, answers: Sequence[Answer], beside: int) -> None:
        """Take answers of a pack. `beside` tokens were computed besides those that the answers count."""
        finished = self.work.take(pack, answers)
        finished.tokens.computed += beside
        self._receiver.take(self._opened.window, finished)

    def ended(self, pack: Pack) -> None:
        """End a pack that is fully answered."""
        self._shares.pop(id(pack), None)
        self._receiver.pack_ends(pack)
        self._opened.left -= 1
        self._loop.go_on(self._opened)

    def given_up(self, pack: Pack, why: str) -> None:
        """Give up a pack whose only prompt cannot be answered."""
        finished = self.work.fail(pack.prompts[0], RowError(ErrorCode.WORKER_LOST, why))
        self._receiver.take(self._opened.window, finished)
        self.ended(pack)

    def split(self, pack: Pack, count: int) -> None:
        """Replace the pack by this number of other packs, which answer its prompts."""
        self._receiver.pack_ends(pack)
        self._opened.left += count - 1


class ScoringLoop:
    """Scores windows with a pool. `written` is called with the index of each window whose rows are all written."""

    def __init__(
        self,
        pool: ScoringPool,
        options: ScoringOptions,
        receiver: Receiver,
        written: Callable[[int], None] = lambda window: None,
    ) -> None:
        self.options = options
        self.receiver = receiver
        self.most_open = 0
        """The most windows that were open at a time."""
        self._pool = pool
        self._written = written
        self._open: dict[int, _OpenWindow] = {}  # by the window's index, in the order of the input
        self._carried: tuple[int, Sequence[CarriedBlock]] = (-1, ())  # of the window that was planned last

    def score(self, windows: Iterator[Window], ready: Callable[[], bool] = lambda: True) -> None:
        """Score all `windows`; `ready` returns whether the next one is available at once.

        Enough of them are open for every engine to have work. Raises ResourceError if the pool cannot go on.
        """
        pool, more = self._pool, True
        with self.receiver.written_if_stopped():
            while more or self._open:
                hungry = more and pool.waiting < pool.ahead
                if hungry and (pool.idle or ready()):
                    if (window := next(windows, None)) is None:
                        more = False
                    else:
                        self._begin(window)
                else:
                    pool.pump(0.05 if hungry else 0.5, self.receiver.phase)

    def _begin(self, window: Window) -> None:
        receiver = self.receiver
        done = receiver.done(window.index)
        before, carried = self._carried
        if before != receiver.window_before(window.index):  # an earlier run scored that one
            carried = receiver.carried_into(window.index)
        self._pool.fit(max((len(prompt.whole) for prompt in window.prompts), default=0))
        receiver.begin(window, done)
        rows_open = sum(len(each.window.rows) for each in self._open.values())
        work, finished = begin_window(
            window,
            done,
            carried,
            self._pool,
            self.options,
            receiver,
            rows_open=rows_open,
            next_tokens=NEXT_TOKENS if receiver.listens else 0,
        )
        self._carried = window.index, work.plan.carried
        receiver.take(window, finished)
        opened = self._open[window.index] = _OpenWindow(window, work, work)
        self.most_open = max(self.most_open, len(self._open))
        self._pool.ask(Asked(self, opened, len(window.rows) - len(done)))
        self.go_on(opened)

    def go_on(self, opened: _OpenWindow) -> None:
        """Ask further questions about some rows of a window whose packs are all answered, or end it.

        The first of the wanted rows are known when all earlier windows are written.
        """
        if opened.left:
            return
        job = self.options.further
        waits = job is not None and job.limit is not None and next(iter(self._open)) != opened.window.index
        if waits and opened.work is opened.first and opened.first.wanted:
            return
        while not opened.left and opened.first.wanted:
            self._follow(opened)
        if opened.left:
            return
        self.receiver.end(opened.window)
        del self._open[opened.window.index]
        self._written(opened.window.index)
        if job is not None and job.limit is not None and self._open:
            self.go_on(next(iter(self._open.values())))

    def _follow(self, opened: _OpenWindow) -> None:
        """Ask further questions about some of a window's wanted rows."""

        def tick() -> None:
            self.receiver.step(None, 0, 0, 0)

        following = follow_up(opened.first, self._pool.limits, tick)
        if following is not None:
            self.receiver.take(opened.window, Finished(rows=following.finished))
            opened.work = following
            self._pool.ask(Asked(self, opened, 0))


# The pool of one.


class LocalPool:
    """A `ScoringPool` that answers packs one after the other, in the order of their plans.

    `adjust_threads` is called often while something is computed. `answered` is called after each of the engine's
    answers, and when it fails.
    """

    ahead = 1
    remote = None

    def __init__(
        self, engine: Engine, adjust_threads: Callable[[], None], answered: Callable[[], None] = lambda: None
    ) -> None:
        self.engine = engine
        self.whole_packs = engine.whole_packs
        self._adjust_threads = adjust_threads
        self._answered = answered
        self._packs: deque[tuple[Pack, Asked]] = deque()

    @property
    def limits(self) -> Limits:
        """The engine's limits, which change when memory runs out."""
        return self.engine.limits

    @property
    def waiting(self) -> int:
        return len(self._packs)

    @property
    def idle(self) -> bool:
        return not self._packs

    def fit(self, longest: int) -> None:
        """Do nothing: one engine has no reason for packs smaller than its limits."""

    def ask(self, asked: Asked) -> None:
        """Add a plan's packs, which run in its order: K,V that packs hold for others stay in the engine."""
        plan = asked.work.plan
        at_hand = {pack.block for pack in plan.given if pack.block is not None and self.engine.holds(pack.block)}
        packs = packs_to_run(plan, asked.work.done_prompts, at_hand)
        asked.planned(packs)
        self._packs += [(pack, asked) for pack in packs]

    def pump(self, seconds: float, phase: Callable[..., AbstractContextManager[None]]) -> None:
        """Answer the next pack, however long that takes."""
        pack, asked = self._packs.popleft()
        requests = asked.work.requests

        def tick(tokens: float) -> None:
            asked.advanced(pack, tokens)
            self._adjust_threads()

        self._adjust_threads()
        asked.begun(pack)
        self.engine.expect([pack, *(coming for coming, _ in islice(self._packs, 1))])
        # Tokens of a block are counted here, whether or not they are charged to a row of another pack.
        beside = len(pack.tokens) if pack.block is not None else -pack.charged_tokens
        answers = iter(self.engine.answer(pack, lambda i: requests[i].prompt.labels, tick, asked.work.treatment(pack)))
        try:
            while True:
                with phase("model", waits=self.engine.waits):
                    found = next(answers, None)
                if found is None:
                    break
                self._answered()
                asked.answered(pack, found, beside)
                beside = 0
        finally:
            self._answered()
        asked.ended(pack)

    def ask_for_reports(self) -> None:
        """Do nothing: the engine can report at any time."""

    def used(self) -> PoolUse:
        """Return the work of the engine so far."""
        engine = self.engine
        return PoolUse(engine.weights_report(), engine.reduced(), engine.decoded())

    def answer_all(
        self,
        packs: Sequence[Pack],
        labels: Callable[[int], LabelSet],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterator[list[Answer]]:
        """See `PlanEngine`."""
        return self.engine.answer_all(packs, labels, tick, treatment)
