"""Scored rows out: parts as they come, the output file at the end, and going on after a stop."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from prefillcli.data import parts
from prefillcli.data.counts import Counts
from prefillcli.data.formats import write_jsonl, write_parquet
from prefillcli.data.json_columns import type_for, typed_column
from prefillcli.data.manifest import Manifest, differing, digest
from prefillcli.data.rows import RowError, Scored, Window
from prefillcli.data.tallies import ROW
from prefillcli.data.target import METADATA, Target
from prefillcli.errors import OutputConflictError, OutputExistsError, PrefillError, UsageError

log = logging.getLogger(__name__)

_ROW_COLUMN = "row"


class Sink:
    """Collects the results of a job in `<output>.prefill/` and makes the output of them when all are there.

    Killed at any point, a job that is started again with `resume` writes what an undisturbed one would have.
    Use it as a context manager, or `close` it: it holds a lock on the work folder.
    """

    def __init__(
        self,
        target: Target,
        manifest: Manifest,
        release: Callable[[], None],
        *,
        label_names: Sequence[str],
        id_name: str | None,
        jsonl_input: bool,
        carried: pa.Schema,
        audit: bool,
        truth: str | None,
    ) -> None:
        self.counts = Counts()
        """Of all rows that are safe on disk, those of earlier attempts included."""
        self.seconds = 0.0
        """Time spent writing so far."""
        self._target = target
        self._work = target.work
        self._manifest = manifest
        self._release = release
        self._labels = tuple(label_names)
        self._id = id_name
        self._jsonl_input = jsonl_input
        self._carried = carried
        self._audit = audit
        self._truth = truth
        self._parts: dict[int, list[int]] = {}
        self._sizes: dict[int, tuple[int, int, int]] = {}
        self._written: dict[int, int] = {}
        self._kinds: dict[str, set[str]] = {}
        self._current: tuple[int, set[int]] = (-1, set())

    @classmethod
    def open(
        cls,
        output: str,
        *,
        fingerprint: dict[str, str],
        resume: bool,
        overwrite: bool,
        label_names: Sequence[str],
        id_name: str | None,
        jsonl_input: bool,
        carried: pa.Schema | None = None,
        audit: bool = False,
        truth: str | None = None,
    ) -> Sink:
        """Begin the job's output, or go on with it.

        `carried` is the schema of the id and the kept columns (`Source.carried_schema`). With an `audit` the output
        has its columns; `truth` is the carried column with the right answers. Raises UsageError for an unknown
        ending, a clash of column names, or if the job's own output exists and neither flag is
        given; OutputConflictError if it is another job's; ResourceError if another process is at it.
        """
        target = Target.parse(output)
        carried = carried if carried is not None else pa.schema([])
        check_columns(carried.names, label_names, id_name, audit, truth)
        _decide(target, fingerprint, resume, overwrite)  # a refusal leaves no trace
        release = target.work.lock()
        try:
            found = _decide(target, fingerprint, resume, overwrite)
            sink = cls(
                target,
                found or Manifest(fingerprint, {}),
                release,
                label_names=label_names,
                id_name=id_name,
                jsonl_input=jsonl_input,
                carried=carried,
                audit=audit,
                truth=truth,
            )
            sink._begin(fresh=found is None)
        except BaseException:
            release()
            raise
        return sink

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the lock back. What was written stays."""
        release, self._release = self._release, lambda: None
        release()

    @property
    def plan(self) -> dict[str, Any]:
        """What the job has stored here; empty at first, and when going on what an earlier attempt stored."""
        return self._manifest.plan

    @plan.setter
    def plan(self, plan: dict[str, Any]) -> None:
        self._manifest.plan = plan
        self._manifest.save(self._work)

    @property
    def complete(self) -> bool:
        """Whether the output is there and nothing is left to do."""
        return self._manifest.state == "complete"

    def done(self, window: int) -> set[int]:
        """Numbers of the rows of a window that are in its parts."""
        if self._current[0] != window:
            rows: set[int] = set()
            for number in self._parts.get(window, ()):
                rows.update(parts.read_row_numbers(self._work, parts.part_name(window, number)).tolist())
            self._current = (window, rows)
        return set(self._current[1])

    def finished(self, window: int) -> bool:
        """Whether every row of a window is in its parts; for `windows(skip=...)`."""
        return self.complete or (window in self._sizes and self._written[window] == self._sizes[window][0])

    def write(
        self, window: Window, results: Sequence[Scored], errors: dict[int, RowError], *, temperature: float
    ) -> None:
        """Write rows of a window as one part, safe on disk when this returns.

        The window's own error rows come with its first part. Rows that are written already are left out;
        when the output is complete, that is all of them.
        """
        if self.complete:
            return
        started = time.perf_counter()
        size = parts.window_rows(window)
        if self._sizes.setdefault(window.index, size) != size:
            raise OutputConflictError(
                f"{self._work.location} holds other rows for window {window.index} than the input has now\n"
                "start over with --overwrite"
            )
        done = self.done(window.index)
        results = [scored for scored in results if scored.row not in done]
        errors = {row: error for row, error in (window.errors | errors).items() if row not in done}
        if results or errors:
            rows = parts.make_rows(window, results, errors, self._labels, temperature, self._audit)
            number = max(self._parts.get(window.index, [-1])) + 1
            json_columns = window.carried.column_names if self._jsonl_input else ()
            counts = self._count(Counts(), rows)
            self._register(parts.write_part(self._work, window, number, rows, json_columns, counts), number)
            self._carried = window.carried.schema
            self._current[1].update(rows[ROW].to_pylist())
        self.seconds += time.perf_counter() - started

    def finish(self, windows: int | None = None) -> None:
        """Make the output of the parts, rows in the order of the input; then remove the parts.

        `windows` is the number of windows of the input, if the caller counted them. Raises PrefillError if
        rows are missing.
        """
        if self.complete:
            return
        started = time.perf_counter()
        self._require_all_rows(windows)
        final = Counts()
        if self._target.kind == "directory":
            self._write_directory(final)
        else:
            with self._target.store.create(self._target.name) as file:
                if self._target.kind == "parquet":
                    write_parquet(file, self._schema(), self._tables(final))
                else:
                    names = self._carried.names if self._jsonl_input else ()
                    write_jsonl(file, self._tables(final), json_columns=names, codec=self._target.codec)
        self.counts = final
        self._manifest.state = "complete"
        self._manifest.counts = final
        self._manifest.save(self._work)
        self._delete_parts()
        self.seconds += time.perf_counter() - started

    def _begin(self, *, fresh: bool) -> None:
        self._work.clean(lambda name: True)
        self._target.store.clean(self._target.is_ours)
        if fresh:
            self._delete_parts()
            self._manifest.save(self._work)
        elif self.complete:
            self._delete_parts()
            self.counts = self._manifest.counts or self._target.count(self._id)
        else:
            for name in self._work.names():
                self._load(name)

    def _load(self, name: str) -> None:
        place = parts.parse_part_name(name)
        if place is None:
            return
        info = parts.read_info(self._work, name)
        if info is None:
            log.warning("%s/%s is damaged: its rows are scored again", self._work.location, name)
            self._work.delete(name)
        else:
            self._register(info, place[1])

    def _register(self, info: parts.PartInfo, number: int) -> None:
        self._parts.setdefault(info.window, []).append(number)
        self._sizes[info.window] = info.window_rows
        self._written[info.window] = self._written.get(info.window, 0) + info.counts.total
        self.counts.add(info.counts)
        for name, kinds in info.kinds.items():
            self._kinds.setdefault(name, set()).update(kinds)

    def _delete_parts(self) -> None:
        for name in self._work.names():
            if parts.parse_part_name(name) is not None:
                self._work.delete(name)

    def _require_all_rows(self, windows: int | None) -> None:
        expected = range(len(self._sizes) if windows is None else windows)
        last = -1
        for window in expected:
            size, low, high = self._sizes.get(window, (-1, 0, 0))
            if self._written.get(window) != size or low <= last:
                raise PrefillError(
                    f"{self._work.location}: rows of window {window} are missing or doubled\n"
                    "run again with --resume; if this stays, with --overwrite"
                )
            last = high

    def _tables(self, counts: Counts) -> Iterator[pa.Table]:
        """The output, window by window, counted on the way."""
        for window in sorted(self._parts):
            names = [parts.part_name(window, number) for number in self._parts[window]]
            rows = pa.concat_tables([parts.read_rows(self._work, name) for name in names])
            rows = rows.take(pa.array(np.argsort(rows[ROW].to_numpy(), kind="stable")))
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
        text = json.dumps({"schema_version": 1, "digest": digest(self._manifest.fingerprint)})
        return pa.schema(
            [*carried, *parts.result_schema(self._labels, self._audit)], metadata={METADATA: text.encode()}
        )

    def _write_directory(self, counts: Counts) -> None:
        store = self._target.store
        names = []
        for number, table in enumerate(self._tables(counts)):
            names.append(f"part-{number:05d}.parquet")
            with store.create(names[-1]) as file:
                write_parquet(file, self._schema(), [table])
        if not names:
            names.append("part-00000.parquet")
            with store.create(names[0]) as file:
                write_parquet(file, self._schema(), [])
        for name in filter(self._target.is_ours, store.names()):
            if name not in names:
                store.delete(name)


def check_columns(
    carried: Sequence[str],
    label_names: Sequence[str],
    id_name: str | None,
    audit: bool = False,
    truth: str | None = None,
) -> None:
    """Raise UsageError if a kept column has the name of an output column."""
    taken = [*([] if id_name is not None else [_ROW_COLUMN]), *parts.result_schema(label_names, audit).names, ROW]
    for name in carried:
        if name in taken:
            option = {truth: "--truth", id_name: "--id-column"}.get(name, "--keep-columns")
            raise UsageError(f"{option} {name}: the output has a column {name} already\nrename it in the input")


def _decide(target: Target, fingerprint: dict[str, str], resume: bool, overwrite: bool) -> Manifest | None:
    """The manifest to go on with; None to begin. Raises if what is there must not be touched."""
    if overwrite:
        return None
    exists = target.exists()
    manifest = Manifest.load(target.work)
    begun = any(parts.parse_part_name(name) for name in target.work.names())
    if manifest is None or (manifest.state == "complete" and not exists):
        if not exists:
            return None
        if target.digest() != digest(fingerprint):
            raise OutputConflictError(
                f"{target.path} exists and was not written by this job\n"
                "choose another --output, or replace it with --overwrite"
            )
        manifest = Manifest(fingerprint, {}, "complete")
    different = differing(fingerprint, manifest.fingerprint)
    if not different and resume:
        return manifest
    if not exists and not begun:
        return None
    if different:
        raise OutputConflictError(
            f"{target.path} belongs to another job: different {', '.join(different)}\n"
            "choose another --output, or replace it with --overwrite"
        )
    state = "is complete" if manifest.state == "complete" else "is there in part"
    raise OutputExistsError(f"{target.path} {state}\ngo on with --resume, or replace it with --overwrite")
