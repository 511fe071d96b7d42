"""`prefill status`: the state of an output's job (running, stopped or complete), and its progress."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from prefillcli.errors import DamagedFileError, PrefillError, UsageError, counted
from prefillcli.rows.output import Shard, parts
from prefillcli.rows.output.destination import Destination, Manifest
from prefillcli.rows.output.shards import shards_beside
from prefillcli.rows.output.store import Beat
from prefillcli.rows.output.tallies import Counts
from prefillcli.runtime import log
from prefillcli.runtime.clock import Expected, duration, rows_of

_ROWS = ("done", "saved", "errors", "empty", "total")
_STATES = {"running": "is running", "stopped": "has stopped", "complete": "is complete"}


@dataclass
class Status:
    """The last line on stdout."""

    output: str
    status: str = "failed"  # `running`, `stopped`, `unmerged` or `complete`; `failed` if that cannot be found out
    exit_code: int = 0
    # `done` is what a running job has computed, and `saved` what it would keep if it were killed now. A job that has
    # stopped has done what it saved. `errors` and `empty` are among the saved ones.
    rows: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(_ROWS))
    estimated: bool = False  # whether the total is an estimate
    rows_per_second: float | None = None
    expected_end: str | None = None
    updated: str | None = None  # when the job gave its last sign of life, or was complete
    owner: str | None = None  # the process that runs the job, or ran it last
    # The same of every shard beside the output, under `shard`; where the output itself has no job, the rest is their
    # sum.
    shards: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


def status_job(output: str, *, quiet: bool = False) -> dict[str, Any]:
    """Report the state of an output's job on stderr; return the summary for the last line on stdout.

    Nothing is changed. An output without a known job is a usage error in the summary.
    """
    status = Status(output)
    try:
        destination = Destination.parse(output, option="OUTPUT")
        shards = [_of_shard(destination, folder.shard) for folder in shards_beside(destination)]
        status.shards = [{"shard": str(shard), **_shown(each)} for shard, each in shards]
        try:
            _find_out(destination, status)
        except UsageError:
            if not shards:
                raise
            _add_up([each for _, each in shards], shards[0][0].count, status)
        if not quiet:
            log.info(_sentence(status))
    except PrefillError as error:
        status.status, status.exit_code, status.error = "failed", error.exit_code, str(error)
        log.error(str(error))
    return {name: value for name, value in vars(status).items() if name != "error" or value is not None}


def _of_shard(destination: Destination, shard: Shard) -> tuple[Shard, Status]:
    # The state of a shard beside an output.
    status = Status(f"shard {shard}")
    _find_out(Destination(destination.path, destination.format, shard), status)
    return shard, status


def _shown(status: Status) -> dict[str, Any]:
    return {
        name: value for name, value in vars(status).items() if name not in ("output", "exit_code", "shards", "error")
    }


def _add_up(shards: Sequence[Status], count: int, status: Status) -> None:
    # The state of a job of this many shards, of which these have begun.
    states = {each.status for each in shards}
    status.status = "running" if "running" in states else "stopped"
    if states == {"complete"} and len(shards) == count:
        status.status = "unmerged"
    for name in ("done", "saved", "errors", "empty"):
        status.rows[name] = sum(each.rows[name] or 0 for each in shards)
    if status.status == "unmerged":
        status.rows["total"] = status.rows["done"]
    rates = [each.rows_per_second for each in shards if each.rows_per_second is not None]
    status.rows_per_second = sum(rates) if rates else None
    ends = [each.expected_end for each in shards if each.status == "running"]
    if ends and None not in ends:
        status.expected_end = max(end for end in ends if end is not None)
    status.updated = max((each.updated for each in shards if each.updated is not None), default=None)


def _find_out(destination: Destination, status: Status) -> None:
    work = destination.work
    try:
        manifest = Manifest.load(work)
    except DamagedFileError:
        manifest = None
    held, beat = work.in_use(), Beat.last(work)
    begun = any(map(parts.is_part, work.names()))
    running = beat is not None and beat.alive() if held is None else held
    if running:
        status.status = "running"
        _take_saved(_in_parts(destination), status)
    elif (
        manifest is not None
        and manifest.state == "complete"
        and (destination.shard is not None or destination.exists())
    ):
        status.status, status.updated = "complete", manifest.updated
        if manifest.counts is not None:
            _take_saved(manifest.counts, status)
        status.rows["done"] = status.rows["total"] = status.rows["saved"]
        return
    elif begun or beat is not None or destination.shard is not None:
        status.status = "stopped"
        _take_saved(_in_parts(destination), status)
        status.rows["done"] = status.rows["saved"]
    elif destination.published() is not None:
        status.status = "complete"
        return
    else:
        raise UsageError(f"no run of prefill is known for {destination.path}: there is no {work.location}")
    if beat is not None and (beat.alive() or not running):  # else it is an earlier attempt's
        _take(beat, status)


def _take(beat: Beat, status: Status) -> None:
    status.owner, status.updated = str(beat.owner), beat.updated.isoformat()
    status.rows["total"], status.estimated = beat.pace.total, beat.pace.estimated
    if status.status == "running":
        status.rows["done"] = max(int(beat.pace.rows), status.rows["saved"] or 0)  # the beat may be older than a part
        status.rows_per_second = beat.pace.rows_per_second
        if beat.pace.seconds_left is not None:
            end = beat.updated + datetime.timedelta(seconds=beat.pace.seconds_left)
            status.expected_end = end.isoformat(timespec="seconds")


def _take_saved(counts: Counts, status: Status) -> None:
    status.rows |= {"saved": counts.total, "errors": counts.errors, "empty": counts.empty}


def _in_parts(destination: Destination) -> Counts:
    # The rows that `--resume` need not score again, damaged parts left out.
    counts = Counts()
    for _, part in parts.read_parts(destination.work, filter(parts.is_part, destination.work.names()), []):
        with suppress(DamagedFileError):  # a running job removes its parts when it ends
            counts.add(part.result()[0].counts)
    return counts


def _sentence(status: Status) -> str:
    done, saved, errors, empty, total = (status.rows[name] for name in _ROWS)
    text = f"{status.output} is {status.status}"
    if status.status == "unmerged":
        text = f"all shards of {status.output} are complete, and are to be joined with prefill merge"
    if status.status == "stopped":
        text = f"the job of {status.output} has stopped"
    if done is not None:
        expected = None if total is None else Expected(total, not status.estimated)
        text += f": {rows_of(done, expected)}" + (f" ({min(done / total, 1):.1%})" if total else "")
    apart = {"error": errors, "empty text": empty}
    text += "".join(f", {counted(number, name)}" for name, number in apart.items() if number)
    if status.status == "running" and saved is not None:
        text += f", {saved:,} of them saved"
    if status.rows_per_second is not None:
        text += f", {status.rows_per_second:,.1f} rows/s"
    if status.expected_end is not None:
        end = datetime.datetime.fromisoformat(status.expected_end)
        left = (end - datetime.datetime.now(datetime.UTC)).total_seconds()
        text += f", to end about {end.astimezone().isoformat(timespec='seconds')} (in {duration(max(left, 0))})"
    if status.status != "complete" and status.owner is not None:
        text += f"\n{status.owner}, last seen {status.updated}"
    for shard in status.shards:
        rows = shard["rows"]["done"]
        text += f"\nshard {shard['shard']} {_STATES[shard['status']]}" + ("" if rows is None else f": {rows_of(rows)}")
    return text + ("\nthese rows are saved: continue with --resume" if status.status == "stopped" else "")
