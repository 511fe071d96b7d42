"""Scored rows out: parts as they come, the output file at the end, and going on after a stop."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from prefillcli.data.output import heartbeat, parts
from prefillcli.data.output.columns import ResultRows, result_schema
from prefillcli.data.output.counts import Counts
from prefillcli.data.output.formats import write_jsonl, write_parquet
from prefillcli.data.output.json_columns import kinds_of, type_for, typed_column
from prefillcli.data.output.locks import Lock
from prefillcli.data.output.manifest import Job, Manifest
from prefillcli.data.output.parts import WindowRows
from prefillcli.data.output.publication import publication, settle
from prefillcli.data.output.resuming import decide, proven_parts, require_undamaged
from prefillcli.data.output.tallies import ROW
from prefillcli.data.output.target import Published, Target
from prefillcli.data.proof.seals import JOB_KEY
from prefillcli.data.reading.partitions import Partitions
from prefillcli.data.rows import Int64Array, RowError, ScoredRow, Window
from prefillcli.errors import DamagedFileError, OutputConflictError, PrefillError, UsageError

_ROW_COLUMN = "row"


class _WindowParts:
    """The parts of one window."""

    def __init__(self, rows: WindowRows) -> None:
        self.rows = rows
        self.numbers: list[int] = []
        self.written = 0

    @property
    def whole(self) -> bool:
        return self.written == self.rows.count


class Sink:
    """Collects the results of a job in `<output>.prefill/` and makes the output of them when all are there.

    Killed at any point, a job that is started again with `resume` writes what an undisturbed one would have.
    Use it as a context manager, or `close` it: it holds a lock on the work folder.
    """

    def __init__(
        self,
        target: Target,
        manifest: Manifest,
        lock: Lock,
        *,
        label_names: Sequence[str],
        jsonl_input: bool,
        carried: pa.Schema,
        audit: bool,
        truth: str | None,
        partitions: Partitions | None,
    ) -> None:
        self.counts = Counts()
        """Of all rows that are safe on disk, those of earlier attempts included."""
        self.seconds = 0.0
        """Time spent writing so far."""
        self.work = target.work
        """The work folder."""
        self._target = target
        self._manifest = manifest
        self._lock = lock
        self._labels = tuple(label_names)
        self._id = manifest.job.id_name
        self._jsonl_input = jsonl_input
        self._carried = carried
        self._audit = audit
        self._truth = truth
        self._partitions = partitions
        self._windows: dict[int, _WindowParts] = {}
        self._sequence = 0
        self._kinds: dict[str, set[str]] = {}
        self._current: tuple[int, set[int]] = (-1, set())

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
        audit: bool = False,
        truth: str | None = None,
        partitions: Partitions | None = None,
    ) -> Sink:
        """Begin the job's output, or go on with it.

        `selection` are the options that say which rows of the input are taken, `carried` is the schema of the id and
        the kept columns (`Source.carried_schema`). With an `audit` the output has its columns; `truth` is the carried
        column with the right answers. With `partitions`, whose keys are carried columns, the files of a directory lie
        in folders that hold them. Raises UsageError for an unknown ending, a clash of column names, or if the job's
        own output exists and neither flag is given; OutputConflictError if it is another job's, or damaged;
        ResourceError if another process is at it.
        """
        target = Target.parse(output)
        carried = carried if carried is not None else pa.schema([])
        check_columns(carried.names, label_names, id_name, audit, truth)
        job = Job(fingerprint, selection, id_name)
        found = decide(target, job, resume, overwrite, quiet=True)  # a refusal leaves no trace
        if found is not None and found.state == "complete":
            require_undamaged(target, found)
        lock = target.work.lock()
        try:
            found = decide(target, job, resume, overwrite)
            sink = cls(
                target,
                found or Manifest(job, {}),
                lock,
                label_names=label_names,
                jsonl_input=jsonl_input,
                carried=carried,
                audit=audit,
                truth=truth,
                partitions=partitions,
            )
            sink._begin(fresh=found is None)
        except BaseException:
            lock.release()
            raise
        return sink

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the lock back. What was written stays."""
        self._lock.release()

    @property
    def plan(self) -> dict[str, Any]:
        """What the job has stored here; empty at first, and when going on what an earlier attempt stored."""
        return self._manifest.plan

    @plan.setter
    def plan(self, plan: dict[str, Any]) -> None:
        self._manifest.plan = plan
        self._manifest.save(self.work)

    @property
    def complete(self) -> bool:
        """Whether the output is there and nothing is left to do."""
        return self._manifest.state == "complete"

    def done(self, window: int) -> set[int]:
        """Numbers of the rows of a window that are in its parts."""
        if self._current[0] != window:
            rows: set[int] = set()
            if window in self._windows:
                rows.update(self._rows_of(window, [ROW])[ROW].to_pylist())
            self._current = (window, rows)
        return set(self._current[1])

    def finished(self, window: int, rows: Int64Array) -> bool:
        """Whether every row of a window is in its parts; for `windows(skip=...)`.

        Raises OutputConflictError if the parts are of other rows than the input's window.
        """
        if self.complete:
            return True
        found = self._windows.get(window)
        if found is None:
            return False
        self._require_same(found, window, rows)
        return found.whole

    def write(
        self, window: Window, results: Sequence[ScoredRow], errors: dict[int, RowError], *, temperature: float
    ) -> None:
        """Write rows of a window as one part, safe on disk when this returns.

        The window's own error rows come with its first part. Rows that are written already are left out;
        when the output is complete, that is all of them. Raises OutputBusyError if the lock was taken away.
        """
        if self.complete:
            return
        started = time.perf_counter()
        found = self._windows.get(window.index)
        if found is not None:
            self._require_same(found, window.index, window.rows)
        done = self.done(window.index)
        results = [scored for scored in results if scored.row not in done]
        errors = {row: error for row, error in (window.errors | errors).items() if row not in done}
        if results or errors:
            self._lock.check()
            result = ResultRows.of(window, results, errors, self._labels, temperature)
            rows = parts.make_rows(window, result, self._audit)
            info = parts.PartInfo(
                job=self._manifest.job,
                plan=self.plan,
                sequence=self._sequence,
                window=window.index,
                number=max(found.numbers, default=-1) + 1 if found else 0,
                window_rows=WindowRows.of(window.rows) if found is None else found.rows,
                counts=self._count(Counts(), rows),
                kinds={name: kinds_of(rows[name]) for name in window.carried.column_names}
                if self._jsonl_input
                else {},
            )
            parts.write_part(self.work, info, rows)
            self._register(info)
            self._carried = window.carried.schema
            self._current[1].update(rows[ROW].to_pylist())
        self.seconds += time.perf_counter() - started

    def finish(self, windows: int) -> None:
        """Make the output of the parts, rows in the order of the input; then remove the parts.

        `windows` is the number of windows of the input. Raises PrefillError if rows are missing or a part is damaged.
        """
        if self.complete:
            return
        started = time.perf_counter()
        self._require_all_rows(windows)
        self._lock.check()
        final = Counts()
        self._manifest.files = self._write_output(final)
        self.counts = final
        self._manifest.state = "complete"
        self._manifest.counts = final
        self._manifest.save(self.work)
        self._delete_parts()
        self.seconds += time.perf_counter() - started

    def _begin(self, *, fresh: bool) -> None:
        self.work.clean(lambda name: True)
        settle(self._target)
        self._target.clean()
        if fresh:
            self._delete_parts()
            self._manifest.save(self.work)
        elif self.complete:
            self._delete_parts()
            self.counts = self._manifest.counts or self._target.count(self._id)
        else:
            for info in proven_parts(self.work, self._manifest.job):
                self._register(info)

    def _register(self, info: parts.PartInfo) -> None:
        window = self._windows.setdefault(info.window, _WindowParts(info.window_rows))
        window.numbers.append(info.number)
        window.written += info.counts.total
        self._sequence = max(self._sequence, info.sequence + 1)
        self.counts.add(info.counts)
        for name, kinds in info.kinds.items():
            self._kinds.setdefault(name, set()).update(kinds)

    def _delete_parts(self) -> None:
        for name in filter(parts.is_part, self.work.names()):
            self.work.delete(name)
        self.work.delete(heartbeat.NAME)

    def _require_same(self, found: _WindowParts, window: int, rows: Int64Array) -> None:
        if found.rows != WindowRows.of(rows):
            raise OutputConflictError(
                f"{self.work.location} holds other rows for window {window} than the input has now\n"
                "start over with --overwrite"
            )

    def _require_all_rows(self, windows: int) -> None:
        last = -1
        for window in range(max(windows, max(self._windows, default=-1) + 1)):
            found = self._windows.get(window)
            if found is None or not found.whole or found.rows.first <= last or window >= windows:
                raise PrefillError(
                    f"{self.work.location}: rows of window {window} are missing or doubled\n"
                    "run again with --resume; if this stays, with --overwrite"
                )
            last = found.rows.last

    def _rows_of(self, window: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows in the parts of a window. Raises DamagedFileError if a part is damaged by now."""
        numbers = self._windows[window].numbers
        try:
            return pa.concat_tables(
                [parts.read_part(self.work, parts.part_name(window, number), columns)[1] for number in numbers]
            )
        except DamagedFileError as error:
            raise DamagedFileError(f"{error}\nrun again with --resume: its rows are scored again") from None

    def _tables(self, counts: Counts) -> Iterator[pa.Table]:
        """The output, window by window, counted on the way; the rows of each are exactly those of the input."""
        for window in sorted(self._windows):
            rows = self._rows_of(window)
            rows = rows.take(pa.array(np.argsort(rows[ROW].to_numpy(), kind="stable")))
            if WindowRows.of(rows[ROW].to_numpy()) != self._windows[window].rows:
                raise PrefillError(
                    f"{self.work.location}: the parts of window {window} do not hold its rows by now\n"
                    "run again with --resume: they are scored again"
                )
            self._count(counts, rows)
            yield self._output(rows)

    def _count(self, counts: Counts, rows: pa.Table) -> Counts:
        counts.add_rows(rows, self._truth, id_name=self._id, json_carried=self._jsonl_input)
        return counts

    def _output(self, rows: pa.Table) -> pa.Table:
        """Rows of parts with the columns of the output."""
        columns = []
        for field in self._schema():
            column = rows[ROW if field.name == _ROW_COLUMN and self._id is None else field.name]
            if self._jsonl_input and field.name in self._carried.names and self._target.kind != "jsonl":
                column = typed_column(column, field.type)
            columns.append(column)
        return pa.Table.from_arrays(columns, schema=self._schema())

    def _schema(self) -> pa.Schema:
        carried = list(self._carried)
        if self._jsonl_input and self._target.kind != "jsonl":
            carried = [pa.field(f.name, type_for(self._kinds.get(f.name, ()))) for f in carried]
        if self._id is None:
            carried.insert(0, pa.field(_ROW_COLUMN, pa.int64()))
        else:
            carried.sort(key=lambda field: field.name != self._id)
        text = json.dumps(self._manifest.job.to_json())
        return pa.schema([*carried, *result_schema(self._labels, self._audit)], metadata={JOB_KEY: text.encode()})

    def _write_output(self, counts: Counts) -> dict[str, str]:
        """The output's files by name, with their digests."""
        target = self._target
        if target.kind == "directory":
            return self._write_directory(counts)
        with target.store.create(target.name) as file:
            if target.kind == "parquet":
                return {target.name: write_parquet(file, self._schema(), self._tables(counts))}
            names = self._carried.names if self._jsonl_input else ()
            return {target.name: write_jsonl(file, self._tables(counts), json_columns=names, codec=target.codec)}

    def _write_directory(self, counts: Counts) -> dict[str, str]:
        output, files = publication(self._target), {}
        tables: Iterable[pa.Table] = self._tables(counts) if self._windows else [self._schema().empty_table()]
        runs = ((folder, rows) for table in tables for folder, rows in self._folders_of(table))
        for number, (folder, rows) in enumerate(runs):  # the numbers are in the order of the input
            name = f"{folder}/part-{number:05d}.parquet".removeprefix("/")
            with output.create(name) as file:
                files[name] = write_parquet(file, rows.schema, [rows])
        output.publish(Published(self._manifest.job, files))
        return files

    def _folders_of(self, table: pa.Table) -> Iterable[tuple[str, pa.Table]]:
        """Rows of the output that come one after another and belong into one folder, with that folder."""
        if self._partitions is None or len(table) == 0:
            return [("", table)]
        return self._partitions.runs(table)


def check_columns(
    carried: Sequence[str],
    label_names: Sequence[str],
    id_name: str | None,
    audit: bool = False,
    truth: str | None = None,
) -> None:
    """Raise UsageError if a kept column has the name of an output column."""
    taken = [*([] if id_name is not None else [_ROW_COLUMN]), *result_schema(label_names, audit).names, ROW]
    for name in carried:
        if name in taken:
            option = {truth: "--truth", id_name: "--id-column"}.get(name, "--keep-columns")
            raise UsageError(f"{option} {name}: the output has a column {name} already\nrename it in the input")
