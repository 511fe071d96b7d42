"""Columns carried from JSON Lines: JSON text until all values are known, then the type that holds them.

Kinds of values: b true or false, i integer, f other number, s string, j anything else (arrays, objects,
integers beyond 64 bits). A column of one kind gets its type; i and f together are float64, unless they are ids; any
other mix is text, with strings as they are and everything else as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from prefillcli.data.values import text_of

_TYPES = {
    frozenset("b"): pa.bool_(),
    frozenset("i"): pa.int64(),
    frozenset("f"): pa.float64(),
    frozenset("if"): pa.float64(),
}


def kinds_of(texts: pa.ChunkedArray) -> str:
    """The kinds of values in a column of JSON texts, as letters."""
    return "".join(sorted({_kind(text) for text in texts.to_pylist() if text is not None}))


def type_for(kinds: Iterable[str], *, ids: bool = False) -> pa.DataType:
    """The type of a column that holds these kinds of values. Among `ids`, 1 and 1.0 differ, so they stay texts."""
    found = frozenset(kinds)
    return pa.string() if ids and len(found) > 1 else _TYPES.get(found, pa.string())


def typed_column(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """JSON texts as values of `kind`."""
    if kind != pa.string():
        return texts.cast(kind)
    values = [None if text is None else text_of(text) for text in texts.to_pylist()]
    return pa.chunked_array([pa.array(values, pa.string())])


def _kind(text: str) -> str:
    first = text[0]
    if first == '"':
        return "s"
    if first in "tf":
        return "b"
    if first in "[{":
        return "j"
    if "." in text or "e" in text or "E" in text:
        return "f"
    return "i" if len(text) < 19 or -(2**63) <= int(text) < 2**63 else "j"
