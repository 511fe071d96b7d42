"""The output file: Parquet or JSON Lines, written from a stream of tables."""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Callable, Collection, Iterable
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefillcli.data.proof.seals import UNSEALED, Digesting, seal
from prefillcli.data.values import to_python


def write_parquet(
    file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table], *, compression: str = "snappy"
) -> str:
    """Write the tables, whose columns are those of `schema`, as one sealed Parquet file with page checksums.

    `file` is open for writing and reading. Returns the file's digest (`seals.digest_of`).
    """
    digesting = Digesting(file)
    with pq.ParquetWriter(digesting, schema, compression=compression, write_page_checksum=True) as writer:
        for table in tables:
            writer.write_table(table.cast(schema))
        writer.add_key_value_metadata(UNSEALED)
    seal(file, digesting.digest())
    return digesting.digest()


def write_jsonl(
    file: IO[bytes], tables: Iterable[pa.Table], *, json_columns: Collection[str], codec: str | None
) -> str:
    """Write the tables as JSON Lines, compressed by `codec` if given; returns the digest of the file.

    The values of `json_columns` are JSON already. Numbers that JSON does not have (NaN, infinity) are null.
    """
    digesting = Digesting(file)
    stream: Any = digesting if codec is None else pa.CompressedOutputStream(digesting, codec)
    for table in tables:
        names = [json.dumps(name) for name in table.column_names]
        columns = [
            _as_they_are(column.to_pylist()) if name in json_columns else as_json(column)
            for name, column in zip(table.column_names, table.columns, strict=True)
        ]
        form = "{" + ",".join(f"{name.replace('%', '%%')}:%s" for name in names) + "}\n"
        stream.write("".join(form % values for values in zip(*columns, strict=True)).encode())
    if codec is not None:
        stream.close()
    return digesting.digest()


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
