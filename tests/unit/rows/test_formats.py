"""What the output file holds, read back with pyarrow and json."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.rows.output.destination import CsvFormat, JsonlFormat
from prefillcli.rows.output.schema import kinds_of, type_for, typed_column


def lines(table: pa.Table, codec: str | None = None, json_columns: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    file = io.BytesIO()
    JsonlFormat(codec).write(file, table.schema, [table], json_columns)
    data = file.getvalue()
    if codec == "gzip":
        data = gzip.decompress(data)
    elif codec == "zstd":
        data = pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in data.decode().split("\n")[:-1]]


columns = st.fixed_dictionaries(
    {
        'text %s " \\': st.lists(st.none() | st.text(), min_size=3, max_size=3),
        "number": st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3),
        "n": st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3),
        "flag": st.lists(st.none() | st.booleans(), min_size=3, max_size=3),
        "list": st.lists(st.none() | st.lists(st.integers(0, 9), max_size=3), min_size=3, max_size=3),
    }
)


@pytest.mark.parametrize("codec", [None, "gzip", "zstd"])
@given(columns)
def test_json_lines_hold_the_values_of_the_table(codec: str | None, values: dict[str, list[Any]]) -> None:
    types = {"number": pa.float64(), "n": pa.int64(), "flag": pa.bool_(), "list": pa.list_(pa.int64())}
    table = pa.table({name: pa.array(v, types.get(name, pa.string())) for name, v in values.items()})
    assert lines(table, codec) == table.to_pylist()


@given(columns)
def test_csv_holds_the_values_of_the_table_and_gives_them_back(values: dict[str, list[Any]]) -> None:
    types = {"number": pa.float64(), "n": pa.int64(), "flag": pa.bool_(), "list": pa.list_(pa.int64())}
    renamed = {"number": "score", "n": "prompt_tokens", "flag": "truncated", "list": "scores"}  # of an output
    table = pa.table(
        {renamed.get(name, name): pa.array(v, types.get(name, pa.string())) for name, v in values.items()}
    )
    file, form = io.BytesIO(), CsvFormat(",")
    form.write(file, table.schema, [table.slice(0, 2), table.slice(2)])
    file.seek(0)
    (back,) = form.read(file, table.column_names)
    assert back.to_pylist() == table.to_pylist()
    file.seek(0)
    kinds = {field.name: pa.string() if pa.types.is_list(field.type) else field.type for field in table.schema}
    by_arrow = pa.csv.read_csv(
        file,
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(
            column_types=kinds, strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""]
        ),
    ).to_pylist()
    lists = [row["scores"] if row["scores"] is None else json.loads(row["scores"]) for row in by_arrow]
    assert [row | {"scores": own} for row, own in zip(by_arrow, lists, strict=True)] == table.to_pylist()


@given(st.lists(st.tuples(st.none() | st.text(), st.none() | st.text()), min_size=1, max_size=5))
def test_tsv_holds_texts_as_they_are_but_for_tabs_and_line_breaks(rows: list[tuple[str | None, ...]]) -> None:
    table = pa.table({name: pa.array(v, pa.string()) for name, v in zip("ab", zip(*rows, strict=True), strict=True)})
    file, form = io.BytesIO(), CsvFormat("\t")
    form.write(file, table.schema, [table])
    lines = file.getvalue().decode().split("\n")
    assert (lines[0], lines[-1], len(lines)) == ("a\tb", "", len(rows) + 2)
    expected = [
        [(text or "").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r") for text in row] for row in rows
    ]
    assert [line.split("\t") for line in lines[1:-1]] == expected
    file.seek(0)
    (back,) = form.read(file, ["a", "b"])
    assert [[text or "" for text in row.values()] for row in back.to_pylist()] == expected
    assert [form.as_read(row) for row in rows] == [[text or None for text in row] for row in expected]


def test_what_tsv_cannot_hold_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.table({"a": ["x", "y\tz"], "b": ["one\ntwo", '"q'], "c": [1, 2]})
    CsvFormat("\t").write(io.BytesIO(), table.schema, [table])
    assert "TSV cannot hold tabs and line breaks: 2 texts have" in capsys.readouterr().err
    CsvFormat(",").write(io.BytesIO(), table.schema, [table])
    CsvFormat("\t").write(io.BytesIO(), table.schema, [table.select(["c"])])
    assert capsys.readouterr().err == ""


def test_what_csv_does_not_have_is_empty_or_text() -> None:
    table = pa.table(
        {
            "f": [float("inf")],
            "nested": [[{"x": float("nan"), "y": [1.5]}]],
            "time": [datetime.datetime(2026, 1, 2, 3, 4)],
            "raw": [b"\xff"],
            "formula": ["=1+1"],
            "empty": [""],
        }
    )
    file = io.BytesIO()
    CsvFormat(",").write(file, table.schema, [table])
    (row,) = csv.DictReader(io.StringIO(file.getvalue().decode()))
    assert row == {
        "f": "",
        "nested": '[{"x":null,"y":[1.5]}]',
        "time": "2026-01-02T03:04:00",
        "raw": "/w==",
        "formula": "=1+1",
        "empty": "",
    }


@pytest.mark.parametrize("cut", [b'a,b\n1,"2', b"a,b\n1,2\n3", b"a,b\n1\n", b""])
def test_a_csv_output_that_is_cut_is_not_read(cut: bytes) -> None:
    with pytest.raises(ValueError, match=r"no end|fewer fields|not in list"):
        list(CsvFormat(",").read(io.BytesIO(cut), ["a"]))


def test_what_json_does_not_have_is_null_or_text() -> None:
    table = pa.table(
        {
            "f": [float("nan")],
            "g": [float("-inf")],
            "nested": [[{"x": float("nan"), "y": [1.5]}]],
            "day": [datetime.date(2026, 1, 2)],
            "time": [datetime.datetime(2026, 1, 2, 3, 4)],
            "money": [decimal.Decimal("1.50")],
            "raw": [b"\xff"],
        }
    )
    assert lines(table) == [
        {
            "f": None,
            "g": None,
            "nested": [{"x": None, "y": [1.5]}],
            "day": "2026-01-02",
            "time": "2026-01-02T03:04:00",
            "money": "1.50",
            "raw": "/w==",
        }
    ]


def test_json_columns_are_written_as_they_are() -> None:
    table = pa.table({"a": ['{"x":[1]}', None, '"t"'], "b": [1, 2, 3]})
    assert lines(table, json_columns=("a",)) == [{"a": {"x": [1]}, "b": 1}, {"a": None, "b": 2}, {"a": "t", "b": 3}]


def typed(values: list[Any]) -> pa.ChunkedArray:
    texts = pa.chunked_array([pa.array([None if v is None else json.dumps(v) for v in values], pa.string())])
    return typed_column(texts, type_for(kinds_of(texts)))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, -5, None, 2**63 - 1, -(2**63)], pa.int64()),
        ([1.5, 2e300, -0.0, None], pa.float64()),
        ([1, 2.5], pa.float64()),
        ([True, None, False], pa.bool_()),
        (["a", '\u00e9\n"', None, ""], pa.string()),
        ([None], pa.string()),
    ],
)
def test_a_column_of_one_kind_gets_its_type(values: list[Any], kind: pa.DataType) -> None:
    column = typed(values)
    assert column.type == kind
    assert column.to_pylist() == values


def test_mixed_columns_are_text() -> None:
    assert typed([1, "a", [2], {"b": None}, True]).to_pylist() == ["1", "a", "[2]", '{"b": null}', "true"]
    assert typed([2**63, 1]).to_pylist() == [str(2**63), "1"]


@given(
    st.lists(st.none() | st.integers())
    | st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False))
    | st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"])))
    | st.lists(st.none() | st.booleans())
)
def test_typed_values_are_those_of_json(values: list[Any]) -> None:
    column = typed(values)
    if column.type == pa.string() and any(isinstance(value, int) for value in values):
        values = [None if value is None else str(value) for value in values]
    assert column.to_pylist() == values
