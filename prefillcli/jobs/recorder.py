"""What listens while windows are scored: the sink, the progress line, the forecast and the counts for the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prefillcli.data.output.sink import Sink
from prefillcli.data.rows import Int64Array, RowError, ScoredRow, Window
from prefillcli.errors import Interrupted, ResourceError
from prefillcli.forecast.remaining_time import RemainingTime
from prefillcli.jobs.window_scoring import Finished
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Pack
from prefillcli.report.run import Tokens
from prefillcli.runtime.clock import Clock, Phase
from prefillcli.runtime.progress import Progress
from prefillcli.runtime.signals import Stop

if TYPE_CHECKING:  # takes torch along
    from prefillcli.compress.auto import KeepChoice


class Recorder:
    """Writes finished rows, and counts what they took. It is the `Listener` of windows that this process scores.

    `unchanged` raises ContentChangedError if what the given rows and the model were read from is not what the job's
    fingerprint names: nothing is written then. Finished rows are written at least every `flush_seconds`.
    """

    def __init__(
        self,
        sink: Sink,
        clock: Clock,
        progress: Progress,
        stop: Stop,
        *,
        temperature: float,
        unchanged: Callable[[Int64Array], None],
        forecast: RemainingTime | None = None,
        flush_seconds: float,
    ) -> None:
        self.tokens = Tokens()
        self.packs = 0
        self._sink = sink
        self._clock = clock
        self._progress = progress
        self._stop = stop
        self._temperature = temperature
        self._unchanged = unchanged
        self._forecast = forecast
        self._flush_seconds = flush_seconds
        self._drafted = 0.0  # seconds of the draft that the forecast knows of
        self._rows: list[ScoredRow] = []  # finished, but not yet written
        self._errors: dict[int, RowError] = {}
        self._carried: tuple[CarriedBlock, ...] | None = None
        self._flushed = time.monotonic()

    def record(self, window: Window, done: set[int], scored: Iterator[Finished]) -> None:
        """Take in what scoring `window` gives, and write it. Whatever stops the scoring, finished rows are written."""
        self._progress.advance(len(window.errors.keys() - done))
        self._carried = None
        while True:
            try:
                finished = next(scored, None)
            except (Interrupted, ResourceError):  # a signal, or an engine that has died: what it said before stands
                self._flush(window)
                raise
            if finished is None:
                break
            self.tokens.add(finished.tokens)
            self._progress.advance(len(finished.errors))
            self._rows += finished.rows
            self._errors |= finished.errors
            self._carried = self._carried if finished.carried is None else finished.carried
            if finished.rows and time.monotonic() - self._flushed > self._flush_seconds:
                self._flush(window)
        self._flush(window)

    def _flush(self, window: Window) -> None:
        """Write finished rows as a part; the window's own error rows come with its first one."""
        with self._clock.phase("write"):
            self._unchanged(window.rows)  # a part would be reused by a later run under the same fingerprint
            self._sink.write(window, self._rows, self._errors, temperature=self._temperature, carried=self._carried)
        self._rows, self._errors = [], {}
        self._flushed = time.monotonic()

    # What scoring a window tells: see `prefillcli.jobs.window_scoring.Listener`.

    @contextmanager
    def phase(self, name: Phase, *, waits: bool = False) -> Iterator[None]:
        with self._clock.phase(name), self._stop.at_once() if waits else nullcontext():
            yield

    def chose(self, choice: KeepChoice) -> None:
        chosen: dict[str, Any] = {"keep": choice.keep, "keep_auto": asdict(choice)}
        self._sink.plan = self._sink.plan | chosen

    def planned(self, packs: list[Pack], rows: int) -> None:
        if self._forecast is not None:
            drafted = self._clock.seconds["draft"]
            self._forecast.plan(packs, rows, drafted - self._drafted)
            self._drafted = drafted

    def pack_begins(self, pack: Pack) -> None:
        if self._forecast is not None:
            self._forecast.begin(pack)

    def step(self, rows: float, tokens: float, share: float) -> None:
        if self._forecast is not None:
            self._forecast.step(share)
        self._progress.advance(rows, tokens)
        self._stop.check()

    def pack_ends(self) -> None:
        self.packs += 1
        if self._forecast is not None:
            self._forecast.end()
