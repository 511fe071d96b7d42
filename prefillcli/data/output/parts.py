"""A part: some scored rows of one window as a small Parquet file in the work folder."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefillcli.data.output.counts import Counts
from prefillcli.data.output.formats import write_parquet
from prefillcli.data.output.manifest import Job
from prefillcli.data.output.store import Store
from prefillcli.data.output.tallies import ROW
from prefillcli.data.proof.seals import JOB_KEY, require_seal
from prefillcli.data.rows import ErrorCode, Float64Array, Int64Array, RowError, ScoredRow, Window
from prefillcli.errors import DamagedFileError, PrefillError, brief

_NAME = re.compile(r"part-(\d{6,})-(\d{6,})\.parquet")


@dataclass(frozen=True)
class WindowRows:
    """What must be the same when a window is read again, and what its parts must hold together."""

    count: int
    first: int
    last: int
    digest: str
    """SHA-256 of all its row numbers, as little-endian 64-bit integers."""

    @classmethod
    def of(cls, rows: Int64Array) -> WindowRows:
        """Of ascending row numbers; at least one."""
        digest = hashlib.sha256(np.ascontiguousarray(rows, "<i8").tobytes()).hexdigest()
        return cls(len(rows), int(rows[0]), int(rows[-1]), digest)


@dataclass
class PartInfo:
    """What a part says of itself."""

    job: Job
    plan: dict[str, Any]
    """The job's plan when the part was written."""
    sequence: int
    """How many parts the job had written before."""
    window: int
    number: int
    """The part's number in its window."""
    window_rows: WindowRows
    counts: Counts
    kinds: dict[str, str] = field(default_factory=dict)
    """Of every JSON column which kinds of values it holds (see json_columns)."""

    @property
    def name(self) -> str:
        """The file name that the part must have."""
        return part_name(self.window, self.number)


def part_name(window: int, number: int) -> str:
    """The file name of a window's part."""
    return f"part-{window:06d}-{number:06d}.parquet"


def is_part(name: str) -> bool:
    """Whether a file of a work folder is a part by its name."""
    return _NAME.fullmatch(name) is not None


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
    results: Sequence[ScoredRow],
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
        scored.row: RowError(ErrorCode.NONFINITE_SCORE, f"label log-probabilities {scored.logprobs.tolist()}")
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


def write_part(store: Store, info: PartInfo, rows: pa.Table) -> None:
    """Write rows of a window as a part."""
    buffer = io.BytesIO()
    metadata = {JOB_KEY: json.dumps({**asdict(info), "job": info.job.to_json()}).encode()}
    write_parquet(buffer, rows.schema.with_metadata(metadata), [rows], compression="lz4")
    store.put_bytes(info.name, buffer.getvalue())


def read_part(store: Store, name: str, columns: Sequence[str] | None = None) -> tuple[PartInfo, pa.Table]:
    """What a part says of itself, and its rows.

    Raises DamagedFileError if the part is not as it was written, or is another part than its name says; PrefillError
    if it cannot be read now.
    """
    try:
        with store.read(name) as file:
            data = io.BytesIO(file.read())
    except Exception as error:  # the clients of object stores raise what they like
        kind = DamagedFileError if getattr(error, "errno", None) == errno.EIO else PrefillError
        raise kind(f"cannot read {store.location}/{name}: {brief(error)}") from error
    try:
        require_seal(data)
        table = pq.read_table(data, columns=columns, page_checksum_verification=True)
        content = json.loads(table.schema.metadata[JOB_KEY])
        content["job"] = Job.of_json(content["job"])
        content["window_rows"] = WindowRows(**content["window_rows"])
        content["counts"] = Counts.of_json(content["counts"])
        info = PartInfo(**content)
    except DamagedFileError as error:
        raise DamagedFileError(f"{store.location}/{name} is damaged: {error}") from None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{store.location}/{name} is damaged: {brief(error)}") from None
    if info.name != name:
        raise DamagedFileError(f"{store.location}/{name} is a copy of {info.name}")
    return info, table.replace_schema_metadata(None)


def _softmax(logits: Float64Array) -> Float64Array:
    """Over the last axis, in float64; a row with a NaN or without any finite value gives NaN."""
    with np.errstate(invalid="ignore"):
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True, initial=-np.inf))
        shares: Float64Array = weights / weights.sum(axis=-1, keepdims=True)
    return shares
