"""What an earlier attempt has left: the output and the work folder of a job are empty, or hold its own rows to go on
with, or belong to another job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa

from prefillcli.errors import (
    DamagedFileError,
    OutputConflictError,
    OutputDamagedError,
    OutputExistsError,
    PrefillError,
    UsageError,
)
from prefillcli.rows.output import Shard, parts
from prefillcli.rows.output.columns import ROW
from prefillcli.rows.output.destination import NAME, Destination, Job, Manifest, replaced
from prefillcli.rows.output.parts import PartInfo, WindowRows
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.rows.output.store import Store
from prefillcli.rows.output.tallies import Counts
from prefillcli.rows.records import is_error
from prefillcli.runtime import log
from prefillcli.stats.arrays import Int64Array


def find_resumable(
    destination: Destination, job: Job, resume: bool, overwrite: bool, *, quiet: bool = False
) -> Manifest | None:
    """Find the manifest to go on with; None to begin anew. Warns of a damaged one unless `quiet`.

    For a shard it is the manifest of its work folder, or of the output into which the shards were merged. Raises
    OutputConflictError if the output is another job's, OutputExistsError if it is this job's and no flag is given.
    """
    if overwrite:
        return None
    manifest = _manifest(destination.work, job, quiet)
    begun = any(map(parts.is_part, destination.work.names()))
    if destination.shard is not None:
        if manifest is not None:
            begun = begun or manifest.state == "complete"
            return _resumed(
                manifest, job, resume, begun=begun, name=f"shard {destination.shard} of {destination.path}"
            )
        whole = find_resumable(destination.whole, job, True, False, quiet=True)
        if resume or not is_merged(whole):
            return whole if is_merged(whole) else None
        raise OutputExistsError(
            f"{destination.path} is complete\nkeep it with --resume, or score again with --overwrite"
        )
    exists = destination.exists()
    if manifest is None or (manifest.state == "complete" and not exists):
        if not exists:
            return None
        published = destination.published()
        if published is None or published.job.digest != job.digest:
            raise OutputConflictError(
                f"{destination.path} exists and was not written by this job, or is damaged\n"
                "choose another --output, or replace it with --overwrite"
            )
        manifest = Manifest(published.job, {}, "complete", files=published.files)
    return _resumed(manifest, job, resume, begun=exists or begun, name=destination.path)


def refuse_known(output: str, is_same: Callable[[Job], bool], *, resume: bool) -> None:
    """Raise the errors of `find_resumable` that are certain before the job itself is known: the output is of no job,
    or of one that `is_same` and must `resume`."""
    destination = Destination.parse(output)
    manifest = _manifest(destination.work, Job({}), True)
    published = destination.published() if manifest is None and destination.exists() else None
    found = manifest.job if manifest is not None else published.job if published is not None else None
    if found is None or (not resume and is_same(found)):
        find_resumable(destination, found or Job({}), resume, False, quiet=True)


def has_rows(output: str, shard: Shard | None = None) -> bool:
    """Return whether an output is there, or rows of it, or another process is about to write some."""
    destination = Destination.parse(output, shard)
    return destination.exists() or any(map(parts.is_part, destination.work.names())) or bool(destination.work.in_use())


def is_merged(manifest: Manifest | None) -> TypeGuard[Manifest]:
    """Return whether a manifest is that of a whole output that exists, not just of a complete shard."""
    return manifest is not None and manifest.state == "complete" and manifest.shard is None


def _resumed(manifest: Manifest, job: Job, resume: bool, *, begun: bool, name: str) -> Manifest | None:
    # The manifest, if it is this job's and the job may resume; None if nothing has `begun`. Raises otherwise.
    different = job.differing(manifest.job)
    if not different and resume:
        return manifest
    if not begun:
        return None
    if different:
        raise OutputConflictError(
            f"{name} belongs to another job: different {', '.join(different)}\n"
            "choose another --output, or replace it with --overwrite"
        )
    state = "is complete" if manifest.state == "complete" else "is there in part"
    raise OutputExistsError(f"{name} {state}\ncontinue with --resume, or replace it with --overwrite")


def require_undamaged(destination: Destination, manifest: Manifest) -> None:
    """Raise OutputDamagedError unless the output is as the job of a complete manifest wrote it."""
    damage = destination.damage(destination.stored(manifest.job, manifest.files))
    if damage:
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        raise OutputDamagedError(
            f"{damage[0]}{more}: another program has written there, or the disk is damaged\n"
            "choose another --output, or write it again with --overwrite"
        )


def proven_parts(work: Store, job: Job, shard: Shard | None = None) -> Iterator[PartInfo]:
    """Yield the intact parts of a job, by window; all others are removed, and their rows are scored again.

    Such a part is undamaged, of this job and shard, under its own name, and holds rows that no other part of its
    window has. The parts of a complete window hold exactly the rows of the window, or the shard's rows in it.
    """
    for _, group in groupby(_whole_parts(work, job, shard), lambda part: part[0].window):
        found = list(group)
        kept: list[PartInfo] = []
        rows: Int64Array = np.empty(0, np.int64)
        for info, numbers in found:
            together = np.union1d(rows, numbers)
            fits = info.expected_rows == found[0][0].expected_rows and len(together) == len(rows) + info.counts.total
            if fits and len(numbers) == info.counts.total:
                kept.append(info)
                rows = together
            else:
                _drop(work, info.name, "holds rows of other parts")
        if kept and len(rows) == kept[0].expected_rows.count and WindowRows.of(rows) != kept[0].expected_rows:
            for info in kept:
                _drop(work, info.name, "holds rows of another window")
            kept = []
        yield from kept


def _whole_parts(work: Store, job: Job, shard: Shard | None) -> Iterator[tuple[PartInfo, Int64Array]]:
    for name, part in parts.read_parts(work, filter(parts.is_part, work.names()), [ROW]):
        try:
            info, table = part.result()
        except DamagedFileError as error:
            log.warning(f"{error}: its rows are scored again")
            work.delete(name)
            continue
        if info.job.digest != job.digest:
            _drop(work, name, "belongs to another job")
        elif info.shard != (str(shard) if shard is not None else None):
            _drop(work, name, "belongs to another shard")
        else:
            yield info, table[ROW].to_numpy()


def _drop(work: Store, name: str, why: str) -> None:
    log.warning(f"{work.location}/{name} {why}: its rows are scored again")
    work.delete(name)


def _manifest(work: Store, job: Job, quiet: bool) -> Manifest | None:
    # The manifest of a work folder; a damaged or missing one is rebuilt from the parts.
    try:
        manifest = Manifest.load(work)
        if manifest is not None:
            return manifest
    except DamagedFileError as error:
        if not quiet:
            log.warning(f"{work.location}/{NAME} is damaged: {error}; it is made again from the parts")
    found = []
    for name in filter(parts.is_part, work.names()):
        try:
            found.append(parts.read_part(work, name, [])[0])
        except DamagedFileError:
            continue
    own = [info for info in found if info.job.digest == job.digest] or found
    if not own:
        return None
    latest = max(own, key=lambda info: info.sequence)
    return Manifest(latest.job, latest.settled)


def settled_by(output: str, shard: Shard | None) -> dict[str, Any] | None:
    """Return what an earlier attempt at an output has settled, whatever its job is; None without one, or where it
    cannot be read, which opening the output will report."""
    with suppress(PrefillError, OSError):
        found = _manifest(Destination.parse(output, shard).work, Job({}), quiet=True)
        return None if found is None else found.settled
    return None


def retried(destination: Destination, found: Manifest) -> Manifest | None:
    """Return the state from which a complete job starts again to score its error rows; None if it has none.

    Raises OutputConflictError if its other rows could not be taken over, UsageError for shards that were merged.
    """
    whole = destination.whole
    if not (found.counts or whole.count(found.job.id_name)).errors:
        return None
    if found.digests is None:
        raise OutputConflictError(
            f"--retry-errors: {whole.path} has no digests of its rows: its work folder is gone\n"
            "score all rows again with --overwrite"
        )
    if destination.shard is not None:
        raise UsageError(
            f"--retry-errors: the shards of {whole.path} were merged\nscore its error rows again without --shard"
        )
    return Manifest(found.job, found.settled, before=replaced(whole.work), retries=True)


def without_errors(work: Store, found: Iterable[PartInfo], schema: OutputSchema) -> Iterator[PartInfo]:
    """Yield the parts of a job, those with error rows replaced by others without.

    A new part is written before the old one is removed. So a run that is killed in between loses no row: of two parts
    with the same rows the first one counts.
    """
    infos = list(found)
    numbers: dict[int, int] = defaultdict(int)
    for info in infos:
        numbers[info.window] = max(numbers[info.window], info.number)
    for info in infos:
        if not info.counts.errors:
            yield info
            continue
        rows = parts.read_part(work, info.name)[1]
        kept = rows.filter(pa.array([not is_error(code) for code in rows["error"].to_pylist()], pa.bool_()))
        if len(kept):
            numbers[info.window] += 1
            counts = schema.count(Counts(), kept)
            mended = replace(info, number=numbers[info.window], counts=counts)
            parts.write_part(work, mended, kept)
            yield mended
        work.delete(info.name)
