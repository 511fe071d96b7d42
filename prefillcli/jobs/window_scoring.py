"""Scoring a window: prompts in, scored rows out. It writes nothing and reports nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from prefillcli.compress.answers import kept_tokens, method_of, plan_requests, thinning_of
from prefillcli.compress.audit_draw import AuditDraw
from prefillcli.compress.request import Request
from prefillcli.data.methods import early_exit_method
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.rows import ErrorCode, Float64Array, RowError, ScoredRow, Window
from prefillcli.engines.base import Answer, Engine, PlanEngine, Treatment
from prefillcli.jobs.job_exits import NO_EXITS, JobExits, Spared
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Pack
from prefillcli.plan.plan import Plan, packs_to_run
from prefillcli.report.run import Tokens
from prefillcli.runtime.clock import Phase

if TYPE_CHECKING:  # these take torch along
    from prefillcli.compress.auto import KeepChoice
    from prefillcli.compress.window_compressor import WindowCompressor


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """How windows are scored.

    `audit` says which compressed prompts, with `exits` which of all, are read in full as well. `adjust_threads` is
    called often while something is computed. `block_tokens` as in `make_plan`.
    """

    labels: Labels
    schedule: str
    block_tokens: int = 0
    audit: AuditDraw | None = None
    exits: JobExits = NO_EXITS
    adjust_threads: Callable[[], None] = lambda: None


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


class Listener(Protocol):
    """Hears how scoring a window goes. `step` may raise Interrupted to stop it."""

    def phase(self, name: Phase, *, waits: bool = False) -> AbstractContextManager[None]:
        """Time spent on something. While it only `waits` for other processes, a signal may end it anywhere."""

    def chose(self, choice: KeepChoice) -> None:
        """`--keep auto` has chosen the job's keep rate."""

    def planned(self, packs: list[Pack], rows: int) -> None:
        """So many rows will be computed as these packs."""

    def pack_begins(self, pack: Pack) -> None: ...

    def step(self, pack: Pack | None, rows: float, tokens: float, share: float) -> None:
        """So many `rows` (also parts of one), prompt `tokens` and this `share` of the pack more are computed."""

    def pack_ends(self, pack: Pack) -> None: ...


def score_window(
    window: Window,
    done: set[int],
    carried: Sequence[CarriedBlock],
    engine: Engine,
    compressor: WindowCompressor | None,
    options: ScoringOptions,
    listener: Listener,
) -> Iterator[Finished]:
    """Score the rows of `window` that are not `done`; what is finished comes as soon as the engine answers.

    Arguments as in `begin_window`. Raises ResourceError if the engine cannot go on.
    """
    work, finished = begin_window(window, done, carried, engine, compressor, options, listener)
    plan = work.plan
    at_hand = {pack.block for pack in plan.given if pack.block is not None and engine.holds(pack.block)}
    packs = packs_to_run(plan, work.done_prompts, at_hand)
    yield finished
    listener.planned(packs, len(window.rows) - len(done))
    for pack in packs:
        yield from _score_pack(pack, work, engine, options, listener)


def begin_window(
    window: Window,
    done: set[int],
    carried: Sequence[CarriedBlock],
    engine: PlanEngine,
    compressor: WindowCompressor | None,
    options: ScoringOptions,
    listener: Listener,
) -> tuple[WindowWork, Finished]:
    """What an engine has to answer for the rows of `window` that are not `done`, and what is known before.

    `carried` are the blocks that the window before hands on, whether or not the engine still holds them. Without a
    `compressor` every prompt is read in full. A row that is read both ways is finished when both are answered. The
    window's own error rows are not repeated.
    """
    requests, finished = _requests(window, done, compressor, options, listener)
    known = options.exits.known
    finished = _with_known(finished, [each for each in requests if each.prompt.row in known.keys() - done], options)
    if finished.rows:
        listener.step(None, len(finished.rows), finished.tokens.prompt, 0)
    requests = [request for request in requests if request.prompt.row not in known]
    requests, too_large = _fitting(requests, engine.limits.max_tokens)
    if not engine.whole_packs:
        requests = [request for request in requests if request.prompt.row not in done]
    audited = _audited(window, requests, engine, options)
    work = WindowWork(requests, audited, done)
    with listener.phase("plan"):
        work.plan = plan_requests(
            work.requests, engine.limits, options.schedule, carried=carried, block_tokens=options.block_tokens
        )
    finished.errors, finished.tokens.unique = too_large, work.plan.unique_tokens
    finished.carried = work.plan.carried
    return work, finished


def _with_known(finished: Finished, requests: Sequence[Request], options: ScoringOptions) -> Finished:
    """What is finished, with the rows of requests that were answered before the first window."""
    finished.rows = [options.exits.known[each.prompt.row] for each in requests]
    finished.tokens.prompt = sum(len(each.prompt.tokens) for each in requests)
    finished.tokens.kept = sum(len(each.tokens) for each in requests)
    finished.tokens.shared = sum(row.shared_tokens for row in finished.rows)
    return finished


class WindowWork:
    """The requests of a window: first the `ordinary` ones, then those of audited prompts in full.

    Of the prompts that are `audited`, those that are compressed have a second request. Their rows wait in `scored` or
    `audits` for their other half. The others are read to the end.
    """

    def __init__(self, requests: list[Request], audited: Sequence[int], done: set[int]) -> None:
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
        self.plan = Plan([], 0)

    @property
    def done_prompts(self) -> list[int]:
        """The prompts whose rows need no answer any more."""
        return [number for number, each in enumerate(self.requests) if each.prompt.row in self.done]

    def treatment(self, pack: Pack, exits: JobExits) -> Treatment:
        """What happens to the prompts of a pack between layers."""
        thinning = thinning_of({prompt: self.requests[prompt] for prompt in pack.prompts})
        return replace(exits.treatment(self.in_full), thinning=thinning)

    def take(self, answers: Sequence[Answer]) -> Finished:
        """The rows that these answers finish."""
        finished = Finished()
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
            if row in self.scored and (row in self.audits or row not in self.audited):
                scored = self.scored.pop(row)
                scored.audit = self.audits.pop(row, scored.audit)
                finished.rows.append(scored)
        return finished

    def fail(self, prompt: int, error: RowError) -> Finished:
        """A prompt that cannot be answered makes its row an error row."""
        row = self.requests[prompt].prompt.row
        if row in self.done:
            return Finished()
        self.done.add(row)
        self.scored.pop(row, None)
        self.audits.pop(row, None)
        return Finished(errors={row: error})

    def share(self, pack: Pack) -> tuple[float, float]:
        """Rows and prompt tokens that the ordinary prompts of a pack have, for each of the pack's tokens."""
        ordinary = [i for i in pack.prompts if i < self.ordinary]
        tokens = sum(len(self.requests[i].prompt.tokens) for i in ordinary)
        return len(ordinary) / len(pack.tokens), tokens / len(pack.tokens)


def scored_row(request: Request, answer: Answer, *, audited: bool = False) -> ScoredRow:
    """What an answer makes of a row. Of an `audited` one it has what an exit would have given, and the full read."""
    logprobs, layer, audit = answer.logprobs, answer.exit_layer, None
    if audited:
        audit = answer.logprobs
        if answer.early is not None:
            layer, logprobs = answer.early
    return ScoredRow(
        row=request.prompt.row,
        logprobs=logprobs,
        shared_tokens=answer.shared_tokens,
        computed_tokens=answer.computed_tokens,
        kept_tokens=kept_tokens(request, answer),
        seconds=answer.seconds + request.pick_seconds,
        method=method_of(request, answer) if layer is None else early_exit_method(method_of(request, answer)),
        exit_layer=None if layer is None else layer + 1,
        audit=audit,
    )


def _requests(
    window: Window,
    done: set[int],
    compressor: WindowCompressor | None,
    options: ScoringOptions,
    listener: Listener,
) -> tuple[list[Request], Finished]:
    """How the model will read the prompts of a window, and what finding that out took."""
    if compressor is None:
        return [Request(prompt) for prompt in window.prompts], Finished()
    options.adjust_threads()
    with listener.phase("draft"):
        compressed = compressor(window, done, lambda tokens: listener.step(None, 0, 0, 0))
    if compressed.choice is not None:
        listener.chose(compressed.choice)
    return compressed.requests, Finished(tokens=Tokens(draft=compressed.draft_tokens))


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
    able = [
        number
        for number, request in enumerate(requests)
        if (request.compressed or options.exits.asked) and len(request.prompt.tokens) <= most
    ]
    return options.audit.draw(window, able)


def _score_pack(
    pack: Pack, work: WindowWork, engine: Engine, options: ScoringOptions, listener: Listener
) -> Iterator[Finished]:
    rows, tokens = work.share(pack)

    def tick(step: float) -> None:
        listener.step(pack, step * rows, step * tokens, step / len(pack.tokens))
        options.adjust_threads()

    options.adjust_threads()
    listener.pack_begins(pack)
    sets = options.labels.sets
    # What is computed of a block is counted here, whether or not it is charged to a row of another pack.
    uncounted = len(pack.tokens) if pack.block is not None else -pack.charged_tokens
    treatment = work.treatment(pack, options.exits)
    answers = iter(engine.answer(pack, lambda i: sets[work.requests[i].prompt.labels], tick, treatment))
    while True:
        with listener.phase("model", waits=engine.waits):
            found = next(answers, None)
        if found is None:
            break
        finished = work.take(found)
        finished.spared = options.exits.spared(pack, found)
        finished.tokens.computed += uncounted
        uncounted = 0
        yield finished
    listener.pack_ends(pack)
