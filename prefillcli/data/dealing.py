"""How the rows of a window are dealt to the shards of a job, before anything is tokenised.

Rows that begin alike should be scored by one shard, because their common prefix is then computed once. So the rows are
sorted by the text that their prompts begin with, as the plan will sort their tokens. The sorted rows are cut into runs
where neighbours have little in common, and each run goes to the shard that has the least work so far. All of this
follows from the input and the number of shards alone, so every shard finds the same.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.rows import Int64Array, RowBatch
from prefillcli.data.shard import Shard

RUN_ROWS = 512
"""Rows of a run, at most."""
RUNS_PER_SHARD = 16
"""A run has at most this fraction of what one shard gets of a window, where cutting it there costs little."""
_KEY_CHARS = 1 << 16  # of the beginning of a row that are compared
_LITTLE = 64  # bytes in common that are not worth keeping two rows together
_HANDED_ON = 1024  # bytes in common for which a window's first row follows the last row of the window before
_ROW_BYTES = 16  # what a row costs beside its text


class Dealer:
    """Deals the windows of a job, which it must be given in order, to `count` shards."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._loads = [0] * count
        self._last: tuple[bytes, int] | None = None  # of the window before: its last row, and that row's shard

    def deal(self, keys: Sequence[bytes], sizes: Sequence[int]) -> Int64Array:
        """The shard of each row of a window, from 0 [rows].

        `keys` are the beginnings of the rows' prompts, `sizes` their lengths.
        """
        order = sorted(range(len(keys)), key=keys.__getitem__)
        shared = [0, *(common_bytes(keys[a], keys[b]) for a, b in pairwise(order)), 0]
        costs = [max(sizes[row] - shared[at], 0) + _ROW_BYTES for at, row in enumerate(order)]
        most = max(sum(costs) // (RUNS_PER_SHARD * self._count), 1)
        runs = cut_runs(costs, shared, most)
        work = [shared[start] + sum(costs[start:stop]) for start, stop in runs]
        dealt = np.empty(len(keys), np.int64)
        pinned = self._follow(keys, order, runs, work, dealt)
        heap = [(load, number) for number, load in enumerate(self._loads)]
        heapq.heapify(heap)
        for run in sorted(range(len(runs)), key=lambda run: (-work[run], run)):
            if run != pinned:
                load, number = heap[0]
                self._loads[number] = load + work[run]
                heapq.heapreplace(heap, (self._loads[number], number))
                dealt[order[runs[run][0] : runs[run][1]]] = number
        if len(keys):
            self._last = keys[-1], int(dealt[-1])
        return dealt

    def _follow(
        self,
        keys: Sequence[bytes],
        order: Sequence[int],
        runs: Sequence[tuple[int, int]],
        work: Sequence[int],
        dealt: Int64Array,
    ) -> int | None:
        """The run that goes where the window before ends, because they have a long beginning in common.

        That shard has the K,V of the beginning.
        """
        if self._last is None or not keys or common_bytes(self._last[0], keys[0]) < _HANDED_ON:
            return None
        at = order.index(0)
        pinned = next(run for run, (start, stop) in enumerate(runs) if start <= at < stop)
        number = self._last[1]
        dealt[order[runs[pinned][0] : runs[pinned][1]]] = number
        self._loads[number] += work[pinned]
        return pinned


def cut_runs(
    costs: Sequence[int], shared: Sequence[int], most: int, most_rows: int = RUN_ROWS
) -> list[tuple[int, int]]:
    """Runs of rows as (start, stop), of at most `most_rows` rows and about the cost `most`.

    `shared[i]` is what row i has in common with the one before, [rows + 1] with 0 at both ends; `costs[i]` is what
    else it has. A run ends where the rows have least in common. It may cost more than `most` if all cuts before would
    leave much on both sides.
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
    """The last of these cuts that leaves hardly more in common than the best one."""
    least = min(shared[first : last + 1])
    return max(at for at in range(first, last + 1) if shared[at] <= least + _LITTLE)


def common_bytes(one: bytes, other: bytes) -> int:
    """How many leading bytes two texts have in common."""
    size = min(len(one), len(other))
    differing = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return size - (differing.bit_length() + 7) // 8


class ShardRows:
    """Finds the rows of one shard, window by window."""

    def __init__(self, shard: Shard, builder: PromptBuilder) -> None:
        self._number = shard.number - 1
        self._dealer = Dealer(shard.count)
        text = builder.template.text if builder.template is not None else ""
        self._columns = in_order_of_use(text, builder.columns)

    def of(self, batches: Sequence[RowBatch]) -> list[Int64Array]:
        """Positions of the shard's rows in each batch of the next window."""
        found = [key for batch in batches for key in self._keys(batch)]
        dealt = self._dealer.deal([key for key, _ in found], [size for _, size in found])
        own, at = [], 0
        for batch in batches:
            own.append(np.flatnonzero(dealt[at : at + len(batch.rows)] == self._number))
            at += len(batch.rows)
        return own

    def _keys(self, batch: RowBatch) -> list[tuple[bytes, int]]:
        """The beginning of each row's prompt, and its length."""
        columns = [map(_text, batch.columns[name]) for name in self._columns]
        return [_joined(texts) for texts in zip(*columns, strict=True)]


def in_order_of_use(template: str, columns: Sequence[str]) -> tuple[str, ...]:
    """The columns in the order in which a template names them first."""
    places = {name: re.search(rf"\b{re.escape(name)}\b", template) for name in columns}
    return tuple(sorted(columns, key=lambda name: place.start() if (place := places[name]) else len(template)))


def _text(value: Any) -> str | bytes:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
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
