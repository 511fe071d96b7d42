"""One window: compressed, planned, answered pack by pack, written as parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt

from prefillcli.compress.answers import plan_requests
from prefillcli.compress.audit_draw import AuditDraw
from prefillcli.compress.request import Request
from prefillcli.data.output.sink import Sink
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.rows import ErrorCode, Int64Array, Prompt, RowError, ScoredRow, Window
from prefillcli.engines.base import Answer, Engine
from prefillcli.errors import Interrupted, ResourceError
from prefillcli.forecast.remaining_time import RemainingTime
from prefillcli.plan.pack import Pack
from prefillcli.plan.plan import packs_to_run
from prefillcli.report.run import RunReport
from prefillcli.runtime.clock import Clock
from prefillcli.runtime.progress import Progress
from prefillcli.runtime.signals import Stop
from prefillcli.runtime.threads import Threads

#: Decides how the target reads a window's prompts; the function given is to be called with the tokens of each step.
Compress = Callable[[Window, Sequence[Prompt], Callable[[float], None]], list[Request]]

FLUSH_SECONDS = 15.0  # finished rows are written at least this often, between packs


class _Work:
    """The requests of a window: first the `ordinary` ones, then those of audited prompts in full.

    An audited row waits in `scored` or `audits` for its other half.
    """

    def __init__(self, requests: list[Request], audited: Sequence[int], ordinary: int, done: set[int]) -> None:
        self.requests = requests
        self.audited = {requests[number].prompt.row for number in audited}
        self.ordinary = ordinary
        self.done = done
        self.scored: dict[int, ScoredRow] = {}
        self.audits: dict[int, npt.NDArray[np.float64]] = {}


class WindowScorer:
    """Brings windows through an engine into a sink, and counts in the report what that took.

    Without `compress` every prompt is read in full. `audit` says which of the compressed ones are read in full too.
    `forecast` is told what is planned and done. `unchanged` raises ContentChangedError if what the given rows and the
    model were read from is not what the job's fingerprint names: nothing is written then.
    """

    def __init__(
        self,
        engine: Engine,
        sink: Sink,
        labels: Labels,
        *,
        schedule: str,
        temperature: float,
        report: RunReport,
        clock: Clock,
        progress: Progress,
        stop: Stop,
        threads: Threads | None = None,
        compress: Compress | None = None,
        audit: AuditDraw | None = None,
        forecast: RemainingTime | None = None,
        unchanged: Callable[[Int64Array], None],
    ) -> None:
        self._engine = engine
        self._sink = sink
        self._labels = labels
        self._schedule = schedule
        self._temperature = temperature
        self._report = report
        self._clock = clock
        self._progress = progress
        self._stop = stop
        self._threads = threads
        self._compress = compress
        self._audit = audit
        self._forecast = forecast
        self._unchanged = unchanged
        self._scored: list[ScoredRow] = []  # done, but not yet written
        self._errors: dict[int, RowError] = {}
        self._flushed = time.monotonic()

    def score(self, window: Window) -> None:
        """Score the rows of `window` that are not in the sink yet; stopped, write what is finished before raising."""
        done = self._sink.done(window.index)
        drafted = self._clock.seconds["draft"]
        requests = self._fitting(self._read(window))
        if not self._engine.whole_packs:
            requests = [request for request in requests if request.prompt.row not in done]
        audited = self._audited(window, requests)
        work = _Work(requests + [Request(requests[number].prompt) for number in audited], audited, len(requests), done)
        self._progress.advance(len(window.errors.keys() - done) + len(self._errors))
        with self._clock.phase("plan"):
            plan = plan_requests(work.requests, self._engine.limits, self._schedule)
            packs = packs_to_run(plan, [i for i, each in enumerate(work.requests) if each.prompt.row in done])
        self._report.tokens.unique += plan.unique_tokens
        if self._forecast is not None:
            self._forecast.plan(packs, len(window.rows) - len(done), self._clock.seconds["draft"] - drafted)
        try:
            for pack in packs:
                self._score_pack(pack, work, window)
        except Interrupted:
            self._flush(window)
            raise
        self._flush(window)

    def _read(self, window: Window) -> list[Request]:
        if self._compress is None:
            return [Request(prompt) for prompt in window.prompts]

        def tick(tokens: float) -> None:
            self._progress.advance(0)
            self._stop.check()

        self._adjust_threads()
        with self._clock.phase("draft"):
            return self._compress(window, window.prompts, tick)

    def _adjust_threads(self) -> None:
        if self._threads is not None:
            self._threads.adjust()

    def _fitting(self, requests: Sequence[Request]) -> list[Request]:
        """The requests that the memory budget holds; the others become error rows."""
        most = self._engine.limits.max_tokens
        fitting = []
        for request in requests:
            if len(request.tokens) <= most:
                fitting.append(request)
            else:
                detail = f"{len(request.tokens)} tokens; the memory budget holds {most}"
                self._errors[request.prompt.row] = RowError(ErrorCode.EXCEEDS_MEMORY, detail)
        return fitting

    def _audited(self, window: Window, requests: Sequence[Request]) -> list[int]:
        """Numbers of the requests whose prompts are read in full as well."""
        if self._audit is None:
            return []
        most = self._engine.limits.max_tokens
        able = [
            number
            for number, request in enumerate(requests)
            if request.compressed and len(request.prompt.tokens) <= most
        ]
        return self._audit.draw(window, able)

    def _score_pack(self, pack: Pack, work: _Work, window: Window) -> None:
        ordinary = [i for i in pack.prompts if i < work.ordinary]
        rows = len(ordinary) / len(pack.tokens)
        tokens = sum(len(work.requests[i].prompt.tokens) for i in ordinary) / len(pack.tokens)

        def tick(step: float) -> None:
            if forecast is not None:
                forecast.step(step / len(pack.tokens))
            self._progress.advance(step * rows, step * tokens)
            self._stop.check()
            self._adjust_threads()

        self._adjust_threads()
        forecast = self._forecast
        if forecast is not None:
            forecast.begin(pack)
        answers = iter(self._engine.answer(pack, lambda i: self._labels.sets[work.requests[i].prompt.labels], tick))
        while True:
            try:
                with self._clock.phase("model"), self._stop.at_once() if self._engine.waits else nullcontext():
                    found = next(answers, None)
            except ResourceError:  # the engine has died; what it said before stands
                self._flush(window)
                raise
            if found is None:
                break
            self._collect(found, work)
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._flush(window)
        self._report.packs += 1
        if forecast is not None:
            forecast.end()

    def _collect(self, answers: Iterable[Answer], work: _Work) -> None:
        tokens = self._report.tokens
        for answer in answers:
            tokens.computed += answer.computed_tokens
            request = work.requests[answer.prompt]
            prompt = request.prompt
            if prompt.row in work.done:
                continue  # computed again only for the K,V that a later pack holds
            if answer.prompt >= work.ordinary:
                tokens.audit += answer.computed_tokens
                work.audits[prompt.row] = answer.logprobs
            else:
                tokens.prompt += len(prompt.tokens)
                tokens.kept += len(request.tokens)
                tokens.shared += answer.shared_tokens
                work.scored[prompt.row] = ScoredRow(
                    row=prompt.row,
                    logprobs=answer.logprobs,
                    shared_tokens=answer.shared_tokens,
                    computed_tokens=answer.computed_tokens,
                    kept_tokens=len(request.tokens),
                    seconds=answer.seconds + request.pick_seconds,
                    method=request.method,
                )
            if prompt.row in work.scored and (prompt.row in work.audits or prompt.row not in work.audited):
                scored = work.scored.pop(prompt.row)
                scored.audit = work.audits.pop(prompt.row, None)
                self._scored.append(scored)

    def _flush(self, window: Window) -> None:
        """Write finished rows as a part; the window's own error rows come with its first one."""
        with self._clock.phase("write"):
            self._unchanged(window.rows)  # a part would be reused by a later run under the same fingerprint
            self._sink.write(window, self._scored, self._errors, temperature=self._temperature)
        self._scored, self._errors = [], {}
        self._flushed = time.monotonic()
