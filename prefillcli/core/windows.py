"""Windows of rows, which are planned, scored and written together, and one row found in its window.

The rows of a window are dealt to the shards of a job before anything is tokenised. Rows that begin alike should be
scored by one shard, because their common prefix is then computed once. So the rows are sorted by the text that their
prompts begin with, as the plan will sort their tokens. The sorted rows are cut into runs where neighbours have little
in common, and each run goes to the shard that has the least work so far. All of this follows from the input and the
number of shards alone, so every shard gets the same result.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import queue
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.errors import UsageError, counted
from prefillcli.prompts.builder import PromptBuilder
from prefillcli.prompts.labels import Labels
from prefillcli.rows.input.selection import BATCH_ROWS
from prefillcli.rows.input.source import Source, TableRows
from prefillcli.rows.output import Shard
from prefillcli.rows.records import ErrorCode, Prompt, RowBatch, RowError, Window
from prefillcli.rows.values import id_texts, is_text, plain_type, text_of, to_python
from prefillcli.stats.arrays import Float64Array, Int64Array

RUN_ROWS = 512  # rows of a run, at most
# A run has at most this fraction of a shard's part of a window, where cutting it costs little.
RUNS_PER_SHARD = 16
_KEY_CHARS = 1 << 16  # of the beginning of a row that are compared
_LITTLE = 64  # bytes in common that are not worth keeping two rows together
_HANDED_ON = 1024  # bytes in common for which a window's first row follows the last row of the window before
_ROW_BYTES = 16  # cost of a row beside its text


class Dealer:
    """Deals the windows of a job, which it must be given in order, to `count` shards."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._loads = [0] * count
        self._last: tuple[bytes, int] | None = None  # last row of the window before, and that row's shard

    def deal(self, keys: Sequence[bytes], sizes: Sequence[int]) -> Int64Array:
        """Return the shard of each row of a window, from 0 [rows].

        `keys` are the beginnings of the rows' prompts, `sizes` their lengths.
        """
        order = sorted(range(len(keys)), key=keys.__getitem__)
        shared = [0, *(common_bytes(keys[a], keys[b]) for a, b in pairwise(order)), 0]
        costs = [max(sizes[row] - shared[at], 0) + _ROW_BYTES for at, row in enumerate(order)]
        most = max(sum(costs) // (RUNS_PER_SHARD * self._count), 1)
        runs = cut_runs(costs, shared, most)
        work = [shared[start] + sum(costs[start:stop]) for start, stop in runs]
        dealt = np.empty(len(keys), np.int64)

        def give(run: int, number: int) -> None:
            start, stop = runs[run]
            dealt[order[start:stop]] = number
            self._loads[number] += work[run]

        pinned = None
        if self._last is not None and keys and common_bytes(self._last[0], keys[0]) >= _HANDED_ON:
            # The window before ends with the long beginning of this one: the shard of its last row has the K,V.
            at = order.index(0)
            pinned = next(run for run, (start, stop) in enumerate(runs) if start <= at < stop)
            give(pinned, self._last[1])
        heap = [(load, number) for number, load in enumerate(self._loads)]
        heapq.heapify(heap)
        for run in sorted(range(len(runs)), key=lambda run: (-work[run], run)):
            if run != pinned:
                _, number = heap[0]
                give(run, number)
                heapq.heapreplace(heap, (self._loads[number], number))
        if len(keys):
            self._last = keys[-1], int(dealt[-1])
        return dealt


def cut_runs(
    costs: Sequence[int], shared: Sequence[int], most: int, most_rows: int = RUN_ROWS
) -> list[tuple[int, int]]:
    """Return runs of rows as (start, stop), of at most `most_rows` rows and about the cost `most`.

    `shared[i]` is the part that row i has in common with the one before, [rows + 1] with 0 at both ends; `costs[i]` is
    the rest of the row. A run ends where the rows have least in common. It may cost more than `most` if every earlier
    cut would break up much in common.
    """
    before = [0, *accumulate(costs)]
    count, runs, start = len(costs), [], 0
    while start < count:
        last = min(start + most_rows, count)
        reach = start + 1
        while reach < last and shared[start] + before[reach + 1] - before[start] <= most:
            reach += 1
        stop = _best_cut(shared, start + 1, reach)
        if shared[stop] > max(most // 8, _LITTLE):
            cheap = (at for at in range(reach + 1, last + 1) if shared[at] <= max(most // 8, _LITTLE))
            stop = next(cheap, _best_cut(shared, start + 1, last))
        runs.append((start, stop))
        start = stop
    return runs


def _best_cut(shared: Sequence[int], first: int, last: int) -> int:
    # The last of these cuts that breaks up hardly more than the best one.
    least = min(shared[first : last + 1])
    return max(at for at in range(first, last + 1) if shared[at] <= least + _LITTLE)


def common_bytes(one: bytes, other: bytes) -> int:
    """Return how many leading bytes two texts have in common."""
    size = min(len(one), len(other))
    # The highest bit of the XOR is in the first byte that differs.
    differing = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return size - (differing.bit_length() + 7) // 8


class ShardRows:
    """Finds the rows of one shard, window by window."""

    def __init__(self, shard: Shard, builder: PromptBuilder) -> None:
        self._number = shard.number - 1
        self._dealer = Dealer(shard.count)
        text = builder.template.text if builder.template is not None else ""
        # Images stand before texts, and equal ones should be in one shard.
        texts = in_order_of_use(text, builder.columns)
        self._columns = tuple(dict.fromkeys([*builder.image_columns, *texts]))

    def of(self, batches: Sequence[RowBatch]) -> list[Int64Array]:
        """Return positions of the shard's rows in each batch of the next window."""
        found = [key for batch in batches for key in self._keys(batch)]
        dealt = self._dealer.deal([key for key, _ in found], [size for _, size in found])
        own, at = [], 0
        for batch in batches:
            own.append(np.flatnonzero(dealt[at : at + len(batch.rows)] == self._number))
            at += len(batch.rows)
        return own

    def _keys(self, batch: RowBatch) -> list[tuple[bytes, int]]:
        # The beginning of each row's prompt, and its length.
        columns = [map(_text, batch.columns[name]) for name in self._columns]
        return [_joined(texts) for texts in zip(*columns, strict=True)]


def in_order_of_use(template: str, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns in the order in which a template names them first."""
    places = {name: re.search(rf"\b{re.escape(name)}\b", template) for name in columns}
    return tuple(sorted(columns, key=lambda name: place.start() if (place := places[name]) else len(template)))


def _text(value: Any) -> str | bytes:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray):
        return value.astype("<i8").tobytes()
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):  # nested in itself, or too deeply: no row becomes a prompt of it
        return ""


def _joined(texts: Sequence[str | bytes]) -> tuple[bytes, int]:
    size = sum(map(len, texts))
    start = [each[:_KEY_CHARS] for each in texts]
    key = b"\0".join(each if isinstance(each, bytes) else each.encode("utf-8", "surrogatepass") for each in start)
    return key, size


MAX_ROWS = 16_384
MAX_PICTURED = 1_024  # rows with columns of images, whose files are in memory until their window is scored

T = TypeVar("T")


class WindowSize(NamedTuple):
    """The size at which a window closes: `rows` or `nbytes`, after the batch of at most `batch_rows` that reaches
    it."""

    rows: int = MAX_ROWS
    nbytes: int = 128 << 20
    batch_rows: int = BATCH_ROWS


USUAL_SIZE = WindowSize()


def windows(
    source: Source | TableRows | _Search,
    builder: PromptBuilder,
    labels: Labels,
    *,
    id_column: str | None,
    size: WindowSize = USUAL_SIZE,
    skip: Callable[[int, Int64Array], bool] | None = None,
    only: ShardRows | None = None,
    ended: Callable[[int], None] | None = None,
) -> Iterator[Window]:
    """Yield windows of this size, cut the same way every time.

    A row whose id is null or was seen before is an error row. A window whose index and row numbers `skip` accepts (one
    that is scored already) is read for its ids, but neither tokenised nor yielded. With `only` the windows are cut the
    same way, but hold only the rows of one shard; an empty one is not yielded. At the end of the input `ended` is
    called with the number of windows. Raises BuilderClosed at the next batch after `builder` is closed.
    """
    seen = SeenIds(json=source.kind == "jsonl")
    if builder.image_columns:
        size = size._replace(rows=min(size.rows, MAX_PICTURED))
    count = 0
    for index, batches in enumerate(_groups(source, size, builder)):
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
            yield window
    if ended is not None:
        ended(count)


def _groups(
    source: Source | TableRows | _Search, size: WindowSize, builder: PromptBuilder
) -> Iterator[list[RowBatch]]:
    # The batches of each window. A run that is stopped does not wait for the batches of windows that are skipped.
    group: list[RowBatch] = []
    rows = nbytes = 0
    for batch in source.batches(size.batch_rows):
        builder.require_open()
        group.append(batch)
        rows += len(batch.rows)
        nbytes += batch.nbytes
        if rows >= size.rows or nbytes >= size.nbytes:
            yield group
            group, rows, nbytes = [], 0, 0
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

    The thread starts at once. An exception in `items` is raised here, after the items before it. Leaving the `with`
    block, or `close`, stops the thread and waits for its current item; `cancel` is called first, to cut that short.
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
            return cast(T, value)
        self.close()
        if kind == "error":
            raise value
        raise StopIteration

    @property
    def ready(self) -> bool:
        """True if the next item, or the end, is ready."""
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
        except BaseException as error:  # any exception is handed to the consumer
            self._ready.put(("error", error))
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()


class SeenIds:
    """Finds null and repeated ids over a whole input.

    Numbers and times are compared as they are, anything else by a 64-bit hash, the same one in every process: in ten
    million rows the chance of one false duplicate is about one in 400,000. With `json` the ids are JSON texts, which
    are compared as a column of text would hold them: 1 equals "1" but differs from 1.0.
    """

    def __init__(self, *, json: bool = False) -> None:
        self._json = json
        # Keys of all rows so far in sorted runs, each more than twice as long as the next.
        self._sorted: list[Int64Array] = []

    def check(self, rows: Int64Array, ids: pa.ChunkedArray) -> dict[int, RowError]:
        """Return the rows among these whose id is null or was seen before, by row number; then remember the ids."""
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
    # A number for every id [rows], of which none is null.
    if isinstance(ids, pa.ExtensionArray):
        return _keys(ids.storage)
    kind = plain_type(ids.type)
    if pa.types.is_floating(kind):
        numbers: Float64Array = ids.to_numpy(zero_copy_only=False).astype(np.float64) + 0.0  # -0.0 is 0.0
        return numbers.view(np.int64)
    if pa.types.is_uint64(kind):
        return np.asarray(ids, np.uint64).view(np.int64)
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        ids, kind = ids.view(pa.int32() if kind.bit_width == 32 else pa.int64()), pa.int64()
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return np.asarray(ids.cast(pa.int64()), np.int64)
    if is_text(kind):
        return _hashed(pc.cast(ids, pa.large_binary()).to_pylist())
    return _hashed(repr(value).encode("utf-8", "surrogatepass") for value in to_python(ids))


def _json_keys(ids: pa.Array) -> Int64Array:
    texts = (text_of(text) for text in ids.to_pylist())
    # In a column of floats both zeros are equal.
    return _hashed(("0.0" if text == "-0.0" else text).encode("utf-8", "surrogatepass") for text in texts)


def _hashed(values: Iterable[bytes]) -> Int64Array:
    # Hashes that do not depend on the process, as Python's own do.
    return np.frombuffer(b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in values), np.int64)


# One row of an input, with the window it is scored in.


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A row by its number, its id as text (None without an id column), and its window."""

    row: int
    id: str | None
    window: Window


def find_row(
    source: Source, builder: PromptBuilder, labels: Labels, *, row: str | None, id_column: str | None
) -> FoundRow:
    """Find the row with the number `row`, or with `id_column` the row with this id as text. If an id occurs twice,
    the first row counts; None: the first row of all.

    Only its own window is tokenised. Raises UsageError if there is no such row, PrefillError if a file is damaged.
    """
    search = _Search(source, row, id_column)
    found = next(windows(search, builder, labels, id_column=id_column, skip=search.goes_on), None)
    if found is None or search.row is None:
        where = f"the {counted(search.rows, 'row')} read" + ("" if search.last is None else f", 0 to {search.last:,}")
        if id_column is not None:
            where = f"column {id_column!r} of the {counted(search.rows, 'row')} read"
        raise UsageError("the input has no rows" if row is None else f"--row {row}: no such row in {where}")
    return FoundRow(search.row, search.id, found)


def find_prompts(
    source: Source,
    builder: PromptBuilder,
    labels: Labels,
    *,
    named: Collection[int | str | None],
    id_column: str | None,
    part: int = 0,
) -> dict[int | str | None, Prompt]:
    """Find the prompts of the rows with these numbers, or with `id_column` with these ids as text; of a row with
    several prompts, the one with the number `part`.

    Reads the input up to the last of them, and tokenises no other row. Rows without a prompt are left out; for an id
    that occurs twice the first row counts.
    """
    wanted, found = set(named), {}
    for batch in source.batches():
        if not wanted:
            break
        names: list[Any] = batch.rows.tolist()
        if id_column is not None:
            names = id_texts(batch.carried[id_column], json_text=source.kind == "jsonl")
        positions = [at for at, name in enumerate(names) if name in wanted]
        wanted -= {names[at] for at in positions}
        prompts, _ = builder.build(batch.only(np.array(positions, np.int64)), labels)
        by_row = {row: names[at] for at in reversed(positions) for row in [int(batch.rows[at])]}
        for prompt in (each for each in reversed(prompts) if each.part == part):
            found[by_row[prompt.row]] = prompt
    return found


class _Search:
    """The batches of a source, watched for the wanted row."""

    def __init__(self, source: Source, wanted: str | None, id_column: str | None) -> None:
        self.row: int | None = None
        self.id: str | None = None
        self.rows = 0
        self.last: int | None = None
        self._source = source
        self._wanted = wanted
        self._id_column = id_column
        self.kind = source.kind

    def goes_on(self, window: int, rows: Int64Array) -> bool:
        # Whether no batch so far has the row, so that it is not in this window, which has just been read.
        return self.row is None

    def batches(self, most_rows: int) -> Iterator[RowBatch]:
        for batch in self._source.batches(most_rows):
            if self.row is None:
                self._look(batch)
            yield batch

    def _look(self, batch: RowBatch) -> None:
        numbers = batch.rows.tolist()
        self.rows += len(numbers)
        self.last = numbers[-1] if numbers else self.last
        ids = None if self._id_column is None else [self._text(v) for v in to_python(batch.carried[self._id_column])]
        names = [str(number) for number in numbers] if ids is None else ids
        if numbers and (self._wanted is None or self._wanted in names):
            at = 0 if self._wanted is None else names.index(self._wanted)
            self.row, self.id = numbers[at], None if ids is None else ids[at]

    def _text(self, value: object) -> str | None:
        # An id as a user writes it. Columns carried from JSON Lines hold JSON text.
        if value is None:
            return None
        return text_of(str(value)) if self.kind == "jsonl" else str(value)
