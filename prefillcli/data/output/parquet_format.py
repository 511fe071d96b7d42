"""Rows in Parquet files, sealed and with page checksums."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefillcli.data.proof.seals import JOB_KEY, UNSEALED, Digesting, seal
from prefillcli.data.reading.footer import Footer


class ParquetFormat:
    """See `FileFormat`."""

    sealed = True
    json_text = False

    def write(
        self, file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table], json_columns: Collection[str] = ()
    ) -> str:
        return write_parquet(file, schema, tables)

    def read(self, file: IO[bytes], names: Sequence[str]) -> Iterator[pa.Table]:
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
        return pq.read_schema(file).field(name).type

    def job_of(self, file: IO[bytes]) -> Any:
        return json.loads(pq.read_schema(file).metadata[JOB_KEY])


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
