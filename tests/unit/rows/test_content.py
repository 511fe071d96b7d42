"""Files whose content is not what their ending says are named as what they are."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefillcli.errors import UsageError
from prefillcli.rows.input.source import Source

TEXT = b"id,prompt\n1,\xc3\xa4\n"
ROWS = [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b"}]
PARQUET, SHEET = io.BytesIO(), io.BytesIO()
pq.write_table(pa.Table.from_pylist(ROWS), PARQUET)
with zipfile.ZipFile(SHEET, "w") as archive:
    archive.writestr(zipfile.ZipInfo("xl/workbook.xml"), "<workbook/>")  # of 1980: the bytes name a case


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(TEXT, mtime=0), r"compressed with gzip\ngive its name the ending \.{}\.gz"),
        (pa.compress(TEXT, "zstd", asbytes=True), r"compressed with Zstandard\n.*\.{}\.zst"),
        (bz2.compress(TEXT), "compressed with bzip2\nunpack it"),
        (lzma.compress(TEXT), "compressed with xz\nunpack it"),
        (PARQUET.getvalue(), r"a Parquet file\n.*\.parquet"),
        (SHEET.getvalue(), r"a ZIP archive or a spreadsheet \(\.xlsx\)\n.*CSV in UTF-8"),
        (b"\n<!DOCTYPE html>\n<html><body>Sign in, please</body></html>\n", "an HTML page"),
        (json.dumps(ROWS).encode(), r"one JSON array\n.*jq -c '\.\[\]' .*in\.{} > new\.jsonl"),
        (json.dumps(ROWS, indent=2).encode(), "one JSON array"),
    ],
)
def test_it_is_named(tmp_path: Path, ending: str, content: bytes, message: str) -> None:
    path = tmp_path / f"in.{ending}"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message.format(ending)) as caught:
        Source.open([str(path)])
    assert str(caught.value).startswith(f"{path}: it is ")
    assert len(str(caught.value).splitlines()) == 2


def test_json_lines_named_csv_and_objects_over_several_lines_are_told(tmp_path: Path) -> None:
    lines = tmp_path / "in.csv"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.raises(UsageError, match=r"its lines are JSON objects\n.*\.jsonl"):
        Source.open([str(lines)])
    for text in (json.dumps(ROWS[0], indent=2), "".join(map(json.dumps, ROWS))):
        (tmp_path / "in.jsonl").write_text(text)
        with pytest.raises(UsageError, match=r"is a JSON object .*\n.*\nwrite each object on a line: jq -c \. "):
            Source.open([str(tmp_path / "in.jsonl")])


def test_a_name_like_the_beginning_of_another_kind_is_a_name(tmp_path: Path) -> None:
    for name in ("PAR1", "BZhx", "[x", "{"):
        (tmp_path / "in.csv").write_text(f"{name},prompt\n1,a\n")
        assert Source.open([str(tmp_path / "in.csv")]).available == (name, "prompt")


def test_lines_of_json_after_a_byte_order_mark_are_read_wherever_files_were_joined(tmp_path: Path) -> None:
    line = b"\xef\xbb\xbf" + b'{"prompt": "a"}\n'
    (tmp_path / "in.jsonl").write_bytes(line * 3)
    (batch,) = Source.open([str(tmp_path / "in.jsonl")], columns=["prompt"]).batches()
    assert (batch.columns["prompt"], batch.errors) == (["a"] * 3, {})
