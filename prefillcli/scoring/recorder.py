"""Write finished rows; report progress, the answers in the first window, and the time left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from prefillcli.core.scorer import USUAL, Granularity
from prefillcli.errors import Interrupted, ResourceError
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Pack
from prefillcli.plan.plan import Plan
from prefillcli.prompts.encoding import Encoder
from prefillcli.prompts.labels import ClassLabels, Labels
from prefillcli.report.run import FirstAnswers, LikelyToken
from prefillcli.report.verdict import ABOUT_ANSWERS, CHECK_LAYOUT
from prefillcli.rows.records import NextTokens, Prompt, ScoredRow, Window
from prefillcli.runtime import log
from prefillcli.runtime.clock import Expected, Phase, Progress
from prefillcli.scoring.loop import NEXT_TOKENS, Finished
from prefillcli.stats.arrays import Float64Array
from prefillcli.stats.labels import UNANSWERED_MASS, Measure, label_mass, label_probabilities

if TYPE_CHECKING:
    from prefillcli.core.run import Run
    from prefillcli.reading.earlier import EarlierOutput
    from prefillcli.rows.output.sink import Sink
    from prefillcli.scoring.compose import Parts
    from prefillcli.scoring.identity import LocalModels

#: Seconds that the model takes for a plan.
Predict = Callable[[Plan], float]


class RemainingTime:
    """Seconds to the end of a run: the prediction for the rest, scaled by the ratio of actual to predicted time so
    far.

    `rows` returns the number of the job's rows, as far as it is known. Rows without a plan yet are expected to take as
    long as planned ones. `workers` is the number of packs that are computed at a time.
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
        """Take the `packs` as which a window of `rows` rows will run."""
        self.skip(rows)
        self._rows += rows
        self._planned += sum(map(self._seconds, packs)) if self.least_pack else self._predict(Plan(packs, 0))
        self._other += draft_seconds

    def begin(self, pack: Pack) -> None:
        """Note that a pack starts."""
        self._running[pack.index] = self._seconds(pack), time.monotonic()

    def _seconds(self, pack: Pack) -> float:
        return max(self._predict(Plan([pack], 0)), self.least_pack)

    def step(self, pack: Pack, share: float) -> None:
        """Note that a further `share` of the pack is done, 0 to 1."""
        self._done += self._running[pack.index][0] * share

    def end(self, pack: Pack) -> None:
        """Note that the pack is done."""
        predicted, begun = self._running.pop(pack.index)
        self.ran += predicted
        if not self._running:
            self._done = self.ran
        self._took += time.monotonic() - begun

    def seconds_left(self) -> float | None:
        """Return the seconds left; None while nothing is planned, or the number of rows is not known."""
        expected = self._expected()
        if expected is None or not self._rows:
            return None
        now = time.monotonic()
        took = self._took + sum(now - begun for _, begun in list(self._running.values()))
        scale = took / self._done if self._done > 0 and took > 0 else 1.0
        more = max(expected.rows - self._left_out, 0) / self._rows
        packs = (max(self._planned - self._done, 0.0) + self._planned * more) * scale
        return packs / self._workers + self._other * more


# The likeliest tokens after the prompts of the first window; a warning if they are hardly ever an answer.


LEAST_BEGUN = 1e-3
"""Of the probability that choices or targets begin, on average over a window."""
_SHOWN_SHARE = 0.01  # of a token that the warning names, unless it is the likeliest
_MOST_SHOWN = 3
_MOST_CHARACTERS = 2000  # of a prompt that is shown, from both ends

_CHECK = "check that the model is the right one, that the template asks for {what}, and how {where} spells {it}"
_ASKED = "check that the model is the right one, one that follows instructions; or give the question its own template"
_ADVICE = {
    Measure.SHARES: (_CHECK + " (a space before a word is part of its token)", "--labels"),
    Measure.CHOICES: (_CHECK, "the column of --choices-column"),
    Measure.LIKELIHOOD: ("check that the model is the right one, and that {what} go on where the prompts end", ""),
}


@dataclass
class _Heard:
    """Sums over the rows of a window that were asked the same question, and the first of these rows."""

    labels: Labels
    rows: int = 0
    mass: float = 0.0
    begins: float = 0.0
    shares: dict[int, float] = field(default_factory=dict)  # by token
    first: tuple[Prompt, Float64Array] | None = None  # with its logprobs

    def add(self, prompt: Prompt, logprobs: Float64Array, told: NextTokens) -> None:
        self.rows += 1
        self.mass += float(label_mass(prompt.labels.whole(logprobs)))
        self.begins += told.begins
        for token, logprob in zip(told.tokens.tolist(), told.logprobs.tolist(), strict=True):
            self.shares[token] = self.shares.get(token, 0.0) + math.exp(logprob)
        if self.first is None or prompt.row < self.first[0].row:
            self.first = prompt, logprobs


class FirstWindow:
    """Collects what the model would answer in the first window with rows that are read to the end. Warns if the
    answers asked for are unlikely: for labels, if all of them together have a small probability; for a row's choices
    or target, if their first tokens have. Longer ones have a small probability in any case.

    A head answers nothing but its classes, and a whole document has no prompt before it.
    """

    def __init__(self, labels: Labels, tokenizer: Any, temperature: float) -> None:
        self.listens = labels.measure in _ADVICE and not isinstance(labels, ClassLabels)
        self.found: list[FirstAnswers] = []
        """The findings, once the window has ended."""
        self._labels, self._encoder, self._temperature = labels, Encoder(tokenizer), temperature
        self._window: int | None = None
        self._heard: dict[str, _Heard] = {}  # by question

    def take(self, window: Window, rows: Iterable[ScoredRow]) -> None:
        """Take scored rows of this window."""
        if not self.listens or self._window not in (None, window.index):
            return
        prompts = {(prompt.row, prompt.part): prompt for prompt in window.prompts}
        for row in rows:
            for part, own in enumerate(row.answers):
                left = own.exit_layer is not None
                logprobs = own.audit if left else own.logprobs
                if own.next is None or logprobs is None or self._is_document(row, prompts[row.row, part]):
                    continue
                if np.isnan([own.next.begins, *logprobs]).any():  # an error row, as it will be written
                    continue
                labels = self._labels.asked[part]
                heard = self._heard.setdefault(labels.question.name, _Heard(labels))
                heard.add(prompts[row.row, part], logprobs, own.next)
                self._window = window.index

    def _is_document(self, row: ScoredRow, prompt: Prompt) -> bool:
        return self._labels.measure is Measure.LIKELIHOOD and (bool(row.parts) or len(prompt.tokens) == 1)

    def end(self, window: int) -> None:
        """End a window whose rows are all scored."""
        if not self.listens or window != self._window:
            return
        self.listens = False
        for question, heard in self._heard.items():
            said = self._said(question, heard)
            self.found.append(said)
            mass = said.label_mass
            if said.begins < LEAST_BEGUN if mass is None else mass < UNANSWERED_MASS:
                log.warning(self._warning(said), event=ABOUT_ANSWERS)
        self._heard = {}

    def _said(self, question: str, heard: _Heard) -> FirstAnswers:
        shares = sorted(heard.shares.items(), key=lambda pair: (-pair[1], pair[0]))[:NEXT_TOKENS]
        prompt, answer = ("", "") if heard.first is None else self._shown(heard.labels, *heard.first)
        return FirstAnswers(
            question=question or None,
            rows=heard.rows,
            label_mass=heard.mass / heard.rows if heard.labels.measure is Measure.SHARES else None,
            begins=heard.begins / heard.rows,
            tokens=[
                LikelyToken(id=token, text=self._encoder.text_behind(token), share=share / heard.rows)
                for token, share in shares
            ],
            prompt=prompt,
            answer=answer,
        )

    def _shown(self, labels: Labels, prompt: Prompt, logprobs: Float64Array) -> tuple[str, str]:
        # A prompt as the model read it, and its answer.
        text = self._encoder.decode(prompt.tokens)
        if len(text) > _MOST_CHARACTERS:
            half = _MOST_CHARACTERS // 2
            text = f"{text[:half]}\n… {len(text) - 2 * half:,} characters …\n{text[-half:]}"
        if labels.measure is Measure.LIKELIHOOD:
            return text, f"the target, with a log-probability of {logprobs[0]:.4f}"
        shares = label_probabilities(logprobs, self._temperature)
        best = int(shares.argmax())
        return text, f"{(prompt.labels.texts or labels.read)[best]}, with a probability of {shares[best]:.4f}"

    def _warning(self, said: FirstAnswers) -> str:
        noun = {Measure.CHOICES: "choices", Measure.LIKELIHOOD: "targets"}.get(self._labels.measure, "labels")
        what = f"the {noun}" + ("" if said.question is None else f" of question {said.question!r}")
        rows = f"on average over the first rows ({said.rows:,})"
        if said.label_mass is None:
            text = (
                f"the first tokens of {what} have {said.begins:.1g} of the probability {rows}: the model hardly ever "
                "begins with one of them"
            )
        else:
            text = (
                f"{what} have {said.label_mass:.1g} of the probability {rows}: the model hardly ever answers with one "
                "of them"
            )
        named = [each for each in said.tokens if each.share >= _SHOWN_SHARE][:_MOST_SHOWN] or said.tokens[:1]
        if named:
            text += "; it answers " + ", ".join(f"{each.name} ({each.percent})" for each in named)
        advice, where = _ADVICE[self._labels.measure]
        asked = {own.question.name: own.question for own in self._labels.each}
        if said.question is not None and asked[said.question].instructions:
            laid_out = any(answer.tokens for answer in asked[said.question].read.labels)
            return f"{text}\n{CHECK_LAYOUT if laid_out else _ASKED}"
        where = where if said.question is None else "the file of --questions"
        return f"{text}\n{advice.format(what=what, where=where, it='them')}"


class Recorder:
    """Writes finished rows, and counts their tokens. It is the `Receiver` of the windows of a job.

    Several windows may be open at a time. Nothing is written once the files of the model, or of the rows, have changed
    since the fingerprint was made. Finished rows are written as often as `Granularity` says. Only finished rows are
    written, so that the clock has no part in their scores, and at most a few parts a minute, so that there are never
    too many.
    """

    def __init__(
        self,
        run: Run,
        parts: Parts,
        models: LocalModels,
        rows: Callable[[], Expected | None],
        *,
        granularity: Granularity = USUAL,
        forecast: RemainingTime | None = None,
    ) -> None:
        self.tokens = run.tokens
        self.packs = 0
        self._run, self._parts, self._models = run, parts, models
        self._sink, self._clock, self._stop = run.sink, run.clock, run.stop
        self.first_window = FirstWindow(
            run.inputs.labels, run.inputs.opened.tokenizer, run.settings.answers.temperature
        )
        self._forecast = forecast
        self._progress = Progress(
            rows,
            interval=run.settings.run.progress_interval,
            quiet=run.settings.run.quiet,
            seconds_left=(lambda: None) if forecast is None else forecast.seconds_left,
        )
        self._drafted = 0.0  # seconds of the draft that the forecast includes
        self._open: dict[
            int, tuple[Window, Finished]
        ] = {}  # finished rows that are not written, by the window's index
        self._flushed = time.monotonic()
        self._usual_wait = granularity.flush_seconds
        self._wait = min(granularity.first_flush_seconds, self._usual_wait)  # seconds until rows are written
        self._begun = False  # whether a window has begun

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show progress, and let other processes see that this one is alive, inside the block."""
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
        """Write the finished rows if a signal or a dead engine ends the work inside."""
        try:
            yield
        except (Interrupted, ResourceError):
            for window, finished in list(self._open.values()):
                self._flush(window, finished)
            raise

    @property
    def listens(self) -> bool:
        return self.first_window.listens

    def done(self, window: int) -> set[int]:
        return self._sink.done(window)

    def window_before(self, window: int) -> int:
        return self._sink.window_before(window)

    def carried_into(self, window: int) -> Sequence[CarriedBlock]:
        return self._sink.carried_into(window)

    def begin(self, window: Window, done: set[int]) -> None:
        """Begin a window, of which these rows are written."""
        if not self._begun:
            self._begun = True
            self._progress.start()
        self._progress.advance(len(window.errors.keys() - done))
        self._open[window.index] = window, Finished()

    def take(self, window: Window, finished: Finished) -> None:
        """Take finished rows of an open window."""
        self.tokens.add(finished.tokens)
        self._progress.advance(len(finished.errors))
        self._open[window.index][1].add(finished)
        self.first_window.take(window, finished.rows)
        if finished.rows and time.monotonic() - self._flushed > self._wait:
            for each, unwritten in list(self._open.values()):
                if unwritten.rows:
                    self._flush(each, unwritten)

    def take_over(self, window: Window, results: pa.Table) -> None:
        """Write rows of a window as an earlier output has them (`EarlierOutput.take`)."""
        before = self._sink.counts.total
        with self._clock.phase("write"):
            self._require_unchanged(window)
            self._sink.take_over(window, results)
        self._skip(self._sink.counts.total - before)
        self._progress.advance(0)
        self._stop.check()

    def end(self, window: Window) -> None:
        """End a window whose rows are all finished."""
        self._flush(*self._open.pop(window.index))
        self.first_window.end(window.index)

    def _flush(self, window: Window, finished: Finished) -> None:
        """Write finished rows as a part; the window's own error rows come with its first one."""
        with self._clock.phase("write"):
            self._require_unchanged(window)
            self._sink.write(
                window,
                finished.rows,
                finished.errors,
                temperature=self._run.settings.answers.temperature,
                probabilities=self._parts.probabilities,
                carried=finished.carried,
            )
        finished.rows, finished.errors = [], {}
        self._flushed, self._wait = time.monotonic(), self._usual_wait

    def _require_unchanged(self, window: Window) -> None:
        # A later run would reuse the part under the same fingerprint.
        self._models.require_unchanged()
        self._run.inputs.source.require_unchanged(window.rows)

    @property
    def predicted_seconds(self) -> float | None:
        """Seconds that were predicted for the packs that are done; None without a forecast."""
        return None if self._forecast is None else self._forecast.ran

    # As a `Listener` of `prefillcli.scoring.loop`.

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


def left_to_score(
    windows: Iterator[Window], earlier: EarlierOutput, sink: Sink, recorder: Recorder
) -> Iterator[Window]:
    """Yield the windows without the rows that are taken over, which are written first.

    A window with nothing left is written whole, and not yielded.
    """
    for window in windows:
        taken = earlier.take(window)
        if taken is not None:
            recorder.take_over(window, taken)
            if not window.prompts:
                recorder.begin(window, sink.done(window.index))
                recorder.end(window)
                continue
        yield window
