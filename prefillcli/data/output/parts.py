"""A part: some scored rows of one window as a small Parquet file in the work folder."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefillcli.data.output.column_groups import NO_GROUPS, ColumnGroups
from prefillcli.data.output.columns import ResultRows, result_arrays, result_schema
from prefillcli.data.output.counts import Counts
from prefillcli.data.output.manifest import Job
from prefillcli.data.output.parquet_format import write_parquet
from prefillcli.data.output.row_digests import TYPE as DIGEST_TYPE
from prefillcli.data.output.store import Store
from prefillcli.data.output.tallies import DIGEST, ROW, TAKEN_OVER
from prefillcli.data.proof.seals import JOB_KEY, require_seal
from prefillcli.data.rows import Int64Array, Window
from prefillcli.errors import DamagedFileError, PrefillError, brief

_NAME = re.compile(r"part-(\d{6,})-(\d{6,})\.parquet")


@dataclass(frozen=True)
class WindowRows:
    """The rows of a window: the same when it is read again, and those that its parts must hold together."""

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
    """The metadata of a part."""

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
    carried: list[tuple[int, str]] | None = None
    """The blocks that the window hands to the next one (see `prefillcli.plan.blocks`); None if not known then."""
    shard: str | None = None
    """The shard that wrote it, like `2/4`; None where one run scores all rows."""
    own_rows: WindowRows | None = None
    """The rows of the window that this shard scores; None where it scores all."""

    @property
    def expected_rows(self) -> WindowRows:
        """The rows that the parts of this run have of the window, when they are all there."""
        return self.own_rows or self.window_rows

    @property
    def name(self) -> str:
        """The file name that the part must have."""
        return part_name(self.window, self.number)


def part_name(window: int, number: int) -> str:
    """The file name of a window's part."""
    return f"part-{window:06d}-{number:06d}.parquet"


def window_of(name: str) -> int:
    """The window of a part by its file name."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is not the name of a part")
    return int(found[1])


def is_part(name: str) -> bool:
    """Whether a file of a work folder is a part by its name."""
    return _NAME.fullmatch(name) is not None


def make_rows(window: Window, rows: ResultRows, groups: ColumnGroups = NO_GROUPS) -> pa.Table:
    """Row number, carried columns and result columns of some rows of a window."""
    carried = window.carried.take(pa.array(np.searchsorted(window.rows, rows.numbers)))
    results = result_schema(rows.labels, groups, rows.measure)
    return pa.Table.from_arrays(
        [pa.array(rows.numbers), *carried.columns, *result_arrays(rows, groups)],
        schema=pa.schema([(ROW, pa.int64()), *carried.schema, *results]),
    )


def with_digests(rows: pa.Table, found: ResultRows) -> pa.Table:
    """Rows that were scored now, with the digests of those that have a score."""
    pairs = zip(found.prompts, found.errors, strict=True)
    digests = [None if prompt is None or error is not None else prompt.digest for prompt, error in pairs]
    return _marked(rows, pa.array(digests, DIGEST_TYPE), taken_over=False)


def taken_rows(window: Window, results: pa.Table) -> pa.Table:
    """Rows of a window as an earlier output has them: their numbers, result columns and digests.

    The carried columns are the window's own.
    """
    numbers, digests = results[ROW], results[DIGEST].cast(DIGEST_TYPE)
    carried = window.carried.take(pa.array(np.searchsorted(window.rows, numbers.to_numpy())))
    rest = results.drop_columns([ROW, DIGEST])
    rows = pa.Table.from_arrays(
        [numbers, *carried.columns, *rest.columns],
        schema=pa.schema([(ROW, pa.int64()), *carried.schema, *rest.schema]),
    )
    return _marked(rows, digests, taken_over=True)


def _marked(rows: pa.Table, digests: pa.Array, *, taken_over: bool) -> pa.Table:
    rows = rows.append_column(pa.field(DIGEST, DIGEST_TYPE), digests)
    return rows.append_column(pa.field(TAKEN_OVER, pa.bool_()), pa.array([taken_over] * len(rows)))


def write_part(store: Store, info: PartInfo, rows: pa.Table) -> None:
    """Write rows of a window as a part."""
    buffer = io.BytesIO()
    metadata = {JOB_KEY: json.dumps({**asdict(info), "job": info.job.to_json()}).encode()}
    write_parquet(buffer, rows.schema.with_metadata(metadata), [rows], compression="lz4")
    store.put_bytes(info.name, buffer.getvalue())


def read_part(store: Store, name: str, columns: Sequence[str] | None = None) -> tuple[PartInfo, pa.Table]:
    """The metadata of a part, and its rows.

    Raises DamagedFileError if the part was changed since it was written, or has the name of another part;
    PrefillError if it cannot be read now.
    """
    try:
        data = io.BytesIO(store.read_bytes(name))
    except FileNotFoundError:
        raise DamagedFileError(f"{store.location}/{name} is gone") from None
    except PrefillError:
        raise
    except Exception as error:  # the clients of object stores raise what they like
        kind = DamagedFileError if getattr(error, "errno", None) == errno.EIO else PrefillError
        raise kind(f"cannot read {store.location}/{name}: {brief(error)}") from error
    try:
        require_seal(data)
        table = pq.read_table(data, columns=columns, page_checksum_verification=True)
        content = json.loads(table.schema.metadata[JOB_KEY])
        content["job"] = Job.of_json(content["job"])
        content["window_rows"] = WindowRows(**content["window_rows"])
        if (own := content.get("own_rows")) is not None:
            content["own_rows"] = WindowRows(**own)
        content["counts"] = Counts.of_json(content["counts"])
        if (carried := content.get("carried")) is not None:
            content["carried"] = [(end, key) for end, key in carried]
        info = PartInfo(**content)
    except DamagedFileError as error:
        raise DamagedFileError(f"{store.location}/{name} is damaged: {error}") from None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{store.location}/{name} is damaged: {brief(error)}") from None
    if info.name != name:
        raise DamagedFileError(f"{store.location}/{name} is a copy of {info.name}")
    return info, table.replace_schema_metadata(None)


def read_parts(
    store: Store, names: Iterable[str], columns: Sequence[str] | None = None
) -> Iterator[tuple[str, Future[tuple[PartInfo, pa.Table]]]]:
    """The names with what `read_part` gives or raises for each; from an object store several are read at a time.

    There may be many: no more are read than are soon asked for.
    """
    pool = ThreadPoolExecutor(store.at_once, thread_name_prefix="prefill-parts")
    coming: deque[tuple[str, Future[tuple[PartInfo, pa.Table]]]] = deque()
    try:
        for name in names:
            coming.append((name, pool.submit(read_part, store, name, columns)))
            if len(coming) > 2 * store.at_once:
                yield coming.popleft()
        while coming:
            yield coming.popleft()
    finally:
        pool.shutdown(cancel_futures=True)
