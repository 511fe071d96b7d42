"""Files that are not as they were written: edits of bytes, and of values inside JSON."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.texts import numbers, texts

_BYTES = st.one_of(st.sampled_from([b"\x00", b"\xff", b"\x7f", b"\x80", b"\n", b'"', b"{", b"\xff" * 8]), st.binary())

byte_edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "put", "insert", "remove", "cut", "double", "swap"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 40),
        _BYTES,
    ),
    min_size=1,
    max_size=4,
)
"""Edits for `edited`."""


def edited(data: bytes, edits: Sequence[tuple[str, float, int, bytes]]) -> bytes:
    """The data after edits: what is done, at which share of its length, to how many bytes, and which ones come in."""
    for what, share, size, piece in edits:
        at = int(share * len(data))
        before, some, after = data[:at], data[at : at + size], data[at + size :]
        match what:
            case "flip":
                data = before + bytes(byte ^ (1 << size % 8) for byte in some[:1]) + some[1:] + after
            case "put":
                data = before + piece + data[at + len(piece) :]
            case "insert":
                data = before + piece + some + after
            case "remove":
                data = before + after
            case "cut":
                data = before
            case "double":
                data = before + some + some + after
            case "swap":
                data = before + some[::-1] + after
    return data


_JUNK = st.one_of(
    numbers,
    texts,
    st.none(),
    st.booleans(),
    st.sampled_from([[], {}, [[]], "float32", "../x", [None], {"a": 1}, "x" * 3000, -1, 0, 10**12]),
)
value_edits = st.lists(
    st.tuples(st.sampled_from(["set", "remove", "add", "wrap"]), st.integers(0, 10**6), _JUNK), min_size=1, max_size=3
)
"""Edits for `with_values`."""


def with_values(value: Any, edits: Sequence[tuple[str, int, Any]]) -> Any:
    """A JSON value after edits: what is done, to which of the places in it, and what comes in."""
    box = [copy.deepcopy(value)]
    for what, number, junk in edits:
        places = list(_places(box))
        holder, key = places[number % len(places)]
        junk = copy.deepcopy(junk)  # examples share it, and the next edit may be in it
        match what:
            case "set":
                holder[key] = junk
            case "remove" if holder is not box:
                del holder[key]
            case "add" if isinstance(holder[key], dict):
                holder[key][str(junk)[:50]] = junk
            case "add" if isinstance(holder[key], list):
                holder[key].append(junk)
            case "wrap":
                holder[key] = [holder[key]]
    return box[0]


def _places(holder: Any) -> Any:
    """Holders and keys of all values: small parts of large lists and mappings stand for the others."""
    keys: Any = range(len(holder)) if isinstance(holder, list) else list(holder)
    for key in [*keys[:30], *keys[-3:]] if len(keys) > 33 else keys:
        yield holder, key
        if isinstance(holder[key], list | dict):
            yield from _places(holder[key])
