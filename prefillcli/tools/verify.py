"""`prefill verify`: an output checked against its digests, its own rows, and the input that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.errors import ContentChangedError, DamagedFileError, OutputConflictError, counted
from prefillcli.rows.input.source import Source
from prefillcli.rows.output.columns import ROW_COLUMN
from prefillcli.rows.output.destination import MEASURE, CsvFormat, Destination, Job, Manifest, Published, rows_of_input
from prefillcli.rows.output.schema import typed_column
from prefillcli.rows.output.tallies import Counts
from prefillcli.rows.records import ErrorCode
from prefillcli.rows.values import as_json, plain_texts, to_python
from prefillcli.runtime import log
from prefillcli.scoring.shell import Ended, shell
from prefillcli.stats.labels import Measure

# Checks that an output is as its job wrote it, and was made from the input that it names.


_MOST = 20  # problems that are named

#: Ids or row numbers, scores and errors of some rows.
Batch = tuple[list[Any], pa.ChunkedArray, pa.ChunkedArray]

_NUMBERS = (Measure.VALUES, Measure.LIKELIHOOD)  # whose scores are not probabilities
_UNREAD = object()  # instead of the id of a row that was not read


class Verification:
    """Collects the `problems` of an output, and changes nothing."""

    def __init__(self, destination: Destination) -> None:
        self.problems: list[str] = []
        # The counts of the output, as far as it can be read; `errors` includes the rows that were left out.
        self.rows = {"total": 0, "scored": 0, "errors": 0}
        self._destination = destination
        self._manifest = self._find_manifest()
        self._published = self._find_published()

    def run(self, inputs: Sequence[str] = ()) -> None:
        """Check the output and, with `inputs`, that it was made from them. Raises UsageError for wrong inputs."""
        published = self._published
        if published is None:
            return
        self.problems += self._destination.damage(published)
        if self.problems:  # a damaged output is not read further
            return
        ids = self._rows_checked(published)
        try:
            source = self._open_input(published.job, inputs) if inputs else None
            if source is not None:
                self._compare(ids, self._input_ids(published.job, source))
                source.require_unchanged()
        except ContentChangedError as error:
            self._add(str(error))
        for _ in ids:  # rows that were not compared are checked too
            pass
        self._compare_counts()

    def _find_manifest(self) -> Manifest | None:
        try:
            return Manifest.load(self._destination.work)
        except DamagedFileError as error:
            self.problems.append(f"{self._destination.work.location}/manifest.json is damaged: {error}")
        except OutputConflictError as error:
            self.problems.append(str(error).splitlines()[0])
        return None

    def _find_published(self) -> Published | None:
        destination, manifest = self._destination, self._manifest
        if not destination.exists():
            self.problems.append(f"{destination.path}: there is no output")
        elif manifest is not None and manifest.state == "complete":
            return destination.stored(manifest.job, manifest.files)
        elif manifest is not None:
            self.problems.append(f"{destination.path}: its job is not complete; `prefill status` shows how far it is")
        else:
            published = destination.published()
            if published is None:
                self.problems.append(f"{destination.path}: nothing proves it: it has no work folder and no seal")
            return published
        return None

    def _rows_checked(self, published: Published) -> Iterator[list[Any]]:
        # The ids or row numbers of the output, batch by batch, while the rows are checked.
        last = -1
        for ids, scores, errors in self._batches(published):
            self._check_results(scores, errors, values=published.job.fingerprint.get(MEASURE) in _NUMBERS)
            if published.job.id_name is None:
                if any(b <= a for a, b in zip([last, *ids], ids, strict=False)):
                    self._add(f"rows are out of order or repeated near row {ids[0]}")
                last = ids[-1] if ids else last
            yield _with_unread(ids, errors)

    def _batches(self, published: Published) -> Iterator[Batch]:
        # The output, as far as it can be read.
        job, form = published.job, self._destination.file_format
        id_name = job.id_name or ROW_COLUMN
        for name in published.files:
            with self._destination.store.read(name) as file:
                try:
                    if form.sealed and Job.of_json(form.job_of(file)).digest != job.digest:
                        self._add(f"{name} is of another job")
                    for rows in rows_of_input(form, file, [id_name, *job.told, "error"], job):
                        table = job.with_score(rows)
                        ids = to_python(table[id_name])
                        numbers = isinstance(form, CsvFormat) and job.id_name is None
                        yield _json_values(ids) if form.json_text or numbers else ids, table["score"], table["error"]
                except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
                    self._add(f"{name} cannot be read: {error}")

    def _check_results(self, scores: pa.ChunkedArray, errors: pa.ChunkedArray, *, values: bool) -> None:
        scored, failed = pc.is_valid(scores), pc.is_valid(errors)
        both = pc.sum(pc.equal(scored, failed)).as_py() or 0
        if both:
            self._add(f"{both:,} rows have neither a score nor an error, or both")
        if values and pc.all(pc.is_finite(scores)).as_py() is False:
            self._add("a score is not a finite number")
        elif not values and pc.all(pc.and_(pc.greater_equal(scores, 0), pc.less_equal(scores, 1))).as_py() is False:
            self._add("a score is not between 0 and 1")
        self.rows["total"] += len(scores)
        self.rows["scored"] += pc.sum(scored).as_py() or 0
        self.rows["errors"] += pc.sum(failed).as_py() or 0

    def _compare_counts(self) -> None:
        counts: Counts | None = self._manifest.counts if self._manifest is not None else None
        if counts is not None:
            expected = {
                "total": counts.total,
                "scored": counts.scored,
                "errors": counts.errors + counts.skipped + counts.empty,
            }
            if expected != self.rows:
                self._add(f"the output has {_counted(self.rows)}; its job wrote {_counted(expected)}")

    def _open_input(self, job: Job, inputs: Sequence[str]) -> Source | None:
        carried = [job.id_name] if job.id_name is not None else []
        source = Source.open(inputs, carried=carried, **job.selection)
        if source.fingerprint() != job.fingerprint.get("input"):
            self._add(f"{', '.join(inputs)}: not the input that the output was made of, or changed since then")
            return None
        return source

    def _input_ids(self, job: Job, source: Source) -> Iterator[list[Any]]:
        # The ids or row numbers of the input as the output should have them.
        kind, form = None, self._destination.file_format
        if not form.json_text and job.id_name is not None and self._published is not None:
            with self._destination.store.read(next(iter(self._published.files))) as file:
                kind = form.column_type(file, job.id_name)
        for batch in source.batches():
            if job.id_name is None:
                yield batch.rows.tolist()
                continue
            column = batch.carried[job.id_name]
            if isinstance(form, CsvFormat):
                typed = typed_column(column, pa.string()) if source.kind == "jsonl" else column
                yield form.as_read(plain_texts(typed))
            elif kind is None:
                texts = column.to_pylist() if source.kind == "jsonl" else as_json(column)
                yield _json_values(texts)
            else:
                typed = typed_column(column, kind) if source.kind == "jsonl" else column.cast(kind)
                yield to_python(typed)

    def _compare(self, output: Iterator[list[Any]], source: Iterator[list[Any]]) -> None:
        # Row by row, so that the first difference has a number.
        missing = object()
        theirs = (value for values in source for value in values)
        mine = (value for values in output for value in values)
        try:
            for number, (own, other) in enumerate(zip_longest(mine, theirs, fillvalue=missing)):
                if own is missing or other is missing:
                    more = "fewer" if own is missing else "more"
                    self._add(f"the output has {more} rows than the input; the first {number:,} are the same")
                    break
                if own is _UNREAD:
                    continue
                if own != other and (own == own or other == other):  # NaN equals NaN here
                    self._add(f"row {number:,} of the output is {own!r}, of the input {other!r}")
                    break
        except (pa.ArrowException, ValueError) as error:
            self._add(f"the ids of the input are not of the output's type: {error}")

    def _add(self, problem: str) -> None:
        text = f"{self._destination.path}: {problem}"
        if text not in self.problems and len(self.problems) < _MOST:
            self.problems.append(text)


def _with_unread(ids: list[Any], errors: pa.ChunkedArray) -> list[Any]:
    # The ids, with `_UNREAD` for rows that were too large for their job to read: their ids are unknown, or those of
    # rows that are wrong when they are read as a whole.
    unread = pc.equal(errors, ErrorCode.ROW_TOO_LARGE.value)
    if not pc.any(unread).as_py():
        return ids
    return [_UNREAD if error else own for own, error in zip(ids, unread.to_pylist(), strict=True)]


def _json_values(texts: Sequence[str | None]) -> list[Any]:
    return [None if text is None else json.loads(text) for text in texts]


def _counted(rows: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in rows.items())


@dataclass
class Verified(Ended):
    """The last line on stdout."""

    output: str = ""
    inputs: list[str] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def verify_job(output: str, inputs: Sequence[str] = (), *, quiet: bool = False) -> dict[str, Any]:
    """Report the problems of an output on stderr; return the summary for the last line on stdout.

    Nothing is changed. With `inputs` the output must be made from these. The exit code in the summary is 1 if anything
    is wrong.
    """
    verified = Verified("complete", 0, output=output, inputs=list(inputs))
    with shell(verified, debug=False) as stop, stop.at_once():
        verification = Verification(Destination.parse(output, option="OUTPUT"))
        verification.run(inputs)
        verified.rows, verified.problems = verification.rows, verification.problems
    if verified.status != "complete":
        return vars(verified)
    for problem in verified.problems:
        log.error(problem)
    if verified.problems:
        verified.status, verified.exit_code = "failed", 1
        verified.error = verified.problems[0]
    elif not quiet:
        rows = verified.rows
        of = f", and of {', '.join(inputs)}" if inputs else ""
        log.info(
            f"{output} is as it was written{of}: {counted(rows['total'], 'row')}, {rows['scored']:,} scored, "
            f"{rows['errors']:,} with an error"
        )
    return vars(verified)
