"""Arrow columns of any type, with values of that type."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from tests.fuzz.texts import numbers, texts

_WHOLE = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
_DAYS = st.dates(datetime.date(1600, 1, 1))
_MOMENTS = st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1))  # what nanoseconds reach


def _whole(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


_SIMPLE: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.string(), texts),
    (pa.large_string(), texts),
    (pa.string_view(), texts),
    (pa.binary(), st.binary(max_size=20)),
    (pa.large_binary(), st.one_of(st.binary(max_size=20), texts.map(lambda text: text.encode()))),
    (pa.binary_view(), st.binary(max_size=20)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    *((kind, _whole(bits)) for bits, kind in _WHOLE.items()),
    (pa.uint8(), st.integers(0, 255)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float16(), st.floats(width=16)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), numbers.map(float)),
    (pa.bool_(), st.booleans()),
    (pa.null(), st.none()),
    (pa.date32(), _DAYS),
    (pa.date64(), _DAYS),
    (pa.time32("s"), st.times().map(lambda time: time.replace(microsecond=0))),
    (pa.time64("us"), st.times()),
    (pa.time64("ns"), st.times()),
    *((pa.timestamp(unit), _MOMENTS.map(lambda at: at.replace(microsecond=0))) for unit in ("s", "ms", "us", "ns")),
    (pa.timestamp("us", "Europe/Berlin"), _MOMENTS),
    (pa.duration("us"), st.timedeltas(datetime.timedelta(-1000), datetime.timedelta(1000))),
    (pa.duration("ns"), st.timedeltas(datetime.timedelta(-1000), datetime.timedelta(1000))),
    (pa.decimal128(10, 2), st.decimals(-(10**7), 10**7, places=2)),
    (pa.decimal256(40, 0), st.integers(-(10**30), 10**30).map(decimal.Decimal)),
]


def _grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists, structs and maps of such types."""
    return inner.flatmap(
        lambda of: st.sampled_from(
            [
                (pa.list_(of[0]), st.lists(st.none() | of[1], max_size=3)),
                (pa.large_list(of[0]), st.lists(of[1], max_size=3)),
                (pa.list_(of[0], 2), st.lists(of[1], min_size=2, max_size=2)),
                (pa.struct([("role", pa.string()), ("content", of[0])]), _message(of[1])),
                (pa.struct([]), st.just({})),
                (pa.map_(pa.string(), of[0]), st.lists(st.tuples(texts, of[1]), max_size=2)),
            ]
        )
    )


def _message(content: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional={"role": st.sampled_from(["user", "tool"]), "content": content})


_TYPES = st.recursive(st.sampled_from(_SIMPLE), _grown, max_leaves=4)
_PROMPTS = st.sampled_from(
    [
        (pa.string(), texts),
        (pa.dictionary(pa.int32(), pa.string()), texts),
        (pa.list_(pa.int64()), st.lists(st.integers(-1, 401), max_size=4)),
        (
            pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
            st.lists(_message(texts), max_size=3),
        ),
    ]
)


@st.composite
def columns(draw: st.DrawFn, rows: int, *, plain: bool = False) -> pa.Array:
    """An array of this length; a `plain` one has a type of prompts in most examples."""
    kind, values = draw(_PROMPTS if plain and draw(st.integers(0, 3)) else _TYPES)
    drawn = draw(st.lists(st.none() | values, min_size=rows, max_size=rows))
    try:
        array = pa.array(drawn, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, OverflowError):
        array = pa.nulls(rows, kind)
    hashable = not pa.types.is_nested(kind) and not pa.types.is_dictionary(kind)
    if hashable and draw(st.booleans()):
        try:
            return array.dictionary_encode()
        except pa.ArrowNotImplementedError:
            return array
    return array
