"""An output: its job, its place, the writing of its files, and the records in it and in its work folder."""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import IO, Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from prefillcli.errors import DamagedFileError, OutputConflictError, PrefillError, UsageError, counted, without_secrets
from prefillcli.rows.filesystems import (
    WORK_ENDING,
    filesystem_of,
    is_local,
    patiently,
    split_path,
    writing,
    written_path,
)
from prefillcli.rows.input.delimited import Delimited
from prefillcli.rows.input.parquet import Footer
from prefillcli.rows.output import DIRECTORY, FILE_ENDINGS, OutputFormat, Shard, batches, format_of
from prefillcli.rows.output.answers import AnswerColumns, answers_of
from prefillcli.rows.output.columns import COLUMN_TYPES, COLUMNS, ROW_COLUMN, Group, answer_columns
from prefillcli.rows.output.store import Store, open_store, requesting
from prefillcli.rows.output.tallies import Counts
from prefillcli.rows.proof import JOB_KEY, UNSEALED, Digesting, digest_of, seal, seal_of, take_checksum, with_checksum
from prefillcli.rows.records import BadLine
from prefillcli.rows.values import as_json, encode_json, plain_texts
from prefillcli.runtime import file_calls, log

NAME = "manifest.json"
SCHEMA_VERSION = 2
# The part of a fingerprint that names the meaning of the labels' numbers, where they are not shares.
MEASURE = "measure"
# The part of a fingerprint that describes the answers to several questions.
ANSWERS = "answers"
# The part of a fingerprint that marks an output with the lines of an OpenAI batch output.
FORMAT = "format"


@dataclass(frozen=True)
class Job:
    """The job that an output belongs to, with everything needed to recognise it."""

    # Digest of every part of the job: input, model, tokenizer, template, labels, settings.
    fingerprint: dict[str, str]
    # The options `limit`, `sample` and `seed`, which choose the rows of the input.
    selection: dict[str, Any] = field(default_factory=dict)
    id_name: str | None = None  # the column with the ids; None where rows are identified by their number
    asked: str = ""  # digest of the options that it was asked for with

    @property
    def digest(self) -> str:
        """One digest of all parts of the fingerprint."""
        return hashlib.sha256(json.dumps(self.fingerprint, sort_keys=True).encode()).hexdigest()

    @property
    def answers(self) -> list[AnswerColumns]:
        """The columns with the answers to each of several questions; none where there is one."""
        return answers_of(self.fingerprint.get(ANSWERS, ""))

    @property
    def told(self) -> list[str]:
        """The columns that tell the score of a row, which is that of its first question."""
        return next((own.told for own in self.answers), ["score"])

    def with_score(self, rows: pa.Table) -> pa.Table:
        """Return rows of the output with the column `score`, by the columns `told`."""
        for own in self.answers[:1]:
            rows = own.with_answer(rows)
            rows = rows.append_column("score", rows[own.column("score")])
        return rows

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The types of the columns of named questions."""
        every = (replace(own, groups=frozenset(get_args(Group))) for own in self.answers)
        columns = [(own, column) for own in every for column in answer_columns(own)]
        return {column.of_question(0, own).name: column.type for own, column in columns}

    def differing(self, other: Job) -> list[str]:
        """Return the parts in which two jobs differ, in the order of this one."""
        mine, others = self.fingerprint, other.fingerprint
        return [part for part in dict.fromkeys([*mine, *others]) if mine.get(part) != others.get(part)]

    def to_json(self) -> dict[str, Any]:
        """Return its content for a file that belongs to the job."""
        return {"schema_version": SCHEMA_VERSION, "digest": self.digest, **asdict(self)}

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Job:
        """Return the job of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        job = cls(dict(content["fingerprint"]), dict(content["selection"]), content["id_name"], content["asked"])
        if content["schema_version"] != SCHEMA_VERSION or content["digest"] != job.digest:
            raise ValueError("another version, or another digest")
        return job


@dataclass
class Manifest:
    """The content of `manifest.json`."""

    job: Job
    settled: dict[str, Any]  # values that the job stores for its resumption; any JSON
    state: Literal["running", "complete"] = "running"
    counts: Counts | None = None  # set when complete
    # Set when complete: the output's files by name, with their digests (`digest_of`).
    files: dict[str, str] = field(default_factory=dict)
    # In a shard's work folder its `sink.ShardRecord`; else None.
    shard: dict[str, Any] | None = None
    # The tokens of the shards that the output was made from, if any.
    merged: list[str] = field(default_factory=list)
    digests: str | None = None  # set when complete: SHA-256 of the digests of its rows (see `parts.digests_of`)
    # The complete output that this job will replace (see `replaced`); None if there was none.
    before: dict[str, Any] | None = None
    retries: bool = False  # whether that is the job's own output, of which only the error rows are scored again
    created: str = field(default_factory=lambda: _now())
    updated: str = field(default_factory=lambda: _now())

    def save(self, store: Store) -> None:
        """Write it, whole."""
        self.updated = _now()
        content = {**vars(self), **self.job.to_json()}
        del content["job"]
        store.put_bytes(NAME, with_checksum(content))

    @classmethod
    def load(cls, store: Store) -> Manifest | None:
        """Load the manifest of a work folder; None without one.

        Raises DamagedFileError if it has changed since, OutputConflictError if another version wrote it.
        """
        try:
            content = json.loads(store.read_bytes(NAME))
            right = take_checksum(content)
            version = content["schema_version"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError, TypeError, KeyError):
            raise DamagedFileError("it cannot be read") from None
        if not right:
            raise DamagedFileError("it is not what was written")
        if version != SCHEMA_VERSION:
            raise OutputConflictError(
                f"{store.location} was written by another version of prefill\n"
                "finish the job with that version, or start over with --overwrite"
            )
        try:
            return _MANIFEST.validate_python({**content, "job": Job.of_json(content)})
        except (KeyError, TypeError, ValueError):
            raise DamagedFileError("it is not a manifest") from None


_MANIFEST = TypeAdapter(Manifest)


def replaced(store: Store) -> dict[str, Any] | None:
    """Return the complete output that a new job in a work folder will replace, as that job records it; None without
    one."""
    with suppress(PrefillError):
        found = Manifest.load(store)
        if found is not None and found.state == "complete" and found.digests is not None:
            return {"job": found.job.to_json(), "files": found.files, "digests": found.digests}
        return None if found is None else found.before
    return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# The file of a directory output that is written last: its job and files, as `Published.to_json` gives them.
SUCCESS = "_SUCCESS"
OLD = "old"  # the folder in the work folder where a publication puts an older output aside
_DIRECTORY_PART = re.compile(r"([^/=]+=[^/]*/)*part-\d{5,}\.parquet")  # in folders of partitions, or in none


@dataclass(frozen=True)
class Published:
    """The job and the files that an output names."""

    job: Job
    files: dict[str, str]  # names of its files, with their digests

    def to_json(self) -> bytes:
        """Return the content of `_SUCCESS`."""
        return with_checksum({**self.job.to_json(), "files": self.files})


@dataclass(frozen=True)
class Destination:
    """The place of the output, and its format."""

    path: str  # as the user named it, in the form of `written_path`
    format: OutputFormat
    shard: Shard | None = None  # the share of the rows that is worked on; None for all

    @classmethod
    def parse(cls, output: str, shard: Shard | None = None, *, option: str = "--output") -> Destination:
        """Parse the destination at a path that `option` names. Raises UsageError for an unknown ending, and as
        `written_path`."""
        named = written_path(output, option)
        path = named.rstrip("/")
        if named.endswith("/") or _is_directory(path):
            return cls(path, DIRECTORY, shard)
        found = format_of(path)
        if found is None and _is_directory(f"{path}{WORK_ENDING}/{OLD}"):
            found = DIRECTORY
        if found is None:
            raise UsageError(
                f"unknown ending of {option} {output}\n"
                f"use {', '.join(FILE_ENDINGS)}, or end it in / for {DIRECTORY.meaning}"
            )
        return cls(path, found, shard)

    @property
    def directory(self) -> bool:
        """Return whether the output is a folder of parts."""
        return self.format.directory

    @cached_property
    def file_format(self) -> FileFormat:
        """Return the format in which each of its files is written and read."""
        return open_format(self.format)

    @cached_property
    def store(self) -> Store:
        """The folder that holds the output."""
        return open_store(self.path if self.directory else split_path(self.path)[0])

    @cached_property
    def work(self) -> Store:
        """The work folder. Every shard has its own."""
        return open_store(self.path + (self.shard.ending if self.shard else "") + WORK_ENDING)

    @cached_property
    def whole(self) -> Destination:
        """The output of the whole job, without a shard."""
        return replace(self, shard=None)

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def is_ours(self, name: str) -> bool:
        """Return whether a file of `store` is part of the output."""
        if self.directory:
            return name == SUCCESS or bool(_DIRECTORY_PART.fullmatch(name))
        return name == self.name

    def files(self) -> list[str]:
        """Return the existing files of the output, by their names in `store`."""
        if not self.directory:  # not searched among all the files beside it
            return [self.name] if self.store.exists(self.name) else []
        return list(filter(self.is_ours, self.store.find(is_partition)))

    def clean(self) -> None:
        """Remove half-written files of the output that killed runs left."""
        if self.directory:
            self.store.clean(self.is_ours, is_partition)
        else:
            self.store.clean(self.is_ours)

    def exists(self) -> bool:
        return bool(self.files())

    def published(self) -> Published | None:
        """Return the job and the files that the output names; None if they cannot be read, or its format names
        none."""
        if not self.file_format.sealed:
            return None
        try:
            if self.directory:
                content = json.loads(self.store.read_bytes(SUCCESS))
                return Published(Job.of_json(content), dict(content["files"]))
            with self.store.read(self.name) as file:
                return Published(Job.of_json(self.file_format.job_of(file)), {self.name: seal_of(file)})
        except (pa.ArrowException, DamagedFileError, OSError, ValueError, KeyError, TypeError):
            return None

    def stored(self, job: Job, files: dict[str, str]) -> Published:
        """Return the record of the output in its work folder. A single file is recognised by its digest, because it
        may be renamed together with its work folder."""
        return Published(job, files if self.directory else dict(zip([self.name], files.values(), strict=False)))

    def damage(self, published: Published) -> list[str]:
        """List the files of the output that have changed since they were published."""
        found = []
        for name, digest in published.files.items():
            try:
                if self._digest(name) != digest:
                    found.append(f"{self._shown(name)} is not as it was written")
            except FileNotFoundError:
                found.append(f"{self._shown(name)} is missing")
        if self.directory:
            try:
                if self.store.read_bytes(SUCCESS) != published.to_json():
                    found.append(f"{self._shown(SUCCESS)} is not as it was written")
            except FileNotFoundError:
                found.append(f"{self._shown(SUCCESS)} is missing")
        others = [name for name in self.files() if name not in published.files and name != SUCCESS]
        return found + [f"{self._shown(name)} is not one of its files" for name in others]

    def _digest(self, name: str) -> str | None:
        # The digest of a file; None if it is damaged, its seal included.
        sealed = self.file_format.sealed
        with suppress(DamagedFileError), self.store.read(name) as file:
            digest = digest_of(file, sealed=sealed)
            return digest if not sealed or seal_of(file) == digest else None
        return None

    def count(self, id_name: str | None = None) -> Counts:
        """Count the rows of the output, whose ids are in the column `id_name`."""
        job, counts = self._job() or Job({}), Counts()
        first = next((own.prefix for own in job.answers), "")
        names = [column.name for column in COLUMNS if column.counted and (column.part == "row" or not first)]
        for table in self.tables([*names, *job.told, id_name or ROW_COLUMN]):
            counts.add_rows(job.with_score(table), id_name=id_name, first=first)
        return counts

    def tables(self, names: Sequence[str], files: Iterable[str] | None = None) -> Iterator[pa.Table]:
        """Yield these columns of the output, piece by piece, in the order of these files; without, always in the same
        one.

        There is a row for each row of the input, with columns for each question. Raises as `FileFormat`'s reading.
        """
        job = self._job()
        for name in sorted(self.files()) if files is None else files:
            if name != SUCCESS:
                with self.store.read(name) as file:
                    yield from rows_of_input(self.file_format, file, names, job)

    def _job(self) -> Job | None:
        # The job that wrote the output: by its own record, or else by that of its work folder.
        if (published := self.published()) is not None:
            return published.job
        manifest = Manifest.load(self.work)
        return None if manifest is None else manifest.job

    def _shown(self, name: str) -> str:
        return f"{self.path}/{name}" if self.directory else self.path


def rows_of_input(form: FileFormat, file: IO[bytes], names: Sequence[str], job: Job | None) -> Iterator[pa.Table]:
    """Yield these columns of a file of this job's output, piece by piece. Raises as `FileFormat`'s reading."""
    if job is not None and FORMAT in job.fingerprint and isinstance(form, JsonlFormat):
        yield from (batches.rows_of(lines, names, job.id_name or ROW_COLUMN) for lines in form.objects(file))
        return
    yield from form.read(file, names, COLUMN_TYPES if job is None else COLUMN_TYPES | job.types)


def is_partition(folder: str) -> bool:
    """Return whether a folder in a directory output is of a partition, like `day=2026-11-21`."""
    return "=" in folder


def _is_directory(path: str) -> bool:
    filesystem, inner = filesystem_of(path)
    if is_local(filesystem):
        with writing(path):
            return file_calls.is_folder(inner)
    with requesting(without_secrets(path)):
        return bool(patiently(lambda: filesystem.isdir(inner)))


# Writing and reading the files of each format.


_BLOCK = 1 << 22


class JsonlFormat:
    """JSON Lines, with the methods of `ParquetFormat`; `codec` is that of pyarrow's streams: gzip, zstd, or None."""

    sealed = False
    json_text = True

    def __init__(self, codec: str | None) -> None:
        self.codec = codec

    def write(
        self, file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table], json_columns: Collection[str] = ()
    ) -> str:
        # Numbers that JSON lacks (NaN, infinity) become null.
        digesting = Digesting(file)
        plain = nullcontext(digesting)
        # Left open after an error, Arrow would write to a closed file later, and print a traceback.
        with plain if self.codec is None else pa.CompressedOutputStream(digesting, self.codec) as stream:
            for table in tables:
                names = [json.dumps(name) for name in table.column_names]
                columns = [
                    [text or "null" for text in column.to_pylist()] if name in json_columns else as_json(column)
                    for name, column in zip(table.column_names, table.columns, strict=True)
                ]
                form = "{" + ",".join(f"{name.replace('%', '%%')}:%s" for name in names) + "}\n"
                stream.write("".join(form % values for values in zip(*columns, strict=True)).encode())
        return digesting.digest()

    def objects(self, file: IO[bytes]) -> Iterator[list[dict[str, Any]]]:
        """Yield the lines of a file, some at a time."""
        stream = pa.input_stream(file, compression=self.codec)
        rest = b""
        while data := stream.read(_BLOCK):
            *lines, rest = (rest + data).split(b"\n")
            yield [json.loads(line) for line in lines]
        if rest:
            raise ValueError("the last line has no end")

    def read(
        self, file: IO[bytes], names: Sequence[str], types: Mapping[str, pa.DataType] = COLUMN_TYPES
    ) -> Iterator[pa.Table]:
        for rows in self.objects(file):
            columns = {}
            for name in names:
                values = [row[name] for row in rows]
                kind = types.get(name, pa.string())
                if name not in types:
                    values = [None if value is None else encode_json(value) for value in values]
                elif kind == pa.string() and any(isinstance(value, int) for value in values):
                    # Choices are booleans if all options are; predictions are numbers where rows have their own.
                    kind = pa.bool_() if any(isinstance(value, bool) for value in values) else pa.int64()
                columns[name] = pa.array(values, kind)
            yield pa.table(columns)

    def column_type(self, file: IO[bytes], name: str) -> pa.DataType:
        return pa.string()

    def job_of(self, file: IO[bytes]) -> Any:
        raise ValueError("JSON Lines do not name the job that wrote them")


class CsvFormat:
    """CSV, with the methods of `ParquetFormat`: null is an empty field, an empty text has quotes, and lists are JSON.

    With tabs it is text/tab-separated-values, where quotes are characters like any other: tabs and line breaks are
    written as `\\t`, `\\n` and `\\r`, and an empty text is null.
    """

    sealed = False
    json_text = False

    def __init__(self, delimiter: str) -> None:
        self.delimiter = delimiter
        self._quotes = delimiter != "\t"
        self._special = re.compile(f'["\r\n{re.escape(delimiter)}]')

    def write(
        self, file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table], json_columns: Collection[str] = ()
    ) -> str:
        digesting = Digesting(file)
        digesting.write(self._lines([schema.names]))
        changed = 0
        for table in tables:
            columns = [plain_texts(column) for column in table.columns]
            if not self._quotes:
                changed += sum(text is not None and text != _in_tsv(text) for own in columns for text in own)
            digesting.write(self._lines(zip(*columns, strict=True)))
        if changed:
            log.warning(
                f"TSV cannot hold tabs and line breaks: {counted(changed, 'text')} have these as \\t and \\n\n"
                "write .csv, .jsonl or .parquet to keep them"
            )
        return digesting.digest()

    def as_read(self, texts: Iterable[str | None]) -> list[str | None]:
        """Return the texts as they are read again from a file in this format."""
        return [*texts] if self._quotes else [_in_tsv(text) or None if text else None for text in texts]

    def _lines(self, rows: Iterable[Sequence[str | None]]) -> bytes:
        return "".join(self.delimiter.join(map(self._field, row)) + "\n" for row in rows).encode()

    def _field(self, text: str | None) -> str:
        if not self._quotes or text is None:
            return _in_tsv(text or "")
        quoted = not text or self._special.search(text)
        return '"' + text.replace('"', '""') + '"' if quoted else text

    def read(
        self, file: IO[bytes], names: Sequence[str], types: Mapping[str, pa.DataType] = COLUMN_TYPES
    ) -> Iterator[pa.Table]:
        form = Delimited(self.delimiter, quotes=self._quotes)
        records = form.records(file, sys.maxsize - 2, {}, lambda: 0)
        header = self._fields(form, next(records, b""))
        # Predictions are numbers where rows have their own choices.
        numbered = {"prediction": pa.int64(), "audit_prediction": pa.int64()} if "prediction_text" in header else {}
        kinds = {name: ({**types} | numbered).get(name, pa.string()) for name in names}
        places = [header.index(name if self._quotes else _in_tsv(name)) for name in kinds]
        while rows := [self._fields(form, record) for record in islice(records, _READ_ROWS)]:
            if any(len(row) != len(header) for row in rows):
                raise ValueError("a row has more or fewer fields than the header")
            yield pa.table(
                {
                    name: pa.array([_of_text(row[at], kind) for row in rows], kind)
                    for at, (name, kind) in zip(places, kinds.items(), strict=True)
                }
            )

    def _fields(self, form: Delimited, record: bytes | BadLine) -> list[str | None]:
        if isinstance(record, BadLine) or not record.endswith(b"\n"):
            raise ValueError("its last row has no end")
        return form.fields(record.decode())

    def column_type(self, file: IO[bytes], name: str) -> pa.DataType:
        return pa.string()

    def job_of(self, file: IO[bytes]) -> Any:
        raise ValueError("CSV does not name the job that wrote it")


_READ_ROWS = 4096


_ESCAPES = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})


def _in_tsv(text: str) -> str:
    return text.translate(_ESCAPES) if any(mark in text for mark in "\t\n\r") else text


def _of_text(text: str | None, kind: pa.DataType) -> Any:
    # The value of a field in a column of this type.
    return text if text is None or kind == pa.string() else json.loads(text)


class ParquetFormat:
    """Writes rows to one file, and reads them back. A damaged file raises an error of pyarrow, or ValueError."""

    sealed = True  # a file proves its own content: it names its job, and holds the digest of its other bytes
    json_text = False  # values carried from JSON Lines get a column's type, instead of staying JSON text

    def write(
        self, file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table], json_columns: Collection[str] = ()
    ) -> str:
        """Write the tables, whose columns are those of `schema`; returns the digest of the file (`digest_of`).

        `file` is open for writing and reading. The values of `json_columns` are JSON already.
        """
        return write_parquet(file, schema, tables)

    def read(
        self, file: IO[bytes], names: Sequence[str], types: Mapping[str, pa.DataType] = COLUMN_TYPES
    ) -> Iterator[pa.Table]:
        """Yield some columns of a file, piece by piece; where `json_text` holds, carried columns come as JSON text.
        Formats without types of their own have these `types`."""
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        footer = Footer.check(parquet.metadata, file.seek(0, io.SEEK_END))
        footer.require(names)
        rows = 0
        for batch in parquet.iter_batches(columns=list(dict.fromkeys(names))):
            rows += batch.num_rows
            yield pa.Table.from_batches([batch])
        if rows != footer.rows:
            raise OSError(f"its footer has {footer.rows:,} rows, but its pages have {rows:,}")

    def column_type(self, file: IO[bytes], name: str) -> pa.DataType:
        """Return the type in which a carried column is read back."""
        return pq.read_schema(file).field(name).type

    def job_of(self, file: IO[bytes]) -> Any:
        """Return the record of its job in a sealed file, as `Job.of_json` takes it."""
        return json.loads(pq.read_schema(file).metadata[JOB_KEY])


FileFormat = ParquetFormat | JsonlFormat | CsvFormat


def open_format(form: OutputFormat) -> FileFormat:
    """Return how a file of this format is written and read; of a directory each of its parts."""
    if form.delimiter:
        return CsvFormat(form.delimiter)
    return ParquetFormat() if form.parquet else JsonlFormat(form.codec)


def write_parquet(
    file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table], *, compression: str = "snappy"
) -> str:
    """Write the tables, whose columns are those of `schema`, as one sealed Parquet file with page checksums.

    `file` is open for writing and reading. Returns the file's digest (`digest_of`).
    """
    digesting = Digesting(file)
    with pq.ParquetWriter(digesting, schema, compression=compression, write_page_checksum=True) as writer:
        for table in tables:
            writer.write_table(table.cast(schema))
        writer.add_key_value_metadata(UNSEALED)
    seal(file, digesting.digest())
    return digesting.digest()
