"""Attention whose bits for a query depend on its path alone, by torch's operators, on any device.

A query sees the keys of its path in blocks whose first depths are multiples of `KEYS`, in their order, whatever nodes
they lie in. All products have one shape for all of a model's calls: so many blocks of queries beside each other, each
of so many queries, padded. A block of keys that a query sees nothing of changes nothing of it. What is left to the
operators is that rows of a product and elements do not depend on their places; `forest_attention.cpp` needs no such
thing, and is taken where it is there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prefillcli.prefill.attention import room_for_output
from prefillcli.prefill.cpu_kernels import LANES, BlockArray, ForestKernel, forest_kernel, takes
from prefillcli.prefill.layout import Chunk, IntArray, KeyWindow, LastTokens, on_device

QUERIES = 32  # of a block, for each head
KEYS = 128  # of a block
TOGETHER = {"cpu": 8}  # blocks of queries in a product
TOGETHER_ELSEWHERE = 64


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
    computed: Chunk | LastTokens,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: KeyWindow | None,
) -> tuple[Tensor, Tensor]:
    """Attention of the computed `query` [1, heads, tokens, width] over the buffer `key`, `value` [1, kv heads, keys,
    width]: the output [1, heads, tokens, width] and the natural log-sum-exp float32 [1, heads, tokens]."""
    kernel = forest_kernel() if takes(query, value, key.shape[1]) else None
    if kernel is not None:
        return attend_by_kernel(kernel, computed, query, key, value, scale=scale, softcap=softcap, window=window)
    return _attend_by_operators(computed, query, key, value, scale, softcap, window)


def attend_by_kernel(
    kernel: ForestKernel,
    computed: Chunk | LastTokens,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: KeyWindow | None,
) -> tuple[Tensor, Tensor]:
    """`attend_by_path` of shapes that the kernel takes."""
    blocks, runs = _blocks(computed, window, LANES * key.shape[1] // query.shape[1])
    out, lse = room_for_output(query, value)
    sliding = None if window is None or window.aligned else window.size
    how: dict[str, Any] = {"scale": scale, "softcap": softcap, "window": sliding}
    kernel.attend(query, key, value, blocks, runs, out=out, lse=lse, **how)
    return out, lse


def _blocks(computed: Chunk | LastTokens, window: KeyWindow | None, rows: int) -> tuple[IntArray, IntArray]:
    return computed.blocks(window, rows) if isinstance(computed, Chunk) else computed.blocks(window)


def _attend_by_operators(
    computed: Chunk | LastTokens,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
    window: KeyWindow | None,
) -> tuple[Tensor, Tensor]:
    blocks, runs = _blocks(computed, window, QUERIES)
    out, lse = room_for_output(query, value)
    by_token = out[0].transpose(0, 1)
    count = TOGETHER.get(query.device.type, TOGETHER_ELSEWHERE)
    by_steps = np.argsort([_steps(block, runs) for block in blocks], kind="stable")
    for first in range(0, len(blocks), count):
        part = _together(blocks[by_steps[first : first + count]], runs, count, query.device)
        found, found_lse = _attend(query, key, value, part, scale, softcap, window)
        at = part.tokens[part.valid]
        by_token.index_copy_(0, at, found[part.valid].to(query.dtype))
        lse[0].index_copy_(1, at, found_lse[part.valid].T)
    return out, lse


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: _Together,
    scale: float,
    softcap: float | None,
    window: KeyWindow | None,
) -> tuple[Tensor, Tensor]:
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
    oldest = window.oldest(part.depths) if window else torch.zeros_like(part.depths)

    def gathered(states: Tensor, index: Tensor) -> Tensor:
        each = states[index.flatten()].view(count, KEYS, kv_heads, -1)
        return each.transpose(1, 2).reshape(count * kv_heads, KEYS, -1)

    for index, depths in zip(part.places, part.key_depths, strict=True):
        scores = _product(rows, gathered(keys, index).transpose(1, 2)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        hidden = (depths[:, None] > part.depths[..., None]) | (depths[:, None] < oldest[..., None])
        hidden |= (depths < 0)[:, None]
        of_heads = scores.view(count, kv_heads * groups, QUERIES, KEYS)
        of_heads.masked_fill_(hidden[:, None], -math.inf)
        highest = torch.maximum(top, scores.amax(dim=-1))
        shift = torch.where(highest == -math.inf, 0.0, highest)
        powers = torch.exp(scores - shift[..., None])
        fade = torch.exp(top - shift)
        total = total * fade + powers.sum(dim=-1)
        out = out * fade[..., None] + _product(powers, gathered(values, index))
        top = highest
    out = out / total[..., None]
    lse = top + torch.log(total)
    shape = (count, kv_heads * groups, QUERIES)
    return out.view(*shape, narrow).transpose(1, 2), lse.view(shape).transpose(1, 2)


def _product(one: Tensor, other: Tensor) -> Tensor:
    """The product of `one` [n, rows, m], which may be float32, and `other` [n, m, columns], in float32."""
    if other.dtype != torch.float32 and other.device.type == "cuda" and torch.version.hip is None:
        return torch.bmm(one.to(other.dtype), other, out_dtype=torch.float32)
    return torch.bmm(one.float(), other.float())


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
