"""Parquet: every type a prompt, an id or a kept column comes in; damage; bounded memory."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefillcli.errors import PrefillError, UsageError
from prefillcli.rows.input.source import Source
from prefillcli.rows.records import RowBatch


def text_array(values: list[bytes], kind: pa.DataType) -> pa.Array:
    """An array of strings that pyarrow does not check for valid UTF-8."""
    data = pa.array(values, pa.large_binary() if kind == pa.large_string() else pa.binary())
    return pa.Array.from_buffers(kind, len(data), data.buffers())


def save(tmp_path: Path, name: str = "a.parquet", row_group_size: int | None = None, **columns: Any) -> str:
    path = str(tmp_path / name)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def read(path: str, columns: tuple[str, ...] = ("prompt",), carried: tuple[str, ...] = ()) -> Any:
    batches = list(Source.open([path], columns=columns, carried=carried).batches())
    values = {name: [value for batch in batches for value in batch.columns[name]] for name in columns}
    errors = {row: error for batch in batches for row, error in batch.errors.items()}
    return values, errors, pa.concat_tables([batch.carried for batch in batches])


TEXTS = ["a", None, "b\u00e9\U0001f600", "", "a"]


@pytest.mark.parametrize(
    "array",
    [
        pa.array(TEXTS, pa.string()),
        pa.array(TEXTS, pa.large_string()),
        pa.array(TEXTS, pa.string_view()),
        pa.array(TEXTS).dictionary_encode(),
        pa.DictionaryArray.from_arrays(pa.array([0, None, 1, 2, 0], pa.uint8()), ["a", "b\u00e9\U0001f600", ""]),
        pa.array([text and text.encode() for text in TEXTS], pa.binary()),
        pa.array([None if text is None else text.encode() for text in TEXTS], pa.large_binary()),
    ],
    ids=lambda array: str(array.type)[:30],
)
def test_every_string_type_gives_the_same_texts(tmp_path: Path, array: pa.Array) -> None:
    values, errors, kept = read(save(tmp_path, prompt=array), carried=("prompt",))
    assert values["prompt"] == TEXTS
    assert not errors
    assert kept.to_pylist() == pa.table({"prompt": array}).to_pylist()
    assert not pa.types.is_dictionary(kept.schema.field("prompt").type)


def test_messages_come_as_lists_of_dicts(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "a"}], None, [], [{"role": "user", "content": None}]]
    values, _, _ = read(save(tmp_path, messages=messages), ("messages",))
    assert values["messages"] == [*messages[:3], [{"role": "user"}]]  # a null is a key that is not there


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64())])
def test_token_ids_come_as_integer_arrays(tmp_path: Path, kind: pa.DataType) -> None:
    lists = [[1, 2, 3], None, [], [7], [5, 6]]
    values, _, _ = read(save(tmp_path, ids=pa.array(lists, kind)), ("ids",))
    assert [value if value is None else value.tolist() for value in values["ids"]] == lists


def test_token_ids_of_a_fixed_size_and_with_nulls_inside(tmp_path: Path) -> None:
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    values, _, _ = read(save(tmp_path, a=fixed, b=[[1, None], [2], None]), ("a", "b"))
    assert [value if value is None else list(value) for value in values["a"]] == [[1, 2], None, [3, 4]]
    assert [value if value is None else list(value) for value in values["b"]] == [[1, None], [2], None]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("encode", [False, True])
def test_invalid_utf8_in_a_prompt_is_an_error_of_that_row_alone(
    tmp_path: Path, kind: pa.DataType, encode: bool
) -> None:
    array = text_array([b"good", b"\xff\xfe", "gr\u00fcn".encode(), b"bad\xc3"], kind)
    path = save(tmp_path, prompt=array.dictionary_encode() if encode else array)
    values, errors, _ = read(path)
    assert values["prompt"] == ["good", None, "gr\u00fcn", None]
    assert {row: error.code for row, error in errors.items()} == {1: "invalid_utf8", 3: "invalid_utf8"}
    assert "prompt" in errors[1].detail


def test_invalid_utf8_inside_messages_is_an_error_of_that_row_alone(tmp_path: Path) -> None:
    contents = text_array([b"a", b"\xff", b"c"], pa.string())
    messages = pa.StructArray.from_arrays([pa.array(["user"] * 3), contents], ["role", "content"])
    array = pa.ListArray.from_arrays([0, 1, 2, 3], messages)
    values, errors, kept = read(save(tmp_path, m=array), ("m",), carried=("m",))
    assert values["m"] == [[{"role": "user", "content": "a"}], None, [{"role": "user", "content": "c"}]]
    assert list(errors) == [1]
    assert kept["m"].to_pylist()[1] is None


def test_invalid_utf8_in_a_kept_column_is_an_error_of_that_row_and_the_value_is_mended(tmp_path: Path) -> None:
    path = save(tmp_path, prompt=["p"] * 2, k=text_array([b"ok", b"\xffx"], pa.string()))
    _, errors, kept = read(path, carried=("k",))
    assert {row: error.code for row, error in errors.items()} == {1: "invalid_utf8"}
    assert kept["k"].to_pylist() == ["ok", "\ufffdx"]


def test_a_missing_column_is_a_usage_error_that_lists_the_others(tmp_path: Path) -> None:
    path = save(tmp_path, text=["a"], label=[1])
    with pytest.raises(UsageError, match=r"'prompt'.*a\.parquet\n.*text, label"):
        Source.open([path], columns=["prompt"])
    with pytest.raises(UsageError, match="'id'"):
        Source.open([path], columns=["text"], carried=["id"])


def test_a_column_that_a_file_has_twice_is_a_usage_error_unless_it_is_not_needed(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    texts = pa.array(["a", "b"])
    pq.write_table(pa.Table.from_arrays([texts, texts, texts], names=["prompt", "id", "id"]), path)
    assert read(path)[0] == {"prompt": ["a", "b"]}
    for chosen in ({"columns": ("id",)}, {"carried": ("id",)}, {"optional": ("id",)}):
        named: dict[str, Any] = {"columns": ("prompt",), "carried": ()} | chosen
        with pytest.raises(UsageError, match=r"two columns of .*a\.parquet are named 'id'\nrename or drop"):
            Source.open([path]).select(**named)


def test_a_column_missing_in_the_second_file_is_found_at_open(tmp_path: Path) -> None:
    paths = [save(tmp_path, prompt=["a"]), save(tmp_path, "b.parquet", text=["a"])]
    with pytest.raises(UsageError, match=r"b\.parquet"):
        Source.open(paths, columns=["prompt"])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([1]), pa.array([2**63], pa.uint64())),
        (pa.array([2**53 + 1]), pa.array([0.5])),
        (pa.array([0.5]), pa.array([2**60 + 1])),
        (pa.array([253_402_300_800_000_000]).view(pa.timestamp("us")), pa.array([1]).view(pa.timestamp("ns"))),
        (pa.array([{"a": 2**53 + 1}]), pa.array([{"a": 0.5}])),
        (pa.array([Decimal("12345678.91")]), pa.array([0.5], pa.float32())),
    ],
    ids=lambda array: str(array.type),
)
def test_kept_values_that_no_common_type_holds_are_refused_at_open(
    tmp_path: Path, one: pa.Array, other: pa.Array
) -> None:
    paths = [save(tmp_path, f"{name}.parquet", n=array) for name, array in (("a", one), ("b", other))]
    with pytest.raises(UsageError) as caught:
        Source.open(paths, carried=["n"])
    assert f"column 'n' is {one.type} in {paths[0]} but {other.type} in {paths[1]}" in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([1]), pa.array([2], pa.uint64())),
        (pa.array([2**53]), pa.array([0.5])),
        (pa.array([5]).view(pa.timestamp("us")), pa.array([1]).view(pa.timestamp("ns"))),
        (pa.array([{"a": 1}]), pa.array([{"b": 2}])),
    ],
    ids=lambda array: str(array.type),
)
def test_kept_values_of_two_types_are_carried_where_one_type_holds_them(
    tmp_path: Path, one: pa.Array, other: pa.Array
) -> None:
    paths = [save(tmp_path, f"{name}.parquet", n=array) for name, array in (("a", one), ("b", other))]
    found = pa.concat_tables([batch.carried for batch in Source.open(paths, carried=["n"]).batches()])["n"]
    assert found.equals(pa.chunked_array([each.cast(found.type) for each in (one, other)]))


def test_a_damaged_page_fails_by_name_after_the_rows_before_it(tmp_path: Path) -> None:
    texts = [f"{row} {hash(row * 7)} {'x' * (row % 50)}" for row in range(20_000)]
    path = Path(save(tmp_path, prompt=texts, row_group_size=5000))
    data = bytearray(path.read_bytes())
    second = pq.ParquetFile(path).metadata.row_group(2).column(0)
    start = second.dictionary_page_offset or second.data_page_offset
    data[start : start + 2000] = b"\xa5" * 2000
    path.write_bytes(data)
    rows: list[int] = []
    batches = Source.open([str(path)], columns=["prompt"]).batches()
    with pytest.raises(PrefillError, match=r"a\.parquet"):
        rows.extend(row for batch in batches for row in batch.rows)
    assert rows == list(range(10_000))


def test_batches_are_bounded_in_rows_and_bytes_and_the_same_every_time(tmp_path: Path) -> None:
    texts = ["x" * (40_000 if row % 3 == 0 else 10) for row in range(3000)]
    path = save(tmp_path, prompt=[f"{row}{text}" for row, text in enumerate(texts)], row_group_size=2500)
    first = list(Source.open([path], columns=["prompt"]).batches())
    assert all(len(batch.rows) <= 2048 and batch.nbytes <= 9 << 20 for batch in first)
    assert np.concatenate([batch.rows for batch in first]).tolist() == list(range(3000))
    again = Source.open([path], columns=["prompt"]).batches()
    assert [batch.rows.tolist() for batch in again] == [batch.rows.tolist() for batch in first]


def test_a_long_text_repeated_over_rows_is_held_once_but_counted_in_full(tmp_path: Path) -> None:
    history = "h" * 100_000
    path = save(tmp_path, prompt=[history] * 500)
    batches: list[RowBatch] = list(Source.open([path], columns=["prompt"]).batches())
    assert len({id(value) for batch in batches for value in batch.columns["prompt"]}) <= len(batches)
    assert sum(batch.nbytes for batch in batches) >= 500 * 100_000
    assert len(batches) >= 5


def test_reading_a_large_row_group_stays_bounded_in_memory(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    texts = [random.bytes(1500).hex() for _ in range(30_000)]
    path = save(tmp_path, prompt=texts, id=list(range(30_000)), row_group_size=30_000)
    del texts
    before = pa.total_allocated_bytes()
    peak = 0
    for _ in Source.open([path], columns=["prompt"], carried=["id"]).batches():
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert peak < 60 << 20  # the row group holds 90 MB


def test_only_the_needed_columns_are_read(tmp_path: Path) -> None:
    path = Path(save(tmp_path, junk=["j" * 1000] * 100, prompt=["a"] * 100))
    data = bytearray(path.read_bytes())
    junk = pq.ParquetFile(path).metadata.row_group(0).column(0)
    start = junk.dictionary_page_offset or junk.data_page_offset
    data[start : start + junk.total_compressed_size] = b"\0" * junk.total_compressed_size
    path.write_bytes(data)
    assert read(str(path))[0]["prompt"] == ["a"] * 100


def test_a_column_whose_name_begins_like_another_is_not_mixed_up(tmp_path: Path) -> None:
    path = save(tmp_path, **{"a.b": ["dotted"], "a": [{"b": "nested", "c": 1}], "ab": ["longer"]})
    values, _, _ = read(path, ("a.b", "a", "ab"))
    assert values == {"a.b": ["dotted"], "a": [{"b": "nested", "c": 1}], "ab": ["longer"]}


def test_a_footer_that_ends_arrows_process_is_an_error(tmp_path: Path) -> None:
    path = Path(save(tmp_path, prompt=["a", "b"], id=[1, 2]))
    optional, required = b"\x25\x02\x18\x02id", b"\x25\x00\x18\x02id"  # of its schema, where its pages have nulls
    assert path.read_bytes().count(optional) == 1
    path.write_bytes(path.read_bytes().replace(optional, required))
    code = "import sys; from prefillcli.rows.input.source import Source; Source.open(sys.argv[1:], carried=['id'])"
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1  # not that of a signal
    assert f"{path}: Definition level histogram size mismatch" in ended.stderr
    assert read(str(path))[0] == {"prompt": ["a", "b"]}


def test_any_wrong_byte_of_repeated_texts_is_read_or_refused(tmp_path: Path) -> None:
    path = Path(save(tmp_path, prompt=["a", "b", "c"] * 4))
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for at in range(4, footer):
        for flip in (1, 2, 3, 255):
            path.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
            try:
                assert len(read(str(path))[0]["prompt"]) == 12
            except PrefillError as error:
                assert "a.parquet" in str(error)  # noqa: PT017 - either is right


def test_a_row_with_views_of_texts_in_a_list_may_be_too_large(tmp_path: Path) -> None:
    values = pa.array([["x" * 30], ["x" * 90_000], None], pa.list_(pa.string_view()))
    path = save(tmp_path, prompt=["a", "b", "c"], kept=values)
    source = Source.open([path]).select(columns=("prompt",), carried=("kept",), max_row_bytes=500)
    (batch,) = source.batches()
    assert list(batch.errors) == [1]
    assert batch.carried.column("kept").to_pylist() == [["x" * 30], None, None]
