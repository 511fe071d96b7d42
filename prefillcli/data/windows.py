"""Row batches joined into windows: what is planned, scored and written together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from prefillcli.data.dealing import ShardRows
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.reading.ids import SeenIds
from prefillcli.data.reading.selection import BATCH_ROWS
from prefillcli.data.rows import Int64Array, RowBatch, Window

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
