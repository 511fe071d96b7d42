"""Attention whose bits for a query depend on its path alone, by torch's operators, on any device.

A query sees the keys of its path in blocks whose first depths are multiples of `KEYS`, in their order, whatever nodes
they lie in. All products have one shape for all of a model's calls: so many blocks of queries beside each other, each
of so many queries, padded. A block of keys that a query sees nothing of changes nothing of it. What is left to the
operators is that rows of a product and elements do not depend on their places; `forest_attention.cpp` needs no such
thing, and is taken where it is there."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from prefillcli.errors import UsageError
from prefillcli.prefill.attention import (
    LANES,
    BlockArray,
    ForestKernel,
    Shift,
    apply_sinks,
    attend,
    fast_products,
    forest_kernel,
    longest_batched,
    merge_into,
    room_for_output,
    takes,
)
from prefillcli.prefill.cuda_kernels import (
    attend_by_flex,
    attend_sequences,
    mask_of,
    sequence_tables,
    takes_flex,
    takes_sequences,
)
from prefillcli.prefill.layout import Chunk, IntArray, KeyWindow, LastTokens, Span, layer_window, on_device

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


ATTENTION = "prefillcli"

# Keywords that transformers' layers pass along and that change nothing in a causal forward without a cache.
_HARMLESS = {
    "position_ids",
    "position_embeddings",
    "use_cache",
    "cache_position",
    "is_causal",
    "past_key_values",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "output_router_logits",
    "logits_to_keep",
}

_active: ContextVar[ForestAttention] = ContextVar("forest_attention")


class UnsupportedModelError(UsageError):
    """The architecture cannot be walked layer by layer without risking wrong scores."""


class KeysStored(BaseException):
    """The layer's K,V are in the buffer, and nothing else is needed from this call."""


def register() -> None:
    """Make the forest attention known to transformers. Idempotent."""
    if ATTENTION not in AttentionInterface():
        AttentionInterface.register(ATTENTION, _attention)
        AttentionMaskInterface.register(ATTENTION, _no_mask)


def leave_untraced() -> None:
    """From now on torch.compile calls the forest attention as it is, and compiles what is around it."""
    AttentionInterface.register(ATTENTION, torch.compiler.disable(_attention))  # type: ignore[no-untyped-call]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    active = _active.get(None)
    if active is None:
        raise UnsupportedModelError(f"{type(module).__name__} attends outside of the model's layers")
    return active(module, query, key, value, attention_mask, **kwargs), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer scores keys: the factor, the soft cap and the window, if any."""

    scale: float
    softcap: float | None
    window: KeyWindow | None

    @property
    def how(self) -> dict[str, Any]:
        """What does not depend on which keys are seen."""
        return {"scale": self.scale, "softcap": self.softcap}


@dataclass(frozen=True, slots=True)
class WatchedLayer:
    """One layer of a pack: all keys [kv heads, tokens, width] and some queries [heads, queries, width], both after
    position encoding, and how the layer scores them. `number` is its place in the model, from 0."""

    number: int
    keys: Tensor
    queries: Tensor
    scoring: Scoring


class ForestAttention:
    """Attention of one pack. Holds the K,V of one layer, [1, kv heads, tokens, width] each.

    Before each call of a layer say what is computed: `chunk(...)` stores K,V and attends, with `keys_only` it leaves
    the layer as soon as they are stored; `last_tokens(...)` attends from last tokens over K,V stored before. The
    queries of the pack's tokens `watched` (ascending) are kept for `watched_layer`. A subclass may compute other
    queries too, by overriding `receive` and `compute`. With `by_path` a query's bits depend on its path alone.
    """

    def __init__(self, tokens: int, watched: Sequence[int] = (), *, by_path: bool = False) -> None:
        self._by_path = by_path
        self._tokens = tokens
        self._watched = watched
        self.queries: list[Tensor] = []
        self._scoring: Scoring | None = None
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.shift: Shift | None = None
        self._computed: Chunk | LastTokens | None = None
        self._keys_only = False
        self._held: Sequence[tuple[Tensor, Tensor]] = ()
        self.calls = 0  # by the current layer call; more than one is no layer we know
        self.attended = False  # whether the current layer has attention
        self.windows: set[KeyWindow] = set()  # that layers asked for

    def __enter__(self) -> Self:
        self._token = _active.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        if _active.get(None) is self:  # not where a walk that was given up is closed late, by another thread
            _active.reset(self._token)

    @property
    def keys_values(self) -> tuple[Tensor, Tensor]:
        """K,V of the layer: of the held tokens, then of the pack's."""
        if self.keys is None or self.values is None:
            raise UnsupportedModelError("a layer stored no keys")
        return self.keys, self.values

    def take_keys_values(self) -> tuple[Tensor, Tensor]:
        """Hand over the layer's K,V; the next layer gets room of its own."""
        taken = self.keys_values
        self.keys = self.values = None
        return taken

    def watched_layer(self, number: int) -> WatchedLayer:
        """The current layer, of this `number`, with the queries kept of it."""
        if self._scoring is None:
            raise RuntimeError("no layer was called yet")
        return WatchedLayer(number, self.keys_values[0][0], torch.cat(self.queries, dim=1), self._scoring)

    def start_layer(self, held: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin a layer, with the K,V of the held nodes, on any device."""
        self._held = held
        self.attended = False
        self.queries = []
        self.shift = None

    @property
    def watches(self) -> bool:
        """Whether it keeps any queries."""
        return len(self._watched) > 0

    def watch(self, tokens: Sequence[int]) -> None:
        """From the next layer on keep the queries of these tokens of the pack (ascending)."""
        self._watched = tokens

    def resize(self, tokens: int) -> None:
        """From the next layer on there are `tokens` tokens, those of held nodes included."""
        self._tokens = tokens
        self.keys = self.values = None

    def chunk(self, chunk: Chunk, *, keys_only: bool = False) -> None:
        self._computed, self._keys_only, self.calls = chunk, keys_only, 0

    def last_tokens(self, tokens: LastTokens) -> None:
        self._computed, self._keys_only, self.calls = tokens, False, 0

    @property
    def depths(self) -> IntArray:
        """The depths of the tokens that are computed."""
        if self._computed is None:
            raise RuntimeError("say what is computed before a layer is called")
        return self._computed.depths

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """What transformers calls. Returns `[1, tokens, heads, width]`."""
        self.calls += 1
        self.attended = True
        strange = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
        if strange or attention_mask is not None or dropout:
            what = ", ".join(strange) or ("an attention mask of its own" if attention_mask is not None else "dropout")
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {what} to attention, which the walk does not know"
            )
        if key.shape[:3] != value.shape[:3] or key.shape[2] != query.shape[2] or query.shape[0] != 1:
            raise UnsupportedModelError(f"{type(module).__name__} attends over keys other than its own tokens'")
        window = layer_window(module, sliding_window)
        if window is not None:
            self.windows.add(window)
        scoring = Scoring(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap, window)
        self._scoring = scoring
        self.receive(query, key, value, scoring)
        shift = self.shift
        if shift:
            shift.include(query=query)
        out, lse = self.compute(query, key, value, scoring)
        sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
        if sinks is not None:
            lse = lse + shift.taken(query) if shift else lse
            apply_sinks(out, lse, sinks)
        return out.transpose(1, 2)

    def receive(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> None:
        """Put aside what is needed of a call: a chunk's K,V. Raises KeysStored if no more is needed."""
        if isinstance(self._computed, Chunk):
            if not self._by_path and not self._by_kernel(query, key, value, scoring):
                self.include_keys([*(keys for keys, _ in self._held), key], scoring)
            self._store(self._computed, key, value)
            self._watch(self._computed, query)
            if self._keys_only:
                raise KeysStored

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """What the queries of a call see: output [1, heads, tokens, width] and log-sum-exp [1, heads, tokens]."""
        computed = self._computed
        if computed is None:
            raise RuntimeError("say what is computed before a layer is called")
        if self._by_path:
            return attend_by_path(computed, query, *self.keys_values, **scoring.how, window=scoring.window)
        if takes_sequences(query, value, scoring.softcap):
            tables = sequence_tables(computed, scoring.window)
            return attend_sequences(tables, query, *self.keys_values, scoring.scale)
        if takes_flex(query, value, scoring.softcap):
            mask = mask_of(computed, scoring.window)
            if mask is not None:
                return attend_by_flex(query, *self.keys_values, mask, **scoring.how)
        if isinstance(computed, LastTokens):
            return self.attend_last_tokens(computed, query, scoring)
        kernel = self._by_kernel(query, key, value, scoring)
        if kernel is not None:
            return attend_by_kernel(kernel, computed, query, *self.keys_values, **scoring.how, window=scoring.window)
        return self._attend_chunk(computed, query, key, value, scoring, self.shift)

    def _store(self, chunk: Chunk, key: Tensor, value: Tensor) -> None:
        held = chunk.tree.held
        at = slice(held + chunk.start, held + chunk.end)
        self.keys, self.values = self._room(self.keys, key), self._room(self.values, value)
        first = 0
        for keys, values in self._held:
            last = first + keys.shape[2]
            self.keys[:, :, first:last].copy_(keys, non_blocking=True)
            self.values[:, :, first:last].copy_(values, non_blocking=True)
            first = last
        self.keys[:, :, at], self.values[:, :, at] = key, value
        self._held = ()

    def include_keys(self, keys: list[Tensor], scoring: Scoring) -> None:
        """Let the layer's shift cover new keys; there is a shift only where products are fast."""
        if scoring.softcap is not None or not fast_products(keys[-1].device, keys[-1].dtype):
            return
        if self.shift is None:
            self.shift = Shift.of(keys[-1], scoring.scale)
        for each in keys:
            self.shift.include(key=each)

    def _watch(self, chunk: Chunk, query: Tensor) -> None:
        first, last = bisect_left(self._watched, chunk.start), bisect_left(self._watched, chunk.end)
        if first < last:
            at = on_device(np.asarray(self._watched[first:last]) - chunk.start, query.device)
            self.queries.append(query[0][:, at])

    def _room(self, buffer: Tensor | None, like: Tensor) -> Tensor:
        shape = (1, like.shape[1], self._tokens, like.shape[3])
        if buffer is None or buffer.shape != shape or buffer.dtype != like.dtype:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        return buffer

    def _by_kernel(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> ForestKernel | None:
        """The kernel, where it computes such a chunk."""
        return forest_kernel() if takes(query, value, key.shape[1]) else None

    def _attend_chunk(
        self, chunk: Chunk, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, shift: Shift | None
    ) -> tuple[Tensor, Tensor]:
        view = chunk.view(scoring.window)
        if view.pieces == [(0, query.shape[2])]:
            out, lse = _attend_causally(query, key, value, scoring, shift)
        else:
            out, lse = room_for_output(query, value)
            for start, end in view.pieces:
                at = slice(start, end)
                part = _attend_causally(query[:, :, at], key[:, :, at], value[:, :, at], scoring, shift)
                out[:, :, at], lse[:, :, at] = part
            by_token = out[0].transpose(0, 1)
            for group in view.groups:
                q, k, v = (group.gather(x) for x in (query, key, value))
                padded, padded_lse = _attend_causally(q, k, v, scoring, shift)
                rows, row_lse = padded.transpose(1, 2).flatten(0, 1), padded_lse.transpose(0, 1).flatten(1)
                by_token.index_copy_(0, group.tokens, rows.index_select(0, group.places))
                lse[0].index_copy_(1, group.tokens, row_lse.index_select(1, group.places))
        self._merge_spans(view.spans, out, lse, query, chunk, scoring, shift)
        return out, lse

    def attend_last_tokens(self, last: LastTokens, query: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """`compute` for queries that see whole nodes."""
        shift = self.shift
        keys, values = self.keys_values
        how: dict[str, Any] = {**scoring.how, "shift": shift}
        own = last.own_keys(scoring.window, longest_batched(query.device, query.dtype))
        out, lse = room_for_output(query, values)
        for read in own.passed:
            out[:, :, read], lse[:, :, read] = 0.0, -torch.inf
        for read, start, end in own.alone:
            at, run = slice(read, read + 1), slice(start, end)
            part = attend(query[:, :, at], keys[:, :, run], values[:, :, run], **how)
            out[:, :, at], lse[:, :, at] = part
        for group, rows in own.groups:
            q = query[0][:, rows].transpose(0, 1).unsqueeze(2)
            k, v = (x[0][:, group.index].transpose(0, 1) for x in (keys, values))
            padded, padded_lse = attend(q, k, v, visible=group.valid[:, None, None], **how)
            out[0, :, rows] = padded[:, :, 0].transpose(0, 1)
            lse[0, :, rows] = padded_lse[:, :, 0].transpose(0, 1)
        self._merge_spans(last.ancestors(scoring.window), out, lse, query, last, scoring, shift)
        return out, lse

    def _merge_spans(
        self,
        spans: list[Span],
        out: Tensor,
        lse: Tensor,
        query: Tensor,
        computed: Chunk | LastTokens,
        scoring: Scoring,
        shift: Shift | None,
    ) -> None:
        """Add what the queries see of earlier pieces and ancestors to `out` and `lse`."""
        keys, values = self.keys_values
        for span in spans:
            at, run = slice(span.q0, span.q1), slice(span.k0, span.k1)
            visible = None
            if span.masked and scoring.window is not None:
                oldest = scoring.window.oldest(computed.depths_on_device)[at]
                key_depths = torch.arange(span.k1 - span.k0, device=query.device) + span.k_depth
                visible = (key_depths[None, :] >= oldest[:, None])[None, None]
            q, k, v = query[:, :, at], keys[:, :, run], values[:, :, run]
            part = attend(q, k, v, visible=visible, shift=shift, **scoring.how)
            merge_into(out[:, :, at], lse[:, :, at], *part)


def _attend_causally(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, shift: Shift | None
) -> tuple[Tensor, Tensor]:
    """Attention of consecutive tokens among themselves, within the window; those of an aligned one are in one part."""
    tokens, window, band = query.shape[2], scoring.window, None
    if window is not None and tokens > window.size:
        ones = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device)
        band = (ones.tril() & ones.triu(1 - window.size))[None, None]
    return attend(query, key, value, causal=band is None, visible=band, shift=shift, **scoring.how)
