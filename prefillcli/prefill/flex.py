"""Attention over a forest as one call of compiled flex attention, where flash attention has no answer.

That is where scores have a soft cap, heads are wider than flash takes, or a GPU is too old for it. One mask says what
the queries of a chunk see of all keys of the layer's buffer, so ancestors, windows and triangles need no parts to
merge. Only the blocks of scores that something is seen of are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefillcli.prefill.attention import fits_flash
from prefillcli.prefill.attention_paths import may_take
from prefillcli.prefill.key_window import KeyWindow
from prefillcli.prefill.layout import Chunk, IntArray, LastTokens, Tree, on_device

BLOCK = 128  # queries, and keys, that are skipped or computed together
#: Never the kernel for few queries, which is compiled for other shapes.
_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}


@dataclass(frozen=True, slots=True)
class ForestMask:
    """What some queries see of the first `keys` keys of the buffer, as flex attention takes it."""

    keys: int
    blocks: Any  # a BlockMask


def takes_flex(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Whether flex attention computes such queries and values: half precision on CUDA that flash does not take."""
    device = query.device
    if lacks_flex(device, query.dtype) is not None or not may_take("flex", device):
        return False
    return softcap is not None or not fits_flash(query, value)


def lacks_flex(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why flex attention is not there for this device and dtype; None if it is."""
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
    tree: Tree, tokens: IntArray, depths: IntArray, window: KeyWindow | None, device: torch.device
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
    """`forest_mask` of what is computed, made once for all layers."""
    at = ("flex", window, computed.ahead if isinstance(computed, LastTokens) else 0)
    if at not in computed.tables:
        tokens = np.arange(computed.start, computed.end) if isinstance(computed, Chunk) else computed.tokens
        computed.tables[at] = forest_mask(computed.tree, tokens, computed.depths, window, computed.device)
    mask: ForestMask | None = computed.tables[at]
    return mask


def _wanted() -> Any:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


def _reach(tree: Tree) -> tuple[IntArray, IntArray, IntArray] | None:
    """Of each key of the buffer: the place of the first query that sees it, the end of these places, and its depth."""
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


def _by_blocks(each: IntArray, reduce: np.ufunc) -> IntArray:
    """The least or largest number of every block."""
    reduced: IntArray = reduce.reduceat(each, np.arange(0, len(each), BLOCK))
    return reduced


def _listed(blocks: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[IntArray, IntArray]:
    """How many blocks each row has, int32 [rows], and which, int32 [rows, blocks] with those first."""
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
