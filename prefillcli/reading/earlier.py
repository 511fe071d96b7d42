"""The scored rows of an earlier job's output, found again by their digests."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.core.roles import Judge
from prefillcli.errors import DamagedFileError, OutputConflictError, OutputDamagedError, PrefillError, counted
from prefillcli.options.groups import OutputOptions
from prefillcli.options.reading import EarlierOptions
from prefillcli.report.finding import Finding
from prefillcli.report.section import Section
from prefillcli.rows.filesystems import reading, writing
from prefillcli.rows.output.columns import DIGEST, ROW
from prefillcli.rows.output.destination import Destination, Job, Manifest, Published
from prefillcli.rows.output.parts import NAME, TYPE, DigestReader
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.rows.records import Window
from prefillcli.runtime import log
from prefillcli.stats.arrays import Int64Array

if TYPE_CHECKING:
    from prefillcli.core.run import Reached, Run
    from prefillcli.report.run import RunReport


class SinceUse(Finding):
    """The rows that were taken over from an earlier output."""

    key: ClassVar[str] = "since"
    place: ClassVar[int] = 6

    output: str | None = None  # None where it is not known, as in a merge
    rows: int = 0  # scored rows of the output that were taken over, in all attempts
    reason: str | None = None  # why none could be taken over in this attempt

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return the section on rows that were taken over."""
        whence = "" if self.output is None else f" from {self.output}"
        line = ("taken over", f"{counted(self.rows, 'row')}{whence}")
        return [Section(lines=[line], summary={"since": {"rows": self.rows}})]


NOT_COMPARED = "input"  # the part of a fingerprint that may differ: the contents of rows are compared row by row


@dataclass(frozen=True)
class FoundOutput:
    """A complete output with the digests of its rows."""

    destination: Destination
    published: Published
    digests: str  # SHA-256 of the file with the digests
    own: str | None = None  # the output that is to be written, as in `find_output`
    remedy: str = "leave --since out"

    @property
    def stands(self) -> bool:
        """True if nothing has replaced it since it was found."""
        found = find_output(self.destination.path, self.own)
        return isinstance(found, FoundOutput) and replace(found, remedy=self.remedy) == self

    def require_same_job(self, fingerprint: dict[str, str]) -> None:
        """Raise OutputConflictError unless it is of a job that differs from this one in its input alone."""
        theirs = self.published.job.fingerprint
        names = dict.fromkeys([*fingerprint, *theirs])
        different = [name for name in names if name != NOT_COMPARED and fingerprint.get(name) != theirs.get(name)]
        if different:
            raise OutputConflictError(
                f"{self.destination.path} was written by another job: different {', '.join(different)}\n"
                f"its rows cannot be taken over: {self.remedy} to score all rows"
            )


def find_output(path: str, own: str | None = None, *, option: str = "--output") -> FoundOutput | str:
    """Find the complete output at a path, or the reason why its rows cannot be taken over. Raises UsageError for an
    unknown ending.

    `own` is the path of the output that is to be written: until its job is complete, an older output may be there.
    """
    destination = Destination.parse(path, option=option)
    if not destination.exists():
        return "there is no such output"
    try:
        manifest = Manifest.load(destination.work)
    except (DamagedFileError, OutputConflictError) as error:
        return f"{destination.work.location}/manifest.json: {str(error).splitlines()[0]}"
    if manifest is None:
        return (
            f"its work folder {destination.work.location}, which has the digests of its rows, is missing: "
            "an output is moved or renamed together with its work folder"
        )
    if manifest.state != "complete":
        before = manifest.before
        if before is None or own is None or Destination.parse(own).path != destination.path:
            return "its job is not complete"
        published = destination.stored(Job.of_json(before["job"]), before["files"])
        found = FoundOutput(destination, published, before["digests"], own)
        return found if not destination.damage(published) else "it is being replaced"
    if manifest.digests is None:
        return "its work folder was lost, and with it the digests of its rows"
    return FoundOutput(destination, destination.stored(manifest.job, manifest.files), manifest.digests, own)


class EarlierOutput:
    """The scored rows of an output, copied to a file of this process, which ends with it.

    It takes the disk that the rows' results need, and 16 bytes of memory for each. Close it.
    """

    def __init__(self, found: FoundOutput, schema: OutputSchema, folder: str | None) -> None:
        """Copy the rows. `schema` is that of the job that takes them over; the file lies in `folder`, None for the
        system's own.

        Raises OutputDamagedError if the output is not as it was written, ResourceError if the disk is full, and
        PrefillError if it cannot be read.
        """
        self._found = found
        self._names = schema.results
        where = folder or tempfile.gettempdir()
        with writing(where):
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=where)  # noqa: SIM115 - `close` does
        try:
            with writing(where):
                keys = self._copy()
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except BaseException:
            self._file.close()
            raise
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        self._reader = pa.ipc.open_file(pa.py_buffer(self._map))
        sizes = [self._reader.get_batch(at).num_rows for at in range(self._reader.num_record_batches)]
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)

    def take(self, window: Window) -> pa.Table | None:
        """Return the results of a window's rows that this output has: row numbers, result columns, digests; None if it
        has none.

        Their prompts are taken out of the window.
        """
        asked = [prompt for prompt in window.prompts if prompt.digest is not None and prompt.part == 0]
        keys = np.frombuffer(b"".join(prompt.digest or b"" for prompt in asked), np.uint64)[::2]
        at = np.minimum(np.searchsorted(self._keys, keys), max(len(self._keys) - 1, 0))
        hits = np.flatnonzero(self._keys[at] == keys) if len(self._keys) else np.empty(0, np.int64)
        if len(hits) == 0:
            return None
        found = self._at(self._order[at[hits]])
        wanted = pa.array([asked[hit].digest for hit in hits.tolist()], TYPE)
        found = found.append_column(ROW, pa.array([asked[hit].row for hit in hits.tolist()], pa.int64()))
        found = found.filter(pc.equal(found[DIGEST].combine_chunks(), wanted))
        taken = set(found[ROW].to_pylist())
        window.prompts = [prompt for prompt in window.prompts if prompt.row not in taken]
        return found.sort_by(ROW) if taken else None

    def close(self) -> None:
        """Free the disk space."""
        del self._reader
        self._file.close()

    def _at(self, places: Int64Array) -> pa.Table:
        # The rows at these places, in this order.
        batches = np.searchsorted(self._starts, places, "right") - 1
        order = np.argsort(batches, kind="stable")
        pieces = []
        for number in np.unique(batches).tolist():
            inside = places[order][batches[order] == number] - self._starts[number]
            pieces.append(self._reader.get_batch(number).take(pa.array(inside)))
        back = np.empty(len(places), np.int64)
        back[order] = np.arange(len(places))
        return pa.Table.from_batches(pieces).take(pa.array(back))

    def _copy(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        # Copy the rows that have a score and a digest; returns the first half of each digest [rows].
        found, keys = self._found, [np.empty(0, np.uint64)]
        damage = found.destination.damage(found.published)
        if damage:
            raise self._damaged(damage[0])
        schema = self._names.append(pa.field(DIGEST, TYPE))
        try:
            with found.destination.work.read(NAME) as digests, pa.ipc.new_file(self._file, schema) as copy:
                reader = DigestReader(digests, found.destination.work.location)
                for table in self._tables():
                    table = table.append_column(DIGEST, reader.next(len(table)))
                    table = table.filter(_usable(table))
                    copy.write_table(table.cast(schema))
                    keys.append(np.frombuffer(b"".join(table[DIGEST].to_pylist()), np.uint64)[::2])
                reader.finish(found.digests)
        except (DamagedFileError, FileNotFoundError) as error:
            raise self._damaged(str(error)) from None
        if not found.stands:
            raise self._damaged("another run has replaced it")
        self._file.flush()
        return np.concatenate(keys)

    def _tables(self) -> Iterator[pa.Table]:
        # The result columns of the output, in the order in which it was written.
        found, names = self._found, self._names.names
        with reading(found.destination.path):
            for table in found.destination.tables(names, found.published.files):
                yield table.select(names).cast(self._names)

    def _damaged(self, what: str) -> PrefillError:
        return OutputDamagedError(
            f"{self._found.destination.path}: {what}\n"
            f"its rows cannot be taken over: {self._found.remedy} to score all rows"
        )


def _usable(table: pa.Table) -> pa.ChunkedArray:
    # Whether each row may be taken over: it has a score and a digest, and lacks no number that its format cannot
    # express. JSON has no infinity, and its null may stand for one.
    scored = pc.is_valid(table["score"]) if "score" in table.column_names else pc.is_null(table["error"])
    usable = pc.and_(scored, pc.is_valid(table[DIGEST]))
    for name in table.column_names:
        if name.startswith(("logprob_", "value_")):
            usable = pc.and_(usable, pc.is_valid(table[name]))
    return usable


def find_earlier(
    options: EarlierOptions, files: OutputOptions, output: str, fingerprint: dict[str, str]
) -> tuple[FoundOutput | None, SinceUse | None]:
    """Find the output of `--since`, or the job's own with `--retry-errors`, and its entry in the report.

    A warning names an output that is missing or not complete: all rows are scored then. Raises OutputConflictError for
    an output of another job.
    """
    own = find_output(output, own=output) if _retries(options, files, output) else ""
    if not isinstance(own, str):  # the sink decides whether this is the job that wrote it
        return replace(own, remedy="give --overwrite"), SinceUse(output=output)
    if options.since is None:
        return None, None
    found = find_output(options.since, own=output, option="--since")
    if isinstance(found, str):
        log.warning(f"--since {options.since}: {found}; all rows are scored")
        return None, SinceUse(output=options.since, reason=found)
    found.require_same_job(fingerprint)
    return found, SinceUse(output=options.since)


def _retries(options: EarlierOptions, files: OutputOptions, output: str) -> bool:
    # Whether a job begins or continues to score again the error rows of its complete output.
    if files.shard is not None or not (files.resume or options.retry_errors):
        return False
    with suppress(DamagedFileError, OutputConflictError):
        manifest = Manifest.load(Destination.parse(output).work)
        if manifest is not None:
            return manifest.retries or (options.retry_errors and manifest.state == "complete")
    return False


class Earlier(Judge):
    """The rows that a job takes over from an earlier output, which need not be read again."""

    def __init__(self, options: EarlierOptions, files: OutputOptions) -> None:
        self._options, self._files = options, files
        self._found: FoundOutput | None = None

    def find(self, report: RunReport, output: str) -> None:
        """Find the output, once the job's fingerprint is in the report. Raises OutputConflictError for that of another
        job."""
        self._found, use = find_earlier(self._options, self._files, output, report.fingerprint)
        report.add(use)

    def open(self, run: Run) -> EarlierOutput | None:
        """Return the rows of the output that was found; None if there is none. Close them. Raises as
        `EarlierOutput`."""
        if self._found is None:
            return None
        with run.clock.phase("read"), run.stop.at_once():
            return EarlierOutput(self._found, run.sink.schema, run.sink.local_folder)

    def reported(self, report: RunReport, reached: Reached) -> None:
        if reached.counts is not None:
            _count(report, reached.counts.taken_over)

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        _count(report, 0 if manifest.counts is None else manifest.counts.taken_over)


def _count(report: RunReport, rows: int) -> None:
    use = SinceUse.from_report(report) or (SinceUse() if rows else None)  # of a merge, or of earlier attempts
    if use is not None:
        report.add(use.model_copy(update={"rows": rows}))
