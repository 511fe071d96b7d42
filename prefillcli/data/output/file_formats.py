"""Writing and reading the files of each format."""

from __future__ import annotations

import base64
import datetime
import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefillcli.data.output.columns import COLUMN_TYPES
from prefillcli.data.proof import JOB_KEY, UNSEALED, Digesting, seal
from prefillcli.data.reading.parquet import Footer
from prefillcli.data.rows import text_of, to_python

_BLOCK = 1 << 22


class JsonlFormat:
    """As `ParquetFormat`; `codec` is that of pyarrow's streams: gzip, zstd, or None."""

    sealed = False
    json_text = True

    def __init__(self, codec: str | None) -> None:
        self.codec = codec

    def write(
        self, file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table], json_columns: Collection[str] = ()
    ) -> str:
        # Numbers that JSON does not have (NaN, infinity) are null.
        digesting = Digesting(file)
        plain = nullcontext(digesting)
        # Left open after an error, Arrow would write to a closed file later, and print a traceback.
        with plain if self.codec is None else pa.CompressedOutputStream(digesting, self.codec) as stream:
            for table in tables:
                names = [json.dumps(name) for name in table.column_names]
                columns = [
                    _as_they_are(column.to_pylist()) if name in json_columns else as_json(column)
                    for name, column in zip(table.column_names, table.columns, strict=True)
                ]
                form = "{" + ",".join(f"{name.replace('%', '%%')}:%s" for name in names) + "}\n"
                stream.write("".join(form % values for values in zip(*columns, strict=True)).encode())
        return digesting.digest()

    def read(self, file: IO[bytes], names: Sequence[str]) -> Iterator[pa.Table]:
        stream = pa.input_stream(file, compression=self.codec)
        rest = b""
        while data := stream.read(_BLOCK):
            *lines, rest = (rest + data).split(b"\n")
            rows = [json.loads(line) for line in lines]
            columns = {}
            for name in names:
                values = [row[name] for row in rows]
                if name not in COLUMN_TYPES:
                    values = [None if value is None else _encoder.encode(value) for value in values]
                columns[name] = pa.array(values, COLUMN_TYPES.get(name, pa.string()))
            yield pa.table(columns)
        if rest:
            raise ValueError("the last line has no end")

    def column_type(self, file: IO[bytes], name: str) -> pa.DataType:
        return pa.string()

    def job_of(self, file: IO[bytes]) -> Any:
        raise ValueError("JSON Lines do not say which job wrote them")


def _as_they_are(texts: list[str | None]) -> list[str]:
    return ["null" if text is None else text for text in texts]


def as_json(column: pa.ChunkedArray) -> list[str]:
    """The values of a column as JSON texts, as an output in JSON Lines has them."""
    values = to_python(column)
    if pa.types.is_floating(column.type):
        return ["null" if v is None or not math.isfinite(v) else repr(v) for v in values]
    encode: Callable[[Any], str] = _encoder.encode
    try:
        return [encode(value) for value in values]
    except ValueError:  # a NaN inside a nested value
        return [encode(_finite(value)) for value in values]


def id_texts(column: pa.ChunkedArray, *, json_text: bool) -> list[str]:
    """Ids as a user writes them, the same whether they come typed or as JSON text."""
    return [text_of(text) for text in json_texts(column, json_text=json_text)]


def json_texts(column: pa.ChunkedArray, *, json_text: bool) -> list[str]:
    """The values of a column as JSON texts in one form, whether they come typed or as JSON text."""
    if not json_text:
        return as_json(column)
    values = [json.loads(text or "null") for text in column.to_pylist()]
    return [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> str:
    # What JSON has no form for: ISO dates, base64 bytes, everything else as text.
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)


class ParquetFormat:
    """How rows are written to one file, and read back. A damaged file raises what pyarrow raises, or ValueError."""

    sealed = True  # a file proves itself: it names its job, and holds the digest of its other bytes
    json_text = False  # values carried from JSON Lines get a column's type, and are not written as the JSON they are

    def write(
        self, file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table], json_columns: Collection[str] = ()
    ) -> str:
        """Write the tables, whose columns are those of `schema`; returns the digest of the file (`digest_of`).

        `file` is open for writing and reading. The values of `json_columns` are JSON already.
        """
        return write_parquet(file, schema, tables)

    def read(self, file: IO[bytes], names: Sequence[str]) -> Iterator[pa.Table]:
        """Some columns of a file, piece by piece; where `json_text` holds, carried columns come as JSON text."""
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        footer = Footer.check(parquet.metadata, file.seek(0, io.SEEK_END))
        footer.require(names)
        rows = 0
        for batch in parquet.iter_batches(columns=list(dict.fromkeys(names))):
            rows += batch.num_rows
            yield pa.Table.from_batches([batch])
        if rows != footer.rows:
            raise OSError(f"its footer says {footer.rows:,} rows, but its pages have {rows:,}")

    def column_type(self, file: IO[bytes], name: str) -> pa.DataType:
        """The type in which a carried column is read back."""
        return pq.read_schema(file).field(name).type

    def job_of(self, file: IO[bytes]) -> Any:
        """What a sealed file says of its job, as `Job.of_json` takes it."""
        return json.loads(pq.read_schema(file).metadata[JOB_KEY])


FileFormat = ParquetFormat | JsonlFormat


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
