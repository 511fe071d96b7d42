"""The way from rows to a complete output: parts in a work folder, then one commit, for one run or for all shards of a
job.

First a job looks at its output and work folder. They are empty, or hold its own rows to go on with, or belong to
another job.
"""

from __future__ import annotations

import base64
import json
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, groupby
from typing import IO, Any, Self, TypeGuard

import numpy as np
import pyarrow as pa

from prefillcli.errors import (
    DamagedFileError,
    OutputBusyError,
    OutputConflictError,
    OutputDamagedError,
    OutputExistsError,
    PrefillError,
    UsageError,
    run_again,
)
from prefillcli.rows.filesystems import WORK_ENDING, split_path, writing
from prefillcli.rows.input.discovery import Partitions
from prefillcli.rows.output import Shard, parts, store
from prefillcli.rows.output.columns import ROW, Probabilities, ResultRows
from prefillcli.rows.output.parts import PartIndex, PartInfo, RowDigests, WindowRows
from prefillcli.rows.output.schema import OutputSchema, kinds_of
from prefillcli.rows.output.store import Heartbeat, LocalStore, Lock, Store, make_folder, open_store, walk_folder
from prefillcli.rows.output.tallies import Counts
from prefillcli.rows.output.target import NAME, OLD, SUCCESS, Job, Manifest, Published, Target, is_partition, replaced
from prefillcli.rows.proof import JOB_KEY, Digesting
from prefillcli.rows.records import Prompt, RowError, ScoredRow, Window, is_error
from prefillcli.runtime import file_calls, log
from prefillcli.runtime.clock import Pace
from prefillcli.stats.arrays import Int64Array
from prefillcli.stats.labels import Measure


def find_resumable(target: Target, job: Job, resume: bool, overwrite: bool, *, quiet: bool = False) -> Manifest | None:
    """Find the manifest to go on with; None to begin anew. Warns of a damaged one unless `quiet`.

    For a shard it is the manifest of its work folder, or of the output into which the shards were merged. Raises
    OutputConflictError if the output is another job's, OutputExistsError if it is this job's and no flag is given.
    """
    if overwrite:
        return None
    manifest = _manifest(target.work, job, quiet)
    begun = any(map(parts.is_part, target.work.names()))
    if target.shard is not None:
        if manifest is not None:
            begun = begun or manifest.state == "complete"
            return _resumed(manifest, job, resume, begun=begun, name=f"shard {target.shard} of {target.path}")
        whole = find_resumable(target.whole, job, True, False, quiet=True)
        if resume or not is_merged(whole):
            return whole if is_merged(whole) else None
        raise OutputExistsError(f"{target.path} is complete\nkeep it with --resume, or score again with --overwrite")
    exists = target.exists()
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


def refuse_known(output: str, is_same: Callable[[Job], bool], *, resume: bool) -> None:
    """Raise the errors of `find_resumable` that are certain before the job itself is known: the output is of no job,
    or of one that `is_same` and must `resume`."""
    target = Target.parse(output)
    manifest = _manifest(target.work, Job({}), True)
    published = target.published() if manifest is None and target.exists() else None
    found = manifest.job if manifest is not None else published.job if published is not None else None
    if found is None or (not resume and is_same(found)):
        find_resumable(target, found or Job({}), resume, False, quiet=True)


def has_rows(output: str, shard: Shard | None = None) -> bool:
    """Return whether an output is there, or rows of it, or another process is about to write some."""
    target = Target.parse(output, shard)
    return target.exists() or any(map(parts.is_part, target.work.names())) or bool(target.work.in_use())


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


def _require_undamaged(target: Target, manifest: Manifest) -> None:
    # Raise OutputDamagedError unless the output is as the job of a complete manifest wrote it.
    damage = target.damage(target.stored(manifest.job, manifest.files))
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
    return Manifest(latest.job, latest.plan)


def plan_of(output: str, shard: Shard | None) -> dict[str, Any] | None:
    """Return the plan of an earlier attempt at an output, whatever its job is; None without one, or where it cannot be
    read, which opening the output will report."""
    with suppress(PrefillError, OSError):
        found = _manifest(Target.parse(output, shard).work, Job({}), quiet=True)
        return None if found is None else found.plan
    return None


def retried(target: Target, found: Manifest) -> Manifest | None:
    """Return the state from which a complete job starts again to score its error rows; None if it has none.

    Raises OutputConflictError if its other rows could not be taken over, UsageError for shards that were merged.
    """
    whole = target.whole
    if not (found.counts or whole.count(found.job.id_name)).errors:
        return None
    if found.digests is None:
        raise OutputConflictError(
            f"--retry-errors: {whole.path} has no digests of its rows: its work folder is gone\n"
            "score all rows again with --overwrite"
        )
    if target.shard is not None:
        raise UsageError(
            f"--retry-errors: the shards of {whole.path} were merged\nscore its error rows again without --shard"
        )
    return Manifest(found.job, found.plan, before=replaced(whole.work), retries=True)


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


_NEW = "new"


def publication(target: Target) -> _Renamed | _InPlace:
    """Return the way to write the output of a directory target: `create` its files, then `publish` them together."""
    store, work = target.store, target.work
    if isinstance(store, LocalStore) and isinstance(work, LocalStore) and not _shared(target, store.location):
        return _Renamed(target, store.location, work.location)
    return _InPlace(target, store)


def recover_publication(target: Target) -> None:
    """Clear up after a run that was killed while publishing: an output that was put aside comes back."""
    work = target.work
    if not target.directory or not isinstance(target.store, LocalStore) or not isinstance(work, LocalStore):
        return
    old, new, place = (os.path.join(work.location, OLD), os.path.join(work.location, _NEW), target.store.location)
    with writing(place):
        if file_calls.is_folder(old) and not file_calls.is_folder(place):
            file_calls.move_folder(old, place)
        for folder in (old, new):
            _remove(folder)


class _Renamed:
    """Built in the work folder, and put in place by a rename.

    An older output is put aside first, so for an instant there is none.
    """

    def __init__(self, target: Target, place: str, work: str) -> None:
        self._target = target
        self._place = place
        self._new, self._old = os.path.join(work, _NEW), os.path.join(work, OLD)
        self._store = LocalStore(self._new)
        recover_publication(target)

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return self._store.create(name)

    def publish(self, published: Published) -> None:
        self._store.put_bytes(SUCCESS, published.to_json())
        with writing(self._place):
            parent = os.path.dirname(self._place)
            make_folder(parent)
            if _shared(self._target, self._place):  # since the publication began
                raise PrefillError(f"{self._place} now holds other files too\n{run_again()}")
            if file_calls.is_folder(self._place):
                with suppress(OSError):  # the modes of a folder that its users have set up
                    file_calls.copy_modes(self._place, self._new)
                file_calls.move_folder(self._place, self._old)
            file_calls.move_folder(self._new, self._place)
            file_calls.sync_folder(parent)
            _remove(self._old)


class _InPlace:
    """Written directly into its final folder, `_SUCCESS` last: in object stores, and where the folder holds other
    files too."""

    def __init__(self, target: Target, store: Store) -> None:
        self._target = target
        self._store = store
        self._begun = False

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        if not self._begun:
            self._store.delete(SUCCESS)
            self._begun = True
        with self._store.create(name) as file:
            yield file

    def publish(self, published: Published) -> None:
        # Raises OutputBusyError if another run has published an output meanwhile, where the store can detect that.
        self._store.delete_all(sorted(set(self._target.files()) - published.files.keys() - {SUCCESS}))
        self._store.put_bytes(SUCCESS, published.to_json(), new=True)


def _shared(target: Target, place: str) -> bool:
    # Whether a local folder cannot be put aside: it holds other files too, something is mounted there, or this
    # process is in it.
    if os.path.ismount(place) or f"{os.path.abspath('.')}/".startswith(f"{os.path.realpath(place)}/"):
        return True
    with writing(place):
        return any(
            not (is_partition(os.path.basename(path)) if is_folder else target.is_ours(path))
            for path, is_folder in walk_folder(place, is_partition)
        )


def _remove(folder: str) -> None:
    with suppress(FileNotFoundError):
        file_calls.remove_tree(folder)


def commit(
    target: Target,
    manifest: Manifest,
    schema: OutputSchema,
    index: PartIndex,
    partitions: Partitions | None = None,
    *,
    new: bool = False,
) -> Counts:
    """Make the output from the rows in the parts of a job, in the order of the input, and its digests.

    Returns the counts of its rows. As the last step the manifest of the work folder records that the job is complete.
    With `partitions` the files of a directory lie in folders named like those of the input. A `new` file replaces no
    other (`Store.create`).
    """
    metadata = {JOB_KEY: json.dumps(manifest.job.to_json()).encode()}
    arrow, counts = schema.arrow(index.json_kinds).with_metadata(metadata), Counts()
    with target.work.create(parts.NAME) as file:
        digests = Digesting(file)

        def tables() -> Iterator[pa.Table]:
            for rows in index.tables():
                schema.count(counts, rows)
                digests.write(parts.digests_of(rows))
                yield schema.table(rows, arrow)

        if target.directory:
            files = _write_directory(target, manifest.job, arrow, tables(), schema.json_columns, partitions)
        else:
            with target.store.create(target.name, new=new) as output:
                files = {target.name: target.file_format.write(output, arrow, tables(), schema.json_columns)}
    manifest.files, manifest.digests, manifest.before, manifest.retries = files, digests.digest(), None, False
    manifest.state, manifest.counts = "complete", counts
    manifest.save(target.work)
    return counts


def _write_directory(
    target: Target,
    job: Job,
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    json_columns: tuple[str, ...],
    partitions: Partitions | None,
) -> dict[str, str]:
    output, files = publication(target), {}
    runs = (run for table in tables for run in ([("", table)] if partitions is None else partitions.runs(table)))
    first = next(runs, ("", schema.empty_table()))
    for number, (folder, rows) in enumerate(chain([first], runs)):  # the numbers are in the order of the input
        name = f"{folder}/part-{number:05d}.parquet".removeprefix("/")
        with output.create(name) as file:
            files[name] = target.file_format.write(file, rows.schema, [rows], json_columns)
    output.publish(Published(job, files))
    return files


class Sink:
    """Collects the results of a job in `<output>.prefill/` and makes the output when they are complete.

    A job that was killed at any point and is started again with `resume` writes the same output as an undisturbed one.
    Use it as a context manager, or `close` it: it holds a lock on the work folder.
    """

    def __init__(
        self, target: Target, manifest: Manifest, lock: Lock, schema: OutputSchema, partitions: Partitions | None
    ) -> None:
        self.work = target.work  # the work folder
        self._target = target
        self._manifest = manifest
        self._lock = lock
        self.schema = schema  # the columns of the output
        self._partitions = partitions
        self._parts = PartIndex(target.work.location)
        self._final: Counts | None = None  # of a complete output
        self._replaces = True  # an output that was there
        self._retries = False  # the error rows of parts

    @classmethod
    def open(
        cls,
        output: str,
        job: Job,
        schema: OutputSchema,
        *,
        resume: bool = False,
        overwrite: bool = False,
        retry_errors: bool = False,
        partitions: Partitions | None = None,
        shard: Shard | None = None,
    ) -> Self:
        """Begin the job's output, or go on with it; a `shard` is for a `ShardSink`.

        The format of the output decides `json_text` of the schema. With `partitions`, whose keys are carried columns,
        the files of a directory lie in folders that hold them. With `retry_errors` the existing error rows are scored
        and written again. Raises UsageError for an unknown ending, a clash of column names, or if the job's own output
        exists and no flag is given; OutputConflictError if it is another job's, or damaged; ResourceError if another
        process is working on it.
        """
        target = Target.parse(output, shard)
        schema = replace(schema, json_text=target.file_format.json_text)
        schema.require_distinct()
        resume = resume or retry_errors
        found = find_resumable(target, job, resume, overwrite, quiet=True)  # a refusal leaves no trace
        if is_merged(found):
            _require_undamaged(target.whole, found)
        # Nothing is written for a shard of an output that exists.
        lock = Lock() if shard is not None and is_merged(found) else target.work.lock()
        try:
            found = find_resumable(target, job, resume, overwrite)
            again = retried(target, found) if retry_errors and is_merged(found) else None
            begun = again or found or Manifest(job, {}, before=replaced(target.work))
            sink = cls(target, begun, lock, schema, partitions)
            sink._retries = retry_errors
            sink._begin(fresh=begun is not found)
        except BaseException:
            lock.release()
            raise
        return sink

    def digests(self, columns: Collection[str], common: Sequence[Prompt]) -> RowDigests:
        """Return the recorder of row digests, which also depend on the rows' values in those of these `columns` that
        the output has."""
        schema = self.schema
        return RowDigests(
            id_column=schema.id_name,
            json_carried=schema.json_carried,
            columns=[each for each in columns if each in schema.carried.names],
            common=common,
        )

    def signs_of_life(self, pace: Callable[[], Pace]) -> Heartbeat:
        """Show other processes that this one is alive, and its pace, inside the `with` block."""
        return Heartbeat(self.work, pace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. Everything written stays."""
        self._lock.release()

    @property
    def local_folder(self) -> str | None:
        """The work folder on a local disk; None in an object store."""
        return self.work.location if isinstance(self.work, LocalStore) else None

    @property
    def location(self) -> str:
        """The place of the rows when it is finished: the output."""
        return self._target.path

    @property
    def empty_input(self) -> bool:
        """Return whether the whole input has no rows, as far as is known."""
        return self.counts.total == 0

    @property
    def counts(self) -> Counts:
        """Counts all rows that are safe on disk, those of earlier attempts included."""
        return self._parts.counts if self._final is None else self._final

    @property
    def plan(self) -> dict[str, Any]:
        """The values that the job has stored here, in an earlier attempt too; empty at first."""
        return self._manifest.plan

    @plan.setter
    def plan(self, plan: dict[str, Any]) -> None:
        self._manifest.plan = plan
        self._manifest.save(self.work)

    @property
    def complete(self) -> bool:
        """Return whether the output exists and nothing is left to do."""
        return self._manifest.state == "complete"

    def tables(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Return these columns of the finished output, piece by piece, rows in the order of the input."""
        return self._target.tables(names, self._target.stored(self._manifest.job, self._manifest.files).files)

    def done(self, window: int) -> set[int]:
        """Return the numbers of the rows of a window that are in its parts."""
        return self._parts.rows(window)

    def carried_into(self, window: int) -> list[tuple[int, str]]:
        """Return the blocks that were written with the window before."""
        return self._parts.carried(self.window_before(window))

    def window_before(self, window: int) -> int:
        """Return the window that is scored before this one."""
        return window - 1

    def finished(self, window: int, rows: Int64Array) -> bool:
        """Return whether every row of a window is in its parts; for `windows(skip=...)`.

        Raises OutputConflictError if the parts hold other rows than the input's window.
        """
        return self.complete or self._parts.holds(window, rows)

    def write(
        self,
        window: Window,
        results: Sequence[ScoredRow],
        errors: dict[int, RowError],
        *,
        temperature: float,
        probabilities: Mapping[str, Probabilities] = {},
        carried: Sequence[tuple[int, str]] | None = None,
    ) -> None:
        """Write rows of a window as one part, safe on disk when this returns.

        `carried` are the blocks that the window hands to the next one, if that is known.

        The window's own error rows come with its first part. Rows that are written already are left out: all of them,
        if the output is complete. Raises OutputBusyError if the lock was taken away.
        """
        if self.finished(window.index, window.rows):
            return
        done = self.done(window.index)
        results = [scored for scored in results if scored.row not in done]
        errors = {row: error for row, error in (window.errors | errors).items() if row not in done}
        if not results and not errors:
            return
        self._lock.check()
        found = ResultRows.of(window, results, errors, self.schema, temperature, probabilities)
        rows = parts.with_digests(parts.make_rows(window, found), found)
        self._write_part(window, rows, carried)

    def take_over(self, window: Window, results: pa.Table) -> None:
        """Write rows of a window with the results of an earlier output (`EarlierOutput.take`), as `write` does."""
        done = self.done(window.index)
        results = results.filter(pa.array([row not in done for row in results[ROW].to_pylist()], pa.bool_()))
        if not self.finished(window.index, window.rows) and len(results):
            self._lock.check()
            self._write_part(window, parts.taken_rows(window, results), None)

    def _write_part(self, window: Window, rows: pa.Table, carried: Sequence[tuple[int, str]] | None) -> None:
        schema, shard = self.schema, self._target.shard
        info = parts.PartInfo(
            job=self._manifest.job,
            plan=self.plan,
            sequence=self._parts.next_sequence,
            window=window.index,
            number=self._parts.next_number(window.index),
            window_rows=WindowRows.of(window.rows if window.whole_rows is None else window.whole_rows),
            own_rows=None if window.whole_rows is None else WindowRows.of(window.rows),
            shard=None if shard is None else str(shard),
            counts=schema.count(Counts(), rows),
            carried=None if carried is None else list(carried),
            kinds={name: kinds_of(rows[name]) for name in schema.carried.names} if schema.json_carried else {},
        )
        parts.write_part(self.work, info, rows)
        self._parts.add(self.work, info, rows[ROW].to_pylist())

    def finish(self, windows: int) -> None:
        """Make the output from the parts, rows in the order of the input; then remove the parts.

        `windows` is the number of windows of the input. Raises PrefillError if rows are missing or a part is damaged.
        """
        if self.complete:
            return
        self._parts.require_complete(windows)
        self._lock.check()
        new = not self._replaces
        self._final = commit(self._target, self._manifest, self.schema, self._parts, self._partitions, new=new)
        self._delete_parts()

    def _begin(self, *, fresh: bool) -> None:
        self.work.clean(lambda name: True)
        recover_publication(self._target)
        self._target.clean()
        self._replaces = self._target.exists()
        if fresh:
            self._delete_parts()
            self._manifest.save(self.work)
        elif self.complete:
            self._delete_parts()
            self._final = self._manifest.counts or self._target.count(self.schema.id_name)
        else:
            self._add_parts(proven_parts(self.work, self._manifest.job))

    def _add_parts(self, found: Iterable[PartInfo]) -> None:
        for info in without_errors(self.work, found, self.schema) if self._retries else found:
            self._parts.add(self.work, info)

    def _delete_parts(self) -> None:
        self.work.delete_all([*filter(parts.is_part, self.work.names()), store.NAME])


# Shards: each leaves its parts in a work folder beside the output, and these are then joined into the output.


@dataclass
class ShardRecord:
    """The part of a shard's manifest that is needed to write the output."""

    shard: str  # like `2/4`
    schema: dict[str, Any]  # the output's columns (`of_schema`)
    partitions: dict[str, Any] | None  # the folders of a partitioned output (`of_partitions`)
    # Distinguishes this attempt from others, until it starts anew.
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    windows: int | None = None  # windows of the input; set when complete

    @classmethod
    def of(cls, shard: Shard | None, schema: OutputSchema, partitions: Partitions | None) -> ShardRecord:
        return cls(str(shard), of_schema(schema), None if partitions is None else of_partitions(partitions))

    @classmethod
    def of_json(cls, content: Any) -> ShardRecord | None:
        """Return the record that `dataclasses.asdict` gave; None for anything else."""
        try:
            record = cls(**content)
            Shard.parse(record.shard)
        except (TypeError, ValueError):
            return None
        return record


@dataclass(frozen=True)
class ShardFolder:
    """The work folder of a shard."""

    shard: Shard
    work: Store

    def begun(self) -> bool:
        """Return whether it holds anything of a job; a left-over lock does not count."""
        names = self.work.names()
        return NAME in names or any(map(parts.is_part, names))

    def delete(self) -> None:
        """Remove it, the manifest after the parts: a run that is killed here leaves the record that it was merged."""
        self.work.delete_all(filter(parts.is_part, self.work.names()))
        self.work.delete(store.NAME)
        self.work.delete(NAME)
        self.work.remove()


def shards_beside(target: Target, *, empty: bool = False) -> list[ShardFolder]:
    """Return the folders of shards that lie beside an output, by count and number: those of a job, or the `empty`
    ones."""
    place, name = split_path(target.path)
    found = []
    for folder in open_store(place).folders():
        named = Shard.of_name(folder.removesuffix(WORK_ENDING)) if folder.endswith(WORK_ENDING) else None
        if named is not None and named[0] == name:
            found.append(folder_of(target, named[1]))
    return sorted(
        (each for each in found if each.begun() != empty), key=lambda each: (each.shard.count, each.shard.number)
    )


def folder_of(target: Target, shard: Shard) -> ShardFolder:
    """Return the folder of a shard of an output; it need not exist."""
    return ShardFolder(shard, Target(target.path, target.format, shard).work)


_OF_QUESTION = ("name", "type", "labels", "values", "options")  # of its columns, as JSON


def of_schema(schema: OutputSchema) -> dict[str, Any]:
    """Return an output's columns as JSON; whether JSON is written as text follows from the format."""
    plain = {name: getattr(schema, name) for name in ("labels", "id_name", "json_carried", "truth")}
    plain |= {name: getattr(schema, name) for name in ("served", "classes")}
    plain |= {"measure": schema.measure.value, "groups": sorted(schema.groups), "carried": _packed(schema.carried)}
    return plain | {
        "questions": [
            {name: getattr(own, name) for name in _OF_QUESTION} | {"groups": sorted(own.groups)}
            for own in schema.questions
        ]
    }


def to_schema(content: dict[str, Any], *, json_text: bool) -> OutputSchema:
    """Return the columns of `of_schema`. Raises KeyError, TypeError, ValueError or ArrowException for anything
    else."""
    rest = content | {"labels": tuple(content["labels"]), "carried": _unpacked(content["carried"])}
    rest["measure"] = Measure(content["measure"])
    rest["questions"] = tuple(
        OutputSchema(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
            | {"groups": frozenset(own["groups"])}
        )
        for own in content["questions"]
    )
    rest["groups"] = frozenset(content["groups"])
    return OutputSchema(**rest, json_text=json_text)


def of_partitions(partitions: Partitions) -> dict[str, Any]:
    """Return the folders of a partitioned output as JSON."""
    return {
        "schema": _packed(partitions.schema),
        "values": list(partitions.values),
        "folders": list(partitions.folders),
    }


def to_partitions(content: dict[str, Any]) -> Partitions:
    """Return the folders of `of_partitions`. Raises as `to_schema`."""
    return Partitions(_unpacked(content["schema"]), tuple(content["values"]), tuple(content["folders"]))


def named(shards: Sequence[Shard]) -> str:
    """Return the shards' name for a message: `shard 2 of 4`, `shards 2 and 3 of 4`."""
    *others, last = [str(each.number) for each in shards]
    listed = f"shards {', '.join(others)} and {last}" if others else f"shard {last}"
    return f"{listed} of {shards[0].count}"


def _packed(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _unpacked(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


class ShardSink(Sink):
    """Collects the results of a shard in `<output>.shard-I-of-N.prefill/`.

    It is complete when it has all of them, or when the shards were merged and the output exists.
    """

    _without: set[int]  # windows of the input that have no rows of this shard, as far as they were read
    _record: ShardRecord

    @property
    def merged(self) -> bool:
        """Return whether the job's output exists already."""
        return is_merged(self._manifest)

    @property
    def location(self) -> str:
        """The work folder with the parts, or the output if it exists."""
        return self._target.path if self.merged else self.work.location

    @property
    def empty_input(self) -> bool:
        if self.merged:
            return self.counts.total == 0
        return self._record.windows == 0

    def window_before(self, window: int) -> int:
        """Return the last window before this one that has rows of the shard."""
        before = window - 1
        while before in self._without:
            before -= 1
        return before

    def finished(self, window: int, rows: Int64Array) -> bool:
        """Return whether all of these rows, the shard's rows in a window, are in its parts. Raises as in a `Sink`."""
        if len(rows) == 0:
            self._without.add(window)
            return True
        return super().finished(window, rows)

    def finish(self, windows: int) -> None:
        """Mark the shard as complete. Raises PrefillError if rows are missing.

        `windows` is the number of windows of the input.
        """
        if self.complete:
            return
        self._parts.require_complete(windows, self._without)
        self._lock.check()
        self._record.windows = windows
        manifest = self._manifest
        manifest.state, manifest.counts, manifest.shard = "complete", self._parts.counts, asdict(self._record)
        manifest.save(self.work)

    def _begin(self, *, fresh: bool) -> None:
        self._without = set()
        manifest, shard = self._manifest, self._target.shard
        if self.merged:
            self._final = manifest.counts or self._target.count(self.schema.id_name)
            return
        self.work.clean(lambda name: True)
        if fresh:
            self._delete_parts()
        else:
            self._add_parts(proven_parts(self.work, manifest.job, shard))
        found = ShardRecord.of_json(manifest.shard)
        named = found is not None and found.shard == str(shard)
        lost = manifest.counts is None or manifest.counts.total != self._parts.counts.total
        self._record = found if found is not None and named else ShardRecord.of(shard, self.schema, self._partitions)
        if fresh or not named or (manifest.state == "complete" and lost):
            self._record.windows = None
            manifest.state, manifest.counts, manifest.shard = "running", None, asdict(self._record)
            manifest.save(self.work)


_KEPT = ("evaluation", "correlations", "max_error_rate")  # entries that the output's plan takes over from the shards'


class JoinedShards(ExitStack):
    """All shards of a job, found beside its output; none of them is being written.

    Use it as a context manager: it holds the locks of the output and of the shards.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.manifest: Manifest  # of one of the shards, set by `open`; they are of one job
        self.merged: Manifest | None = None  # that of the output, if it was made from these shards already
        self._target = target
        self._locked = False
        self._folders: list[ShardFolder] = []
        self._records: list[ShardRecord] = []

    @property
    def count(self) -> int:
        """The number of the job's shards."""
        return len(self._folders)

    def open(self, *, overwrite: bool) -> None:
        """Find the shards, lock them, and see whether they may be merged.

        Raises UsageError if there are none, if their counts differ, or if the output exists; OutputConflictError if
        they are of different jobs, or the output is another job's; OutputBusyError if one is being written;
        PrefillError if one is missing, incomplete or damaged.
        """
        self._find(overwrite=overwrite)  # a refusal leaves no trace
        if self.merged is None or self._folders:
            self.callback(self._target.work.lock().release)
            for folder in self._folders:
                self.callback(folder.work.lock().release)
            self._locked = True
            self._find(overwrite=overwrite)

    def _find(self, *, overwrite: bool) -> None:
        target = self._target
        self._folders = shards_beside(target)
        before = self._merged_before()
        if before is not None and not overwrite and set(self._tokens()) <= set(before.merged):
            self.merged = before
            return
        if not self._folders:
            raise UsageError(
                f"no shards of {target.path}: there is no {target.path}.shard-1-of-N.prefill\n"
                "run them with prefill score --shard I/N, with this --output, or copy their folders beside it"
            )
        self._require_all()
        self.manifest = self._require_one_job()
        self._require_complete()
        if not overwrite:
            self._require_room()

    def _merged_before(self) -> Manifest | None:
        # The manifest of the output, if that exists and was made from shards.
        try:
            manifest = Manifest.load(self._target.work)
        except DamagedFileError:
            return None
        made = manifest is not None and manifest.state == "complete" and manifest.merged and self._target.exists()
        return manifest if made else None

    def _tokens(self) -> list[str]:
        # One for each folder; empty where it cannot be read.
        found = []
        for folder in self._folders:
            try:
                manifest = Manifest.load(folder.work)
            except PrefillError:
                manifest = None
            record = None if manifest is None else ShardRecord.of_json(manifest.shard)
            found.append("" if record is None else record.token)
        return found

    def _require_all(self) -> None:
        # Every shard of one count exists.
        path, counts = self._target.path, sorted({folder.shard.count for folder in self._folders})
        if len(counts) > 1:
            listed = " and ".join(map(str, counts))
            raise UsageError(
                f"beside {path} are shards of {listed}: which of them?\n"
                f"remove the folders {path}.shard-*-of-N.prefill of those that are not to be merged"
            )
        there = {folder.shard for folder in self._folders}
        missing = [each for number in range(counts[0]) if (each := Shard(number + 1, counts[0])) not in there]
        if missing:
            raise PrefillError(
                f"{named(missing[:10])} of {path} {'is' if len(missing) == 1 else 'are'} missing: there is no "
                f"{folder_of(self._target, missing[0]).work.location}\n"
                f"run it with --shard {missing[0]}, or copy its folder beside the output"
            )

    def _require_one_job(self) -> Manifest:
        # The first shard's manifest; all are of its job, and each lies in its own folder.
        found: list[Manifest] = []
        self._records = []
        for folder in self._folders:
            again = f"run it again with --shard {folder.shard} --resume"
            try:
                manifest = Manifest.load(folder.work)
            except DamagedFileError as error:
                raise DamagedFileError(f"{folder.work.location}/manifest.json is damaged: {error}\n{again}") from None
            record = None if manifest is None else ShardRecord.of_json(manifest.shard)
            if manifest is None or record is None:
                raise PrefillError(f"{folder.work.location} does not name its shard\n{again}")
            if record.shard != str(folder.shard):
                raise PrefillError(
                    f"{folder.work.location} is a copy of shard {record.shard}\n"
                    f"remove it, and run shard {folder.shard} or copy that"
                )
            found.append(manifest)
            self._records.append(record)
        for folder, manifest in zip(self._folders, found, strict=True):
            different = found[0].job.differing(manifest.job)
            if different or manifest.job != found[0].job:
                pair = named([self._folders[0].shard, folder.shard])
                raise OutputConflictError(
                    f"{pair} of {self._target.path} belong to different jobs: different "
                    f"{', '.join(different) or 'rows'}\nrun the wrong one again with --overwrite"
                )
        return found[0]

    def _require_complete(self) -> None:
        for folder, record in zip(self._folders, self._records, strict=True):
            if not self._locked and folder.work.in_use():
                folder.work.lock().release()  # raises an error that names its owner
            if record.windows is None:
                raise PrefillError(
                    f"{named([folder.shard])} of {self._target.path} is not complete\n"
                    f"run it again with --shard {folder.shard} --resume; prefill status shows how far it is"
                )
        first = self._records[0]
        for folder, record in zip(self._folders, self._records, strict=True):
            same = (record.windows, record.schema, record.partitions)
            if same != (first.windows, first.schema, first.partitions):
                raise PrefillError(
                    f"{named([self._folders[0].shard, folder.shard])} of {self._target.path} have different columns, "
                    "or read different windows\nrun them again with --overwrite, by one version of prefill"
                )

    def _require_room(self) -> None:
        # Nothing is in the output's place but remains of a merge that was killed.
        target, job = self._target, self.manifest.job
        begun = any(map(parts.is_part, target.work.names()))
        found = find_resumable(target, job, True, False, quiet=True)
        if found is None or (found.state == "running" and not begun):
            return
        state = "exists" if found.state == "complete" else "is there in part, from a run without --shard"
        raise OutputExistsError(f"{target.path} {state}\nkeep it, or replace it with --overwrite")

    def check(self) -> None:
        """Raise PrefillError unless every row of the input is in the parts of these shards exactly once."""
        path = self._target.path
        self._parts = PartIndex(f"the shards of {path}", "run each of them again with --resume, then merge again")
        members = defaultdict(list)
        for folder in self._folders:
            for name in filter(parts.is_part, folder.work.names()):
                members[parts.window_of(name)].append((folder, name))
        for window in sorted(members):
            numbers = [self._add(folder, name) for folder, name in members[window]]
            self._parts.require_rows(window, np.sort(np.concatenate(numbers)))
        self._parts.require_complete(self._records[0].windows or 0)

    def _add(self, folder: ShardFolder, name: str) -> Int64Array:
        # Take in a part, which must be of its shard and of the job; returns the numbers of its rows.
        again = f"run it again with --shard {folder.shard} --resume, then merge again"
        try:
            info, rows = parts.read_part(folder.work, name, [ROW])
        except DamagedFileError as error:
            raise DamagedFileError(f"{error}\n{again}") from None
        if info.job.digest != self.manifest.job.digest or info.shard != str(folder.shard):
            raise PrefillError(f"{folder.work.location}/{name} belongs to another job or shard\n{again}")
        self._parts.add(folder.work, info, expected=info.window_rows)
        return np.asarray(rows[ROW], np.int64)

    def write(self) -> Counts:
        """Make the output from the shards, in the order of the input, and mark it as complete; returns its counts.

        Call `check` before, and `remove` afterwards. Raises as `check` does if parts have changed since.
        """
        target, job, record = self._target, self.manifest.job, self._records[0]
        target.work.clean(lambda name: True)
        recover_publication(target)
        target.clean()
        for name in filter(parts.is_part, target.work.names()):
            target.work.delete(name)
        target.work.delete(store.NAME)
        # The values that the shards have stored for the output; they are the same in all of them.
        manifest = Manifest(job, {name: value for name, value in self.manifest.plan.items() if name in _KEPT})
        manifest.save(target.work)
        schema = to_schema(record.schema, json_text=target.file_format.json_text)
        partitions = None if record.partitions is None else to_partitions(record.partitions)
        manifest.merged = [record.token for record in self._records]
        return commit(target, manifest, schema, self._parts, partitions)

    def remove(self) -> None:
        """Remove the shards, and remains of their folders from a merge that was killed here: the output exists."""
        for folder in self._folders:
            folder.delete()
        for folder in shards_beside(self._target, empty=True):
            with suppress(OutputBusyError):  # a shard that starts anew
                lock = folder.work.lock()
                if not folder.begun():
                    folder.work.remove()
                lock.release()

    def damage(self) -> list[str]:
        """List the changed or missing files of an output that was merged before."""
        merged = self.merged
        return [] if merged is None else self._target.damage(self._target.stored(merged.job, merged.files))
