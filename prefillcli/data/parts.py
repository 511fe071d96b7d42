"""A part: some scored rows of one window as a small Parquet file in the work folder."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefillcli.data.counts import Counts
from prefillcli.data.json_columns import kinds_of
from prefillcli.data.rows import Float64Array, Int64Array, RowError, Scored, Window
from prefillcli.data.store import Store
from prefillcli.data.tallies import ROW

_METADATA = b"prefillcli"
_NAME = re.compile(r"part-(\d{6,})-(\d{6,})\.parquet")


@dataclass
class PartInfo:
    """What a part's footer says of it."""

    window: int
    window_rows: tuple[int, int, int]
    """Number of rows of the window, its first and its last row number."""
    counts: Counts
    kinds: dict[str, str] = field(default_factory=dict)
    """Of every JSON column which kinds of values it holds (see json_columns)."""


def part_name(window: int, number: int) -> str:
    """The file name of a window's part."""
    return f"part-{window:06d}-{number:06d}.parquet"


def parse_part_name(name: str) -> tuple[int, int] | None:
    """Window and number of a part; None for any other file."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def window_rows(window: Window) -> tuple[int, int, int]:
    """What must be the same when a window is read again: number of rows, first and last."""
    return len(window.rows), int(window.rows[0]), int(window.rows[-1])


def result_schema(label_names: Sequence[str], audit: bool = False) -> pa.Schema:
    """The columns that scoring adds; with an audit, those that a compressed row has when it is read in full too."""
    logprobs = [(f"logprob_{name}", pa.float64()) for name in label_names]
    return pa.schema(
        [
            ("score", pa.float64()),
            *logprobs,
            ("label_mass", pa.float64()),
            ("prediction", pa.string()),
            ("prompt_tokens", pa.int64()),
            ("shared_tokens", pa.int64()),
            ("kept_tokens", pa.int64()),
            ("computed_tokens", pa.int64()),
            ("seconds", pa.float64()),
            ("method", pa.string()),
            ("truncated", pa.bool_()),
            ("error", pa.string()),
            ("error_detail", pa.string()),
            *([("audit_score", pa.float64()), ("audit_prediction", pa.string())] if audit else ()),
        ]
    )


def make_rows(
    window: Window,
    results: Sequence[Scored],
    errors: dict[int, RowError],
    label_names: Sequence[str],
    temperature: float,
    audit: bool = False,
) -> pa.Table:
    """Row number, carried columns and result columns of some rows of a window, ascending by row."""
    results = sorted(results, key=lambda scored: scored.row)
    logprobs = np.array([scored.logprobs for scored in results], np.float64).reshape(-1, len(label_names))
    scores = _softmax(logprobs / temperature)
    finite = np.isfinite(scores[:, 0])
    errors = errors | {
        scored.row: RowError("nonfinite_score", f"label log-probabilities {scored.logprobs.tolist()}")
        for scored, good in zip(results, finite.tolist(), strict=True)
        if not good
    }
    results = [scored for scored, good in zip(results, finite.tolist(), strict=True) if good]
    logprobs, scores = logprobs[finite], scores[finite]
    rows = np.array(sorted([scored.row for scored in results] + list(errors)), np.int64)
    at = np.searchsorted(rows, np.array([scored.row for scored in results], np.int64))
    prompts = {prompt.row: prompt for prompt in window.prompts}
    asked = [prompts.get(row) for row in rows.tolist()]
    failed = [errors.get(row) for row in rows.tolist()]

    def of_scored(values: Any, kind: pa.DataType) -> pa.Array:
        column = np.full(len(rows), None, object)
        column[at] = values
        return pa.array(column, kind)

    def numbers(name: str) -> pa.Array:
        return of_scored([getattr(scored, name) for scored in results], schema.field(name).type)

    schema = result_schema(label_names, audit)
    best = [label_names[label] for label in scores.argmax(axis=1)] if len(results) else []
    columns = [
        of_scored(scores[:, 0], pa.float64()),
        *(of_scored(logprobs[:, label], pa.float64()) for label in range(len(label_names))),
        of_scored(np.minimum(np.exp(logprobs).sum(axis=1), 1.0), pa.float64()),
        of_scored(best, pa.string()),
        pa.array([None if prompt is None else len(prompt.tokens) for prompt in asked], pa.int64()),
        *(numbers(name) for name in ("shared_tokens", "kept_tokens", "computed_tokens", "seconds", "method")),
        pa.array([prompt is not None and prompt.truncated for prompt in asked], pa.bool_()),
        pa.array([error and error.code for error in failed], pa.string()),
        pa.array([error and error.detail for error in failed], pa.string()),
    ]
    if audit:
        again = [scored.audit for scored in results]
        whole = [None if own is None else _softmax(own / temperature) for own in again]
        columns += [
            of_scored([None if own is None else own[0] for own in whole], pa.float64()),
            of_scored([None if own is None else label_names[int(own.argmax())] for own in whole], pa.string()),
        ]
    carried = window.carried.take(pa.array(np.searchsorted(window.rows, rows)))
    return pa.Table.from_arrays(
        [pa.array(rows), *carried.columns, *columns],
        schema=pa.schema([(ROW, pa.int64()), *carried.schema, *schema]),
    )


def write_part(
    store: Store, window: Window, number: int, rows: pa.Table, json_columns: Sequence[str], counts: Counts
) -> PartInfo:
    """Write rows of a window as its part `number`. `counts` are theirs."""
    info = PartInfo(window.index, window_rows(window), counts)
    info.kinds = {name: kinds_of(rows[name]) for name in json_columns}
    buffer = io.BytesIO()
    metadata = {_METADATA: json.dumps(asdict(info)).encode()}
    pq.write_table(rows.replace_schema_metadata(metadata), buffer, compression="lz4")
    store.put_bytes(part_name(window.index, number), buffer.getvalue())
    return info


def read_info(store: Store, name: str) -> PartInfo | None:
    """What a part says of itself; None if the file is damaged."""
    try:
        with store.read(name) as file:
            content = json.loads(pq.read_schema(file).metadata[_METADATA])
        first, second, third = content["window_rows"]
        return PartInfo(content["window"], (first, second, third), Counts.of_json(content["counts"]), content["kinds"])
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return None


def read_rows(store: Store, name: str) -> pa.Table:
    """The rows of a part."""
    with store.read(name) as file:
        return pq.read_table(file).replace_schema_metadata(None)


def read_row_numbers(store: Store, name: str) -> Int64Array:
    """The numbers of the rows in a part."""
    with store.read(name) as file:
        numbers: Int64Array = pq.read_table(file, columns=[ROW])[ROW].to_numpy()
    return numbers


def _softmax(logits: Float64Array) -> Float64Array:
    """Over the last axis, in float64; a row with a NaN or without any finite value gives NaN."""
    with np.errstate(invalid="ignore"):
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True, initial=-np.inf))
        shares: Float64Array = weights / weights.sum(axis=-1, keepdims=True)
    return shares
