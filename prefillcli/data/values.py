"""From Arrow columns to Python values, with invalid UTF-8 kept to the rows that have it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.data.rows import Int64Array

_ELEMENT_BYTES = 8  # an empty element of a list takes memory too


def python_values(array: pa.Array) -> tuple[list[Any], dict[int, str]]:
    """The values of a column [rows], and by position what is wrong with the texts that are not valid UTF-8.

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
        return _one_by_one(array)


def to_python(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Like `to_pylist`, but nanoseconds, which Python's times do not hold, become text in ISO 8601.

    Raises UnicodeDecodeError for a text that is not valid UTF-8.
    """
    try:
        if _counts_nanoseconds(column.type):  # with pandas installed, `to_pylist` would make its own times of them
            column = column.cast(_in_microseconds(column.type))
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        raise
    except (ValueError, NotImplementedError):
        values = [_scalar(scalar) for scalar in column]
    return values


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
    if pa.types.is_temporal(kind) and getattr(kind, "unit", None) == "ns":
        return _nanoseconds(scalar)
    return scalar.as_py()


def _nanoseconds(scalar: pa.Scalar) -> str:
    # A timestamp, time of day or duration in nanoseconds, in ISO 8601; timestamps with a zone in UTC.
    if pa.types.is_duration(scalar.type):
        seconds, rest = divmod(abs(scalar.value), 10**9)
        return f"{'-' * (scalar.value < 0)}PT{seconds}.{rest:09}S"
    if pa.types.is_time(scalar.type):
        return str(scalar.cast(pa.string()).as_py())
    text = str(scalar.cast(pa.timestamp("ns")).cast(pa.string()).as_py()).replace(" ", "T")
    return f"{text}+00:00" if scalar.type.tz else text


def text_of(json_text: str) -> str:
    """A value carried from JSON Lines as a column of text has it: a string as it is, all else as JSON."""
    return str(json.loads(json_text)) if json_text.startswith('"') else json_text


def row_bytes(array: pa.Array) -> Int64Array:
    """Size of every value in bytes [rows]; the values in a list or a struct take some bytes more than they hold."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        sizes: Int64Array = np.append(row_bytes(array.dictionary), 0)[_indices(array)]
        return sizes
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
    """The type in which a carried column travels: dictionaries and views are laid out flat.

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
    """A carried column as `kind`, and by position what was wrong with texts that are not valid UTF-8.

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
        if is_text(array.type):
            raw = array.cast(pa.large_binary())
            for position in bad:
                values[position] = raw[position].as_py().decode("utf-8", "replace")
        return pa.array(values, kind), bad
    return array, {}


def is_text(kind: pa.DataType) -> bool:
    """Whether its values are texts or bytes of any length."""
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
    sizes: Int64Array = lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return sizes


def _indices(array: pa.DictionaryArray) -> Int64Array:
    # Positions in the dictionary; null is -1.
    indices: Int64Array = array.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    return indices


def _from_dictionary(array: pa.DictionaryArray) -> tuple[list[Any], dict[int, str]]:
    used, positions = np.unique(_indices(array), return_inverse=True)
    nulls = int(len(used) > 0 and used[0] < 0)
    values, bad = python_values(array.dictionary.take(pa.array(used[nulls:])))
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
        pass
    values: list[Any] = []
    bad: dict[int, str] = {}
    for position, raw in enumerate(array.cast(pa.large_binary()).to_pylist()):
        try:
            values.append(None if raw is None else raw.decode())
        except UnicodeDecodeError as error:
            values.append(None)
            bad[position] = f"byte {error.start}: {error.reason}"
    return values, bad


def _integer_lists(array: pa.Array) -> list[Any]:
    flat = array.flatten().to_numpy(zero_copy_only=False)
    ends = np.cumsum(_filled(pc.list_value_length(array)))
    lists: list[Any] = np.split(flat, ends[:-1]) if len(ends) else []
    for position in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)) if array.null_count else ():
        lists[position] = None
    return lists


def _one_by_one(array: pa.Array) -> tuple[list[Any], dict[int, str]]:
    values: list[Any] = []
    bad: dict[int, str] = {}
    for position, scalar in enumerate(array):
        try:
            values.append(_scalar(scalar))
        except UnicodeDecodeError as error:
            values.append(None)
            bad[position] = f"byte {error.start} of a nested text: {error.reason}"
    return values, bad
