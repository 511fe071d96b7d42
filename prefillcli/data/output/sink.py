"""Scored rows are collected in parts, and become the output when all are there; a stopped job can go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import pyarrow as pa

from prefillcli.data.output import heartbeat, parts
from prefillcli.data.output.columns import NO_GROUPS, ColumnGroups, OutputSchema, Probabilities, ResultRows, kinds_of
from prefillcli.data.output.counts import ROW, Counts
from prefillcli.data.output.locks import Lock
from prefillcli.data.output.manifest import Job, Manifest, replaced
from prefillcli.data.output.parts import PartIndex, PartInfo, WindowRows
from prefillcli.data.output.publication import commit, recover_publication
from prefillcli.data.output.resuming import find_resumable, proven_parts, require_undamaged, retried, without_errors
from prefillcli.data.output.store import LocalStore
from prefillcli.data.output.target import Target
from prefillcli.data.reading.partitions import Partitions
from prefillcli.data.rows import Int64Array, RowError, ScoredRow, Window
from prefillcli.data.shard import Shard
from prefillcli.stats.probabilities import Measure


class Sink:
    """Collects the results of a job in `<output>.prefill/` and makes the output of them when all are there.

    Killed at any point, a job that is started again with `resume` writes what an undisturbed one would have.
    Use it as a context manager, or `close` it: it holds a lock on the work folder.
    """

    def __init__(
        self, target: Target, manifest: Manifest, lock: Lock, schema: OutputSchema, partitions: Partitions | None
    ) -> None:
        self.work = target.work
        """The work folder."""
        self._target = target
        self._manifest = manifest
        self._lock = lock
        self._schema = schema
        self._partitions = partitions
        self._parts = PartIndex(target.work)
        self._final: Counts | None = None  # of a complete output
        self._replaces = True  # an output that was there
        self._retries = False  # the error rows of parts

    @classmethod
    def open(
        cls,
        output: str,
        *,
        fingerprint: dict[str, str],
        selection: dict[str, Any],
        resume: bool,
        overwrite: bool,
        label_names: Sequence[str],
        id_name: str | None,
        jsonl_input: bool,
        carried: pa.Schema | None = None,
        truth: str | None = None,
        groups: ColumnGroups = NO_GROUPS,
        measure: Measure = Measure.SHARES,
        partitions: Partitions | None = None,
        shard: Shard | None = None,
        retry_errors: bool = False,
    ) -> Self:
        """Begin the job's output, or go on with it; a `shard` is for a `ShardSink`.

        `selection` are the options that say which rows of the input are taken, `carried` is the schema of the id and
        the kept columns (`Source.carried_schema`); `truth` is the carried column with the right answers. The output
        has the columns of these `groups`; for calibrated ones `write` needs the probabilities. `measure` says what the
        labels' numbers are. With `partitions`, whose keys are carried columns, the files of a directory lie in folders
        that hold them. With `retry_errors` the error rows that are there are to be written again. Raises UsageError
        for an unknown ending, a clash of column names, or if the job's own output exists and no flag is given;
        OutputConflictError if it is another job's, or damaged; ResourceError if another process is working on it.
        """
        target = Target.parse(output, shard)
        schema = OutputSchema(
            labels=tuple(label_names),
            id_name=id_name,
            carried=carried if carried is not None else pa.schema([]),
            json_carried=jsonl_input,
            json_text=target.file_format.json_text,
            truth=truth,
            groups=groups,
            measure=measure,
        )
        schema.require_distinct()
        job = Job(fingerprint, selection, id_name)
        resume = resume or retry_errors
        found = cls._find(target, job, resume, overwrite, quiet=True)  # a refusal leaves no trace
        if found is not None and found.state == "complete":
            cls._require_undamaged(target, found)
        lock = cls._lock_of(target, found)
        try:
            found = cls._find(target, job, resume, overwrite, quiet=False)
            again = cls._again(target, found, id_name) if retry_errors and found is not None else None
            begun = again or found or Manifest(job, {}, before=replaced(target.work))
            sink = cls(target, begun, lock, schema, partitions)
            sink._retries = retry_errors
            sink._begin(fresh=begun is not found)
        except BaseException:
            lock.release()
            raise
        return sink

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the lock back. What was written stays."""
        self._lock.release()

    @staticmethod
    def _find(target: Target, job: Job, resume: bool, overwrite: bool, *, quiet: bool) -> Manifest | None:
        """What to go on with, as `find_resumable`."""
        return find_resumable(target, job, resume, overwrite, quiet=quiet)

    @staticmethod
    def _require_undamaged(target: Target, manifest: Manifest) -> None:
        """Raise OutputDamagedError unless what a complete manifest names is there."""
        require_undamaged(target, manifest)

    @staticmethod
    def _again(target: Target, found: Manifest, id_name: str | None) -> Manifest | None:
        """A manifest with which a complete job begins anew to score its error rows again; None where that is not so.

        Raises OutputConflictError if its other rows could not be taken over.
        """
        return retried(target, found, id_name)

    @staticmethod
    def _lock_of(target: Target, found: Manifest | None) -> Lock:
        return target.work.lock()

    @property
    def schema(self) -> OutputSchema:
        """The columns of the output."""
        return self._schema

    @property
    def local_folder(self) -> str | None:
        """The work folder on a local disk; None in an object store."""
        return self.work.location if isinstance(self.work, LocalStore) else None

    @property
    def location(self) -> str:
        """Where the rows are when it is finished: the output."""
        return self._target.path

    @property
    def empty_input(self) -> bool:
        """Whether the whole input has no rows, as far as is known."""
        return self.counts.total == 0

    @property
    def counts(self) -> Counts:
        """Of all rows that are safe on disk, those of earlier attempts included."""
        return self._parts.counts if self._final is None else self._final

    @property
    def plan(self) -> dict[str, Any]:
        """What the job has stored here, in an earlier attempt too; empty at first."""
        return self._manifest.plan

    @plan.setter
    def plan(self, plan: dict[str, Any]) -> None:
        self._manifest.plan = plan
        self._manifest.save(self.work)

    @property
    def complete(self) -> bool:
        """Whether the output is there and nothing is left to do."""
        return self._manifest.state == "complete"

    def tables(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """These columns of the output when it is finished, piece by piece, rows in the order of the input."""
        return self._target.tables(names, self._target.stored(self._manifest.job, self._manifest.files).files)

    def done(self, window: int) -> set[int]:
        """Numbers of the rows of a window that are in its parts."""
        return self._parts.rows(window)

    def carried_into(self, window: int) -> list[tuple[int, str]]:
        """The blocks that were written with the window before."""
        return self._parts.carried(self.window_before(window))

    def window_before(self, window: int) -> int:
        """The window that is scored before this one."""
        return window - 1

    def finished(self, window: int, rows: Int64Array) -> bool:
        """Whether every row of a window is in its parts; for `windows(skip=...)`.

        Raises OutputConflictError if the parts are of other rows than the input's window.
        """
        return self.complete or self._parts.holds(window, rows)

    def write(
        self,
        window: Window,
        results: Sequence[ScoredRow],
        errors: dict[int, RowError],
        *,
        temperature: float,
        probabilities: Probabilities | None = None,
        carried: Sequence[tuple[int, str]] | None = None,
    ) -> None:
        """Write rows of a window as one part, safe on disk when this returns.

        `carried` are the blocks that the window hands to the next one, if that is known.

        The window's own error rows come with its first part. Rows that are written already are left out;
        when the output is complete, that is all of them. Raises OutputBusyError if the lock was taken away.
        """
        if self.finished(window.index, window.rows):
            return
        done = self.done(window.index)
        results = [scored for scored in results if scored.row not in done]
        errors = {row: error for row, error in (window.errors | errors).items() if row not in done}
        if not results and not errors:
            return
        self._lock.check()
        schema = self._schema
        found = ResultRows.of(window, results, errors, schema.labels, temperature, probabilities, schema.measure)
        rows = parts.with_digests(parts.make_rows(window, found, schema.groups), found)
        self._write_part(window, rows, carried)

    def take_over(self, window: Window, results: pa.Table) -> None:
        """Write rows of a window as an earlier output has them (`EarlierOutput.take`), as `write` does."""
        done = self.done(window.index)
        results = results.filter(pa.array([row not in done for row in results[ROW].to_pylist()], pa.bool_()))
        if not self.finished(window.index, window.rows) and len(results):
            self._lock.check()
            self._write_part(window, parts.taken_rows(window, results), None)

    def _write_part(self, window: Window, rows: pa.Table, carried: Sequence[tuple[int, str]] | None) -> None:
        schema, shard = self._schema, self._target.shard
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
        self._parts.add(info, rows[ROW].to_pylist())

    def finish(self, windows: int) -> None:
        """Make the output of the parts, rows in the order of the input; then remove the parts.

        `windows` is the number of windows of the input. Raises PrefillError if rows are missing or a part is damaged.
        """
        if self.complete:
            return
        self._parts.require_complete(windows)
        self._lock.check()
        self._final = commit(
            self._target,
            self._manifest,
            self._schema,
            self._parts.tables(),
            json_kinds=self._parts.json_kinds,
            partitions=self._partitions,
            new=not self._replaces,
        )
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
            self._final = self._manifest.counts or self._target.count(self._schema.id_name)
        else:
            self._add_parts(proven_parts(self.work, self._manifest.job))

    def _add_parts(self, found: Iterable[PartInfo]) -> None:
        for info in without_errors(self.work, found, self._schema) if self._retries else found:
            self._parts.add(info)

    def _delete_parts(self) -> None:
        self.work.delete_all([*filter(parts.is_part, self.work.names()), heartbeat.NAME])
