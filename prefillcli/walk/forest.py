"""The attention that layers call while a pack is walked.

A chunk's queries see their own node causally, and all keys of each ancestor. Each part is its own softmax, and
the parts are merged by their log-sum-exp: with sums `exp(a)` and `exp(b)`, the shares of their outputs are `exp(a)`
and `exp(b)` over `exp(a) + exp(b)`, as in one softmax over both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from prefillcli.errors import UsageError
from prefillcli.stats.arrays import Int64Array
from prefillcli.walk.attention import (
    LANES,
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
from prefillcli.walk.cuda_kernels import (
    attend_by_flex,
    attend_sequences,
    mask_of,
    sequence_tables,
    takes_flex,
    takes_sequences,
)
from prefillcli.walk.layout import Chunk, KeyWindow, LastTokens, Span, layer_window, on_device

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
        AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def leave_untraced() -> None:
    """From now on torch.compile leaves the forest attention as it is, and compiles the code around it."""
    AttentionInterface.register(ATTENTION, torch.compiler.disable(_attention))  # type: ignore[no-untyped-call]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    active = _active.get(None)
    if active is None:
        raise UnsupportedModelError(f"{type(module).__name__} attends outside of the model's layers")
    return active(module, query, key, value, attention_mask, **kwargs), None


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scoring of keys by a layer: the factor, the soft cap and the window, if any."""

    scale: float
    softcap: float | None
    window: KeyWindow | None

    @property
    def how(self) -> dict[str, Any]:
        """The settings that do not depend on the visible keys."""
        return {"scale": self.scale, "softcap": self.softcap}


@dataclass(frozen=True, slots=True)
class WatchedLayer:
    """One layer of a pack: all keys [kv heads, tokens, width] and some queries [heads, queries, width], both after
    position encoding, and how the layer scores them. `number` is its place in the model, from 0."""

    number: int
    keys: Tensor
    queries: Tensor
    scoring: Scoring


# Attention of the computed queries [1, heads, tokens, width] over the keys and values of the buffer [1, kv heads,
# keys, width]: the output [1, heads, tokens, width] and the natural log-sum-exp float32 [1, heads, tokens].
Attend = Callable[[Chunk | LastTokens, Tensor, Tensor, Tensor, Scoring], tuple[Tensor, Tensor]]


def attend_by_kernel(
    kernel: ForestKernel, computed: Chunk | LastTokens, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """`Attend` of shapes that the kernel takes."""
    window = scoring.window
    blocks, runs = computed.blocks(window, LANES * key.shape[1] // query.shape[1])
    sliding = None if window is None or window.aligned else window.size  # an aligned one is in the blocks' runs
    return kernel.attend(query, key, value, blocks, runs, window=sliding, **scoring.how)


class ForestAttention:
    """Attention of one pack. Holds the K,V of one layer, [1, kv heads, tokens, width] each.

    Before each call of a layer, choose its work. `chunk(...)` stores K,V and attends; with `keys_only` it leaves the
    layer as soon as they are stored. `last_tokens(...)` attends from last tokens over K,V stored before. The queries
    of the pack's tokens `watched` (ascending) are kept for `watched_layer`. A subclass may compute other queries too,
    by overriding `receive` and `compute`. An `attend` takes the place of the fastest way of the device.
    """

    def __init__(self, tokens: int, watched: Sequence[int] = (), *, attend: Attend | None = None) -> None:
        self._attend = attend
        self._tokens = tokens
        self._watched = watched
        self.queries: list[Tensor] = []
        self._scoring: Scoring  # of the layer that has attended last
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.shift: Shift | None = None
        self._computed: Chunk | LastTokens  # by the next call of the layer
        self._keys_only = False
        self._held: Sequence[tuple[Tensor, Tensor]] = ()
        self.calls = 0  # by the current layer call; no layer we know attends more than once
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
        """The current layer, which has this `number`, with its kept queries."""
        return WatchedLayer(number, self.keys_values[0][0], torch.cat(self.queries, dim=1), self._scoring)

    def start_layer(self, held: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin a layer, with the K,V of the held nodes, on any device."""
        self._held = held
        self.attended = False
        self.queries = []
        self.shift = None

    @property
    def watches(self) -> bool:
        return len(self._watched) > 0

    def watch(self, tokens: Sequence[int]) -> None:
        """From the next layer on keep the queries of these tokens of the pack (ascending)."""
        self._watched = tokens

    def resize(self, tokens: int) -> None:
        """From the next layer on the pack has `tokens` tokens, those of held nodes included."""
        self._tokens = tokens
        self.keys = self.values = None

    def chunk(self, chunk: Chunk, *, keys_only: bool = False) -> None:
        self._computed, self._keys_only, self.calls = chunk, keys_only, 0

    def last_tokens(self, tokens: LastTokens) -> None:
        self._computed, self._keys_only, self.calls = tokens, False, 0

    @property
    def depths(self) -> Int64Array:
        """The depths of the tokens that are computed."""
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
        """The entry for transformers. Returns `[1, tokens, heads, width]`."""
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
        """Store the K,V of a chunk's call. Raises KeysStored if no more is needed."""
        if isinstance(self._computed, Chunk):
            if self._attend is None and not self._by_kernel(query, key, value, scoring):
                self.include_keys([*(keys for keys, _ in self._held), key], scoring)
            self._store(self._computed, key, value)
            self._watch(self._computed, query)
            if self._keys_only:
                raise KeysStored

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Attention of a call's queries: output [1, heads, tokens, width] and log-sum-exp [1, heads, tokens]."""
        out, lse = self._compute_one_way(query, key, value, scoring)
        if isinstance(self._computed, Chunk):
            for start, end in self._computed.both_ways(scoring.window):
                run = slice(start, end)
                own = query[:, :, run], key[:, :, run], value[:, :, run]
                _attend_both_ways(out[:, :, run], lse[:, :, run], *own, scoring, self.shift)
        return out, lse

    def _compute_one_way(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        computed = self._computed
        if self._attend is not None:
            return self._attend(computed, query, *self.keys_values, scoring)
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
            return attend_by_kernel(kernel, computed, query, *self.keys_values, scoring)
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
        """Extend the layer's shift to new keys; only devices with fast products have a shift."""
        if scoring.softcap is not None or not fast_products(keys[-1].device, keys[-1].dtype):
            return
        if self.shift is None:
            self.shift = Shift.of(keys[-1], scoring.scale)
        for each in keys:
            self.shift.include(key=each)

    def _watch(self, chunk: Chunk, query: Tensor) -> None:
        # `_watched` ascends, so a chunk's own are a run of it.
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
                out[:, :, at], lse[:, :, at] = _attend_causally(
                    query[:, :, at], key[:, :, at], value[:, :, at], scoring, shift
                )
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
            out[:, :, at], lse[:, :, at] = attend(query[:, :, at], keys[:, :, run], values[:, :, run], **how)
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
        # Merge attention over earlier pieces and ancestors into `out` and `lse`.
        keys, values = self.keys_values
        for span in spans:
            at, run = slice(span.q0, span.q1), slice(span.k0, span.k1)
            visible = None
            if span.masked and scoring.window is not None:
                oldest = scoring.window.oldest(computed.depths_on_device)[at]
                key_depths = torch.arange(span.k1 - span.k0, device=query.device) + span.k_depth
                visible = (key_depths[None, :] >= oldest[:, None])[None, None]
            q, k, v = query[:, :, at], keys[:, :, run], values[:, :, run]
            merge_into(out[:, :, at], lse[:, :, at], *attend(q, k, v, visible=visible, shift=shift, **scoring.how))


def _attend_both_ways(
    out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, shift: Shift | None
) -> None:
    # Merge attention of consecutive tokens to those after them. A window hides what lies further back, not these.
    tokens = query.shape[2]
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    some = hidden.any(dim=1).nonzero()[:, 0]
    if len(some):
        visible = hidden[some][None, None]
        found = attend(query[:, :, some], key, value, visible=visible, shift=shift, **scoring.how)
        rest = out[:, :, some], lse[:, :, some]
        merge_into(*rest, *found)
        out[:, :, some], lse[:, :, some] = rest


def _attend_causally(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, shift: Shift | None
) -> tuple[Tensor, Tensor]:
    # Attention of consecutive tokens among themselves, within the window; those of an aligned one are in one part. In
    # a sliding window of n, query i sees the keys i - n + 1 to i: a band below the diagonal.
    tokens, window, band = query.shape[2], scoring.window, None
    if window is not None and tokens > window.size:
        ones = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device)
        band = (ones.tril() & ones.triu(1 - window.size))[None, None]
    return attend(query, key, value, causal=band is None, visible=band, shift=shift, **scoring.how)
