"""Footers of Parquet files, taken apart and written again with other numbers in them.

A footer is a struct in Thrift's compact protocol. The numbers of its fields are those of parquet.thrift.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_BOOLEANS, _BYTE, _WHOLE, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12
_TAIL = 8


class Field(NamedTuple):
    """A number of a footer: what it is called, and its way from the root through field numbers and places in lists."""

    name: str
    way: tuple[int, ...]


def fields_of(data: bytes) -> list[tuple[Field, int]]:
    """The numbers in the footer of a file that say where its rows lie and how many there are."""
    root = _read(data[_start(data) :], 0, _STRUCT)[0]
    ways = [Field("num_rows", (3,))]
    for group, (_, row_group) in enumerate(root[4][1][1]):
        ways += [Field(name, (4, group, number)) for name, number in _OF_GROUPS.items()]
        for column in range(len(row_group[1][1][1])):
            chunk = (4, group, 1, column)
            ways.append(Field("chunk.file_offset", (*chunk, 2)))
            ways += [Field(name, (*chunk, 3, number)) for name, number in _OF_CHUNKS.items()]
    found = []
    for field in ways:
        holder = _holder(root, field)
        if field.way[-1] in holder:
            found.append((field, holder[field.way[-1]][1]))
    return found


_OF_GROUPS = {
    "group.total_byte_size": 2,
    "group.num_rows": 3,
    "group.file_offset": 5,
    "group.total_compressed_size": 6,
}
_OF_CHUNKS = {
    "num_values": 5,
    "total_uncompressed_size": 6,
    "total_compressed_size": 7,
    "data_page_offset": 9,
    "dictionary_page_offset": 11,
}


def with_numbers(data: bytes, numbers: Sequence[tuple[Field, int]]) -> bytes:
    """The file with other numbers in its footer."""
    start = _start(data)
    root = _read(data[start:], 0, _STRUCT)[0]
    for field, number in numbers:
        holder = _holder(root, field)
        holder[field.way[-1]] = (holder[field.way[-1]][0], number)
    footer = _written(_STRUCT, root)
    return data[:start] + footer + len(footer).to_bytes(4, "little") + data[-4:]


def _holder(root: Any, field: Field) -> Any:
    """The struct that has a field."""
    for step in field.way[:-1]:
        value = root[step][1]
        root = value[1] if isinstance(value, tuple) else value  # a list: the kind of its elements, and them
    return root


def _start(data: bytes) -> int:
    return len(data) - _TAIL - int.from_bytes(data[-_TAIL:-4], "little")


def _read(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    """A value and where it ends: of a struct its fields by number, each with its kind; of a list that of its elements
    and them, each with its kind."""
    if kind in _BOOLEANS:
        return None, at
    if kind == _BYTE:
        return data[at], at + 1
    if kind in _WHOLE:
        number, at = _varint(data, at)
        return (number >> 1) ^ -(number & 1), at
    if kind == _DOUBLE:
        return data[at : at + 8], at + 8
    if kind == _BINARY:
        length, at = _varint(data, at)
        return data[at : at + length], at + length
    if kind in _LISTS:
        return _list(data, at)
    fields: dict[int, tuple[int, Any]] = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            step, at = _varint(data, at)
            number = (step >> 1) ^ -(step & 1)
        value, at = _read(data, at, head & 15)
        fields[number] = (head & 15, value)
    return fields, at + 1


def _list(data: bytes, at: int) -> tuple[tuple[int, list[tuple[int, Any]]], int]:
    kind, length = data[at] & 15, data[at] >> 4
    at += 1
    if length == 15:
        length, at = _varint(data, at)
    found: list[tuple[int, Any]] = []
    for _ in range(length):
        value, at = (data[at], at + 1) if kind in _BOOLEANS else _read(data, at, kind)
        found.append((kind, value))
    return (kind, found), at


def _written(kind: int, value: Any) -> bytes:
    if kind in _BOOLEANS:
        return b""
    if kind == _BYTE:
        return bytes([value])
    if kind in _WHOLE:
        return _varint_bytes(value << 1 ^ value >> 63)
    if kind == _DOUBLE:
        return bytes(value)
    if kind == _BINARY:
        return _varint_bytes(len(value)) + bytes(value)
    if kind in _LISTS:
        inner, found = value
        head = (
            bytes([len(found) << 4 | inner]) if len(found) < 15 else bytes([0xF0 | inner]) + _varint_bytes(len(found))
        )
        return head + b"".join(bytes([each]) if inner in _BOOLEANS else _written(inner, each) for _, each in found)
    said, before = bytearray(), 0
    for number, (each, inner_value) in sorted(value.items()):
        step = number - before
        said += bytes([step << 4 | each]) if 0 < step < 16 else bytes([each]) + _varint_bytes(number << 1)
        said += _written(each, inner_value)
        before = number
    return bytes(said) + b"\0"


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at


def _varint_bytes(number: int) -> bytes:
    number &= (1 << 64) - 1
    said = bytearray()
    while number > 127:
        said.append(number & 127 | 128)
        number >>= 7
    said.append(number)
    return bytes(said)
