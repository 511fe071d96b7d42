"""Ids of every type that Parquet holds: found again where they repeat, and written as they were read."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefillcli.core.windows import SeenIds
from prefillcli.rows.input.source import Source
from prefillcli.rows.output.schema import kinds_of, type_for, typed_column
from prefillcli.rows.output.tallies import shown_ids
from prefillcli.rows.values import as_json, plain_column, plain_type, to_python

SMALL = st.integers(-3, 120)
TEXTS = st.text(max_size=3)
TYPES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32(), pa.int64()), SMALL),
    **{kind: st.integers(0, 5) for kind in (pa.uint8(), pa.uint16(), pa.uint32())},
    pa.uint64(): st.integers(2**64 - 5, 2**64 - 1),
    **{kind: st.sampled_from([0.0, -0.0, 1.5, -2.0, np.inf]) for kind in (pa.float32(), pa.float64())},
    pa.bool_(): st.booleans(),
    pa.date32(): SMALL,
    **dict.fromkeys((pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")), st.integers(0, 120)),
    **{pa.timestamp(unit): SMALL for unit in ("s", "ms", "us", "ns")},
    pa.timestamp("ns", "Europe/Vienna"): SMALL,
    **{pa.duration(unit): SMALL for unit in ("s", "ms", "us", "ns")},
    pa.decimal128(9, 2): st.decimals(-2, 2, places=1),
    pa.decimal256(40, 3): st.decimals(-2, 2, places=1),
    pa.string(): TEXTS,
    pa.large_string(): TEXTS,
    pa.string_view(): TEXTS,
    pa.binary(): st.binary(max_size=3),
    pa.large_binary(): st.binary(max_size=3),
    pa.binary(2): st.binary(min_size=2, max_size=2),
    pa.dictionary(pa.int32(), pa.string()): TEXTS,
    pa.list_(pa.int32()): st.lists(SMALL, max_size=2),
    pa.list_(pa.timestamp("ns")): st.lists(SMALL, max_size=2),
    pa.struct([("a", pa.int32()), ("b", pa.timestamp("ns"))]): st.fixed_dictionaries({"a": SMALL, "b": SMALL}),
}


def arrays() -> st.SearchStrategy[pa.Array]:
    """Some values of one type, of which several are equal or null."""
    return st.one_of(
        [
            st.lists(st.none() | values, min_size=2, max_size=12).map(lambda some, kind=kind: make(some, kind))
            for kind, values in TYPES.items()
        ]
    )


def make(values: list[Any], kind: pa.DataType) -> pa.Array:
    """An array of times too from integers."""
    if pa.types.is_temporal(kind) and not pa.types.is_nested(kind):
        width = pa.int32() if kind.bit_width == 32 else pa.int64()
        return pa.array(values, width).view(kind)
    return pa.array(values, kind)


def repeated(array: pa.Array) -> set[int]:
    """By pyarrow, the positions whose value an earlier one has, and of nulls."""
    if pa.types.is_floating(array.type):
        array = pc.add(array, pa.scalar(0.0, array.type))
    if not pa.types.is_nested(array.type):
        codes = array.cast(plain_type(array.type)).dictionary_encode().indices.to_pylist()
    else:
        plain = {pa.timestamp("ns"): pa.int64()}
        if pa.types.is_list(array.type):
            array = array.cast(pa.list_(plain.get(array.type.value_type, array.type.value_type)))
        else:
            array = array.cast(pa.struct([(f.name, plain.get(f.type, f.type)) for f in array.type]))
        codes = [None if value is None else str(value) for value in array.to_pylist()]
    return {at for at, code in enumerate(codes) if code is None or code in codes[:at]}


@given(arrays())
def test_repeated_ids_of_every_type_are_found(array: pa.Array) -> None:
    column = array.cast(plain_type(array.type)) if not pa.types.is_nested(array.type) else array
    found = SeenIds().check(np.arange(len(array)), pa.chunked_array([column]))
    assert set(found) == repeated(array)
    for at, error in found.items():
        assert error.code == ("duplicate_id" if array[at].is_valid else "null_id")


@given(arrays(), st.integers(1, 11))
def test_ids_in_another_batch_are_found_as_well(array: pa.Array, cut: int) -> None:
    seen, found = SeenIds(), set()
    column = array.cast(plain_type(array.type)) if not pa.types.is_nested(array.type) else array
    for start, piece in ((0, column[:cut]), (cut, column[cut:])):
        found |= set(seen.check(np.arange(start, start + len(piece)), pa.chunked_array([piece])))
    assert found == repeated(array)


@given(array=arrays())
def test_ids_of_every_type_are_carried_and_written(tmp_path_factory: pytest.TempPathFactory, array: pa.Array) -> None:
    path = tmp_path_factory.getbasetemp() / "ids.parquet"
    pq.write_table(pa.table({"id": array}), path)
    stored = pq.read_table(path)["id"]
    (batch,) = Source.open([str(path)], carried=["id"]).batches()
    carried = batch.carried["id"]
    assert carried.equals(stored.cast(plain_type(stored.type)))
    assert len(shown_ids(carried, False)) == len([json.loads(text) for text in as_json(carried)]) == len(array)
    assert [text == "null" for text in as_json(carried)] == [
        not value.is_valid or (pa.types.is_floating(array.type) and not np.isfinite(value.as_py())) for value in stored
    ]


def test_nanoseconds_are_written_to_the_last_digit() -> None:
    moment = pa.array([1_767_225_600_123_456_789], pa.int64())
    assert as_json(pa.chunked_array([moment.view(pa.timestamp("ns"))])) == ['"2026-01-01T00:00:00.123456789"']
    zoned = moment.view(pa.timestamp("ns", "Europe/Vienna"))
    assert as_json(pa.chunked_array([zoned])) == ['"2026-01-01T00:00:00.123456789+00:00"']
    assert as_json(pa.chunked_array([pa.array([1_000_000_001]).view(pa.duration("ns"))])) == ['"PT1.000000001S"']
    assert as_json(pa.chunked_array([pa.array([1]).view(pa.time64("ns"))])) == ['"00:00:00.000000001"']


TIMES = [
    *(pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "Asia/Tokyo", "tzutc()")),
    *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
    *(pa.date32(), pa.date64()),
]

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def time_arrays() -> st.SearchStrategy[pa.Array]:
    """Some times of one type, of all that it holds."""

    def of(kind: pa.DataType) -> st.SearchStrategy[pa.Array]:
        bits = {pa.date32(): 31, pa.date64(): 62}.get(kind, 63)  # the day that a date64 lies in begins before it
        numbers = st.none() | st.integers(1 - 2**bits, 2**bits - 1) | st.integers(-(2**31), 2**31 - 1)
        if kind == pa.date64():
            numbers = numbers.map(lambda number: number and number // 86_400_000 * 86_400_000)
        return st.lists(numbers, min_size=1, max_size=5).map(lambda some: make(some, kind))

    return st.sampled_from(TIMES).flatmap(of)


def as_arrow_says(value: pa.Scalar) -> str | None:
    """A time as pyarrow's own cast writes it: in UTC, a duration as its count. None where it writes none."""
    kind = value.type
    bare = value.cast(pa.timestamp(kind.unit)) if pa.types.is_timestamp(kind) else value
    text = str(bare.cast(pa.string()).as_py())
    return None if "out of range" in text else text


@given(time_arrays())
@example(make([0, 253_402_300_800_000_000, None], pa.timestamp("us")))
@example(make([0, 253_402_300_799], pa.timestamp("s", "Asia/Tokyo")))
@example(make([1_000, 1], pa.timestamp("ns")))
def test_a_time_that_python_cannot_hold_is_a_text_in_its_own_row_alone(array: pa.Array) -> None:
    values = to_python(array)
    for value, scalar in zip(values, array, strict=True):
        assert value == to_python(pa.array([scalar], array.type))[0], "it does not depend on the rows beside it"
        if isinstance(value, datetime.timedelta):
            count = value // datetime.timedelta(microseconds=1)
            assert count * PER_SECOND[array.type.unit] == scalar.value * 10**6
        elif not isinstance(value, str):  # Arrow takes it back as the same time
            assert pa.scalar(value, array.type).equals(scalar)
        elif pa.types.is_duration(array.type):
            sign, count = (-1 if value.startswith("-") else 1), value.lstrip("-").removeprefix("PT").removesuffix("S")
            assert str(sign * int(count.replace(".", ""))) == as_arrow_says(scalar)
        elif (said := as_arrow_says(scalar)) is not None:
            assert value.removesuffix("+00:00").replace("T", " ") == said
    nested = pa.StructArray.from_arrays([array, pa.ListArray.from_arrays(range(len(array) + 1), array)], ["a", "b"])
    assert to_python(nested) == [{"a": value, "b": [value]} for value in values]
    assert [json.loads(text) for text in as_json(pa.chunked_array([nested]))]


@pytest.mark.parametrize(
    ("texts", "repeats"),
    [
        (["1", "1.0", '"1"', "2", '"1.0"'], {2, 4}),
        (["100.0", "100", "-0.0", "0.0", "0"], {3}),
        (["true", '"true"', '"\\u00e4"', '"ä"', "[1]", '"[1]"'], {1, 3, 5}),
        (["123456789012345678901234567890", '"123456789012345678901234567890"'], {1}),
        (['"a"', '"a"', '"A"'], {1}),
        (["9007199254740993", "9007199254740992"], set()),
        (['{"a":1}', '{"a":1}', "true", '"True"'], {1}),
    ],
)
def test_json_ids_are_equal_where_their_texts_are(texts: list[str], repeats: set[int]) -> None:
    assert set(SeenIds(json=True).check(np.arange(len(texts)), pa.chunked_array([texts]))) == repeats


JSON_IDS = st.one_of(
    st.integers(-2, 2),
    st.floats(-2, 2, width=16),
    st.booleans(),
    TEXTS,
    st.integers(2**53 - 1, 2**53 + 2),
    st.just([1]),
)


@given(st.lists(st.one_of(JSON_IDS, JSON_IDS.map(json.dumps)), max_size=12))
@example([2**53, 2**53 + 1, 0.5])  # as floats, the first two are one
def test_ids_of_json_lines_that_are_no_duplicates_are_written_as_different_texts(ids: list[Any]) -> None:
    column = pa.chunked_array([pa.array([json.dumps(each) for each in ids], pa.string())])
    repeats = SeenIds(json=True).check(np.arange(len(ids)), column)
    typed = typed_column(column, type_for(kinds_of(column), ids=True))
    written = [text for at, text in enumerate(as_json(typed)) if at not in repeats]
    assert len(set(written)) == len(written)
    positive = [{text.replace("-0.0", "0.0") for text in some} for some in (written, as_json(typed))]
    assert positive[0] == positive[1]  # what is called a duplicate is one; both zeros of floats are


def test_hashes_are_the_same_in_every_process() -> None:
    code = (
        "import pyarrow as pa; from prefillcli.core.windows import _keys; "
        "print(_keys(pa.array(['a', 'é'])), _keys(pa.array([[1], [2]])))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
    assert b"[" in said.pop()


def test_other_values_of_the_same_type_are_no_duplicates() -> None:
    day = datetime.date(2026, 1, 1)
    for array in (
        pa.array([day, day + datetime.timedelta(1)], pa.date64()),
        pa.array([Decimal("1.00"), Decimal("1.01")]),
        pa.array([np.float16(1.5), np.float16(-1.5)], pa.float16()),
        pa.array([[("a", 1)], [("a", 2)]], pa.map_(pa.string(), pa.int64())),
    ):
        assert SeenIds().check(np.arange(2), pa.chunked_array([array])) == {}


def test_views_inside_lists_travel_as_texts_whose_rows_can_be_taken() -> None:
    array = pa.array([None, ["a"]], pa.list_(pa.string_view()))
    flat, bad = plain_column(array, plain_type(array.type))
    assert flat.take(pa.array([1, 0])).to_pylist() == [["a"], None]
    assert not bad
