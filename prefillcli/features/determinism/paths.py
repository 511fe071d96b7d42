"""Attention, recurrence and chunks for which a token's bits depend on its path alone: the tokens of its prompt so far.

Attention: a query sees the keys of its path in blocks whose first depths are multiples of `KEYS`, in their order,
whatever nodes they lie in. All products have one shape for all of a model's calls: so many blocks of queries beside
each other, each of so many queries, padded. A block of keys of which a query sees nothing changes nothing of it: its
powers are 0, and the rest is multiplied by 1. What is left to the operators is that rows of a product and elements do
not depend on their places. `forest_attention.cpp` needs no such thing, and is taken where it is there.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.features.determinism.mode import DeterministicMode, computing_with, tile_rows
from prefillcli.plan.blocks import floor_to
from prefillcli.prefill.attention import BlockArray, forest_kernel, product, room_for_output, takes
from prefillcli.prefill.forest import Scoring, attend_by_kernel
from prefillcli.prefill.fusion import fused
from prefillcli.prefill.layout import Chunk, IntArray, LastTokens, Tree, on_device
from prefillcli.prefill.recurrent import (
    MOST_STATES,
    ModuleCall,
    NodeRun,
    PathStates,
    fork_state,
    pick_states,
    recurrent_modules,
    stack_states,
    tensors_of,
)
from prefillcli.prefill.walk import Arithmetic, ChunkCutter, cut_anywhere

QUERIES = 32  # of a block, for each head
KEYS = 128  # of a block
BLOCKS = {"cpu": 8}  # of queries in a product
BLOCKS_ELSEWHERE = 64


class _Together(NamedTuple):
    """Blocks of queries that are computed together.

    `tokens` [blocks, QUERIES] are the queries' numbers, padded with each block's last one, and `valid` says which are
    not padding. `depths` [blocks, QUERIES] are theirs. `places` and `key_depths` [steps, blocks, KEYS] are the keys of
    each step, where they lie in the buffer and their depths; the latter are -1 where there is no such key.
    """

    tokens: Tensor
    valid: Tensor
    depths: Tensor
    places: Tensor
    key_depths: Tensor


def attend_by_path(
    computed: Chunk | LastTokens, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """An `Attend` (`prefill/forest.py`): by the kernel where it takes these shapes, else by torch's operators."""
    kernel = forest_kernel() if takes(query, value, key.shape[1]) else None
    if kernel is not None:
        return attend_by_kernel(kernel, computed, query, key, value, scoring)
    blocks, runs = computed.blocks(scoring.window, QUERIES)
    out, lse = room_for_output(query, value)
    by_token = out[0].transpose(0, 1)
    count = BLOCKS.get(query.device.type, BLOCKS_ELSEWHERE)
    by_steps = np.argsort([_steps(block, runs) for block in blocks], kind="stable")  # neighbours are of one length
    for first in range(0, len(blocks), count):
        part = _together(blocks[by_steps[first : first + count]], runs, count, query.device)
        found, found_lse = _attend(query, key, value, part, scoring)
        at = part.tokens[part.valid]
        by_token.index_copy_(0, at, found[part.valid].to(query.dtype))
        lse[0].index_copy_(1, at, found_lse[part.valid].T)
    return out, lse


def _attend(query: Tensor, key: Tensor, value: Tensor, part: _Together, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Output float32 [blocks, QUERIES, heads, width] and log-sum-exp [blocks, QUERIES, heads] of some blocks."""
    heads, width = query.shape[1], query.shape[3]
    kv_heads, narrow = value.shape[1], value.shape[3]
    count, groups = len(part.tokens), heads // kv_heads
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    rows = query[0].transpose(0, 1)[part.tokens.flatten()].view(count, QUERIES, kv_heads, groups, width)
    rows = rows.permute(0, 2, 3, 1, 4).reshape(count * kv_heads, groups * QUERIES, width)
    out = torch.zeros(*rows.shape[:2], narrow, device=query.device)
    total = torch.zeros(rows.shape[:2], device=query.device)
    top = torch.full_like(total, -math.inf)
    oldest = scoring.window.oldest(part.depths) if scoring.window else torch.zeros_like(part.depths)

    def gathered(states: Tensor, index: Tensor) -> Tensor:
        each = states[index.flatten()].view(count, KEYS, kv_heads, -1)
        return each.transpose(1, 2).reshape(count * kv_heads, KEYS, -1)

    for index, depths in zip(part.places, part.key_depths, strict=True):
        scores = product(rows, gathered(keys, index).transpose(1, 2)) * scoring.scale
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        hidden = (depths[:, None] > part.depths[..., None]) | (depths[:, None] < oldest[..., None])
        hidden |= (depths < 0)[:, None]
        of_heads = scores.view(count, kv_heads * groups, QUERIES, KEYS)
        of_heads.masked_fill_(hidden[:, None], -math.inf)
        # An online softmax: powers are of scores less the highest so far, and sums so far fade as that one rises.
        highest = torch.maximum(top, scores.amax(dim=-1))
        shift = torch.where(highest == -math.inf, 0.0, highest)
        powers = torch.exp(scores - shift[..., None])
        fade = torch.exp(top - shift)
        total = total * fade + powers.sum(dim=-1)
        out = out * fade[..., None] + product(powers, gathered(values, index))
        top = highest
    out = out / total[..., None]
    lse = top + torch.log(total)
    shape = (count, kv_heads * groups, QUERIES)
    return out.view(*shape, narrow).transpose(1, 2), lse.view(shape).transpose(1, 2)


def _steps(block: IntArray, runs: BlockArray) -> int:
    """How many blocks of keys there are from the first to the last that a block of queries sees."""
    first, end = _seen(block, runs)
    return -(-end // KEYS) - first // KEYS


def _seen(block: IntArray, runs: BlockArray) -> tuple[int, int]:
    """The depths first:end of the keys that a block of queries sees."""
    _, rows, depth, first, last = block.tolist()
    start, end, behind = runs[last - 1].tolist()
    return int(runs[first, 2]), min(behind + end - start, depth + rows)


def _together(blocks: BlockArray, runs: BlockArray, count: int, device: torch.device) -> _Together:
    """Some blocks, with the last one repeated until there are `count`."""
    valid = np.zeros((count, QUERIES), np.bool_)
    rows = np.minimum(np.arange(QUERIES)[None], blocks[:, 1:2] - 1)
    valid[: len(blocks)] = np.arange(QUERIES)[None] < blocks[:, 1:2]
    steps = max(_steps(block, runs) for block in blocks)
    index = np.zeros((len(blocks), steps * KEYS), np.int64)
    depths = np.full((len(blocks), steps * KEYS), -1, np.int64)
    for at, block in enumerate(blocks):
        first, end = _seen(block, runs)
        base = first // KEYS * KEYS
        index[at] = runs[block[3], 0]  # any key that is seen
        for start, stop, depth in runs[block[3] : block[4]].tolist():
            last = min(depth + stop - start, end)
            if depth < last:
                index[at, depth - base : last - base] = np.arange(start, start + last - depth)
                depths[at, depth - base : last - base] = np.arange(depth, last)
    more = np.r_[np.arange(len(blocks)), np.full(count - len(blocks), len(blocks) - 1)]
    per_step = (each[more].reshape(count, steps, KEYS).swapaxes(0, 1) for each in (index, depths))
    numbers = ((blocks[:, column : column + 1] + rows)[more] for column in (0, 2))
    tokens, query_depths = (on_device(each, device) for each in numbers)
    at_keys = [on_device(each, device) for each in per_step]
    return _Together(tokens, on_device(valid, device), query_depths, at_keys[0], at_keys[1])


# Recurrent modules that read every path in the same pieces, so that a token's bits depend on its path alone.
#
# A piece is the tokens between two depths that are multiples of a step, and the last of a prompt is padded to as
# many. So a module is always called for pieces of one length. Pieces of several paths are computed in one call where
# each has the bits that it has alone, with one thread. Whether it has is found out for each number of pieces, when
# it first comes up; else they are computed one by one.


STEP = 64
"""Tokens of a piece. Half of them are computed again for a branch, on average; fewer make smaller products."""
TOGETHER = 16  # pieces in one call; a power of 2

_agreed: dict[Hashable, bool] = {}


@dataclass(slots=True)
class _Reader:
    """A run of a chunk's tokens that is read up to token `at`, where the `state` is; None: at a prompt's beginning."""

    run: NodeRun
    at: int
    state: LinearAttentionLayer | None


def read_in_pieces(
    call: ModuleCall, runs: Sequence[NodeRun], tree: Tree, states: PathStates[LinearAttentionLayer]
) -> None:
    """A `ReadRuns` (`prefill/recurrent.py`): in pieces of `STEP` tokens."""
    waiting, unfinished = list(runs), {run.node for run in runs}
    readers: list[_Reader] = []
    while waiting or readers:
        at = 0
        while at < len(waiting) and len(readers) < TOGETHER:
            if tree.parents[waiting[at].node] in unfinished:
                at += 1
            else:
                run = waiting.pop(at)
                readers.append(_Reader(run, run.start, states.before(run)))
        _read_pieces(call, readers, runs[0].start, tree, states)
        for reader in readers:
            if reader.at == reader.run.end:
                unfinished.discard(reader.run.node)
                if reader.state is not None:
                    states.after(reader.run, reader.state)
        readers = [reader for reader in readers if reader.at < reader.run.end]


def _read_pieces(
    call: ModuleCall, readers: Sequence[_Reader], first: int, tree: Tree, states: PathStates[LinearAttentionLayer]
) -> None:
    """The next piece of every reader. Tokens of the call are counted from the pack's token `first`."""
    alike: dict[bool, list[tuple[_Reader, int]]] = {True: [], False: []}
    for reader in readers:
        run = reader.run
        to_depth = tree.starts[run.node] - tree.offsets[run.node]
        end = min(run.end, floor_to(reader.at + to_depth, STEP) + STEP - to_depth)
        if end - reader.at < STEP and (end < run.end or states.needed(run)):  # what is no piece of a plan with steps
            reader.state = reader.state or LinearAttentionLayer(number_of_states=MOST_STATES)
            call.compute(slice(reader.at - first, end - first), reader.state)
            reader.at = end
        else:
            alike[reader.state is None].append((reader, end))
    for some in alike.values():
        if not some:
            continue
        spans = [(reader.at - first, end - first) for reader, end in some]
        index, valid = _tokens(spans, call.device)
        before = [reader.state for reader, _ in some if reader.state is not None]
        found = _compute(call, index, valid, before)
        for (reader, end), state in zip(some, found, strict=True):
            reader.state, reader.at = state, end


def _tokens(spans: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens of spans [pieces, STEP], padded with each span's last one, and which are not padding."""
    starts, ends = (np.asarray(each)[:, None] for each in zip(*spans, strict=True))
    numbers = starts + np.arange(STEP)[None]
    return on_device(np.minimum(numbers, ends - 1), device), on_device(numbers < ends, device)


def _compute(
    call: ModuleCall, index: Tensor, valid: Tensor, before: Sequence[LinearAttentionLayer]
) -> list[LinearAttentionLayer]:
    """Compute pieces `index` [pieces, STEP], behind these states or at the beginning; gives the states behind them."""
    pieces = len(index)
    size = 1 << (pieces - 1).bit_length()
    asked = call.kind, size, tuple(index.shape[1:]), bool(before), torch.get_num_threads()
    found: list[LinearAttentionLayer] = []
    if _agreed.get(asked, True):
        rows = [*range(pieces), *[pieces - 1] * (size - pieces)]
        state = stack_states([before[row] for row in rows]) if before else None
        state = state or LinearAttentionLayer(number_of_states=MOST_STATES)
        out = call.compute_at(index[rows], state)
        found = [pick_states(state, [row]) for row in range(pieces)]
        parts = _cut(out, slice(0, pieces))
        if asked in _agreed:
            call.put(index, valid, parts)
            return found
    with computing_with(1):
        alone, behind = [], []
        for row in range(pieces):
            own = fork_state(before[row]) if before else LinearAttentionLayer(number_of_states=MOST_STATES)
            alone.append(call.compute_at(index[row : row + 1], own))
            behind.append(own)
    for row, out in enumerate(alone):
        call.put(index[row : row + 1], valid[row : row + 1], out)
    if found:
        same_out = all(_same(_cut(parts, slice(row, row + 1)), out) for row, out in enumerate(alone))
        pairs = zip(found, behind, strict=True)
        _agreed[asked] = same_out and all(_same(tensors_of(one), tensors_of(other)) for one, other in pairs)
    return behind


def _cut(out: Any, rows: slice) -> Any:
    return out[rows] if isinstance(out, Tensor) else tuple(part[rows] for part in out)


def _same(one: Any, other: Any) -> bool:
    pairs = [(one, other)] if isinstance(one, Tensor) else zip(one, other, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


# Chunks, and all together.


def cut_between_pieces(tree: Tree, tokens: int, most: int) -> list[tuple[int, int]]:
    """A `ChunkCutter`: chunks of at most `most` tokens, or of one piece of a path."""
    depths = tree.depths
    first = depths == np.repeat(tree.starts, np.diff(tree.offsets))
    cuts = np.append(np.flatnonzero((depths % STEP == 0) | first), tokens)
    chunks = []
    start = 0
    while start < tokens:
        at = int(np.searchsorted(cuts, start + most, side="right")) - 1
        end = int(cuts[at] if cuts[at] > start else cuts[at + 1])
        chunks.append((start, end))
        start = end
    return chunks


def chunk_cutter(layers: Sequence[nn.Module], device: torch.device) -> ChunkCutter:
    """What cuts packs for these layers.

    Recurrent layers read whole pieces. For others, chunks are whole tiles, as products are: else most tensors would be
    copied to be made longer.
    """
    if any(map(recurrent_modules, layers)):
        return cut_between_pieces
    return partial(cut_anywhere, step=tile_rows(device))


def by_row() -> Arithmetic:
    """How a walk computes for which a row's bits depend on the row alone."""
    return Arithmetic(
        mode=DeterministicMode(),
        prepare=partial(fused, always=True),  # whatever pays: which of two ways is taken depends on a chunk's size
        attend=attend_by_path,
        read=read_in_pieces,
        cutter=chunk_cutter,
        state_step=STEP,
        no_packed_weights="--deterministic: {format} weights stay packed here, and the kernels that multiply them are "
        "not known to give a row the same bits beside others\n"
        "take the model as it was before it was quantised, or leave --deterministic out",
        no_own_cache="--deterministic: this model is walked with its own attention and cache, whose sums depend on "
        "how its prompts are cut\ntake another model, or leave it out",
    )
