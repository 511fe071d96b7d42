"""When a run will end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING

import pyarrow as pa

from prefillcli.data.prompts.labels import ClassLabels, Labels
from prefillcli.data.rows import ScoredRow, Window
from prefillcli.errors import Interrupted, ResourceError
from prefillcli.jobs.loop import Finished
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Pack
from prefillcli.plan.plan import Plan
from prefillcli.report.run import Tokens
from prefillcli.runtime import log
from prefillcli.runtime.clock import Expected, Phase, Progress
from prefillcli.stats.evaluation import Measure, label_mass

if TYPE_CHECKING:
    from prefillcli.jobs.score import Job

#: Seconds that the model takes for a plan.
Predict = Callable[[Plan], float]


class RemainingTime:
    """Seconds to the end of a run: the prediction for the rest, scaled by the ratio of actual to predicted time so
    far.

    `rows` tells how many rows the job has, as far as is known. Rows without a plan yet are expected to take as long as
    planned ones. So many `workers` compute packs at a time.
    """

    def __init__(self, predict: Predict, rows: Callable[[], Expected | None], workers: int = 1) -> None:
        self.ran = 0.0
        """Seconds that were predicted for the packs that are done."""
        self.least_pack = 0.0
        """The fewest seconds that a pack takes: those of reading its weights."""
        self._predict = predict
        self._expected = rows
        self._left_out = 0  # rows that are planned, or were done before
        self._workers = workers
        self._rows = 0  # of windows that were planned
        self._planned = 0.0  # predicted seconds of these windows
        self._other = 0.0  # the draft's seconds for them
        self._done = 0.0  # predicted seconds of the done parts of unfinished packs
        self._took = 0.0  # seconds that the finished packs took
        self._running: dict[int, tuple[float, float]] = {}  # by a pack's number: predicted seconds, and when it began

    def skip(self, rows: int) -> None:
        """Leave out rows that were done before this run."""
        self._left_out += rows

    def plan(self, packs: list[Pack], rows: int, draft_seconds: float) -> None:
        """A window of `rows` rows will run as `packs`."""
        self.skip(rows)
        self._rows += rows
        self._planned += sum(map(self._seconds, packs)) if self.least_pack else self._predict(Plan(packs, 0))
        self._other += draft_seconds

    def begin(self, pack: Pack) -> None:
        """A pack starts."""
        self._running[pack.index] = self._seconds(pack), time.monotonic()

    def _seconds(self, pack: Pack) -> float:
        return max(self._predict(Plan([pack], 0)), self.least_pack)

    def step(self, pack: Pack, share: float) -> None:
        """A further `share` of the pack is done, 0 to 1."""
        self._done += self._running[pack.index][0] * share

    def end(self, pack: Pack) -> None:
        """The pack is done."""
        predicted, begun = self._running.pop(pack.index)
        self.ran += predicted
        if not self._running:
            self._done = self.ran
        self._took += time.monotonic() - begun

    def seconds_left(self) -> float | None:
        """None while nothing is planned, or the number of rows is not known."""
        expected = self._expected()
        if expected is None or not self._rows:
            return None
        now = time.monotonic()
        took = self._took + sum(now - begun for _, begun in list(self._running.values()))
        scale = took / self._done if self._done > 0 and took > 0 else 1.0
        more = max(expected.rows - self._left_out, 0) / self._rows
        packs = (max(self._planned - self._done, 0.0) + self._planned * more) * scale
        return packs / self._workers + self._other * more


# A warning if the model hardly ever answers with a label: scores then compare answers that it would not give.


LEAST_MASS = 1e-3
"""Of the label mass, on average over a window."""


class LabelMassCheck:
    """Looks at the first window with rows that are read to the end, and warns once at most.

    A head has no answers but its classes, and a target no others: they have no such mass. That of longer labels is
    small in any case.
    """

    def __init__(self, labels: Labels) -> None:
        self._looks = labels.measure is Measure.SHARES and not isinstance(labels, ClassLabels)
        self._window: int | None = None
        self._masses: list[float] = []

    def take(self, window: Window, rows: Iterable[ScoredRow]) -> None:
        """Rows of this window are scored."""
        if self._looks and self._window in (None, window.index):
            labels = {prompt.row: prompt.labels for prompt in window.prompts if prompt.part == 0}
            self._masses += [
                float(label_mass(labels[each.row].whole(each.logprobs)))
                for each in rows
                if each.exit_layer is None and not labels[each.row].depth
            ]
            self._window = window.index if self._masses else None

    def end(self, window: int) -> None:
        """All rows of a window are scored."""
        if not self._looks or window != self._window:
            return
        self._looks, rows = False, len(self._masses)
        mean = sum(self._masses) / rows
        if mean < LEAST_MASS:
            log.warning(
                f"the labels have {mean:.1g} of the probability on average over the first rows ({rows:,}): the model "
                "hardly ever answers with one of them; check that the model is the right one, that the template asks "
                "for the labels, and how --labels spells them (a space before a word is part of its token)"
            )


class Recorder:
    """Writes finished rows, and counts their tokens. It is the `Receiver` of the windows of a job.

    Several windows may be open at a time. Nothing is written once the files of the model, or of the rows, have changed
    since the fingerprint was made. Finished rows are written at least every `Granularity.flush_seconds`.
    """

    def __init__(self, job: Job, rows: Callable[[], Expected | None], forecast: RemainingTime | None = None) -> None:
        self.tokens = Tokens()
        self.packs = 0
        self._job = job
        self._sink, self._clock, self._stop = job.sink, job.clock, job.stop
        self._label_mass = LabelMassCheck(job.labels)
        self._forecast = forecast
        self._progress = Progress(
            rows,
            interval=job.settings.progress_interval,
            quiet=job.settings.quiet,
            seconds_left=(lambda: None) if forecast is None else forecast.seconds_left,
        )
        self._drafted = 0.0  # seconds of the draft that the forecast includes
        self._open: dict[
            int, tuple[Window, Finished]
        ] = {}  # finished rows that are not written, by the window's index
        self._flushed = time.monotonic()
        self._begun = False  # whether a window has begun

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, progress is shown, and other processes can see that this one is alive."""
        with closing(self._progress), self._sink.signs_of_life(self._progress.pace):
            self._skip(self._sink.counts.total)
            yield

    def _skip(self, rows: int) -> None:
        """Count rows that this run does not compute."""
        self._progress.resume(rows)
        if self._forecast is not None:
            self._forecast.skip(rows)

    @contextmanager
    def written_if_stopped(self) -> Iterator[None]:
        """If a signal or a dead engine ends the work inside, the finished rows are written."""
        try:
            yield
        except (Interrupted, ResourceError):
            for window, finished in list(self._open.values()):
                self._flush(window, finished)
            raise

    def done(self, window: int) -> set[int]:
        return self._sink.done(window)

    def window_before(self, window: int) -> int:
        return self._sink.window_before(window)

    def carried_into(self, window: int) -> Sequence[CarriedBlock]:
        return self._sink.carried_into(window)

    def begin(self, window: Window, done: set[int]) -> None:
        """A window is scored from now on; these of its rows are written."""
        if not self._begun:
            self._begun = True
            self._progress.start()
        self._progress.advance(len(window.errors.keys() - done))
        self._open[window.index] = window, Finished()

    def take(self, window: Window, finished: Finished) -> None:
        """Rows of an open window are finished."""
        self.tokens.add(finished.tokens)
        self._progress.advance(len(finished.errors))
        self._open[window.index][1].add(finished)
        self._label_mass.take(window, finished.rows)
        if finished.rows and time.monotonic() - self._flushed > self._job.granularity.flush_seconds:
            for each, unwritten in list(self._open.values()):
                if unwritten.rows:
                    self._flush(each, unwritten)

    def take_over(self, window: Window, results: pa.Table) -> None:
        """Write rows of a window as an earlier output has them (`EarlierOutput.take`)."""
        before = self._sink.counts.total
        with self._clock.phase("write"):
            self._job.require_unchanged(window.rows)
            self._sink.take_over(window, results)
        self._skip(self._sink.counts.total - before)
        self._progress.advance(0)
        self._stop.check()

    def end(self, window: Window) -> None:
        """All rows of a window are finished."""
        self._flush(*self._open.pop(window.index))
        self._label_mass.end(window.index)

    def _flush(self, window: Window, finished: Finished) -> None:
        """Write finished rows as a part; the window's own error rows come with its first one."""
        with self._clock.phase("write"):
            self._job.require_unchanged(window.rows)  # a later run would reuse the part under the same fingerprint
            self._sink.write(
                window,
                finished.rows,
                finished.errors,
                temperature=self._job.settings.temperature,
                probabilities=self._job.probabilities,
                carried=finished.carried,
            )
        finished.rows, finished.errors = [], {}
        self._flushed = time.monotonic()

    # As a `Listener` of `prefillcli.jobs.loop`.

    @contextmanager
    def phase(self, name: Phase, *, waits: bool = False) -> Iterator[None]:
        with self._clock.phase(name), self._stop.at_once() if waits else nullcontext():
            yield

    def planned(self, packs: list[Pack], rows: int) -> None:
        if self._forecast is not None:
            drafted = self._clock.seconds["draft"]
            self._forecast.plan(packs, rows, drafted - self._drafted)
            self._drafted = drafted

    def pack_begins(self, pack: Pack) -> None:
        if self._forecast is not None:
            self._forecast.begin(pack)

    def step(self, pack: Pack | None, rows: float, tokens: float, share: float) -> None:
        if self._forecast is not None and pack is not None:
            self._forecast.step(pack, share)
        self._progress.advance(rows, tokens)
        self._stop.check()

    def pack_ends(self, pack: Pack) -> None:
        self.packs += 1
        if self._forecast is not None:
            self._forecast.end(pack)
