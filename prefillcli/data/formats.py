"""The output file: Parquet or JSON Lines, written from a stream of tables."""

from __future__ import annotations

import base64
import datetime
import io
import json
import math
from collections.abc import Callable, Collection, Iterable
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_parquet(file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write the tables, whose columns are those of `schema`, as one Parquet file."""
    with pq.ParquetWriter(file, schema) as writer:
        for table in tables:
            writer.write_table(table.cast(schema))


def write_jsonl(
    file: IO[bytes], tables: Iterable[pa.Table], *, json_columns: Collection[str], codec: str | None
) -> None:
    """Write the tables as JSON Lines, compressed by `codec` if given.

    The values of `json_columns` are JSON already. Numbers that JSON does not have (NaN, infinity) are null.
    """
    stream: Any = file if codec is None else pa.CompressedOutputStream(_LeftOpen(file), codec)
    for table in tables:
        names = [json.dumps(name) for name in table.column_names]
        columns = [
            _as_they_are(column.to_pylist()) if name in json_columns else _as_json(column)
            for name, column in zip(table.column_names, table.columns, strict=True)
        ]
        form = "{" + ",".join(f"{name.replace('%', '%%')}:%s" for name in names) + "}\n"
        stream.write("".join(form % values for values in zip(*columns, strict=True)).encode())
    if codec is not None:
        stream.close()


class _LeftOpen(io.RawIOBase):
    """A file for a stream that would close it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)


def _as_they_are(texts: list[str | None]) -> list[str]:
    return ["null" if text is None else text for text in texts]


def _as_json(column: pa.ChunkedArray) -> list[str]:
    values = column.to_pylist()
    if pa.types.is_floating(column.type):
        return ["null" if v is None or not math.isfinite(v) else repr(v) for v in values]
    encode: Callable[[Any], str] = _encoder.encode
    try:
        return [encode(value) for value in values]
    except ValueError:  # a NaN inside a nested value
        return [encode(_finite(value)) for value in values]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> str:
    """What JSON has no form for: ISO dates, base64 bytes, everything else as text."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
