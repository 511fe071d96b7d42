"""Attention of many sequences of different lengths in one call of PyTorch's flash attention, on CUDA.

A call takes queries in sequences. For each sequence it takes the start of the keys in the layer's buffer and their
number, so runs of keys may lie anywhere and overlap. All own pieces of a chunk are one call. Few calls are left for
the rest: one for each level of the tree. The tables of a chunk are made once, uploaded once, and used in all layers.

A mask is aligned at the end of each sequence: its last query stands at its last key. Two kinds of sequences have one.
A block of a node's tokens sees the node from its beginning (or the window's) to the block's end. Where a sliding
window ends inside an ancestor, each token of a node sees one key less than the token before it: with as many keys as
queries, it sees the keys from its own place on. All other keys of ancestors are seen by whole sequences.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prefillcli.stats.arrays import Int64Array
from prefillcli.walk.attention import fits_flash, may_take, merge_into
from prefillcli.walk.layout import Chunk, KeyWindow, LastTokens, Span, Tree, on_device

try:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn
except ImportError:  # an older torch has the operator alone
    AuxRequest = varlen_attn = None  # type: ignore[assignment,misc]

MOST_QUERIES = 512  # of a sequence: with one much longer than the others, most of a launch would be empty
FEWEST_QUERIES = 2  # the longest sequence is said to have: with one, the operator stacks heads and needs no empty ones

#: The number of keys before and after its own place that a query sees; -1: all.
Sides = tuple[int, int]
WHOLE: Sides = (-1, -1)
CAUSAL: Sides = (-1, 0)
NEWER: Sides = (0, -1)


class Seen(NamedTuple):
    """Queries `q0:q1` of a chunk see the keys `k0:k1` of the buffer, those on the `sides` of each query's place.

    The last query's place is the last key.
    """

    sides: Sides
    q0: int
    q1: int
    k0: int
    k1: int


@dataclass(frozen=True, slots=True)
class SequenceTable:
    """The sequences of one call, which has the queries `first:end` of a chunk.

    `queries` int32 [sequences + 1]: the start of each sequence's queries, counted from `first`, and the end of the
    last. `keys` int32 [sequences + 1]: the start of its keys in the buffer (the last number means nothing). `lengths`
    int32 [sequences]: the number of its keys; 0 in the `gaps`, where queries see nothing in this call.
    """

    first: int
    end: int
    queries: Tensor
    keys: Tensor
    lengths: Tensor
    most_queries: int
    most_keys: int
    sides: Sides
    gaps: bool


def takes_sequences(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Return whether attention of such queries and values is computed in sequences."""
    return (
        softcap is None
        and fits_flash(query, value)
        and query.shape[-1] == value.shape[-1]
        and query.stride(-1) == 1
        and may_take("varlen-flash", query.device)
    )


def flash_sequences(
    query: Tensor, key: Tensor, value: Tensor, table: SequenceTable, scale: float
) -> tuple[Tensor, Tensor]:
    """One call: `query` [queries, heads, width] over the buffer `key`, `value` [keys, kv heads, width].

    Gives the output [queries, heads, width], 0 where nothing is seen, and the log-sum-exp float32 [heads, queries],
    +inf there.
    """
    lengths = (max(table.most_queries, FEWEST_QUERIES), table.most_keys)
    if _has_public_operator():
        out, lse = varlen_attn(
            query, key, value, table.queries, table.keys, *lengths,
            return_aux=AuxRequest(lse=True), scale=scale, window_size=table.sides, enable_gqa=True,
            seqused_k=table.lengths,
        )  # fmt: skip
        return out, lse
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, table.queries, table.keys, *lengths, 0.0, table.sides == CAUSAL, False,
        scale=scale, window_size_left=table.sides[0], window_size_right=table.sides[1], seqused_k=table.lengths,
    )  # fmt: skip
    return found[0], found[1]


@cache
def _has_public_operator() -> bool:
    # Whether PyTorch's public operator takes the number of keys of a sequence.
    return varlen_attn is not None and "seqused_k" in inspect.signature(varlen_attn).parameters


def attend_sequences(
    tables: Sequence[SequenceTable], query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of `query` [1, heads, tokens, width] over the buffer `key`, `value` [1, kv heads, keys, width].

    Gives the output [1, heads, tokens, width] and the log-sum-exp [1, heads, tokens]. The first table has all queries.
    """
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    found: tuple[Tensor, Tensor] | None = None
    for table in tables:
        part, part_lse = flash_sequences(queries[table.first : table.end], keys, values, table, scale)
        if table.gaps:  # the kernel says +inf where nothing is seen, whose log-sum-exp is -inf
            part_lse.nan_to_num_(nan=math.nan, posinf=-math.inf, neginf=-math.inf)
        part, part_lse = part.transpose(0, 1)[None], part_lse[None]
        if found is None:
            found = part, part_lse
        else:
            out, lse = (x[:, :, table.first : table.end] for x in found)
            merge_into(out, lse, part, part_lse)
    if found is None:
        raise ValueError("no queries")
    return found


def sequence_tables(computed: Chunk | LastTokens, window: KeyWindow | None) -> list[SequenceTable]:
    """The calls for the computed tokens, seen through a window or without one. They are made once."""
    at = (window, computed.ahead if isinstance(computed, LastTokens) else 0)
    if at not in computed.tables:
        if isinstance(computed, Chunk):
            sides = own_sides(window)
            own = [Seen(sides, *block) for block in computed.own_blocks(window, MOST_QUERIES)]
        else:
            own = [Seen(WHOLE, query, query + 1, *run) for query, run in enumerate(computed.own(window))]
        depths = computed.depths
        seen = [part for span in computed.ancestors(window) for part in visible_parts(span, depths, window)]
        computed.tables[at] = make_tables(own, seen, len(depths), computed.device)
    tables: list[SequenceTable] = computed.tables[at]
    return tables


def own_sides(window: KeyWindow | None) -> Sides:
    """The keys of their own node that tokens see, where these begin with the part of an aligned window."""
    return CAUSAL if window is None or window.aligned else (window.size - 1, 0)


def visible_parts(span: Span, depths: Int64Array, window: KeyWindow | None) -> Iterator[Seen]:
    """The sequences in which queries at these `depths` see the keys of an ancestor through a window.

    All queries see the keys from the newest query's oldest key on. Of the keys before, each sees those from its own
    oldest key on: a band, for which flash kernels have the sides of a window.
    """
    shared = span.k0
    if span.masked and window is not None:
        oldest = window.oldest(depths)
        shared += max(0, int(oldest[span.q0 : span.q1].max()) - span.k_depth)
        end = min(span.k1, shared)
        for first, last in _runs_of_queries(oldest, span.q0, span.q1, 0 if window.aligned else 1):
            yield from _parts_of_run(span, first, last, int(oldest[first]) - span.k_depth, end - span.k0, window)
    if shared < span.k1:
        yield from _cut(span.q0, span.q1, shared, span.k1)


def _runs_of_queries(oldest: Int64Array, first: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    # Queries `first:end` in runs in which the oldest key moves on by `step` from one to the next.
    breaks = np.flatnonzero(np.diff(oldest[first:end]) != step) + first + 1
    edges = [first, *breaks.tolist(), end]
    for start, stop in pairwise(edges):
        for at in range(start, stop, MOST_QUERIES):
            yield at, min(at + MOST_QUERIES, stop)


def _parts_of_run(span: Span, first: int, last: int, oldest: int, end: int, window: KeyWindow) -> Iterator[Seen]:
    # The keys among the span's first `end` that the queries `first:last` see; the first query sees those from `oldest`
    # on. Keys are counted from the span's first, so `oldest` may be negative.
    count, k0 = last - first, span.k0
    if window.aligned:
        begin = max(oldest, 0)
        if begin < end:
            yield from _cut(first, last, k0 + begin, k0 + end)
        return
    whole = max(oldest + count - 1, 0)  # from here on all queries see all keys
    if whole < end:
        yield Seen(WHOLE, first, last, k0 + whole, k0 + end)
    low, high = max(0, -oldest), min(count - 1, end - oldest)  # query `first + i` sees these keys from the i-th on
    if low < high:
        begin, stop = k0 + oldest + low, k0 + oldest + high
        yield Seen(NEWER, first + low, first + high, begin, stop)
        if low:
            yield Seen(WHOLE, first, first + low, begin, stop)


def _cut(q0: int, q1: int, k0: int, k1: int) -> Iterator[Seen]:
    for at in range(q0, q1, MOST_QUERIES):
        yield Seen(WHOLE, at, min(at + MOST_QUERIES, q1), k0, k1)


def make_tables(own: Sequence[Seen], others: Sequence[Seen], count: int, device: torch.device) -> list[SequenceTable]:
    """As few calls as possible: one for `own`, with all `count` queries, then those for the `others`.

    In one call a query is in one sequence, and the sides are the same for all.
    """
    calls = [_Call(own[0].sides, 0, count)]
    for each in own:
        calls[0].add(each)
    open_calls: list[_Call] = []
    for each in sorted(others, key=lambda seen: (seen.q0, -seen.q1, seen.k0)):
        call = next((call for call in open_calls if call.sides == each.sides and call.end <= each.q0), None)
        if call is None:
            call = _Call(each.sides, each.q0)
            open_calls.append(call)
        call.add(each)
    calls += open_calls
    numbers = [call.numbers() for call in calls]
    table = on_device(np.concatenate([row for rows in numbers for row in rows]).astype(np.int32), device)
    parts = iter(torch.split(table, [len(row) for rows in numbers for row in rows]))
    return [call.table(*(next(parts) for _ in rows)) for call, rows in zip(calls, numbers, strict=True)]


class _Call:
    """The sequences of a call, which are added in the order of their queries."""

    def __init__(self, sides: Sides, first: int, count: int | None = None) -> None:
        self.sides = sides
        self.first = self.end = first
        self.gaps = False
        self._until = count
        self._rows: list[tuple[int, int, int]] = []  # queries, the first key, keys

    def add(self, seen: Seen) -> None:
        if seen.k0 == seen.k1:
            return
        self._leave_out(seen.q0)
        self._rows.append((seen.q1 - seen.q0, seen.k0, seen.k1 - seen.k0))
        self.end = seen.q1

    def _leave_out(self, until: int) -> None:
        while self.end < until:
            queries = min(until - self.end, MOST_QUERIES)
            self._rows.append((queries, 0, 0))
            self.end += queries
            self.gaps = True

    def numbers(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        # Where queries and keys start, and the numbers of keys.
        self._leave_out(self._until or 0)
        queries, keys, lengths = np.asarray(self._rows, np.int64).T
        return np.concatenate([[0], np.cumsum(queries)]), np.append(keys, keys[-1] + lengths[-1]), lengths

    def table(self, queries: Tensor, keys: Tensor, lengths: Tensor) -> SequenceTable:
        return SequenceTable(
            self.first,
            self.end,
            queries,
            keys,
            lengths,
            most_queries=max(row[0] for row in self._rows),
            most_keys=max(max(row[2] for row in self._rows), 1),
            sides=self.sides,
            gaps=self.gaps,
        )


# Attention over a forest as one call of compiled flex attention, where flash attention does not apply.
#
# That is where scores have a soft cap, heads are wider than flash takes, or a GPU is too old for it. One mask says
# which of the layer's keys each query of a chunk sees, so ancestors, windows and triangles need no parts to merge.
# Blocks of scores without a visible key are not computed.


BLOCK = 128  # queries, and keys, that are skipped or computed together
#: Never the kernel for few queries, which is compiled for other shapes.
_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}


@dataclass(frozen=True, slots=True)
class ForestMask:
    """The keys among the buffer's first `keys` that some queries see, as flex attention takes them."""

    keys: int
    blocks: Any  # a BlockMask


def takes_flex(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Return whether flex attention computes such queries and values: half precision on CUDA that flash does not
    take."""
    device = query.device
    if lacks_flex(device, query.dtype) is not None or not may_take("flex", device):
        return False
    return softcap is not None or not fits_flash(query, value)


def lacks_flex(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why flex attention is unavailable for this device and dtype; None if it is available."""
    if device.type != "cuda" or dtype == torch.float32:
        return "for half precision on CUDA devices"
    return _lacks_compiler()


@cache
def _lacks_compiler() -> str | None:
    if find_spec("triton") is None:
        return "no Triton, which compiles it"
    from torch.nn.attention import flex_attention

    return None if hasattr(flex_attention, "AuxRequest") else "torch is older than 2.9"


def forest_mask(
    tree: Tree, tokens: Int64Array, depths: Int64Array, window: KeyWindow | None, device: torch.device
) -> ForestMask | None:
    """The `ForestMask` of queries that stand at these `tokens` of the pack, ascending, and at these depths.

    A query sees its own node up to itself, and its ancestors. None where a held node is seen by nodes that do not
    follow one another.
    """
    last = tree.held + int(tokens[-1]) + 1
    reach = _reach(tree)
    if reach is None:
        return None
    since, until, depth = (each[:last] for each in reach)
    place = tokens + tree.held
    oldest = window.oldest(depths) if window else np.zeros_like(depths)
    queries = [(place, np.minimum), (place, np.maximum), (oldest, np.minimum), (oldest, np.maximum)]
    first, end, least, most = (_by_blocks(*each)[:, None] for each in queries)
    some = (_by_blocks(since, np.minimum) <= end) & (_by_blocks(until, np.maximum) > first)
    some &= _by_blocks(depth, np.maximum) >= least
    whole = (_by_blocks(since, np.maximum) <= first) & (_by_blocks(until, np.minimum) > end)
    whole &= _by_blocks(depth, np.minimum) >= most
    whole[:, last // BLOCK :] = False  # a block that the keys do not fill
    tables: list[Any] = [*_listed(some & ~whole), *_listed(whole)]
    tables += [each.astype(np.int32) for each in (place, oldest, since, until, depth)]
    at = [on_device(each, device) for each in tables]
    return ForestMask(last, _block_mask(at[:4], _sees(*at[4:]), (len(tokens), last)))


def attend_by_flex(
    query: Tensor, keys: Tensor, values: Tensor, mask: ForestMask, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of `query` [1, heads, queries, width] over the layer's buffer: output and log-sum-exp as `attend`."""
    out, aux = compiled_flex()(
        query,
        keys.narrow(2, 0, mask.keys),
        values.narrow(2, 0, mask.keys),
        score_mod=None if softcap is None else _soft_cap(softcap, query.device),
        block_mask=mask.blocks,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
        kernel_options=_OPTIONS,
        return_aux=_wanted(),
    )
    return out, aux.lse


@cache
def compiled_flex() -> Callable[..., Any]:
    """Flex attention, compiled once for all shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


def mask_of(computed: Chunk | LastTokens, window: KeyWindow | None) -> ForestMask | None:
    """`forest_mask` of the computed tokens, made once for all layers."""
    at = ("flex", window, computed.ahead if isinstance(computed, LastTokens) else 0)
    if at not in computed.tables:
        tokens = np.arange(computed.start, computed.end) if isinstance(computed, Chunk) else computed.tokens
        computed.tables[at] = forest_mask(computed.tree, tokens, computed.depths, window, computed.device)
    mask: ForestMask | None = computed.tables[at]
    return mask


def _wanted() -> Any:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


def _reach(tree: Tree) -> tuple[Int64Array, Int64Array, Int64Array] | None:
    # Of each key of the buffer: the place of the first query that sees it, the end of these places, and its depth.
    held = tree.held
    lengths = np.diff(np.asarray(tree.offsets))
    since = np.arange(held + len(tree.depths))
    until = np.concatenate([np.zeros(held, np.int64), np.repeat(np.asarray(tree.ends, np.int64), lengths) + held])
    depth = np.concatenate([np.zeros(held, np.int64), tree.depths])
    for node, attached in enumerate(tree.attach):
        for k0, k1, k_depth in attached:
            if until[k0] not in (0, held + tree.offsets[node]):
                return None
            if until[k0] == 0:
                since[k0:k1], depth[k0:k1] = held + tree.offsets[node], k_depth + np.arange(k1 - k0)
            until[k0:k1] = held + tree.ends[node]
    return since, until, depth


def _by_blocks(each: Int64Array, reduce: np.ufunc) -> Int64Array:
    reduced: Int64Array = reduce.reduceat(each, np.arange(0, len(each), BLOCK))
    return reduced


def _listed(blocks: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[Int64Array, Int64Array]:
    # The number of blocks in each row, int32 [rows], and their indices, int32 [rows, blocks], which come first in the
    # row.
    which = np.argsort(~blocks, axis=1, kind="stable")
    return blocks.sum(axis=1).astype(np.int32), which.astype(np.int32)


def _block_mask(tables: list[Tensor], sees: Callable[..., Tensor], lengths: tuple[int, int]) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    count, which, whole_count, whole_which = (each[None, None] for each in tables)
    return BlockMask.from_kv_blocks(
        count,
        which,
        whole_count,
        whole_which,
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=lengths,
        compute_q_blocks=False,
    )


def _sees(place: Tensor, oldest: Tensor, since: Tensor, until: Tensor, depth: Tensor) -> Callable[..., Tensor]:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = place[query]
        return (since[key] <= at) & (at < until[key]) & (depth[key] >= oldest[query])

    return sees


@cache
def _soft_cap(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    bound = torch.tensor(softcap, device=device)  # graphs for all shapes take no plain number

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return cap
