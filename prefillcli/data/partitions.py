"""Columns that the folders of an input name, as Hive does: `date=2026-01-01/hour=7/part.parquet`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class Partitions:
    """The keys with their types, and for every file its values (null where its path lacks the key)."""

    schema: pa.Schema
    values: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, paths: Iterable[str]) -> Partitions:
        """The keys in the folders of these paths, in the order in which they come.

        As pyarrow.dataset infers them: keys and values are URL-decoded, a key is int32 if every value is one, else a
        string.
        """
        raw = [_segments(path) for path in paths]
        names = list(dict.fromkeys(name for segments in raw for name in segments))
        columns = [_typed([segments.get(name) for segments in raw]) for name in names]
        schema = pa.schema([(name, column.type) for name, column in zip(names, columns, strict=True)])
        rows = zip(*(column.to_pylist() for column in columns), strict=True) if names else (() for _ in raw)
        return cls(schema, tuple(dict(zip(names, row, strict=True)) for row in rows))


def _segments(path: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for folder in PurePosixPath(path).parts[:-1]:
        name, equals, value = folder.partition("=")
        if name and equals:
            found[unquote(name)] = None if value == _NULL else unquote(value)
    return found


def _typed(texts: Sequence[str | None]) -> pa.Array:
    column = pa.array(texts, pa.string())
    try:
        return column.cast(pa.int32()) if column.null_count < len(column) else column
    except pa.ArrowInvalid:
        return column
