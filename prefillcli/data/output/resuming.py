"""What a job finds in its output and work folder: nothing, rows of its own to go on with, or another job's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np
import pyarrow as pa

from prefillcli.data.output import parts
from prefillcli.data.output.columns import OutputSchema
from prefillcli.data.output.counts import ROW, Counts
from prefillcli.data.output.manifest import NAME, Job, Manifest, replaced
from prefillcli.data.output.parts import PartInfo, WindowRows
from prefillcli.data.output.store import Store
from prefillcli.data.output.target import Target
from prefillcli.data.rows import Int64Array, is_error
from prefillcli.data.shard import Shard
from prefillcli.errors import DamagedFileError, OutputConflictError, OutputDamagedError, OutputExistsError
from prefillcli.runtime import log


def find_resumable(target: Target, job: Job, resume: bool, overwrite: bool, *, quiet: bool = False) -> Manifest | None:
    """The manifest to go on with; None to begin anew. Warns of a damaged one unless `quiet`.

    Raises OutputConflictError if what is there is another job's, OutputExistsError if it is this job's and no flag is
    given.
    """
    if overwrite:
        return None
    exists = target.exists()
    manifest = _manifest(target.work, job, quiet)
    begun = any(map(parts.is_part, target.work.names()))
    if manifest is None or (manifest.state == "complete" and not exists):
        if not exists:
            return None
        published = target.published()
        if published is None or published.job.digest != job.digest:
            raise OutputConflictError(
                f"{target.path} exists and was not written by this job, or is damaged\n"
                "choose another --output, or replace it with --overwrite"
            )
        manifest = Manifest(published.job, {}, "complete", files=published.files)
    return _resumed(manifest, job, resume, begun=exists or begun, name=target.path)


def find_resumable_shard(
    target: Target, job: Job, resume: bool, overwrite: bool, *, quiet: bool = False
) -> Manifest | None:
    """The manifest of a shard's work folder to go on with, or that of the output that the shards were merged to.

    None to begin anew. Raises as `find_resumable`.
    """
    if overwrite:
        return None
    manifest = _manifest(target.work, job, quiet)
    if manifest is None:
        whole = find_resumable(target.whole, job, True, False, quiet=True)
        if whole is None or whole.state != "complete":
            return None
        if resume:
            return whole
        raise OutputExistsError(f"{target.path} is complete\nkeep it with --resume, or score again with --overwrite")
    begun = manifest.state == "complete" or any(map(parts.is_part, target.work.names()))
    return _resumed(manifest, job, resume, begun=begun, name=f"shard {target.shard} of {target.path}")


def _resumed(manifest: Manifest, job: Job, resume: bool, *, begun: bool, name: str) -> Manifest | None:
    """The manifest, if it is this job's and it is to be resumed; None where nothing has `begun`. Raises otherwise."""
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
    raise OutputExistsError(f"{name} {state}\ngo on with --resume, or replace it with --overwrite")


def require_undamaged(target: Target, manifest: Manifest) -> None:
    """Raise OutputDamagedError unless the output is what the job of a complete manifest wrote."""
    damage = target.damage(target.stored(manifest.job, manifest.files))
    if damage:
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        raise OutputDamagedError(
            f"{damage[0]}{more}: another program has written there, or the disk is damaged\n"
            "choose another --output, or write it again with --overwrite"
        )


def proven_parts(work: Store, job: Job, shard: Shard | None = None) -> Iterator[PartInfo]:
    """The parts of a job that are whole, by window; all others are removed, and their rows are scored again.

    A part is whole, of this job and shard, under its own name, and holds rows that no other part of its window has.
    All parts of a window whose rows are all there hold exactly the rows of the window, or the shard's rows of it.
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
    """The manifest of a work folder; a damaged or missing one is made again from the parts."""
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
    return Manifest(latest.job, latest.plan)


def retried(target: Target, found: Manifest, id_name: str | None) -> Manifest | None:
    """With what a complete job begins anew to score its error rows again; None if it is not complete, or has none.

    Raises OutputConflictError if its other rows could not be taken over.
    """
    if found.state != "complete" or not (found.counts or target.count(id_name)).errors:
        return None
    if found.digests is None:
        raise OutputConflictError(
            f"--retry-errors: {target.path} has no digests of its rows: its work folder is gone, or of an earlier "
            "version\nscore all rows again with --overwrite"
        )
    return Manifest(found.job, found.plan, before=replaced(target.work), retries=True)


def without_errors(work: Store, found: Iterable[PartInfo], schema: OutputSchema) -> Iterator[PartInfo]:
    """The parts of a job, those with error rows replaced by others without.

    A part is written before the one that it replaces is removed: a run that is killed between loses no row, because of
    two parts with the same rows the first one counts.
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
