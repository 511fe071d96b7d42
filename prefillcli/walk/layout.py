"""The keys that each query sees: a pack laid out for forest attention.

One layer's K,V lie in one buffer: the held nodes first, then the pack's tokens in depth-first order. The queries of a
chunk see their own node causally and each ancestor entirely. The descendants of a node are contiguous, so "all of them
to the ancestor" is one `Span`. The triangles are left: the `pieces` of nodes in the chunk.

A token's depth is the number of tokens before it on its path. Windows count depths (`KeyWindow`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefillcli.plan.pack import Pack
from prefillcli.stats.arrays import Int64Array
from prefillcli.walk.attention import ROW_STEP, TILE, round_up

# Local attention: a limit on the keys that a query sees.
#
# Depths are counted, not positions: where tokens were left out of a prompt, a window still covers as many tokens, as
# in transformers and vLLM.


Depth = TypeVar("Depth", int, npt.NDArray[np.int64], Tensor)


@dataclass(frozen=True, slots=True)
class KeyWindow:
    """A sliding window (the last `size` tokens, the query's own included), or the aligned part of `size` tokens around
    the query.

    The second is `aligned`: a path is cut into parts of `size` tokens, and no query sees beyond its part's beginning
    (chunked local attention).
    """

    size: int
    aligned: bool = False

    def oldest(self, depth: Depth) -> Depth:
        """The depth of the first key that a query at `depth` sees; of a sliding window it may be negative."""
        return depth - depth % self.size if self.aligned else depth - self.size + 1


def oldest_key(window: KeyWindow | None, depth: int) -> int:
    """The depth of the first key that a query sees, with or without a window."""
    return window.oldest(depth) if window else 0


def query_blocks(window: KeyWindow | None, start: int, end: int, depth: int, most: int) -> Iterator[tuple[int, int]]:
    """Tokens `start:end` of one node, the first at `depth`, in blocks of at most `most`.

    All tokens of a block are in one part of an aligned window.
    """
    at = start
    while at < end:
        after = min(at + most, end)
        if window and window.aligned:
            own = depth + at - start
            after = min(after, at + window.oldest(own) + window.size - own)
        yield at, after
        at = after


def layer_window(module: Any, sliding_window: int | None) -> KeyWindow | None:
    """The window of an attention module that passes this sliding window, or None.

    Transformers cuts paths into parts by the mask alone, which is not made here. So the window comes from the
    configuration.
    """
    if sliding_window is not None:
        return KeyWindow(sliding_window)
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" not in kinds or kinds[module.layer_idx] != "chunked_attention":
        return None
    return KeyWindow(module.config.attention_chunk_size, aligned=True)


# Runs of queries with the runs of keys that they see.


_Depths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Queries `q0:q1` of a chunk see the keys `k0:k1` of the buffer; key `k0` is token number `k_depth` of its path.

    `masked`: a window hides some of these keys from some of these queries.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    k_depth: int
    masked: bool = False


class SpanSet:
    """Collects the keys that queries at these `depths` see. Clips runs to the window, and joins runs that follow one
    another."""

    def __init__(self, depths: _Depths, window: KeyWindow | None) -> None:
        self._depths = depths
        self._window = window
        self._spans: dict[tuple[int, int], list[Span]] = {}  # by keys

    def add(self, q0: int, q1: int, k0: int, k1: int, k_depth: int) -> None:
        """Queries `q0:q1` see the keys `k0:k1`."""
        known = self._spans.setdefault((k0, k1), [])
        if known and known[-1].q1 == q0:
            known[-1] = Span(known[-1].q0, q1, k0, k1, k_depth)
        else:
            known.append(Span(q0, q1, k0, k1, k_depth))

    def merged(self) -> list[Span]:
        """All spans. Spans of the same queries are joined where their keys follow one another."""
        by_queries: dict[tuple[int, int], list[Span]] = {}
        for spans in self._spans.values():
            for span in spans:
                by_queries.setdefault((span.q0, span.q1), []).append(span)
        result: list[Span] = []
        for spans in by_queries.values():
            spans.sort(key=lambda s: s.k0)
            joined = spans[:1]
            for span in spans[1:]:
                last = joined[-1]
                if last.k1 == span.k0 and last.k_depth + last.k1 - last.k0 == span.k_depth:
                    joined[-1] = Span(last.q0, last.q1, last.k0, span.k1, last.k_depth)
                else:
                    joined.append(span)
            result.extend(joined)
        if self._window is None:
            return result
        return [clipped for span in result if (clipped := self._clip(span, self._window)) is not None]

    def _clip(self, span: Span, window: KeyWindow) -> Span | None:
        seen = window.oldest(self._depths[span.q0 : span.q1])
        first, last = int(seen.min()), int(seen.max())
        end = span.k_depth + span.k1 - span.k0
        if first >= end:
            return None
        cut = max(0, first - span.k_depth)
        return Span(
            span.q0,
            span.q1,
            span.k0 + cut,
            span.k1,
            span.k_depth + cut,
            masked=last > span.k_depth + cut,
        )


GROUP_TOKENS = 16384  # padded tokens in one such batch
MIN_BLOCK = 128  # a window cuts triangles into blocks of its size; a sliding window into blocks not smaller than this


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of tokens of similar length as one batch.

    `index` [runs, longest] are their tokens, padded on the right with each run's last one; `valid` [runs, longest]
    is False for the padding. `tokens` are those that are not padding, at the `places` of the flattened batch.
    """

    runs: list[tuple[int, int]]
    index: torch.Tensor
    valid: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """These tokens `[runs, heads, longest, width]` of states `[1, heads, tokens, width]`."""
        rows = states[0].transpose(0, 1).index_select(0, self.index.flatten())
        return rows.view(*self.index.shape, *rows.shape[1:]).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class View:
    """The keys that the queries of a chunk see, for full attention or through one window.

    `pieces` are (start, end) in the chunk, each causal in itself; `groups` are the short ones.
    """

    spans: list[Span]
    pieces: list[tuple[int, int]]
    groups: list[Group]


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """The attention of reads to their own nodes: `alone` one by one, as (read, start, end) in the buffer, the others
    in groups of runs with the numbers of their reads [runs]. Reads in `passed` see nothing of their node through their
    window.
    """

    passed: list[int]
    alone: list[tuple[int, int, int]]
    groups: list[tuple[Group, torch.Tensor]]


Made = TypeVar("Made")


def made_once(tables: dict[Any, Any], at: Any, make: Callable[[], Made]) -> Made:
    """The entry of `tables` at a place, made on first use: in a chunk, the visible keys are the same for all
    layers."""
    if at not in tables:
        tables[at] = make()
    found: Made = tables[at]
    return found


class Tree:
    """The nodes of a pack, as the layout needs them. Token numbers count the pack's own tokens.

    The tokens of each run (start, end) in `both_ways` see one another whatever their order; with `in_windows` only in
    layers that attend within a window. A run lies in one node.
    """

    def __init__(self, pack: Pack, both_ways: Sequence[tuple[int, int]] = (), *, in_windows: bool = False) -> None:
        self.both_ways = both_ways
        self.in_windows = in_windows
        self.offsets = pack.offsets
        self.parents = pack.parents
        self.starts = pack.starts
        self.held = pack.held_tokens
        ends = np.cumsum([node.length for node in pack.held], dtype=np.int64).tolist()
        held = [(end - node.length, end, node.start) for node, end in zip(pack.held, ends, strict=True)]
        self.held_starts = [start for start, _, _ in held]  # of each held node, in the buffer
        #: The held nodes that each root sees, as (start, end) in the buffer and tokens before them on the path.
        self.attach = [[held[number] for number in seen] for seen in pack.attach]
        count = len(pack.parents)
        self.ends = [0] * count  # where the node's last descendant ends
        for node in range(count - 1, -1, -1):
            self.ends[node] = max(self.ends[node], self.offsets[node + 1])
            if pack.parents[node] >= 0:
                parent = pack.parents[node]
                self.ends[parent] = max(self.ends[parent], self.ends[node])
        lengths = np.diff(np.asarray(pack.offsets))
        #: For each node the depth up to which it sees the keys that the one before it sees.
        self.shared = [0, *pack.starts[1:]]
        for before, root in pairwise(node for node, parent in enumerate(pack.parents) if parent < 0):
            if self.attach[root] != self.attach[before]:
                self.shared[root] = 0
        self.positions: Int64Array = pack.positions.astype(np.int64)
        self.depths: Int64Array = np.arange(len(pack.tokens)) + np.repeat(
            np.asarray(pack.starts) - np.asarray(pack.offsets[:-1]), lengths
        )

    def path(self, node: int) -> list[tuple[int, int]]:
        """The keys that the end of `node` sees, as (start, end) in the buffer, root first."""
        runs = []
        while True:
            runs.append((self.held + self.offsets[node], self.held + self.offsets[node + 1]))
            if self.parents[node] < 0:
                break
            node = self.parents[node]
        runs.extend((first, last) for first, last, _ in reversed(self.attach[node]))
        return runs[::-1]

    def path_with_depths(self, node: int) -> list[tuple[int, int, int]]:
        """The keys that the end of `node` sees, as (start, end) in the buffer and the depth of the first, root
        first."""
        runs = [(self.held + self.offsets[node], self.held + self.offsets[node + 1], self.starts[node])]
        while (parent := self.parents[node]) >= 0:
            node = parent
            runs.append((self.held + self.offsets[node], self.held + self.offsets[node + 1], self.starts[node]))
        joined: list[tuple[int, int, int]] = []
        for start, end, depth in [*self.attach[node], *reversed(runs)]:
            if joined and joined[-1][1] == start and joined[-1][2] + start - joined[-1][0] == depth:
                joined[-1] = (joined[-1][0], end, joined[-1][2])
            else:
                joined.append((start, end, depth))
        return joined

    def nodes_over(self, start: int, end: int) -> list[int]:
        """Nodes with tokens or descendants in `start:end`, parents first."""
        first = bisect_right(self.offsets, start) - 1
        above = [first]
        while self.parents[above[-1]] >= 0:
            above.append(self.parents[above[-1]])
        return above[::-1] + list(range(first + 1, bisect_left(self.offsets, end, hi=len(self.parents))))


@dataclass(slots=True)
class Chunk:
    """Tokens `start:end` of the pack, which one call of a layer computes."""

    tree: Tree
    start: int
    end: int
    device: torch.device
    batched: int  # pieces up to this length are batched
    tables: dict[Any, Any] = field(default_factory=dict)  # tables made once for the chunk, by the visible keys

    @property
    def positions(self) -> Int64Array:
        return self.tree.positions[self.start : self.end]

    @property
    def depths(self) -> Int64Array:
        return self.tree.depths[self.start : self.end]

    @property
    def depths_on_device(self) -> torch.Tensor:
        """The depths, int64 [tokens]."""
        return made_once(self.tables, "depths", lambda: on_device(self.depths, self.device))

    def both_ways(self, window: KeyWindow | None) -> list[tuple[int, int]]:
        """The runs of the chunk's tokens that see one another both ways in a layer with this window."""
        runs = () if self.tree.in_windows and window is None else self.tree.both_ways
        return [(a - self.start, b - self.start) for a, b in runs if self.start <= a < self.end]

    def view(self, window: KeyWindow | None) -> View:
        """The keys seen through a window, or without one."""
        return made_once(self.tables, ("view", window), lambda: self._look(window))

    def blocks(self, window: KeyWindow | None, rows: int) -> tuple[Int64Array, Int64Array]:
        """The visible keys, for `kernel.ForestKernel.attend`: blocks of at most `rows` tokens, and their runs of
        keys."""
        return made_once(self.tables, ("blocks", window, rows), lambda: self._cut(window, rows))

    def _cut(self, window: KeyWindow | None, rows: int) -> tuple[Int64Array, Int64Array]:
        tree, a, b = self.tree, self.start, self.end
        blocks: list[tuple[int, ...]] = []
        runs: list[tuple[int, int, int]] = []
        room, top = 0, 0  # queries that fit in beside the last block, and the depth of the first one there
        shared = 0  # depth up to which the next node sees the keys of the last block
        for node in range(bisect_right(tree.offsets, a) - 1, len(tree.parents)):
            start, end = max(a, tree.offsets[node]), min(b, tree.offsets[node + 1])
            if start >= b:
                break
            shared = min(shared, tree.shared[node])
            if start == end:
                continue
            seen, depth = tree.path_with_depths(node), int(tree.depths[start])
            # Beside the last block, the keys that both see are looked at once. A node that is cut for that needs
            # another look at its own.
            beside, own = min(room, end - start), depth - tree.starts[node] + end - start
            fewest = TILE if beside == end - start else TILE + own
            if shared < fewest or (window and (window.aligned or depth < top)):
                beside = 0
            parts = [(start, start + beside)] if beside else []
            for at, after in [*parts, *query_blocks(window, start + beside, end, depth + beside, rows)]:
                depth = int(tree.depths[at])
                if window or at == start:
                    first, oldest = len(runs), oldest_key(window, depth)
                    runs += [run for each in seen if (run := _without_older(each, oldest)) is not None]
                joined = beside > 0 and at == start
                blocks.append((at - a, after - at, depth, first, len(runs), shared if joined else 0))
                room, top = (room, top) if joined else (rows, depth)
                room -= after - at
            shared = depth + after - at
        return np.array(blocks, np.int64).reshape(-1, 6), np.array(runs, np.int64).reshape(-1, 3)

    def ancestors(self, window: KeyWindow | None) -> list[Span]:
        """The keys of their nodes' ancestors that the queries see."""
        spans = SpanSet(self.depths, window)
        for node in self.tree.nodes_over(self.start, self.end):
            self._add_ancestor(spans, node)
        return spans.merged()

    def own_blocks(self, window: KeyWindow | None, most: int) -> list[tuple[int, int, int, int]]:
        """Blocks of at most `most` tokens of one node, as (start, end) in the chunk, and the keys of the node that
        they see.

        The keys are a run of the buffer; they end with the block, and the last query sees all that the window shows.
        """
        tree, a, b = self.tree, self.start, self.end
        blocks = []
        for node in range(bisect_right(tree.offsets, a) - 1, bisect_left(tree.offsets, b, hi=len(tree.parents))):
            first, depth = tree.offsets[node], tree.starts[node]
            start, end = max(a, first), min(b, tree.offsets[node + 1])
            for s, e in query_blocks(window, start, end, depth + start - first, most):
                seen = first + max(0, oldest_key(window, depth + s - first) - depth)
                blocks.append((s - a, e - a, tree.held + seen, tree.held + e))
        return blocks

    def _add_ancestor(self, spans: SpanSet, node: int) -> None:
        # The keys of a node that its descendants see, and the keys that it and they see of the held nodes before it.
        tree, a, b = self.tree, self.start, self.end
        first, last, below = tree.offsets[node], tree.offsets[node + 1], tree.ends[node]
        for k0, k1, depth in tree.attach[node]:
            spans.add(max(a, first) - a, min(b, below) - a, k0, k1, depth)
        if max(a, last) < min(b, below):
            spans.add(max(a, last) - a, min(b, below) - a, tree.held + first, tree.held + last, tree.starts[node])

    def _look(self, window: KeyWindow | None) -> View:
        tree, a, b = self.tree, self.start, self.end
        spans = SpanSet(self.depths, window)
        pieces: list[tuple[int, int]] = []
        for node in tree.nodes_over(a, b):
            self._add_ancestor(spans, node)
            first, last = tree.offsets[node], tree.offsets[node + 1]
            start, end = max(a, first), min(b, last)
            block = max(window.size, MIN_BLOCK) if window else max(end - start, 1)
            for s, e in query_blocks(window, start, end, tree.starts[node] + start - first, block):
                pieces.append((s - a, e - a))
                if s > first:
                    spans.add(s - a, e - a, tree.held + first, tree.held + s, tree.starts[node])
        long, short = split_by_length(pieces, self.batched)
        groups = group_runs(short, self.device)
        long += [run for group in groups for run in group.runs if len(group.runs) == 1]
        return View(spans.merged(), long, [group for group in groups if len(group.runs) > 1])


@dataclass(slots=True)
class LastTokens:
    """Single tokens, most of them the last ones of prompts: one query for each, or queries that stand `ahead` tokens
    after them.

    They see the nodes above their own, `ancestors(window)`, and of their own the tokens up to themselves:
    `own(window)` as runs of the buffer, empty where the window has passed the node.
    """

    tree: Tree
    tokens: Int64Array  # their numbers in the pack [reads]
    device: torch.device
    ahead: int = 0
    tables: dict[Any, Any] = field(default_factory=dict)  # as a chunk's

    @property
    def nodes(self) -> list[int]:
        """The node of each."""
        return [bisect_right(self.tree.offsets, token) - 1 for token in self.tokens.tolist()]

    @property
    def depths(self) -> Int64Array:
        return self.tree.depths[self.tokens] + self.ahead

    @property
    def depths_on_device(self) -> torch.Tensor:
        """The depths, int64 [reads]."""
        return made_once(self.tables, ("depths", self.ahead), lambda: on_device(self.depths, self.device))

    def ancestors(self, window: KeyWindow | None) -> list[Span]:
        spans = SpanSet(self.depths, window)
        tree = self.tree
        for query, node in enumerate(self.nodes):
            root = node
            while (parent := tree.parents[root]) >= 0:
                root = parent
                first, last = tree.offsets[root], tree.offsets[root + 1]
                spans.add(query, query + 1, tree.held + first, tree.held + last, tree.starts[root])
            for k0, k1, depth in tree.attach[root]:
                spans.add(query, query + 1, k0, k1, depth)
        return spans.merged()

    def blocks(self, window: KeyWindow | None, rows: int = 1) -> tuple[Int64Array, Int64Array]:
        """The visible keys, in the form of `Chunk.blocks`, in blocks of one query: neighbours may belong to different
        nodes."""

        def cut() -> tuple[Int64Array, Int64Array]:
            blocks: list[tuple[int, ...]] = []
            runs: list[tuple[int, int, int]] = []
            for query, (node, depth) in enumerate(zip(self.nodes, self.depths.tolist(), strict=True)):
                first, oldest = len(runs), oldest_key(window, depth)
                *above, (start, end, at) = self.tree.path_with_depths(node)
                seen = [*above, (start, min(end, start + depth - self.ahead + 1 - at), at)]
                runs += [run for each in seen if (run := _without_older(each, oldest)) is not None]
                blocks.append((query, 1, depth, first, len(runs), 0))
            return np.array(blocks, np.int64), np.array(runs, np.int64)

        return made_once(self.tables, ("blocks", window, self.ahead), cut)

    def own(self, window: KeyWindow | None) -> list[tuple[int, int]]:
        """For each read the keys of its own node, as (start, end) in the buffer."""
        tree = self.tree
        runs = []
        for node, token, depth in zip(self.nodes, self.tokens.tolist(), self.depths.tolist(), strict=True):
            first, last = tree.offsets[node], token + 1
            first = min(first + max(0, oldest_key(window, depth) - tree.starts[node]), last)
            runs.append((tree.held + first, tree.held + last))
        return runs

    def own_keys(self, window: KeyWindow | None, batched: int) -> OwnKeys:
        """The same, in groups of runs of at most `batched` tokens."""

        def group() -> OwnKeys:
            runs = self.own(window)
            read = {run: number for number, run in enumerate(runs)}
            long, short = split_by_length([run for run in runs if run[0] < run[1]], batched)
            return OwnKeys(
                [read[run] for run in runs if run[0] == run[1]],
                [(read[run], *run) for run in long],
                [
                    (each, on_device(np.asarray([read[run] for run in each.runs]), self.device))
                    for each in group_runs(short, self.device)
                ],
            )

        return made_once(self.tables, ("own", window, self.ahead, batched), group)


def _without_older(run: tuple[int, int, int], oldest: int) -> tuple[int, int, int] | None:
    # A run of keys (start, end, depth of the first) from the depth `oldest` on, or None if nothing is left.
    start, end, depth = run
    cut = max(0, oldest - depth)
    return (start + cut, end, depth + cut) if start + cut < end else None


def split_by_length(runs: list[tuple[int, int]], most: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The runs to attend one by one, and those of at most `most` tokens, to be batched if there are several."""
    short = [run for run in runs if run[1] - run[0] <= most]
    if len(short) < 2:
        return runs, []
    return [run for run in runs if run[1] - run[0] > most], short


def group_runs(runs: list[tuple[int, int]], device: torch.device) -> list[Group]:
    """Batch runs of tokens, given as (start, end), with at most about an eighth of padding."""
    groups: list[Group] = []
    runs = sorted(runs, key=lambda r: r[1] - r[0])
    at = 0
    while at < len(runs):
        shortest = runs[at][1] - runs[at][0]
        longest = shortest + shortest // 8 + 1
        end = at
        while end < len(runs) and runs[end][1] - runs[end][0] <= longest and (end - at) * longest < GROUP_TOKENS:
            end += 1
        starts = np.asarray([r[0] for r in runs[at:end]])[:, None]
        lengths = np.asarray([r[1] - r[0] for r in runs[at:end]])[:, None]
        steps = np.arange(lengths.max())[None, :]
        index, valid = starts + np.minimum(steps, lengths - 1), steps < lengths
        arrays = (index, valid, index[valid], np.flatnonzero(valid))
        groups.append(Group(runs[at:end], *(on_device(each, device) for each in arrays)))
        at = end
    return groups


def on_device(numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The numbers as a tensor. To CUDA they are copied from pinned memory, without waiting."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def split_evenly(total: int, most: int, step: int = ROW_STEP) -> list[tuple[int, int]]:
    """(start, end) of the fewest parts of `total` that are at most `most` long, of nearly equal length.

    All but the last are multiples of `step` where `most` allows: products of other numbers of rows are slower.
    """
    parts = -(-total // most)
    length = min(round_up(-(-total // parts), step), most)
    return [(start, min(start + length, total)) for start in range(0, total, length)]
