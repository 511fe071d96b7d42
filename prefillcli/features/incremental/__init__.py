"""Incremental nights: rows that an earlier job has scored are written as they are, and only the others are scored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prefillcli.core.feature import Feature
from prefillcli.errors import UsageError, counted
from prefillcli.options.option import FILES, Settings, option
from prefillcli.options.requirements import SCORES

if TYPE_CHECKING:
    from prefillcli.core.feature import Counts, Job, Manifest, RunReport, Section, Window




class Incremental(Feature):
    """The rows that a job takes over. The key `since` of its report holds an `earlier_output.SinceUse`."""

    order = 10
    options = {"score": EarlierOptions}
    keys = {"since": None}

    def check(self) -> None:
        settings = self.settings
        if settings.retry_errors and (settings.overwrite or settings.since is not None):
            other = "--overwrite" if settings.overwrite else "--since"
            raise UsageError(f"--retry-errors keeps this job's rows: give only one of it and {other}")
        if settings.retry_errors or settings.since is not None:
            settings.refuse_joint("--retry-errors" if settings.retry_errors else "--since")

    def reopens(self) -> bool:
        return bool(self.settings.retry_errors)

    def identified(self, job: Job) -> None:
        from prefillcli.reading.earlier import find_earlier

        self._found, job.report.blocks["since"] = find_earlier(self.settings, job.output, job.report.fingerprint)

    def left_to_score(self, job: Job, windows: Iterator[Window]) -> Iterator[Window]:
        if self._found is None:
            return windows
        from prefillcli.reading.earlier import EarlierOutput, left_to_score

        with job.clock.phase("read"), job.stop.at_once():
            earlier = EarlierOutput(self._found, job.sink.schema, job.sink.local_folder)
        job.loaded.callback(earlier.close)
        return left_to_score(windows, earlier, job.sink, job.recorder)

    def reported(self, job: Job, counts: Counts | None) -> None:
        if counts is not None:
            self._count(job.report, counts.taken_over)

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        cls._count(report, 0 if manifest.counts is None else manifest.counts.taken_over)

    @staticmethod
    def _count(report: RunReport, rows: int) -> None:
        from prefillcli.reading.earlier import SinceUse

        if report.blocks["since"] is None and rows:
            report.blocks["since"] = SinceUse()  # of a merge, or of earlier attempts
        if report.blocks["since"] is not None:
            report.blocks["since"].rows = rows

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        from prefillcli.report.section import Section

        use = report.blocks["since"]
        if use is None:
            return None
        whence = "" if use.output is None else f" from {use.output}"
        return Section(
            lines=[("taken over", f"{counted(use.rows, 'row')}{whence}")], summary={"since": {"rows": use.rows}}
        )


FEATURE = Incremental
