"""CSV: what Python's csv module and pyarrow write is read as it was, and one bad row is one error row."""

from __future__ import annotations

import csv
import gzip
import io
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.errors import PrefillError, UsageError
from prefillcli.rows.input.delimited import Delimited, Quotes
from prefillcli.rows.input.source import Source

NAMES = ["id", "prompt", "note"]


def written(path: Path, data: bytes) -> str:
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        data = pa.compress(data, "zstd", asbytes=True)
    path.write_bytes(data)
    return str(path)


def as_csv(rows: Sequence[Sequence[Any]], **form: Any) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file, **form).writerows(rows)
    return file.getvalue().encode()


def read(
    path: str, carried: tuple[str, ...] = ("id", "note"), columns: tuple[str, ...] = ("prompt",), **options: Any
) -> tuple[dict[str, list[Any]], dict[int, str], list[dict[str, Any]]]:
    """The values by column, the errors with their details by row, and the carried rows."""
    rules = {name: options.pop(name) for name in list(options) if name.startswith("csv_")}
    source = Source.open([path], **rules).select(columns=columns, carried=carried, **options)
    values: dict[str, list[Any]] = {name: [] for name in columns}
    errors: dict[int, str] = {}
    kept: list[Any] = []
    for batch in source.batches():
        assert len(batch.rows) == len(batch.carried)
        for name in columns:
            values[name] += batch.columns[name]
        errors |= {row: f"{error.code}: {error.detail}" for row, error in batch.errors.items()}
        kept += batch.carried.to_pylist()
    return values, errors, kept


letters = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('",;\t\r\n "'), max_size=8)
tables = st.lists(st.tuples(letters, letters, letters), max_size=6)
forms = st.fixed_dictionaries(
    {
        "delimiter": st.sampled_from([",", ";", "\t"]),
        "lineterminator": st.sampled_from(["\n", "\r\n"]),
        "quoting": st.just(csv.QUOTE_ALL),
    }
)


@given(tables, forms)
def test_rows_of_pythons_writer_are_read_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, ...]], form: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("csv") / ("a.tsv" if form["delimiter"] == "\t" else "a.csv")
    data = as_csv([NAMES], **form | {"quoting": csv.QUOTE_MINIMAL}) + as_csv(rows, **form)
    values, errors, kept = read(written(path, data), csv_quoting="quotes")
    assert not errors
    assert values["prompt"] == [row[1] for row in rows]
    assert [(row["id"], row["note"]) for row in kept] == [(row[0], row[2]) for row in rows]


@given(st.lists(st.tuples(st.none() | letters, letters, st.none() | letters), min_size=1, max_size=6))
def test_rows_of_arrow_are_read_as_they_were_with_nulls(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str | None, ...]]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    columns = [pa.array(each, pa.string()) for each in zip(*rows, strict=True)]
    pa.csv.write_csv(pa.table(columns, NAMES), path)
    values, errors, kept = read(str(path))
    assert not errors
    assert values["prompt"] == [row[1] for row in rows]
    assert [(row["id"], row["note"]) for row in kept] == [(row[0], row[2]) for row in rows]


unquoted = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\0"), max_size=12)


@given(st.lists(unquoted, min_size=1, max_size=5))
def test_fields_without_outer_quotes_are_those_of_pythons_reader(texts: list[str]) -> None:
    record = ",".join(text.removeprefix('"').replace(',"', ",") for text in texts)
    (expected,) = csv.reader([record]) if record else [[""]]
    assert [text or "" for text in Delimited(",").fields(record)] == expected


def test_ids_keep_their_zeros_and_an_empty_field_is_null_but_no_prompt_is(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", b'id,prompt,note\n007,123,\n1e5,,""\n')
    values, errors, kept = read(path)
    assert not errors
    assert values["prompt"] == ["123", ""]
    assert kept == [{"id": "007", "note": None}, {"id": "1e5", "note": ""}]


def test_every_bad_row_is_one_error_row_and_the_others_are_read(tmp_path: Path) -> None:
    rows = [
        b"0,zero,\xc3\xa4",
        b"1,one",
        b"2,two,,",
        b'3,"three" more,',
        b"4,\xff,",
        b"5,five\rfive,",
        b'6,"two\nlines"',
        b'7,5" and 7",x',
        b'8,"never closed,',
        b"9,nine,y",
    ]
    values, errors, kept = read(written(tmp_path / "a.csv", b"id,prompt,note\n" + b"\n".join(rows)))
    assert errors == {
        1: "invalid_csv: line 3: 2 fields, and 3 in the header",
        2: "invalid_csv: line 4: 4 fields, and 3 in the header",
        3: "invalid_csv: line 5: the quote of field 2 is followed by text: quotes inside are doubled",
        4: "invalid_utf8: line 6: byte 2 of the row: invalid start byte",
        5: "invalid_csv: line 7: a carriage return outside quotes",
        6: "invalid_csv: lines 8 to 9: 2 fields, and 3 in the header",
        8: "invalid_csv: line 11: its last quote is never closed",
    }
    assert [values["prompt"][row] for row in (0, 7, 9)] == ["zero", '5" and 7"', "nine"]
    assert [row["note"] for row in kept if row["id"]] == ["ä", "x", "y"]


def test_blank_lines_are_no_rows_but_empty_fields_and_lines_in_quotes_are(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf\r\nprompt,note\r\n\r\n,\r\n\n" + b"\n" * 50 + b'"a\n\n\nb", \n'
    values, errors, _ = read(written(tmp_path / "a.csv", data), ("note",))
    assert not errors
    assert values["prompt"] == ["", "a\n\n\nb"]


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_files_are_read(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path / f"a.CSV.{ending}", as_csv([["prompt"], *([str(i)] for i in range(5000))]))
    assert read(path, ())[0]["prompt"] == [str(i) for i in range(5000)]
    assert Source.open([path]).count() == 5000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"id,,prompt\n", "column 2 has no name in the header"),
        (b"prompt,id,id\n", "two columns are named 'id'"),
        (b'id,"prompt\n1,2\n', "header cannot be read: its last quote is never closed"),
        (b"id,gr\xf6\xdfe\n", "not UTF-8\nsave it as UTF-8, or convert it.*iconv -f WINDOWS-1252 -t UTF-8"),
        ("id,prompt\n".encode("utf-16"), "not UTF-8\n.*iconv -f UTF-16 -t UTF-8"),
        (b"id,prompt\n1,a\n2,\xe4\n", "not UTF-8\n.*iconv -f WINDOWS-1252"),
        (b"id,text\n1,a\n", "no column 'prompt' in .*a.csv\navailable: id, text"),
        (b"id, prompt\n1, a\n", "no column 'prompt' in .*a.csv\navailable: id, ' prompt'"),
    ],
)
def test_a_file_that_is_no_csv_with_a_header_in_utf_8_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = written(tmp_path / "a.csv", data)
    with pytest.raises(UsageError, match=message) as caught:
        Source.open([path], columns=["prompt"])
    assert path in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_an_empty_file_and_one_with_a_header_alone_have_no_rows(tmp_path: Path) -> None:
    for data in (b"", b"\n\n", b"\xef\xbb\xbf", b"id,prompt,note", b"id,prompt,note\r\n"):
        path = written(tmp_path / "a.csv", data)
        assert read(path) == ({"prompt": []}, {}, [])
        assert Source.open([path]).count() == 0


def test_where_files_were_joined_a_header_is_an_error_row_and_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    data = (
        b"\xef\xbb\xbfid,prompt,note\n1,a,\n\xef\xbb\xbfid,prompt,note\n2,b,note\nid,prompt,note\n\xef\xbb\xbf3,c,\n"
    )
    values, errors, kept = read(written(tmp_path / "a.csv", data))
    again = "the header again, as where files were joined"
    assert errors == {1: f"invalid_csv: line 3: {again}", 3: f"invalid_csv: line 5: {again}"}
    assert [values["prompt"][row] for row in (0, 2, 4)] == ["a", "b", "c"]
    assert [row["id"] for row in kept] == ["1", None, "2", None, "3"]
    assert read(written(tmp_path / "b.csv", b"prompt\nprompt\n"), ())[0]["prompt"] == ["prompt"], (
        "one column may say so"
    )


def test_quotes_with_backslashes_are_told(tmp_path: Path) -> None:
    _, errors, _ = read(written(tmp_path / "a.csv", b'id,prompt,note\n1,"say \\"hi\\"",\n2,b,\n'))
    assert errors[0].endswith(
        "line 2: the quote of field 2 is followed by text: quotes inside are doubled, not written with backslashes"
    )


def test_millions_of_lines_after_an_unclosed_quote_are_rows_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", b'prompt\nfirst\n"\n' + b"a\n\n" * 100_000)
    values, errors, _ = read(path, ())
    assert errors == {1: "invalid_csv: line 3: its last quote is never closed"}
    assert values["prompt"][2:] == ["a"] * 100_000


def test_files_of_a_folder_have_their_own_headers_and_folders_name_columns(tmp_path: Path) -> None:
    for hour, data in ((7, b"prompt,id\na,1\n"), (8, b""), (9, b'id;prompt\n2;"b;c"\n')):
        (tmp_path / f"hour={hour}").mkdir()
        (tmp_path / f"hour={hour}" / "x.csv").write_bytes(data)
    values, errors, kept = read(str(tmp_path), ("id", "hour"))
    assert not errors
    assert values["prompt"] == ["a", "b;c"]
    assert kept == [{"id": "1", "hour": 7}, {"id": "2", "hour": 9}]
    (tmp_path / "hour=9" / "y.csv").write_bytes(b"id,text\n")
    with pytest.raises(UsageError, match=r"no column 'prompt' in .*y\.csv"):
        read(str(tmp_path), ("id", "hour"))


def test_a_row_that_is_too_large_keeps_its_short_values(tmp_path: Path) -> None:
    rows = [
        ["a", "x" * 3000, 'say "hi", twice'],
        ["b", "\n" * 2000 + '"' * 1000, "n"],
        ["c", "short", "m"],
        ["d" * 1000, "", ""],
    ]
    path = written(tmp_path / "a.csv", as_csv([NAMES, *rows]))
    values, errors, kept = read(path, max_row_bytes=1000)
    assert {row: error.split(":")[0] for row, error in errors.items()} == dict.fromkeys((0, 1, 3), "row_too_large")
    assert values["prompt"][2] == "short"
    assert [(row["id"], row["note"]) for row in kept] == [
        ("a", 'say "hi", twice'),
        ("b", "n"),
        ("c", "m"),
        ("d" * 1000, None),
    ]


def test_an_unclosed_quote_takes_no_more_memory_than_a_row_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefillcli.rows.input.source.MAX_ROW_BYTES", 1 << 16)
    path = written(tmp_path / "a.csv", b'prompt\nfirst\n"' + b"a\n" * (1 << 18))
    tracemalloc.start()
    with pytest.raises(PrefillError, match=r"a\.csv: a quote is never closed, and more than 65,536 bytes follow"):
        Source.open([path])
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


@given(st.lists(st.sampled_from([b'"', b'""', b",", b"\n", b"\r\n", b"a", b"\xc3\xa4", b'"a,\n"']), max_size=30))
def test_pieces_show_the_same_quotes_as_the_whole(parts: list[bytes]) -> None:
    form, data = Delimited(","), b"".join(parts)
    whole, by_byte = Quotes(form), Quotes(form)
    whole.read(data)
    for at in range(len(data)):
        by_byte.read(data[at : at + 1])
    assert whole.inside == by_byte.inside
