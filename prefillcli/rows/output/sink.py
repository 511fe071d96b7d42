"""The way from rows to a complete output: parts in a work folder, then one commit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import pyarrow as pa

from prefillcli.rows.input.discovery import Partitions
from prefillcli.rows.output import Shard, parts, store
from prefillcli.rows.output.columns import ROW, Probabilities, ResultRows
from prefillcli.rows.output.destination import Destination, Job, Manifest, replaced
from prefillcli.rows.output.parts import PartIndex, PartInfo, RowDigests, WindowRows
from prefillcli.rows.output.publication import commit, recover_publication
from prefillcli.rows.output.resumption import (
    find_resumable,
    is_merged,
    proven_parts,
    require_undamaged,
    retried,
    without_errors,
)
from prefillcli.rows.output.schema import OutputSchema, kinds_of
from prefillcli.rows.output.store import Heartbeat, LocalStore, Lock
from prefillcli.rows.output.tallies import Counts
from prefillcli.rows.records import Prompt, RowError, ScoredRow, Window
from prefillcli.runtime.clock import Pace
from prefillcli.stats.arrays import Int64Array


class Sink:
    """Collects the results of a job in `<output>.prefill/` and makes the output when they are complete.

    A job that was killed at any point and is started again with `resume` writes the same output as an undisturbed one.
    Use it as a context manager, or `close` it: it holds a lock on the work folder.
    """

    def __init__(
        self,
        destination: Destination,
        manifest: Manifest,
        lock: Lock,
        schema: OutputSchema,
        partitions: Partitions | None,
    ) -> None:
        self.work = destination.work  # the work folder
        self._destination = destination
        self._manifest = manifest
        self._lock = lock
        self.schema = schema  # the columns of the output
        self._partitions = partitions
        self._parts = PartIndex(destination.work.location)
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
        destination = Destination.parse(output, shard)
        schema = replace(schema, json_text=destination.file_format.json_text)
        schema.require_distinct()
        resume = resume or retry_errors
        found = find_resumable(destination, job, resume, overwrite, quiet=True)  # a refusal leaves no trace
        if is_merged(found):
            require_undamaged(destination.whole, found)
        # Nothing is written for a shard of an output that exists.
        lock = Lock() if shard is not None and is_merged(found) else destination.work.lock()
        try:
            found = find_resumable(destination, job, resume, overwrite)
            again = retried(destination, found) if retry_errors and is_merged(found) else None
            begun = again or found or Manifest(job, {}, before=replaced(destination.work))
            sink = cls(destination, begun, lock, schema, partitions)
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
        return self._destination.path

    @property
    def empty_input(self) -> bool:
        """Return whether the whole input has no rows, as far as is known."""
        return self.counts.total == 0

    @property
    def counts(self) -> Counts:
        """Counts all rows that are safe on disk, those of earlier attempts included."""
        return self._parts.counts if self._final is None else self._final

    @property
    def settled(self) -> dict[str, Any]:
        """The values that the job has stored here, in an earlier attempt too; empty at first."""
        return self._manifest.settled

    def settle(self, settled: Mapping[str, Any]) -> None:
        """Store this instead of what was settled before."""
        self._manifest.settled = dict(settled)
        self._manifest.save(self.work)

    @property
    def complete(self) -> bool:
        """Return whether the output exists and nothing is left to do."""
        return self._manifest.state == "complete"

    def tables(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Return these columns of the finished output, piece by piece, rows in the order of the input."""
        return self._destination.tables(
            names, self._destination.stored(self._manifest.job, self._manifest.files).files
        )

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
        schema, shard = self.schema, self._destination.shard
        info = parts.PartInfo(
            job=self._manifest.job,
            settled=self.settled,
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
        self._final = commit(self._destination, self._manifest, self.schema, self._parts, self._partitions, new=new)
        self._delete_parts()

    def _begin(self, *, fresh: bool) -> None:
        self.work.clean(lambda name: True)
        recover_publication(self._destination)
        self._destination.clean()
        self._replaces = self._destination.exists()
        if fresh:
            self._delete_parts()
            self._manifest.save(self.work)
        elif self.complete:
            self._delete_parts()
            self._final = self._manifest.counts or self._destination.count(self.schema.id_name)
        else:
            self._add_parts(proven_parts(self.work, self._manifest.job))

    def _add_parts(self, found: Iterable[PartInfo]) -> None:
        for info in without_errors(self.work, found, self.schema) if self._retries else found:
            self._parts.add(self.work, info)

    def _delete_parts(self) -> None:
        self.work.delete_all([*filter(parts.is_part, self.work.names()), store.NAME])
