"""One window: planned, answered pack by pack, written as parts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from prefillcli.clock import Clock
from prefillcli.data.labels import Labels
from prefillcli.data.rows import Prompt, RowError, Scored, Window
from prefillcli.data.sink import Sink
from prefillcli.engines.base import Engine
from prefillcli.errors import Interrupted
from prefillcli.plan.account import account
from prefillcli.plan.pack import Pack
from prefillcli.plan.plan import make_plan, packs_to_run
from prefillcli.progress import Progress
from prefillcli.report.run import RunReport
from prefillcli.signals import Stop

FLUSH_SECONDS = 15.0  # finished rows are written at least this often, between packs


class WindowScorer:
    """Brings windows through an engine into a sink, and counts in the report what that took."""

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
        self._scored: list[Scored] = []  # done, but not yet written
        self._errors: dict[int, RowError] = {}
        self._flushed = time.monotonic()

    def score(self, window: Window) -> None:
        """Score the rows of `window` that are not in the sink yet; stopped, write what is finished before raising."""
        done = self._sink.done(window.index)
        prompts = self._fitting(window)
        self._progress.advance(len(window.errors.keys() - done) + len(self._errors))
        with self._clock.phase("plan"):
            plan = make_plan([p.tokens for p in prompts], self._engine.limits, self._schedule)
            packs = packs_to_run(plan, [i for i, p in enumerate(prompts) if p.row in done])
        self._report.tokens.unique += plan.unique_tokens
        try:
            for pack in packs:
                self._score_pack(pack, prompts, done)
                if time.monotonic() - self._flushed > FLUSH_SECONDS:
                    self._flush(window)
        except Interrupted:
            self._flush(window)
            raise
        self._flush(window)

    def _fitting(self, window: Window) -> list[Prompt]:
        """The prompts that the memory budget holds; the others become error rows."""
        most = self._engine.limits.max_tokens
        fitting = []
        for prompt in window.prompts:
            if len(prompt.tokens) <= most:
                fitting.append(prompt)
            else:
                detail = f"{len(prompt.tokens)} tokens; the memory budget holds {most}"
                self._errors[prompt.row] = RowError("exceeds_memory", detail)
        return fitting

    def _score_pack(self, pack: Pack, prompts: Sequence[Prompt], done: set[int]) -> None:
        rows = len(pack.prompts) / len(pack.tokens)
        tokens = sum(len(prompts[i].tokens) for i in pack.prompts) / len(pack.tokens)

        def tick(step: float) -> None:
            self._progress.advance(step * rows, step * tokens)
            self._stop.check()

        begun = time.monotonic()
        with self._clock.phase("model"):
            answers = self._engine.answer(pack, lambda i: self._labels.sets[prompts[i].labels], tick)
        self._collect(pack, answers, prompts, done, time.monotonic() - begun)

    def _collect(
        self,
        pack: Pack,
        answers: Mapping[int, npt.NDArray[np.float64]],
        prompts: Sequence[Prompt],
        done: set[int],
        seconds: float,
    ) -> None:
        tokens = self._report.tokens
        self._report.packs += 1
        tokens.computed += len(pack.tokens)
        for part in account(pack):
            prompt = prompts[part.prompt]
            if prompt.row in done:
                continue  # computed again only for the K,V that a later pack holds
            tokens.prompt += len(prompt.tokens)
            tokens.kept += len(prompt.tokens)
            tokens.shared += part.shared_tokens
            self._scored.append(
                Scored(
                    row=prompt.row,
                    logprobs=answers[part.prompt],
                    shared_tokens=part.shared_tokens,
                    computed_tokens=part.computed_tokens,
                    kept_tokens=len(prompt.tokens),
                    seconds=seconds * part.share,
                )
            )

    def _flush(self, window: Window) -> None:
        """Write finished rows as a part; the window's own error rows come with its first one."""
        with self._clock.phase("write"):
            self._sink.write(window, self._scored, self._errors, temperature=self._temperature)
        self._scored, self._errors = [], {}
        self._flushed = time.monotonic()
