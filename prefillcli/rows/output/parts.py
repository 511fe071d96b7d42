"""The parts of a job, which hold its finished rows until the output is made, and the digests of rows.

A later job recognises a row that it need not score again by a digest of everything that its results depend on. The
digests of an output are a file in its work folder, `row-digests.bin`: 16 bytes for each row, in the order of the
output; zeros where a row has no score.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import re
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from prefillcli.errors import DamagedFileError, OutputConflictError, PrefillError, brief, run_again
from prefillcli.rows.output.columns import DIGEST, ROW, TAKEN_OVER, ResultRows
from prefillcli.rows.output.destination import Job, write_parquet
from prefillcli.rows.output.store import Store
from prefillcli.rows.output.tallies import Counts
from prefillcli.rows.proof import JOB_KEY, fields_of, require_seal
from prefillcli.rows.records import Prompt, Window
from prefillcli.rows.values import id_texts, to_python
from prefillcli.stats.arrays import Int64Array

NAME = "row-digests.bin"
SIZE = 16  # bytes of a digest
TYPE = pa.binary(SIZE)
_NONE = bytes(SIZE)


class RowDigests:
    """Notes in each prompt the digest of its row.

    A row's results depend on its id (or number), its tokens and images, the labels after them, whether they were cut,
    its own keep rate and adapter, the values that its sections are made of, and its values in the carried `columns`,
    by which rows are chosen. For a row with several prompts, they depend on all of these. Everything else that they
    depend on is the same for all rows: the job's fingerprint, and `common`.
    """

    def __init__(
        self,
        *,
        id_column: str | None,
        json_carried: bool,
        columns: Sequence[str] = (),
        common: Sequence[Prompt] = (),
    ) -> None:
        self._id_column = id_column
        self._json = json_carried
        self._columns = sorted(columns)
        self._common = b""
        self._common = b"".join(self._of(prompt, ()) for prompt in common)

    def __call__(self, window: Window) -> Window:
        places = {row: place for place, row in enumerate(window.rows.tolist())}
        names = [str(row) for row in places]
        if self._id_column is not None:
            names = id_texts(window.carried[self._id_column], json_text=self._json)
        values = [to_python(window.carried[name]) for name in self._columns]
        for prompt in window.prompts:
            place = places[prompt.row]
            prompt.digest = self._of(prompt, [names[place], *(column[place] for column in values)])
        several: dict[int, list[Prompt]] = {}
        for prompt in window.prompts:
            several.setdefault(prompt.row, []).append(prompt)
        for own in several.values():
            if len(own) > 1:
                found = hashlib.blake2b(b"".join(each.digest or b"" for each in own), digest_size=SIZE).digest()
                for each in own:
                    each.digest = found
        return window

    def _of(self, prompt: Prompt, own: Iterable[Any]) -> bytes:
        rest = [
            *own,
            prompt.labels.single or prompt.labels.as_lists(),
            prompt.truncated,
            prompt.keep,
            prompt.specprefill,
        ]
        text = json.dumps([*rest, prompt.variant, prompt.made_of], sort_keys=True, default=_plain).encode()
        found = hashlib.blake2b(self._common, digest_size=SIZE)
        found.update(b"%d " % len(text) + text)
        found.update(prompt.content)
        return found.digest()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else repr(value)


def digests_of(rows: pa.Table) -> bytes:
    """Return the bytes of the file for rows of parts."""
    return b"".join(_NONE if each is None else each for each in rows[DIGEST].to_pylist())


class DigestReader:
    """Reads the digests of an output, which must be unchanged. `open` makes a reader; `finish` closes it."""

    def __init__(self, file: IO[bytes], location: str) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._location = location

    def next(self, rows: int) -> pa.Array:
        """Return the digests of the next rows, null where a row has none. Raises DamagedFileError if there are
        fewer."""
        data = self._read(rows * SIZE)
        if len(data) < rows * SIZE:
            raise self._damaged()
        known = np.frombuffer(data, np.uint64).reshape(-1, 2).any(axis=1)
        mask = pa.array(known)
        digests = pa.Array.from_buffers(TYPE, rows, [None, pa.py_buffer(data)])
        return pc.if_else(mask, digests, pa.scalar(None, TYPE))

    def finish(self, digest: str) -> None:
        """Raise DamagedFileError unless everything was read and is unchanged."""
        if self._read(1) or self._hash.hexdigest() != digest:
            raise self._damaged()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self._file.read(size - len(data))):
            data += more
        self._hash.update(data)
        return data

    def _damaged(self) -> DamagedFileError:
        return DamagedFileError(f"{self._location}/{NAME} is not as it was written")


_NAME = re.compile(r"part-(\d{6,})-(\d{6,})\.parquet")


@dataclass(frozen=True, slots=True)
class WindowRows:
    """The rows of a window: they are the same when it is read again, and its parts together must hold them."""

    count: int
    first: int
    last: int
    digest: str  # SHA-256 of all its row numbers, as little-endian 64-bit integers

    @classmethod
    def of(cls, rows: Int64Array) -> WindowRows:
        """Return the rows of a window. `rows` are ascending row numbers, at least one."""
        digest = hashlib.sha256(np.ascontiguousarray(rows, "<i8").tobytes()).hexdigest()
        return cls(len(rows), int(rows[0]), int(rows[-1]), digest)


@dataclass
class PartInfo:
    """The metadata of a part."""

    job: Job
    settled: dict[str, Any]  # what the job had settled when the part was written
    sequence: int  # how many parts the job had written before
    window: int
    number: int  # the part's number in its window
    window_rows: WindowRows
    counts: Counts
    # For every JSON column the kinds of its values (see json_columns).
    kinds: dict[str, str] = field(default_factory=dict)
    # The blocks that the window hands to the next one (see `prefillcli.plan.blocks`); None if not known then.
    carried: list[tuple[int, str]] | None = None
    shard: str | None = None  # the shard that wrote it, like `2/4`; None if one run scores all rows
    # The rows of the window that this shard scores; None if it scores all.
    own_rows: WindowRows | None = None

    @property
    def expected_rows(self) -> WindowRows:
        """The rows of the window that the parts of this run hold once they are complete."""
        return self.own_rows or self.window_rows

    @property
    def name(self) -> str:
        """The file name that the part must have."""
        return part_name(self.window, self.number)


_INFO = TypeAdapter(PartInfo)


def part_name(window: int, number: int) -> str:
    """Return the file name of a window's part."""
    return f"part-{window:06d}-{number:06d}.parquet"


def window_of(name: str) -> int:
    """Return the window of a part by its file name."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is not the name of a part")
    return int(found[1])


def is_part(name: str) -> bool:
    """Return whether a file of a work folder is a part by its name."""
    return _NAME.fullmatch(name) is not None


def make_rows(window: Window, rows: ResultRows) -> pa.Table:
    """Make row number, carried columns and result columns of some rows of a window."""
    carried = window.carried.take(pa.array(np.searchsorted(window.rows, rows.numbers)))
    return pa.Table.from_arrays(
        [pa.array(rows.numbers), *carried.columns, *rows.arrays()],
        schema=pa.schema([(ROW, pa.int64()), *carried.schema, *rows.schema.results]),
    )


def with_digests(rows: pa.Table, found: ResultRows) -> pa.Table:
    """Return rows that were scored now, with the digests of those that have a score."""
    pairs = zip(found.prompts, found.errors, strict=True)
    digests = [None if prompt is None or error is not None else prompt.digest for prompt, error in pairs]
    return _marked(rows, pa.array(digests, TYPE), taken_over=False)


def taken_rows(window: Window, results: pa.Table) -> pa.Table:
    """Return rows of a window as an earlier output has them: their numbers, result columns and digests.

    The carried columns are the window's own.
    """
    numbers, digests = results[ROW], results[DIGEST].cast(TYPE)
    carried = window.carried.take(pa.array(np.searchsorted(window.rows, numbers.to_numpy())))
    rest = results.drop_columns([ROW, DIGEST])
    rows = pa.Table.from_arrays(
        [numbers, *carried.columns, *rest.columns],
        schema=pa.schema([(ROW, pa.int64()), *carried.schema, *rest.schema]),
    )
    return _marked(rows, digests, taken_over=True)


def _marked(rows: pa.Table, digests: pa.Array, *, taken_over: bool) -> pa.Table:
    rows = rows.append_column(pa.field(DIGEST, TYPE), digests)
    return rows.append_column(pa.field(TAKEN_OVER, pa.bool_()), pa.array([taken_over] * len(rows)))


def write_part(store: Store, info: PartInfo, rows: pa.Table) -> None:
    """Write rows of a window as a part."""
    buffer = io.BytesIO()
    metadata = {JOB_KEY: json.dumps({**vars(info), "job": info.job.to_json()}, default=fields_of).encode()}
    write_parquet(buffer, rows.schema.with_metadata(metadata), [rows], compression="lz4")
    store.put_bytes(info.name, buffer.getvalue())


def read_part(store: Store, name: str, columns: Sequence[str] | None = None) -> tuple[PartInfo, pa.Table]:
    """Read the metadata of a part, and its rows.

    Raises DamagedFileError if the part was changed since it was written, or has the name of another part;
    PrefillError if it cannot be read now.
    """
    try:
        data = io.BytesIO(store.read_bytes(name))
    except FileNotFoundError:
        raise DamagedFileError(f"{store.location}/{name} is gone") from None
    except PrefillError:
        raise
    except Exception as error:  # the clients of object stores raise exceptions of any class
        kind = DamagedFileError if getattr(error, "errno", None) == errno.EIO else PrefillError
        raise kind(f"cannot read {store.location}/{name}: {brief(error)}") from error
    try:
        require_seal(data)
        table = pq.read_table(data, columns=columns, page_checksum_verification=True)
        content = json.loads(table.schema.metadata[JOB_KEY])
        content["job"] = Job.of_json(content["job"])
        info = _INFO.validate_python(content)
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
    """Yield each name with the result or the error of `read_part`; from an object store several are read at a time.

    There may be many parts, so only the next few are read ahead.
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


@dataclass(slots=True)
class _WindowParts:
    """The parts of one window."""

    rows: WindowRows
    numbers: dict[Store, list[int]] = field(default_factory=lambda: defaultdict(list))  # by the folder they are in
    written: int = 0
    carried: list[tuple[int, str]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return self.written == self.rows.count


class PartIndex:
    """The parts of a job by window. Parts are added one by one; their rows are read only when asked for.

    `name` and `remedy` are for messages: the owner of the parts, and the remedy where rows are missing.
    """

    def __init__(self, name: str, remedy: str | None = None) -> None:
        self.counts = Counts()  # of all rows in the parts
        # For every column carried from JSON Lines the kinds of its values (see json_columns).
        self.json_kinds: dict[str, set[str]] = {}
        self.next_sequence = 0  # the number of the next part in the job
        self._name = name
        self._remedy = remedy
        self._windows: dict[int, _WindowParts] = {}
        self._rows: dict[int, set[int]] = {}  # of windows that were asked for and are incomplete

    def add(
        self, work: Store, info: PartInfo, rows: Sequence[int] = (), *, expected: WindowRows | None = None
    ) -> None:
        """Take in a part of the folder `work`; `rows` are its row numbers where its window is being written.

        The parts of a window must hold its `expected` rows; without these, the rows of the run that wrote the parts.
        """
        expected = expected or info.expected_rows
        window = self._windows.setdefault(info.window, _WindowParts(expected))
        if window.rows != expected:
            raise self._wrong(info.window)
        window.numbers[work].append(info.number)
        window.written += info.counts.total
        if info.carried is not None:
            window.carried = info.carried
        self.next_sequence = max(self.next_sequence, info.sequence + 1)
        self.counts.add(info.counts)
        for name, kinds in info.kinds.items():
            self.json_kinds.setdefault(name, set()).update(kinds)
        if window.whole:
            self._rows.pop(info.window, None)
        elif info.window in self._rows:
            self._rows[info.window].update(rows)

    def next_number(self, window: int) -> int:
        """Return the number of the next part in its window."""
        found = self._windows.get(window)
        return max(chain(*found.numbers.values()), default=-1) + 1 if found else 0

    def rows(self, window: int) -> set[int]:
        """Return the numbers of the rows of a window that are in its parts."""
        found = self._windows.get(window)
        if found is None or window in self._rows:
            return set(self._rows.setdefault(window, set()))
        rows = set(self._read(window, [ROW])[ROW].to_pylist())
        if not found.whole:
            self._rows[window] = rows
        return set(rows)

    def carried(self, window: int) -> list[tuple[int, str]]:
        """Return the blocks that a window hands to the next one."""
        found = self._windows.get(window)
        return list(found.carried) if found else []

    def holds(self, window: int, rows: Int64Array) -> bool:
        """Return whether every row of a window of the input, which has these rows, is in its parts.

        Raises OutputConflictError if the parts hold other rows.
        """
        found = self._windows.get(window)
        if found is None:
            return False
        if found.rows != WindowRows.of(rows):
            raise OutputConflictError(
                f"{self._name} holds other rows for window {window} than the input has now\n"
                "start over with --overwrite"
            )
        return found.whole

    def require_complete(self, windows: int, without: Container[int] = ()) -> None:
        """Raise PrefillError unless each of the input's `windows` windows is there once, and complete.

        Windows `without` rows of this shard must have no part.
        """
        last = -1
        for window in range(max(windows, max(self._windows, default=-1) + 1)):
            found = self._windows.get(window)
            if found is None and window in without:
                continue
            if found is None or not found.whole or found.rows.first <= last or window >= windows:
                raise self._wrong(window)
            last = found.rows.last

    def require_rows(self, window: int, rows: Int64Array) -> None:
        """Raise PrefillError unless these rows, ascending, are those that the parts of a window must hold."""
        if WindowRows.of(rows) != self._windows[window].rows:
            raise self._wrong(window)

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows, window by window, each in the order of the input.

        Raises DamagedFileError or PrefillError if the parts of a window no longer hold its rows.
        """
        for window in sorted(self._windows):
            rows = self._read(window)
            rows = rows.take(pa.array(np.argsort(rows[ROW].to_numpy(), kind="stable")))
            self.require_rows(window, rows[ROW].to_numpy())
            yield rows

    def _read(self, window: int, columns: Sequence[str] | None = None) -> pa.Table:
        found = []
        for work, numbers in self._windows[window].numbers.items():
            for _, part in read_parts(work, [part_name(window, number) for number in numbers], columns):
                try:
                    found.append(part.result()[1])
                except DamagedFileError as error:
                    raise DamagedFileError(f"{error}\n{self._advice}") from None
        return pa.concat_tables(found)

    @property
    def _advice(self) -> str:
        return self._remedy or f"{run_again()}: they are scored again"

    def _wrong(self, window: int) -> PrefillError:
        return PrefillError(f"{self._name}: not every row of window {window} is there exactly once\n{self._advice}")
