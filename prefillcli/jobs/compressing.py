"""A job's windows, compressed; with `--keep auto` the rate is chosen on the first one that has rows to compress."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from prefillcli.compress.audit_draw import draw
from prefillcli.compress.auto import RATES, KeepChoice, choose_keep, sample_rows
from prefillcli.compress.base import ImportanceEstimate, Tick
from prefillcli.compress.compressor import Compressor
from prefillcli.compress.fallbacks import ENOUGH_ROWS, FALLBACKS, NOT_FINITE, compressed_rows, faulty_rows
from prefillcli.compress.reasons import why_in_full, why_no_rate
from prefillcli.compress.request import Request
from prefillcli.data.output.sink import Sink
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.rows import Prompt, Window
from prefillcli.engines.base import Engine
from prefillcli.errors import PrefillError, ResourceError, brief, out_of_resource
from prefillcli.options.score import ScoreSettings
from prefillcli.report.run import RunReport

ALMOST_ALL = 0.95
"""Of a window's tokens: a job that was to read fewer and reads as many hears why."""


class WindowCompressor:
    """Decides how the target reads a window's prompts. A chosen rate goes into the sink's plan, for a resumed run."""

    def __init__(
        self,
        compressor: Compressor,
        engine: Engine,
        labels: Labels,
        sink: Sink,
        settings: ScoreSettings,
        report: RunReport,
    ) -> None:
        self._compressor = compressor
        self._engine = engine
        self._labels = labels
        self._sink = sink
        self._settings = settings
        self._report = report
        self._warned = False

    def __call__(self, window: Window, prompts: Sequence[Prompt], tick: Tick) -> list[Request]:
        """One request for each prompt of `window`. `tick` is called with the tokens of each step; it may raise."""
        compressor = self._compressor
        pending = self._settings.keep == "auto" and "keep" not in self._sink.plan
        wanted = compressor.keeps(prompts, RATES[0] if pending else None)
        estimates = compressor.estimate(prompts, wanted, tick)
        self._check(estimates, pending)
        if pending:
            self._choose(window, prompts, wanted, estimates, tick)
        self._report.tokens.draft = compressor.picker.tokens
        keeps = compressor.keeps(prompts)
        requests = compressor.select(prompts, keeps, estimates)
        if requests and compressor.keep < 1 and not self._warned:
            self._warned = self._warn_of_little(requests, keeps)
        return requests

    def _warn_of_little(self, requests: Sequence[Request], keeps: Sequence[float | None]) -> bool:
        """Tell if the model reads nearly all tokens of a window in spite of the keep rate, and why."""
        read, whole = (
            sum(map(len, each)) for each in zip(*((r.tokens, r.prompt.tokens) for r in requests), strict=True)
        )
        if read <= ALMOST_ALL * whole:
            return False
        compressor, prompts = self._compressor, [each.prompt for each in requests]
        number = max(range(len(requests)), key=lambda at: len(requests[at].tokens))
        full = sum(each.kept is None for each in requests)
        if keeps[number] is None:
            why = why_no_rate(prompts, keeps, number, compressor.keep, compressor.settings, compressor.worth)
        else:
            why = why_in_full(requests[number]) or "its first and last tokens, which are always kept, are most of it"
        print(
            f"prefill: warning: --keep {self._compressor.keep:g} leaves {read / whole:.0%} of the tokens of "
            f"{len(requests):,} rows, {full:,} of them are read in full; row "
            f"{prompts[number].row}, for one: {why}",
            file=sys.stderr,
        )
        return True

    def _check(self, estimates: Sequence[ImportanceEstimate], pending: bool) -> None:
        """Raise PrefillError if the draft has failed on all rows so far: `ENOUGH_ROWS`, or those it is tried on.

        The rows of earlier windows are written. Without this the model would read the whole job in full.
        """
        before = self._sink.counts.tallies.methods
        if compressed_rows(before) or any(found.importance is not None for found in estimates):
            return
        failed = sum(found.reason is not None and FALLBACKS[found.reason].fault for found in estimates)
        if failed and (pending or failed + faulty_rows(before) >= ENOUGH_ROWS):
            error = self._compressor.picker.failure
            why = FALLBACKS[NOT_FINITE].meaning if error is None else f"{type(error).__name__}: {brief(error)}"
            kind = ResourceError if error is not None and out_of_resource(error) else PrefillError
            raise kind(
                f"the draft has failed on all rows so far, {failed + faulty_rows(before):,}: {why}\n"
                "take another --draft, or leave it out to read all rows in full"
            )

    def _choose(
        self,
        window: Window,
        prompts: Sequence[Prompt],
        wanted: Sequence[float | None],
        estimates: Sequence[ImportanceEstimate],
        tick: Tick,
    ) -> None:
        most, settings = self._engine.limits.max_tokens, self._settings
        able = [
            number
            for number, keep in enumerate(wanted)
            if keep is not None and prompts[number].keep is None and len(prompts[number].tokens) <= most
        ]
        if not able:
            return
        chosen = draw(able, settings.audit or sample_rows(settings.max_flips), window.index)
        choice = choose_keep(
            self._compressor, self._engine, prompts, estimates, chosen, self._labels.sets, settings.max_flips, tick
        )
        self._report.keep_auto = asdict(choice)
        self._report.keep = self._compressor.keep = choice.keep
        self._sink.plan = self._sink.plan | {"keep": choice.keep, "keep_auto": self._report.keep_auto}
        if choice.keep == 1:
            print(f"prefill: warning: --keep auto: {self._why(choice, len(chosen))}", file=sys.stderr)

    def _why(self, choice: KeepChoice, rows: int) -> str:
        most = f"{self._settings.max_flips:.2%}"
        if not choice.trials:
            return (
                f"{rows:,} rows to try it on cannot prove that at most {most} flip, {choice.rows_needed:,} could; all "
                "rows are read in full"
            )
        tried = ", ".join(f"{trial.keep:g}: {trial.flips:,} of {trial.rows:,}" for trial in choice.trials)
        return f"no keep rate proves that at most {most} flip ({tried} did); all rows are read in full"
