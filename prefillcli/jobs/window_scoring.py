"""Scoring a window: prompts in, scored rows out. It writes nothing and reports nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from prefillcli.compress.answers import plan_requests
from prefillcli.compress.audit_draw import AuditDraw
from prefillcli.compress.request import Request
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.rows import ErrorCode, RowError, Window
from prefillcli.engines.base import Engine, PlanEngine
from prefillcli.jobs.follow_up import follow_up
from prefillcli.jobs.job_exits import NO_EXITS, JobExits
from prefillcli.jobs.wanted_rows import JobRationales
from prefillcli.jobs.window_work import Finished, PlannedWork, WindowWork
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Pack
from prefillcli.plan.plan import packs_to_run
from prefillcli.report.run import Tokens
from prefillcli.runtime.clock import Phase

if TYPE_CHECKING:  # these take torch along
    from prefillcli.compress.auto import KeepChoice
    from prefillcli.compress.window_compressor import WindowCompressor


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """How windows are scored.

    `audit` says which compressed prompts, with `exits` which of all, are read in full as well. `rationales` says which
    rows are written about, or have their sections weighed. `adjust_threads` is called often while something is
    computed. `block_tokens` as in `make_plan`.
    """

    labels: Labels
    schedule: str
    block_tokens: int = 0
    audit: AuditDraw | None = None
    exits: JobExits = NO_EXITS
    rationales: JobRationales | None = None
    adjust_threads: Callable[[], None] = lambda: None


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
    yield from _follow_up(work, engine, options, listener)


def begin_window(
    window: Window,
    done: set[int],
    carried: Sequence[CarriedBlock],
    engine: PlanEngine,
    compressor: WindowCompressor | None,
    options: ScoringOptions,
    listener: Listener,
    *,
    rows_open: int = 0,
) -> tuple[WindowWork, Finished]:
    """What an engine has to answer for the rows of `window` that are not `done`, and what is known before.

    `carried` are the blocks that the window before hands on, whether or not the engine still holds them. Without a
    `compressor` every prompt is read in full. A row that is read both ways is finished when both are answered. The
    window's own error rows are not repeated. Of windows before, `rows_open` are not written yet.
    """
    requests, finished = _requests(window, done, compressor, options, listener)
    known = options.exits.known
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
    work = WindowWork(window, requests, audited, done, options.exits, rationales, limited=limited)
    if found_before:
        _add_known(finished, work, found_before, options)
        listener.step(None, len(found_before), finished.tokens.prompt, 0)
    with listener.phase("plan"):
        work.plan = plan_requests(
            work.requests, engine.limits, options.schedule, carried=carried, block_tokens=options.block_tokens
        )
    finished.errors, finished.tokens.unique = too_large, work.plan.unique_tokens
    finished.carried = work.plan.carried
    return work, finished


def _add_known(finished: Finished, work: WindowWork, requests: Sequence[Request], options: ScoringOptions) -> None:
    """Add the rows of requests that were answered before the first window."""
    rows = [options.exits.known[each.prompt.row] for each in requests]
    finished.rows = work.settle_known(requests, rows)
    finished.tokens.prompt = sum(len(each.prompt.tokens) for each in requests)
    finished.tokens.kept = sum(len(each.tokens) for each in requests)
    finished.tokens.shared = sum(row.shared_tokens for row in rows)


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


def _follow_up(work: WindowWork, engine: Engine, options: ScoringOptions, listener: Listener) -> Iterator[Finished]:
    """What is done for the wanted rows of a window once all are scored."""
    while (
        following := follow_up(work, engine.limits, options.schedule, lambda: listener.step(None, 0, 0, 0))
    ) is not None:
        yield Finished(rows=following.finished)
        packs = work.after(following.plan)
        listener.planned(packs, 0)
        for pack in packs:
            yield from _score_pack(pack, following, engine, options, listener)


def _score_pack(
    pack: Pack, work: PlannedWork, engine: Engine, options: ScoringOptions, listener: Listener
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
    treatment = work.treatment(pack)
    answers = iter(engine.answer(pack, lambda i: sets[work.requests[i].prompt.labels], tick, treatment))
    while True:
        with listener.phase("model", waits=engine.waits):
            found = next(answers, None)
        if found is None:
            break
        finished = work.take(pack, found)
        finished.tokens.computed += uncounted
        uncounted = 0
        yield finished
    listener.pack_ends(pack)
