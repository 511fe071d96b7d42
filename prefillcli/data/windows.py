"""Row batches joined into windows: rows planned, scored and written together; an id that comes again is an error."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.data.dealing import ShardRows
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.reading.selection import BATCH_ROWS
from prefillcli.data.rows import ErrorCode, Float64Array, Int64Array, RowBatch, RowError, Window
from prefillcli.data.values import is_text, plain_type, text_of, to_python

MAX_ROWS = 16_384
MAX_BYTES = 128 << 20

T = TypeVar("T")


class BatchedRows(Protocol):
    """Rows in batches: the files of an input, or a table."""

    @property
    def kind(self) -> str:
        """`jsonl` if carried values are JSON text."""

    def batches(self, most_rows: int) -> Iterator[RowBatch]:
        """Batches of at most `most_rows` rows, the same ones every time."""


def windows(
    source: BatchedRows,
    builder: PromptBuilder,
    labels: Labels,
    *,
    id_column: str | None,
    max_rows: int = MAX_ROWS,
    max_bytes: int = MAX_BYTES,
    batch_rows: int = BATCH_ROWS,
    skip: Callable[[int, Int64Array], bool] | None = None,
    only: ShardRows | None = None,
    ended: Callable[[int], None] | None = None,
    digest: Callable[[Window], None] | None = None,
) -> Iterator[Window]:
    """Windows that close at `max_rows` rows or `max_bytes` bytes, with the batch of at most `batch_rows` that brings
    them, cut the same way every time.

    A row whose id is null or was seen before is an error row. A window whose index and row numbers `skip` accepts
    (one that is scored already) is read for its ids, but neither tokenised nor yielded. With `only` the windows are
    cut the same way, but have the rows of one shard; one that has none of them is not yielded. At the end of the
    input `ended` is called with the number of windows. `digest` notes in the prompts of a window what their rows'
    results follow from. Raises BuilderClosed at the next batch after `builder` is closed.
    """
    seen = SeenIds(json=source.kind == "jsonl")
    count = 0
    for index, batches in enumerate(_groups(_while_open(source, batch_rows, builder), max_rows, max_bytes)):
        for batch in batches:
            if id_column is not None:
                for row, error in seen.check(batch.rows, batch.carried.column(id_column)).items():
                    batch.errors.setdefault(row, error)
        count = index + 1
        whole = None
        if only is not None:
            whole = _rows(batches)
            batches = [batch.only(own) for batch, own in zip(batches, only.of(batches), strict=True)]
        rows = _rows(batches)
        if not (skip is not None and skip(index, rows)) and len(rows):
            window = _window(index, batches, builder, labels)
            window.whole_rows = whole
            if digest is not None:
                digest(window)
            yield window
    if ended is not None:
        ended(count)


def _while_open(source: BatchedRows, batch_rows: int, builder: PromptBuilder) -> Iterator[RowBatch]:
    """The batches; a run that is stopped does not wait for those of windows that are passed over."""
    for batch in source.batches(batch_rows):
        builder.require_open()
        yield batch


def _groups(batches: Iterable[RowBatch], max_rows: int, max_bytes: int) -> Iterator[list[RowBatch]]:
    group: list[RowBatch] = []
    rows = size = 0
    for batch in batches:
        group.append(batch)
        rows += len(batch.rows)
        size += batch.nbytes
        if rows >= max_rows or size >= max_bytes:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


def _rows(batches: list[RowBatch]) -> Int64Array:
    return np.concatenate([batch.rows for batch in batches])


def _window(index: int, batches: list[RowBatch], builder: PromptBuilder, labels: Labels) -> Window:
    window = Window(
        index=index,
        rows=_rows(batches),
        prompts=[],
        errors={},
        carried=pa.concat_tables([batch.carried for batch in batches]),
    )
    for batch in batches:
        prompts, errors = builder.build(batch, labels)
        window.prompts += prompts
        window.errors |= errors
    return window


class Prefetcher(Iterator[T]):
    """The same items, made by a background thread up to `depth` items before they are asked for.

    The thread starts at once. An exception in `items` is raised here, after the items before it. Leaving the
    `with` block, or `close`, stops the thread and waits for the item that it is making; `cancel` is called first, to
    cut that short.
    """

    def __init__(self, items: Iterable[T], depth: int = 1, cancel: Callable[[], None] | None = None) -> None:
        self._items = items
        self._cancel = cancel
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._room = threading.Semaphore(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefill-reader", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        if self._stopped.is_set():
            raise StopIteration
        kind, value = self._ready.get()
        if kind == "item":
            self._room.release()
            item: T = value
            return item
        self.close()
        if kind == "error":
            raise value
        raise StopIteration

    @property
    def ready(self) -> bool:
        """Whether the next item, or the end, is there."""
        return self._stopped.is_set() or not self._ready.empty()

    def close(self) -> None:
        self._stopped.set()
        self._room.release()
        if self._cancel is not None:
            self._cancel()
        self._thread.join()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _work(self) -> None:
        source = iter(self._items)
        try:
            while self._room.acquire() and not self._stopped.is_set():
                self._ready.put(("item", next(source)))
        except StopIteration:
            self._ready.put(("end", None))
        except BaseException as error:  # handed to the consumer, whatever it is
            self._ready.put(("error", error))
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()


class SeenIds:
    """Finds null and repeated ids over a whole input.

    Numbers and times are compared as they are, anything else by a 64-bit hash, the same one in every process: in ten
    million rows the chance of one false duplicate is about one in 400,000. With `json` the ids are JSON texts, which
    are compared as a column of text would hold them: 1 is the same as "1", and another id than 1.0.
    """

    def __init__(self, *, json: bool = False) -> None:
        self._json = json
        self._sorted: list[Int64Array] = []
        """Keys of all rows so far in sorted runs, each more than twice as long as the next."""

    def check(self, rows: Int64Array, ids: pa.ChunkedArray) -> dict[int, RowError]:
        """The rows among these whose id is null or was seen before, by row number; then remember the ids."""
        column = ids.combine_chunks()
        null = pc.is_null(column, nan_is_null=True).to_numpy(zero_copy_only=False)
        valid = np.flatnonzero(~null)
        keys = (_json_keys if self._json else _keys)(column.filter(pa.array(~null)))
        unique, first = np.unique(keys, return_index=True)
        repeated = np.ones(len(keys), bool)
        repeated[first] = False
        for run in self._sorted:
            at = np.minimum(np.searchsorted(run, keys), len(run) - 1)
            repeated |= run[at] == keys
        self._remember(unique)
        errors = {int(row): RowError(ErrorCode.NULL_ID, "the id is null or missing") for row in rows[null]}
        for position in np.flatnonzero(repeated):
            (what,) = to_python(column.slice(int(valid[position]), 1))
            what = text_of(what) if self._json else what
            errors[int(rows[valid[position]])] = RowError(
                ErrorCode.DUPLICATE_ID, f"an earlier row has the id {what!r}"
            )
        return errors

    def _remember(self, keys: Int64Array) -> None:
        if len(keys) == 0:
            return
        while self._sorted and len(self._sorted[-1]) <= 2 * len(keys):
            keys = np.concatenate([self._sorted.pop(), keys])
            keys.sort()
        self._sorted.append(keys)


def _keys(ids: pa.Array) -> Int64Array:
    """A number for every id [rows], of which none is null."""
    if isinstance(ids, pa.ExtensionArray):
        return _keys(ids.storage)
    kind = plain_type(ids.type)
    if pa.types.is_floating(kind):
        numbers: Float64Array = ids.to_numpy(zero_copy_only=False).astype(np.float64) + 0.0  # -0.0 is 0.0
        as_integers: Int64Array = numbers.view(np.int64)
        return as_integers
    if pa.types.is_uint64(kind):
        unsigned: Int64Array = ids.to_numpy(zero_copy_only=False).view(np.int64)
        return unsigned
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        ids, kind = ids.view(pa.int32() if kind.bit_width == 32 else pa.int64()), pa.int64()
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        keys: Int64Array = ids.cast(pa.int64()).to_numpy(zero_copy_only=False)
        return keys
    if is_text(kind):
        return _hashed(pc.cast(ids, pa.large_binary()).to_pylist())
    return _hashed(repr(value).encode("utf-8", "surrogatepass") for value in to_python(ids))


def _json_keys(ids: pa.Array) -> Int64Array:
    texts = (text_of(text) for text in ids.to_pylist())
    # A column of floats has both zeros as numbers that are equal.
    return _hashed(("0.0" if text == "-0.0" else text).encode("utf-8", "surrogatepass") for text in texts)


def _hashed(values: Iterable[bytes]) -> Int64Array:
    """Hashes that do not depend on the process, as Python's own do."""
    return np.frombuffer(b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in values), np.int64)
