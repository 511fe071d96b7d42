"""The shell of every job: it handles signals, and records the job's end in the report, on stderr and in the exit
code."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from prefillcli.errors import (
    NOT_AS_EXPECTED,
    NOTHING_TO_DO,
    Interrupted,
    PrefillError,
    ResourceError,
    out_of_resource,
    resumable,
    run_again,
    without_secrets,
)
from prefillcli.reading.compress.compress import failure
from prefillcli.report.section import preview, row_name
from prefillcli.rows.output import Shard
from prefillcli.rows.output.resumption import has_rows
from prefillcli.rows.output.tallies import Counts
from prefillcli.runtime import log
from prefillcli.runtime.signals import Stop

if TYPE_CHECKING:
    from prefillcli.report.run import RunReport


class Ending(Protocol):
    """The end of a run, as reports have it."""

    status: Literal["complete", "failed", "interrupted"]
    exit_code: int
    error: str | None


@dataclass
class Ended:
    """The end of a run, for commands that write no report."""

    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    error: str | None = None


@contextmanager
def shell(
    report: Ending, *, debug: bool, can_resume: bool = False, finish: Callable[[], None] = lambda: None
) -> Iterator[Stop]:
    """Run the body of a job: signals ask it to stop, and any error that ends it goes into the `report`.

    Messages advise `--resume` only where it `can_resume`. `finish` writes the report, however the job ended. A signal
    during `finish` does not change how it ended, unless `finish` hangs.
    """
    with Stop() as stop, resumable(can_resume):
        try:
            yield stop
        except BaseException as error:
            with stop.held_off():
                fail(error, report, debug=debug, can_resume=can_resume)
        try:
            with stop.last_step():
                finish()
        except Interrupted as error:
            with stop.held_off():
                fail(error, report, debug=debug, can_resume=can_resume)


def leave_earlier_report(report: RunReport, output: str, shard: Shard | None, *, quiet: bool) -> None:
    """Write no report of a run that ended early without rows, if its output is there: the report beside it describes
    that output.

    What went wrong is on stderr, in the summary on stdout and in the metrics.
    """
    if report.report is None or report.rows.total:
        return
    there, stays, report.report = False, report.report, None  # also if a signal ends the search
    with suppress(PrefillError, OSError):
        there = has_rows(output, shard)
    if not there:
        report.report = stays
    elif not quiet:
        log.info(f"{stays} stays as it was: this run has not changed {output}")


def conclude(
    report: Ending,
    counts: Counts,
    *,
    max_error_rate: float | None,
    empty_input: bool,
    skip_empty: bool,
    failed: Sequence[str] = (),
) -> None:
    """Record the end of a run that no error or signal ended: this alone decides its exit code.

    `failed` are sentences about an output that differs from expectations. A run that scored no row has failed,
    whatever else is wrong: there are no scores to look at. So has one over an `empty_input`, unless it may be skipped.
    Without a `max_error_rate` error rows are not judged: they are a part of an output that is judged as a whole.
    """
    failures, differs = list(filter(None, [failure(counts)])), list(failed)
    if empty_input and not skip_empty:
        failures = [_NO_ROWS]
    elif max_error_rate is not None and counts.total and not counts.scored:
        failures = [_none_scored(counts), *failures]
    elif max_error_rate is not None and counts.errors > max_error_rate * counts.total:
        said = f"{_error_rows(counts)}; --max-error-rate allows {max_error_rate:g}"
        differs = ["\n".join([said, *_first_failed(counts)]), *differs]
    report.status, report.exit_code = "complete", 0
    if failures:
        report.status, report.exit_code = "failed", 1
    elif differs:
        report.exit_code = NOT_AS_EXPECTED
    elif empty_input:
        report.exit_code = NOTHING_TO_DO
    if failures or differs:
        report.error = "\n".join([*failures, *differs])
        log.error(report.error, event="gates" if differs else "message")


_NO_ROWS = "the input has no rows\nwhere that is no fault, --skip-empty makes it exit code 99"


def _error_rows(counts: Counts) -> str:
    codes = ", ".join(f"{code} {count:,}" for code, count in sorted(counts.errors_by_code.items()))
    return f"{counts.errors:,} of {counts.total:,} rows are errors ({codes})"


def _none_scored(counts: Counts) -> str:
    said = [_error_rows(counts)] if counts.errors else []
    said += [f"{counts.skipped:,} are left out for their length (--on-long skip)"] if counts.skipped else []
    said += [f"{counts.empty:,} have no text (--empty-text skip)"] if counts.empty else []
    # An error has three lines at most
    return "\n".join([f"no row was scored: {', '.join(said)}", *_first_failed(counts)[:2]])


_NAMED = 3  # error rows, in a message


def _first_failed(counts: Counts) -> list[str]:
    # A line for each of the first error rows. Ids and details are untrusted, and may be long.
    return [
        preview(f"{row_name(row['row'], row['id'])}: {row['code']}: {row['detail'] or ''}")
        for row in counts.tallies.failed[:_NAMED]
    ]


def fail(error: BaseException, report: Ending, *, debug: bool, can_resume: bool) -> None:
    """Record the end of a run by an error or a signal; after a signal, it goes on where it `can_resume`."""
    if debug:
        log.backtrace("".join(traceback.format_exception(error)))
    report.status = "failed"
    if isinstance(error, Interrupted):
        report.status, report.exit_code, report.error = "interrupted", error.exit_code, str(error)
        log.error(f"{error}{f'; {run_again()}' if can_resume else ''}")
        return
    if isinstance(error, PrefillError):
        report.exit_code, report.error = error.exit_code, str(error)
    elif out_of_resource(error):
        report.exit_code = ResourceError.exit_code
        report.error = without_secrets(f"out of memory, disk or open files: {str(error) or type(error).__name__}")
    else:
        report.exit_code, report.error = 1, without_secrets(f"{type(error).__name__}: {error}")
    hint = "" if isinstance(error, PrefillError) or debug else " (--debug shows where)"
    log.error(f"{report.error}{hint}")
