"""Folders named `key=value` are columns, as pyarrow.dataset reads them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillcli.errors import UsageError
from prefillcli.rows.input.source import Source

VALUES = st.one_of(
    st.integers(-5, 5).map(str),
    st.sampled_from(["2026-01-01", "007", "99999999999", "1.5", "a b/c", "é=1", "true", "__HIVE_DEFAULT_PARTITION__"]),
)


def write(root: Path, kind: str, folders: list[tuple[str, ...]]) -> None:
    """A file with one row in every folder; `kind` is its ending."""
    for number, names in enumerate(folders):
        path = root.joinpath(*names, f"{number}.{kind}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "parquet":
            pq.write_table(pa.table({"prompt": [str(number)]}), path)
        else:
            path.write_text(json.dumps({"prompt": str(number)}) + "\n")


def rows_of(source: Source, *keys: str) -> list[dict[str, Any]]:
    source.select(columns=["prompt", *keys], carried=keys)
    rows = []
    for batch in source.batches():
        assert batch.carried.schema.names == source.carried_schema.names
        carried = batch.carried.to_pylist()
        for at in range(len(batch.rows)):
            row = {name: values[at] for name, values in batch.columns.items()}
            for name, value in carried[at].items():
                known = json.loads(value) if source.kind == "jsonl" and value is not None else value
                assert known == row[name]
            rows.append(row)
    return rows


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["parquet", "jsonl"]),
    values=st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=4, unique=True),
)
def test_keys_are_columns_as_pyarrow_reads_them(kind: str, values: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "n=9" / "data"  # above the directory that is given: no column
        write(root, kind, [(f"day={quote(a, safe='')}", f"x={quote(b, safe='')}") for a, b in values])
        source = Source.open([str(root)])
        form = "parquet" if kind == "parquet" else "json"
        try:
            oracle = ds.dataset(str(root), format=form, partitioning="hive")
        except pa.ArrowInvalid as error:  # a key that is null everywhere: pyarrow gives up
            assert "null" in str(error)  # noqa: PT017
            return
        if kind == "parquet":
            source.select(columns=[], carried=["day", "x"])
            assert source.carried_schema == pa.schema([oracle.schema.field(name) for name in ("day", "x")])
        wanted = sorted(oracle.to_table(columns=["prompt", "day", "x"]).to_pylist(), key=lambda row: row["prompt"])
        assert sorted(rows_of(source, "day", "x"), key=lambda row: row["prompt"]) == wanted
        assert source.partition_keys == ("day", "x")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_keys_of_globs_and_named_files_count_and_missing_ones_are_null(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "in", kind, [("day=1",), ("day=2", "x=a"), ()])
    for inputs in (
        [f"{tmp_path}/in/day=*", f"{tmp_path}/in/2.{kind}"],
        [f"{tmp_path}/in/day=1/*.{kind}", f"{tmp_path}/in/day=2/x=a/1.{kind}", f"{tmp_path}/in/2.{kind}"],
    ):
        assert rows_of(Source.open(inputs), "day", "x") == [
            {"prompt": "0", "day": 1, "x": None},
            {"prompt": "1", "day": 2, "x": "a"},
            {"prompt": "2", "day": None, "x": None},
        ]


def test_a_line_that_cannot_be_read_has_the_keys_of_its_folder(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [("day=1",), ("day=2",)])
    (tmp_path / "day=1" / "0.jsonl").write_text("no json\n")
    source = Source.open([str(tmp_path)]).select(columns=["prompt"], carried=["day"])
    (batch,) = source.batches()
    assert batch.errors[0].code == "invalid_json"
    assert batch.carried["day"].to_pylist() == ["1", "2"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_key_that_is_a_column_too_is_refused_where_it_is_used(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind, [("prompt=x", "day=1")])
    source = Source.open([str(tmp_path)])
    source.select(columns=[], carried=["day"])
    with pytest.raises(UsageError, match="'prompt'"):
        source.select(columns=["prompt"], carried=[])


def test_values_of_keys_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    write(tmp_path / "a", "jsonl", [("day=1",)])
    write(tmp_path / "b", "jsonl", [("day=2",)])
    write(tmp_path / "c", "jsonl", [("plain",)])
    prints = {Source.open([str(tmp_path / name)]).fingerprint() for name in "abc"}
    assert len(prints) == 3
