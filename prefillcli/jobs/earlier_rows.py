"""`--since`: rows that an earlier job has scored are written as they are, and only the others go to the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from prefillcli.data.output.earlier_output import EarlierOutput, FoundOutput, find_output
from prefillcli.data.output.manifest import Manifest
from prefillcli.data.output.sink import Sink
from prefillcli.data.output.target import Target
from prefillcli.data.rows import Window
from prefillcli.errors import DamagedFileError, OutputConflictError
from prefillcli.jobs.recorder import Recorder
from prefillcli.options.score import ScoreSettings
from prefillcli.report.run import SinceUse
from prefillcli.runtime import log


def find_earlier(
    settings: ScoreSettings, output: str, fingerprint: dict[str, str]
) -> tuple[FoundOutput | None, SinceUse | None]:
    """The output of `--since`, and what the report says of it; with `--retry-errors` the job's own.

    One that is not there, or not complete, is told on stderr: all rows are scored then. Raises OutputConflictError for
    one that another job has written.
    """
    own = find_output(output, own=output) if _retries(settings, output) else ""
    if not isinstance(own, str):  # whether this is the job that wrote it, the sink says
        return replace(own, remedy="give --overwrite"), SinceUse(output=output)
    if settings.since is None:
        return None, None
    found = find_output(settings.since, own=output)
    if isinstance(found, str):
        log.warning(f"--since {settings.since}: {found}; all rows are scored")
        return None, SinceUse(output=settings.since, reason=found)
    found.require_same_job(fingerprint)
    return found, SinceUse(output=settings.since)


def _retries(settings: ScoreSettings, output: str) -> bool:
    """Whether a job begins, or goes on, to score the error rows of its own complete output again."""
    if settings.shard is not None or not (settings.resume or settings.retry_errors):
        return False
    with suppress(DamagedFileError, OutputConflictError):
        manifest = Manifest.load(Target.parse(output).work)
        if manifest is not None:
            return manifest.retries or (settings.retry_errors and manifest.state == "complete")
    return False


@contextmanager
def opened_rows(found: FoundOutput | None, sink: Sink) -> Iterator[EarlierOutput | None]:
    """The rows of the output that was found, while this runs. Raises as `EarlierOutput`."""
    if found is None:
        yield None
        return
    earlier = EarlierOutput(found, sink.schema, sink.local_folder)
    try:
        yield earlier
    finally:
        earlier.close()


def left_to_score(
    windows: Iterator[Window], earlier: EarlierOutput | None, sink: Sink, recorder: Recorder
) -> Iterator[Window]:
    """The windows without the rows that are taken over, which are written first.

    A window with nothing left is written whole, and not yielded.
    """
    for window in windows:
        taken = None if earlier is None else earlier.take(window)
        if taken is not None:
            recorder.take_over(window, taken)
            if not window.prompts:
                recorder.begin(window, sink.done(window.index))
                recorder.end(window)
                continue
        yield window
