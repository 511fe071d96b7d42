"""Values of Arrow columns as Python values, with invalid UTF-8 kept to the rows that have it, and as JSON texts."""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.stats.arrays import Int64Array

_ELEMENT_BYTES = 8  # an empty element of a list takes memory too


def python_values(array: pa.Array) -> tuple[list[Any], dict[int, str]]:
    """Return the values of a column [rows], and by position the faults of texts that are not valid UTF-8.

    Bytes count as text. A list of integers without nulls comes as an integer array. Equal entries of a
    dictionary share one Python object, so a long text repeated over rows is held once.
    """
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _from_dictionary(array)
    if is_text(kind):
        return _texts(array)
    if _is_integer_list(kind) and array.flatten().null_count == 0:
        return _integer_lists(array), {}
    try:
        return to_python(array), {}
    except UnicodeDecodeError:
        return _one_by_one(array, _scalar, " of a nested text")


def raw_values(array: pa.Array) -> tuple[list[Any], dict[int, str]]:
    """Return the same, but bytes as they are: those of files, not of texts."""
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if pa.types.is_binary(kind) or kind in (pa.large_binary(), pa.binary_view()):
        return array.to_pylist(), {}
    return python_values(array)


def without_nulls(value: Any) -> Any:
    """Return a value whose objects lack the keys that have a null, at every depth.

    In Arrow every object of a column has the keys of all others, so a null shows no more than that the key is not
    there. Nulls in lists stay.
    """
    try:
        return _without_nulls(value)
    except RecursionError:  # whoever reads it will report that
        return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def to_python(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Convert like `to_pylist`, but times that Python cannot hold become text in ISO 8601, each by itself.

    Those are nanoseconds, years before 1 and after 9999, zones without a rule here, and durations of over a billion
    days. Raises UnicodeDecodeError for a text that is not valid UTF-8.
    """
    try:
        held = column
        if _counts_nanoseconds(column.type):  # with pandas installed, `to_pylist` would make its own times of them
            held = column.cast(_in_microseconds(column.type))
        values: list[Any] = held.to_pylist()
    except UnicodeDecodeError:
        raise
    except (*_NO_TIME, NotImplementedError):
        values = [_scalar(scalar) for scalar in column]
    return values


# Times that Python cannot hold: a nanosecond is lost, it is out of range, or its zone is unknown.
_NO_TIME = (ValueError, OverflowError, LookupError)


def _counts_nanoseconds(kind: pa.DataType) -> bool:
    inner = (
        [kind.value_type] if pa.types.is_dictionary(kind) else [kind.field(at).type for at in range(kind.num_fields)]
    )
    return getattr(kind, "unit", None) == "ns" or any(map(_counts_nanoseconds, inner))


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    # Raises NotImplementedError for a type that holds others.
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_time(kind):
        return pa.time64("us")
    raise NotImplementedError(kind)


def _scalar(scalar: pa.Scalar) -> Any:
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if pa.types.is_dictionary(kind):
        return _scalar(scalar.value)
    if isinstance(scalar, pa.ExtensionScalar):
        return _scalar(scalar.value)
    if pa.types.is_struct(kind):
        return {field.name: _scalar(scalar[at]) for at, field in enumerate(kind)}
    if pa.types.is_map(kind):
        return [(_scalar(entry[0]), _scalar(entry[1])) for entry in scalar.values]
    if pa.types.is_nested(kind):
        return [_scalar(value) for value in scalar.values]
    if pa.types.is_temporal(kind):
        return _time(scalar)
    return scalar.as_py()


def _time(scalar: pa.Scalar) -> Any:
    try:
        counts = getattr(scalar.type, "unit", None) == "ns"
        return (scalar.cast(_in_microseconds(scalar.type)) if counts else scalar).as_py()
    except _NO_TIME:
        return _time_text(scalar)


_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_DAY = 86_400_000  # milliseconds


def _time_text(scalar: pa.Scalar) -> str:
    # A date, timestamp, time of day or duration in ISO 8601; timestamps with a zone in UTC.
    kind, value = scalar.type, scalar.value
    if pa.types.is_time(kind):
        return str(scalar.cast(pa.string()).as_py())
    if pa.types.is_duration(kind):
        digits = _DIGITS[kind.unit]
        seconds, rest = divmod(abs(value), 10**digits)
        return f"{'-' * (value < 0)}PT{seconds}" + f".{rest:0{digits}}" * (digits > 0) + "S"
    plain = scalar.cast(pa.timestamp(kind.unit)) if pa.types.is_timestamp(kind) else scalar
    text = str(plain.cast(pa.string()).as_py()).replace(" ", "T")
    if text.startswith("<"):  # Arrow writes no years of more than five digits
        days = value // _DAY if pa.types.is_date64(kind) else value
        text = str(np.datetime64(value, kind.unit) if pa.types.is_timestamp(kind) else np.datetime64(days, "D"))
    return f"{text}+00:00" if getattr(kind, "tz", None) else text


def text_of(json_text: str) -> str:
    """Return a value carried from JSON Lines as it stands in a column of text: a string as it is, all else as JSON."""
    return str(json.loads(json_text)) if json_text.startswith('"') else json_text


def row_bytes(array: pa.Array) -> Int64Array:
    """Return the size of every value in bytes [rows]; the values in a list or a struct take some bytes more than they
    hold."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return np.asarray(np.append(row_bytes(array.dictionary), 0)[_indices(array)], np.int64)
    if is_text(kind):
        return _filled(pc.binary_length(_plain_text(array)))
    if _is_integer_list(kind):
        width: int = kind.value_type.bit_width // 8
        return _filled(pc.list_value_length(array)) * width
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        return _list_bytes(array)
    if pa.types.is_struct(kind):
        return np.sum([row_bytes(field) for field in array.flatten()], axis=0, initial=0, dtype=np.int64) + np.zeros(
            len(array), np.int64
        )
    return np.full(len(array), -(-array.nbytes // max(len(array), 1)), np.int64)


def _list_bytes(array: pa.Array) -> Int64Array:
    offsets: Int64Array = array.offsets.to_numpy().astype(np.int64)
    first = int(offsets[0]) if len(offsets) else 0
    values = array.values.slice(first, int(offsets[-1]) - first) if len(offsets) else array.values
    ends = np.concatenate([[0], np.cumsum(row_bytes(values) + _ELEMENT_BYTES)])
    sizes: Int64Array = np.diff(ends[offsets - first])
    return np.where(array.is_valid().to_numpy(zero_copy_only=False), sizes, 0)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type in which a carried column travels: dictionaries and views are laid out flat.

    So are views inside lists, structs and maps, of which Arrow cannot take rows.
    """
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if kind == pa.string_view():
        return pa.large_string()
    if kind == pa.binary_view():
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field), kind.keys_sorted)
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    # Dictionaries inside stay: Arrow takes their rows, but does not cast them.
    return field if pa.types.is_dictionary(field.type) else field.with_type(plain_type(field.type))


def plain_column(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Return a carried column as `kind`, and by position the faults of texts that are not valid UTF-8.

    In those texts the bad bytes are replaced by U+FFFD; a nested value with a bad text becomes null.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.type != kind:
        array = array.cast(kind)
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        values, bad = python_values(array)
        if not is_text(array.type):
            return with_nulls(array, np.isin(np.arange(len(array)), list(bad))), bad
        raw = array.cast(pa.large_binary())
        for position in bad:
            values[position] = raw[position].as_py().decode("utf-8", "replace")
        return pa.array(values, kind), bad
    return array, {}


def is_text(kind: pa.DataType) -> bool:
    """Return whether its values are texts or bytes of any length."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or kind in (pa.string_view(), pa.binary_view())
    )


def _is_integer_list(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and pa.types.is_integer(kind.value_type))


def _plain_text(array: pa.Array) -> pa.Array:
    kind = array.type
    if kind == pa.string_view():
        return array.cast(pa.large_string())
    return array.cast(pa.large_binary()) if kind == pa.binary_view() else array


def _filled(lengths: pa.Array) -> Int64Array:
    return np.asarray(lengths.fill_null(0), np.int64)


def _indices(array: pa.DictionaryArray) -> Int64Array:
    # Positions in the dictionary; null is -1.
    return np.asarray(array.indices.cast(pa.int64()).fill_null(-1), np.int64)


def _from_dictionary(array: pa.DictionaryArray) -> tuple[list[Any], dict[int, str]]:
    used, positions = np.unique(_indices(array), return_inverse=True)
    nulls = int(len(used) > 0 and used[0] < 0)
    values, bad = python_values(_plain_text(array.dictionary).take(pa.array(used[nulls:])))
    values = [None] * nulls + values
    wrong = {}
    if bad:
        wrong = {row: bad[at - nulls] for row, at in enumerate(positions.tolist()) if at - nulls in bad}
    return [values[at] for at in positions.tolist()], wrong


def _texts(array: pa.Array) -> tuple[list[Any], dict[int, str]]:
    text = pa.large_string() if array.type in (pa.large_binary(), pa.binary_view()) else pa.string()
    try:
        is_bytes = pa.types.is_binary(array.type) or array.type in (pa.large_binary(), pa.binary_view())
        return (array.cast(text) if is_bytes else array).to_pylist(), {}
    except (UnicodeDecodeError, pa.ArrowInvalid):
        raw = array.cast(pa.large_binary()).to_pylist()
        return _one_by_one(raw, lambda text: None if text is None else text.decode(), "")


def _integer_lists(array: pa.Array) -> list[Any]:
    flat = array.flatten().to_numpy(zero_copy_only=False)
    ends = np.cumsum(_filled(pc.list_value_length(array)))
    lists: list[Any] = np.split(flat, ends[:-1]) if len(ends) else []
    for position in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)) if array.null_count else ():
        lists[position] = None
    return lists


def _one_by_one(raw: Iterable[Any], read: Callable[[Any], Any], where: str) -> tuple[list[Any], dict[int, str]]:
    values: list[Any] = []
    bad: dict[int, str] = {}
    for position, each in enumerate(raw):
        try:
            values.append(read(each))
        except UnicodeDecodeError as error:
            values.append(None)
            bad[position] = f"byte {error.start}{where}: {error.reason}"
    return values, bad


def as_json(column: pa.ChunkedArray) -> list[str]:
    """Return the values of a column as JSON texts, as an output in JSON Lines has them."""
    values = to_python(column)
    if pa.types.is_floating(column.type):
        return ["null" if v is None or not math.isfinite(v) else repr(v) for v in values]
    try:
        return [encode_json(value) for value in values]
    except ValueError:  # a NaN inside a nested value
        return [encode_json(_finite(value)) for value in values]


def plain_texts(column: pa.ChunkedArray) -> list[str | None]:
    """Return the values of a column as texts: a string as it is, all else as JSON, null as None."""
    if is_text(column.type) and not pa.types.is_binary(column.type) and column.type != pa.large_binary():
        return list(column.to_pylist())
    return [None if text == "null" else text_of(text) for text in as_json(column)]


def id_texts(column: pa.ChunkedArray, *, json_text: bool) -> list[str]:
    """Return ids as a user writes them, the same whether they come typed or as JSON text."""
    return [text_of(text) for text in json_texts(column, json_text=json_text)]


def json_texts(column: pa.ChunkedArray, *, json_text: bool) -> list[str]:
    """Return the values of a column as JSON texts in one form, whether they come typed or as JSON text."""
    if not json_text:
        return as_json(column)
    values = [json.loads(text or "null") for text in column.to_pylist()]
    return [encode_json(value) for value in values]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _json_form(value: Any) -> str:
    # Values without a form in JSON: dates as ISO 8601, bytes as base64, everything else as text.
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_json_form).encode


def brief_json(value: Any) -> str:
    """Return a value as JSON text for a message: its first 60 characters."""
    try:
        text = encode_json(value)
    except RecursionError:
        text = "(nested too deeply)"
    short = text if len(text) <= 60 else f"{text[:60]}..."
    return short.encode(errors="backslashreplace").decode()


def with_nulls(column: pa.Array, left_out: npt.NDArray[np.bool_]) -> pa.Array:
    """Return the column with nulls instead of the values that are `left_out`, bool [rows]."""
    try:
        return column.take(pa.array(np.arange(len(column)), mask=left_out))
    except pa.ArrowNotImplementedError:  # texts of a view type inside lists and maps
        null = pa.nulls(1, column.type)
        return pa.concat_arrays([null if out else column.slice(at, 1) for at, out in enumerate(left_out)])
