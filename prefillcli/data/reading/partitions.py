"""Columns that the folders of an input name, as Hive does: `date=2026-01-01/hour=7/part.parquet`.

A partitioned output has the same folders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
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
    folders: tuple[str, ...] = ()
    """Of every file, those of its folders that name a key: `date=2026-01-01/hour=7`."""

    @classmethod
    def of(cls, paths: Iterable[str]) -> Partitions:
        """The keys in the folders of these paths, in the order in which they come.

        As pyarrow.dataset infers them: keys and values are URL-decoded, a key is int32 if every value is one, else a
        string.
        """
        paths = tuple(paths)
        raw = [_segments(path) for path in paths]
        names = list(dict.fromkeys(name for segments in raw for name in segments))
        columns = [_typed([segments.get(name) for segments in raw]) for name in names]
        schema = pa.schema([(name, column.type) for name, column in zip(names, columns, strict=True)])
        rows = zip(*(column.to_pylist() for column in columns), strict=True) if names else (() for _ in raw)
        values = tuple(dict(zip(names, row, strict=True)) for row in rows)
        return cls(schema, values, tuple("/".join(_key_folders(path)) for path in paths))

    def runs(self, table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        """The rows of a table that has the keys as columns, cut where the folder changes, without these columns."""
        names = self.schema.names
        known: dict[tuple[Any, ...], str] = {}
        for values, folder in zip(self.values, self.folders, strict=True):
            known.setdefault(tuple(values[name] for name in names), folder)
        folders = [known[values] for values in zip(*(table[name].to_pylist() for name in names), strict=True)]
        rest = table.drop_columns(names)
        start = 0
        for folder, rows in groupby(folders):
            size = sum(1 for _ in rows)
            yield folder, rest.slice(start, size)
            start += size


def _segments(path: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for folder in _key_folders(path):
        name, _, value = folder.partition("=")
        found[unquote(name)] = None if value == _NULL else unquote(value)
    return found


def _key_folders(path: str) -> list[str]:
    return [folder for folder in PurePosixPath(path).parts[:-1] if folder.find("=") > 0]


def _typed(texts: Sequence[str | None]) -> pa.Array:
    column = pa.array(texts, pa.string())
    try:
        return column.cast(pa.int32()) if column.null_count < len(column) else column
    except pa.ArrowInvalid:
        return column
