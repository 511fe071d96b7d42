"""The values of an output's columns as Python has them, for conditions on rows that were just scored."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Set
from typing import Any

import numpy as np
import pyarrow as pa

from prefillcli.data.output.columns import ROW_COLUMN, ResultRows, conditional_schema, result_values
from prefillcli.data.output.schema import OutputSchema
from prefillcli.data.rows import Window
from prefillcli.data.values import to_python


def known_columns(schema: OutputSchema) -> tuple[pa.Schema, frozenset[str]]:
    """The columns that a condition may use, and the names of those whose kind is not known: those that are JSON."""
    row = [pa.field(ROW_COLUMN, pa.int64())] if schema.id_name is None else []
    results = conditional_schema(schema.labels, schema.groups, schema.measure)
    untyped = schema.carried.names if schema.json_carried else ()
    return pa.schema([*row, *schema.carried, *results]), frozenset(untyped)


def row_values(window: Window, rows: ResultRows, schema: OutputSchema, names: Set[str]) -> list[dict[str, Any]]:
    """The values of the named columns of `known_columns`, by name, for each of some rows of a window.

    Columns that are JSON text give the values that the text says, dates and times texts in ISO 8601.
    """
    found = result_values(rows, names, schema.groups)
    places = pa.array(np.searchsorted(window.rows, rows.numbers))
    for name in names & set(schema.carried.names):
        values = to_python(window.carried[name].take(places))
        if schema.json_carried:
            found[name] = [None if text is None else json.loads(text) for text in values]
        else:
            found[name] = [_plain(value) for value in values]
    if ROW_COLUMN in names and schema.id_name is None:
        found[ROW_COLUMN] = rows.numbers.tolist()
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)] or [
        {} for _ in rows.numbers
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value
