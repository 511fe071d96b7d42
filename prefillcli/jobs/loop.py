"""The loop that scores windows: it asks a pool, in this process or with workers, and passes on the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from prefillcli.data.rows import ErrorCode, RowError, Window
from prefillcli.engines.base import Answer, PlanEngine
from prefillcli.jobs.window_scoring import (
    Finished,
    Listener,
    PlannedWork,
    ScoringOptions,
    WindowWork,
    begin_window,
    follow_up,
)
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Pack


class Receiver(Listener, Protocol):
    """Takes the rows of windows. Several windows may be open at a time; they end in any order."""

    def done(self, window: int) -> set[int]:
        """Numbers of the rows of a window that an earlier run has scored."""

    def window_before(self, window: int) -> int:
        """The window that is scored before this one."""

    def carried_into(self, window: int) -> Sequence[CarriedBlock]:
        """The blocks that an earlier run has handed to a window."""

    def begin(self, window: Window, done: set[int]) -> None:
        """A window is scored from now on; these of its rows are done."""

    def take(self, window: Window, finished: Finished) -> None:
        """Rows of an open window are finished."""

    def end(self, window: Window) -> None:
        """All rows of a window are finished."""

    def written_if_stopped(self) -> AbstractContextManager[None]:
        """Whatever stops the scoring inside, finished rows are kept."""


class ScoringPool(PlanEngine, Protocol):
    """Answers packs, and says to `Asked` how that goes: an engine in this process, or workers."""

    ahead: int
    """Packs that wait for an engine at least, while there are more windows."""

    @property
    def waiting(self) -> int:
        """Packs that no engine has begun."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""

    def fit(self, longest: int) -> None:
        """Limit the packs that are planned next, of prompts with at most `longest` tokens."""

    def ask(self, asked: Asked) -> None:
        """Answer the packs of a plan, behind those that were asked for before."""

    def pump(self, seconds: float, phase: Callable[..., AbstractContextManager[None]]) -> object:
        """Compute, or wait for other processes, until there is news, at most so many seconds where others compute.

        The time goes to a `phase` (`Listener.phase`). Raises Interrupted after a signal.
        """


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
        self.label_sets = loop.options.labels.sets
        self._loop = loop
        self._receiver = loop.receiver
        self._opened = opened
        self._rows = rows

    def planned(self, packs: Sequence[Pack]) -> None:
        """These packs will be answered; called before any of them begins."""
        self._receiver.planned(list(packs), self._rows)
        self._opened.left += len(packs)

    def begun(self, pack: Pack) -> None:
        self._receiver.pack_begins(pack)

    def advanced(self, pack: Pack, tokens: float) -> None:
        """So many more tokens of the pack are computed; negative for those that were lost with a worker."""
        rows, prompt_tokens = self.work.share(pack)
        self._receiver.step(pack, rows * tokens, prompt_tokens * tokens, tokens / len(pack.tokens))

    def answered(self, pack: Pack, answers: Sequence[Answer], beside: int) -> None:
        """Answers of a pack are there. So many tokens were computed beside those that the answers count."""
        finished = self.work.take(pack, answers)
        finished.tokens.computed += beside
        self._receiver.take(self._opened.window, finished)

    def ended(self, pack: Pack) -> None:
        """All of the pack is answered."""
        self._receiver.pack_ends(pack)
        self._opened.left -= 1
        self._loop.go_on(self._opened)

    def given_up(self, pack: Pack, why: str) -> None:
        """The only prompt of a pack cannot be answered."""
        finished = self.work.fail(pack.prompts[0], RowError(ErrorCode.WORKER_LOST, why))
        self._receiver.take(self._opened.window, finished)
        self.ended(pack)

    def split(self, pack: Pack, count: int) -> None:
        """The prompts of a pack are answered by so many other packs."""
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
        """Windows that were open at a time, at most."""
        self._pool = pool
        self._written = written
        self._open: dict[int, _OpenWindow] = {}  # by the window's index, in the order of the input
        self._carried: tuple[int, Sequence[CarriedBlock]] = (-1, ())  # of the window that was planned last

    def score(self, windows: Iterator[Window], ready: Callable[[], bool] = lambda: True) -> None:
        """Score all `windows`; `ready` tells whether the next one can be had at once.

        As many are open as it takes for every engine to have something to do. Raises ResourceError if the pool cannot
        go on.
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
        if before != receiver.window_before(window.index):  # that one was scored by an earlier run
            carried = receiver.carried_into(window.index)
        self._pool.fit(max((len(prompt.tokens) for prompt in window.prompts), default=0))
        receiver.begin(window, done)
        rows_open = sum(len(each.window.rows) for each in self._open.values())
        work, finished = begin_window(window, done, carried, self._pool, self.options, receiver, rows_open=rows_open)
        self._carried = window.index, work.plan.carried
        receiver.take(window, finished)
        opened = self._open[window.index] = _OpenWindow(window, work, work)
        self.most_open = max(self.most_open, len(self._open))
        self._pool.ask(Asked(self, opened, len(window.rows) - len(done)))
        self.go_on(opened)

    def go_on(self, opened: _OpenWindow) -> None:
        """Where all of a window is answered so far, ask further questions about some of its rows, or end it.

        Which of the wanted rows come first is known when all windows before are written.
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

        following = follow_up(opened.first, self._pool.limits, self.options.schedule, tick)
        if following is not None:
            self.receiver.take(opened.window, Finished(rows=following.finished))
            opened.work = following
            self._pool.ask(Asked(self, opened, 0))
