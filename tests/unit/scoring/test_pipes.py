"""The format of rows that come through a pipe."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefillcli.scoring.pipes import kind_of

PARQUET = io.BytesIO()
pq.write_table(pa.table({"a": [1]}), PARQUET)


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (PARQUET.getvalue(), "parquet"),
        (b'{"a": 1}\n', "jsonl"),
        (b'\xef\xbb\xbf\r\n  {"a": 1}', "jsonl"),
        (b"a,b\n1,2\n", "csv"),
        (b'"{",b\n', "csv"),
        (b"PAR,b\n", "csv"),
        (b"", "csv"),
    ],
)
def test_the_first_bytes_show_the_format(start: bytes, kind: str) -> None:
    assert kind_of(start) == kind
