"""A Parquet footer whose numbers disagree: nothing of the file is read, or all of its rows are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefillcli.errors import PrefillError
from prefillcli.rows.input.source import Source
from prefillcli.rows.output.destination import ParquetFormat
from tests.parquet_footers import Field, fields_of, with_numbers

TEXTS = [f"row {number} {number * 7919 % 101}" for number in range(20)]
LISTS = [list(range(number % 3)) for number in range(20)]
NAMES = ("prompt", "ids")


def saved(tmp_path: Path, **options: Any) -> Path:
    path = tmp_path / "a.parquet"
    options = {"row_group_size": 10, "data_page_size": 1, "write_batch_size": 4} | options
    pq.write_table(pa.table({"prompt": TEXTS, "ids": LISTS, "other": TEXTS}), path, **options)
    return path


def found(path: Path, names: tuple[str, ...] = NAMES) -> list[tuple[Any, ...]]:
    """The rows; those that cannot be read are empty."""
    rows: list[tuple[Any, ...]] = []
    for batch in Source.open([str(path)], columns=names).batches():
        values = list(zip(*(batch.columns[name] for name in names), strict=True)) or [()] * len(batch.rows)
        for number, row in zip(batch.rows.tolist(), values, strict=True):
            rows.append(() if number in batch.errors else tuple(map(plain, row)))
    return rows


def plain(value: Any) -> Any:
    return value if isinstance(value, str) or value is None else list(value)


ROWS = list(zip(TEXTS, LISTS, strict=True))


def numbers(path: Path, name: str) -> list[tuple[Field, int]]:
    return [(field, number) for field, number in fields_of(path.read_bytes()) if field.name == name]


@pytest.mark.parametrize("by", [-2, 2, -100])
@pytest.mark.parametrize("what", ["num_rows", "group.num_rows"])
def test_row_groups_with_other_rows_than_the_file_are_refused(tmp_path: Path, what: str, by: int) -> None:
    path = saved(tmp_path)
    field, number = numbers(path, what)[-1]
    path.write_bytes(with_numbers(path.read_bytes(), [(field, number + by)]))
    with pytest.raises(PrefillError, match=r"a\.parquet: its footer has .* rows, but .* in its row groups"):
        Source.open([str(path)])


@pytest.mark.parametrize("by", [-1, 1])
def test_columns_with_other_rows_than_their_row_group_are_refused_at_once(tmp_path: Path, by: int) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for place, (field, number) in enumerate(numbers(path, "num_values")):
        path.write_bytes(with_numbers(whole, [(field, number + by)]))
        if place % 3 == 0:
            with pytest.raises(PrefillError, match=r"column prompt: .* values in a row group of 10 rows"):
                Source.open([str(path)], columns=NAMES)
        elif place % 3 == 1 and by < 0:  # a list may have more elements than there are rows: its pages tell
            with pytest.raises(PrefillError, match=r"a\.parquet"):
                found(path)
        else:
            assert found(path) == ROWS  # of a column that nobody asked for, or as its pages have them
    field = numbers(path, "num_values")[1][0]
    path.write_bytes(with_numbers(whole, [(field, 9)]))
    with pytest.raises(PrefillError, match=r"column ids\.list\.element: 9 values in a row group of 10 rows"):
        Source.open([str(path)], columns=NAMES)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_pages_with_fewer_rows_than_all_of_the_footer_says_are_refused(tmp_path: Path, version: str) -> None:
    path = saved(tmp_path, data_page_version=version)
    whole = path.read_bytes()
    counts = [("num_rows", 0), ("group.num_rows", -1), *(("num_values", at) for at in (-3, -2, -1))]
    changed = [numbers(path, name)[at] for name, at in counts]
    path.write_bytes(with_numbers(whole, [(field, number + 2) for field, number in changed]))
    with pytest.raises(PrefillError, match=r"a\.parquet: a row group of 12 rows has 10"):
        found(path)


@pytest.mark.parametrize("name", ["data_page_offset", "dictionary_page_offset"])
def test_columns_that_lie_in_one_place_are_refused(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, data_page_size=1 << 20, use_dictionary=name != "data_page_offset")
    places = numbers(path, name)
    prompts = [place for place, _ in enumerate(places) if place % 3 == 0]
    first, second = (places[place] for place in prompts)
    path.write_bytes(with_numbers(path.read_bytes(), [(second[0], first[1])]))
    with pytest.raises(PrefillError, match="column prompt: its place in the file is that of other data as well"):
        Source.open([str(path)], columns=["prompt"])


def test_any_other_number_in_a_footer_is_of_no_consequence_or_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    read = 0
    for field, number in fields_of(whole):
        for other in (0, 1, -1, number - 1, number + 1, 10**6, 10**10):
            path.write_bytes(with_numbers(whole, [(field, other)]))
            try:
                assert found(path) == ROWS, (field, number, other)
                read += 1
            except PrefillError as error:
                assert "a.parquet" in str(error)  # noqa: PT017 - either is right
    assert read > 100


def test_an_output_with_such_a_footer_is_not_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with path.open("rb") as file:
        assert sum(len(table) for table in ParquetFormat().read(file, ["prompt"])) == 20
    field, number = numbers(path, "group.num_rows")[0]
    path.write_bytes(with_numbers(path.read_bytes(), [(field, number - 2)]))
    with path.open("rb") as file, pytest.raises(OSError, match="its footer has 20 rows, but 8, 10"):
        list(ParquetFormat().read(file, ["prompt"]))


@pytest.mark.parametrize("codec", ["snappy", "zstd", "gzip", "none"])
@pytest.mark.parametrize("version", ["1.0", "2.6"])
def test_footers_as_pyarrow_writes_them_agree(tmp_path: Path, codec: str, version: str) -> None:
    table = pa.table(
        {
            "prompt": ["a", None, "", "d"] * 50,
            "ids": [None, [], [1, 2], [None]] * 50,
            "deep": [[{"a": [1, None], "b": None}], [], None, [None]] * 50,
            "map": pa.array([[("k", 1)], [], None, [("a", None)]] * 50, pa.map_(pa.string(), pa.int64())),
            "none": pa.nulls(200),
        }
    )
    path = tmp_path / "a.parquet"
    more: list[dict[str, Any]] = [
        {},
        {"use_dictionary": False},
        {"write_page_index": True, "data_page_version": "2.0"},
    ]
    for options in more:
        options |= {"compression": codec, "version": version, "row_group_size": 64, "data_page_size": 20}
        pq.write_table(table, path, **options)
        source = Source.open([str(path)], columns=table.column_names)
        assert sum(len(batch.rows) for batch in source.batches()) == 200
    pq.write_table(table.slice(0, 0), path)
    assert list(Source.open([str(path)], columns=table.column_names).batches()) == []
