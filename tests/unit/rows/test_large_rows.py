"""One row that is far too large: an error row, in little memory, and all other rows are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.errors import PrefillError
from prefillcli.rows.input.source import Source, _ShortValues

MiB = 1 << 20
HUGE = 140 * MiB

READ = """
import json, resource, sys
from prefillcli.rows.input.source import Source

path, columns, carried, most, extra = json.loads(sys.argv[1])
source = Source.open([path]).select(columns=columns, carried=carried, max_row_bytes=most)
list(Source.open(["warm.parquet"], columns=["prompt"]).batches())  # the threads and pools that any read takes
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))
rows, errors, lengths = 0, {}, {}
for batch in source.batches():
    rows += len(batch.rows)
    errors |= {row: list(error) for row, error in batch.errors.items()}
    for row, value in zip(batch.rows.tolist(), batch.columns[columns[0]]):
        lengths[row] = len(value) if hasattr(value, "__len__") else value
print(json.dumps([rows, errors, lengths]))
"""


def read_in_little_memory(
    path: Path, columns: list[str], *, carried: list[str] | None = None, most: int = MiB, extra: int = 64 * MiB
) -> tuple[int, dict[int, list[str]], dict[int, Any]]:
    """Rows, errors and lengths of the first column, read where no more than `extra` bytes can be mapped."""
    pq.write_table(pa.table({"prompt": ["a"]}), path.parent / "warm.parquet")
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps([str(path), columns, carried or [], most, extra])],
        cwd=path.parent,
        capture_output=True,
        text=True,
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"},  # the others reserve far more than they use
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows, errors, lengths = json.loads(done.stdout)
    return rows, {int(row): error for row, error in errors.items()}, {int(row): n for row, n in lengths.items()}


def read(path: Path, most: int, columns: tuple[str, ...] = ("prompt",), carried: tuple[str, ...] = ()) -> Any:
    source = Source.open([str(path)]).select(columns=columns, carried=carried, max_row_bytes=most)
    batches = list(source.batches())
    values = [value for batch in batches for value in batch.columns[columns[0]]]
    errors = {row: error.code for batch in batches for row, error in batch.errors.items()}
    return values, errors, pa.concat_tables([batch.carried for batch in batches])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_a_huge_line_is_an_error_row_in_little_memory(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    codec = {"jsonl": None, "jsonl.gz": "gzip", "jsonl.zst": "zstd"}[ending]
    with pa.output_stream(str(path), compression=codec) as file:
        file.write(b'{"prompt":"first"}\n{"prompt":"')
        for _ in range(HUGE // MiB):
            file.write(b"x" * MiB)
        file.write(b'"}\n{"prompt":"last"}\n')
    rows, errors, lengths = read_in_little_memory(path, ["prompt"], extra=32 * MiB)
    assert rows == 3
    assert lengths == {0: 5, 1: None, 2: 4}
    assert {row: error[0] for row, error in errors.items()} == {1: "row_too_large"}
    assert f"{HUGE + 14:,} bytes" in errors[1][1]


def test_the_limit_of_a_line_is_exact_and_blank_lines_are_no_rows(write_jsonl: Callable[..., str]) -> None:
    lines = [b'{"prompt":"%s"}' % (b"x" * size) for size in (86, 87, 88, 500)]
    path = Path(
        write_jsonl([lines[0], lines[1], lines[1] + b"\r", b" " * 5000, lines[2], lines[3], b'{"prompt":"z"}'])
    )
    values, errors, _ = read(path, 100)
    assert errors == {3: "row_too_large", 4: "row_too_large"}
    assert [value and len(value) for value in values] == [86, 87, 87, None, None, 1]


TEXT = st.text(st.sampled_from('ab"\\\\,{}[]:\\n\\u00e4\\u20ac'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(
    row=st.dictionaries(TEXT, VALUES, max_size=4),
    more=st.dictionaries(st.sampled_from(["id", "note", "absent"]), VALUES, min_size=1),
    at=st.integers(0, 4),
    cut=st.integers(1, 40),
    ascii=st.booleans(),
    space=st.sampled_from(["", " ", "\t "]),
)
def test_short_values_of_a_long_line_are_those_that_the_whole_line_has(
    row: dict[str, Any], more: dict[str, Any], at: int, cut: int, ascii: bool, space: str
) -> None:
    members = list(row.items())
    whole = dict([*members[:at], *more.items(), ("prompt", "x" * 90), *members[at:]])
    line = json.dumps(whole, ensure_ascii=ascii, separators=(f",{space}", f"{space}:{space}")).encode()
    found = _ShortValues(["id", "note", "absent"])
    for start in range(0, len(line), cut):
        found.read(line[start : start + cut])
    assert found.found == {name: value for name, value in whole.items() if name in ("id", "note", "absent")}


def test_a_long_line_keeps_its_id_and_its_short_values(write_jsonl: Callable[..., str]) -> None:
    def lines(text: bytes) -> list[bytes]:
        return [
            b'{"id": 1, "prompt": "' + text + b'", "note": {"a": [1, "}"]}}',
            b'{"prompt": "a", "id": 7, "note": "n"}',
            b'{"prompt": "' + text + b'", "note": "' + text + b'", "id": "a\\"b"}',
            b'{"prompt": [' + b"1," * len(text) + b'1], "id": 7}',
            b'[{"id": 9, "prompt": "' + text + b'"}]',
        ]

    path = Path(write_jsonl(lines(b'\\" ' * MiB)))
    source = Source.open([str(path)]).select(columns=["prompt"], carried=["id", "note"], max_row_bytes=100_000)
    (batch,) = source.batches()
    assert {row: error.code for row, error in batch.errors.items()} == dict.fromkeys((0, 2, 3, 4), "row_too_large")
    assert batch.carried["id"].to_pylist() == ["1", "7", '"a\\"b"', "7", None]
    assert batch.carried["note"].to_pylist() == ['{"a":[1,"}"]}', '"n"', None, None, None]


def test_a_line_that_is_not_utf8_keeps_the_values_that_are(write_jsonl: Callable[..., str]) -> None:
    good = {"id": "c", "prompt": "x", "note": 1}
    lines = [b'{"id": "a", "prompt": "caf\xe9", "note": "\xe9"}', b'{"id": "b", "prompt": "x"', good]
    _, errors, carried = read(Path(write_jsonl(lines)), MiB, carried=("id", "note"))
    assert errors == {0: "invalid_utf8", 1: "invalid_json"}
    assert carried["id"].to_pylist() == ['"a"', None, '"c"']
    assert carried["note"].to_pylist() == [None, None, "1"]


def table(rows: int, at: int, value: Any, kind: pa.DataType, small: Any, nullable: bool = True) -> pa.Table:
    values = [small(row) for row in range(rows)]
    values[at] = value
    fields = [pa.field("prompt", kind, nullable=nullable), pa.field("id", pa.int64(), nullable=False)]
    return pa.table({"prompt": values, "id": list(range(rows))}, schema=pa.schema(fields))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("zstd", {"use_dictionary": False}),
        ("zstd", {"use_dictionary": ["prompt"], "data_page_version": "2.0"}),
        ("snappy", {"use_dictionary": False, "nullable": False}),
    ],
)
def test_a_huge_text_of_a_parquet_file_is_an_error_of_its_row_alone(
    tmp_path: Path, codec: str, options: dict[str, Any]
) -> None:
    nullable = options.pop("nullable", True)
    data = table(9000, 5000, "x" * HUGE, pa.string(), lambda row: f"row {row}", nullable)
    path = tmp_path / "a.parquet"
    pq.write_table(data, path, compression=codec, row_group_size=3000, **options)
    rows, errors, lengths = read_in_little_memory(path, ["prompt"], carried=["id"], extra=8 * HUGE)
    assert rows == 9000
    assert {row: error[0] for row, error in errors.items()} == {5000: "row_too_large"}
    assert {row: n for row, n in lengths.items() if row not in errors} == {
        row: len(f"row {row}") for row in range(9000) if row not in errors
    }
    _, errors, carried = read(path, MiB, carried=("id", "prompt"))
    assert carried["id"].to_pylist() == list(range(9000)), "the rows can still be told apart"
    assert [row for row, value in enumerate(carried["prompt"].to_pylist()) if value is None] == list(errors)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "huge", "small"),
    [
        (pa.list_(pa.int32()), lambda: np.arange(HUGE // 4), [1, 2, 3]),
        (pa.list_(pa.int32()), lambda: np.full(HUGE // 4, 7), [7, 7, 7]),  # in a page of a few bytes
        (
            pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
            lambda: [{"role": "user", "content": "x" * HUGE}],
            [{"role": "user", "content": "a"}],
        ),
    ],
    ids=["token-ids", "repeated-token-ids", "messages"],
)
def test_a_huge_list_is_an_error_of_its_row_alone(
    tmp_path: Path, kind: pa.DataType, huge: Callable[[], Any], small: Any
) -> None:
    value = pa.array([huge()], kind)
    others = pa.array([small] * 50, kind)
    path = tmp_path / "a.parquet"
    schema = pa.schema({"prompt": kind})
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=small == [7, 7, 7]) as writer:
        for array in (others, pa.concat_arrays([others, value]), others):
            writer.write_table(pa.table([array], schema=schema), row_group_size=1000)
    del value
    rows, errors, lengths = read_in_little_memory(path, ["prompt"], extra=8 * HUGE)
    assert rows == 151
    assert {row: error[0] for row, error in errors.items()} == {100: "row_too_large"}
    assert lengths == {row: None if row == 100 else len(small) for row in range(151)}


def test_a_large_row_in_a_page_of_usual_size_is_an_error_by_itself_and_keeps_its_id(tmp_path: Path) -> None:
    texts = [f"row {row}" for row in range(3000)]
    texts[7], texts[2999] = "x" * 300_000, "y" * 200_001
    notes = ["n"] * 3000
    notes[9] = "z" * 300_000
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": texts, "note": notes, "id": [f"id {row}" for row in range(3000)]}), path)
    values, errors, carried = read(path, 200_000, carried=("id", "note"))
    assert errors == dict.fromkeys((7, 9, 2999), "row_too_large")
    assert [row for row, value in enumerate(values) if value != texts[row]] == [7, 2999]
    assert carried["id"].to_pylist() == [f"id {row}" for row in range(3000)]
    assert carried["note"].to_pylist() == ["n"] * 9 + [None] + ["n"] * 2990


def test_large_messages_and_token_ids_are_errors_of_their_rows_alone(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "a" * (5000 if row == 3 else 5)}] for row in range(9)]
    ids = [[1] * (2000 if row == 6 else 3) for row in range(9)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": messages, "ids": ids}), path)
    values, errors, carried = read(path, 4000, ("messages", "ids"), ("messages",))
    assert errors == dict.fromkeys((3, 6), "row_too_large")
    assert [value for row, value in enumerate(values) if row not in errors] == messages[:3] + messages[4:6] + messages[
        7:
    ]
    assert carried["messages"].to_pylist()[4] == messages[4]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["prompt", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("kept", "messages"))]
)
def test_a_long_value_that_is_stored_once_and_repeated_does_not_fill_the_memory(tmp_path: Path, name: str) -> None:
    texts = [f"{at}" + "x" * (9 * MiB) for at in range(3)]
    column = pa.DictionaryArray.from_arrays(pa.array([row % 3 for row in range(600)], pa.int32()), texts)
    array = pa.ListArray.from_arrays(list(range(601)), column) if name == "messages" else column
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({name: array, "row": list(range(600))}), path, compression="zstd", store_schema=False)
    columns, carried = (["row"], ["kept"]) if name == "kept" else ([name], [])
    rows, errors, _ = read_in_little_memory(path, columns, carried=carried, most=8 * MiB, extra=800 * MiB)
    assert rows == 600
    assert len(errors) == 600


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["footer", "page"])
def test_sizes_that_are_lies_change_no_row_or_end_in_an_error(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["x" * HUGE, "b"]}), path, compression="zstd", use_dictionary=False)
    group = pq.ParquetFile(path).metadata.row_group(0).column(0)
    data = bytearray(path.read_bytes())
    true = varint(group.total_uncompressed_size)
    if what == "footer":
        at, length = data.rindex(true), len(true)
    else:  # the header's second field, after one of a byte
        at, length = group.data_page_offset + 3, 5
    data[at : at + length] = padded(1000, length)
    path.write_bytes(data)
    if what == "footer":
        rows, errors, _ = read_in_little_memory(path, ["prompt"], extra=5 * HUGE)
        assert rows == 2
        assert {row: error[0] for row, error in errors.items()} == {0: "row_too_large"}
    else:
        with pytest.raises(PrefillError, match=r"a\.parquet"):
            read(path, MiB)


def varint(number: int) -> bytes:
    return padded(number, 0)


def padded(number: int, length: int) -> bytes:
    """Thrift's compact signed integer, in `length` bytes if it would take fewer."""
    number <<= 1
    data = bytearray()
    while number > 127 or len(data) < length - 1:
        data.append(number & 127 | 128)
        number >>= 7
    data.append(number)
    return bytes(data)
