"""The attention function that transformers' layers call while a pack is walked.

`register()` makes it known to transformers under `ATTENTION`. A layer hands over one chunk's queries, keys and
values after position encoding; the keys and values go to the layer's buffer, the queries attend over the forest.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from prefillcli.errors import PrefillError
from prefillcli.prefill.attention import apply_sinks, attend, merge_into
from prefillcli.prefill.layout import Chunk, Reads, Span, group_runs, split_by_length

ATTENTION = "prefillcli"

# Keywords that transformers' layers pass along and that change nothing in a causal forward without a cache.
_HARMLESS = {
    "position_ids",
    "position_embeddings",
    "use_cache",
    "cache_position",
    "is_causal",
    "past_key_values",
}
_HARMLESS |= {
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "output_router_logits",
    "logits_to_keep",
}

_active: ContextVar[ForestAttention] = ContextVar("forest_attention")


class UnsupportedModelError(PrefillError):
    """The architecture cannot be walked layer by layer without risking wrong scores."""


class KeysStored(BaseException):
    """The layer's K,V are in the buffer, and nothing else of this call is wanted."""


def register() -> None:
    """Make the forest attention known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    return _active.get()(module, query, key, value, attention_mask, **kwargs), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


class ForestAttention:
    """Attention of one pack. Holds the K,V of one layer: `key_buffer`, `value_buffer` [1, kv heads, tokens, width].

    Before each call of a layer set what is computed: `chunk(...)` stores K,V and attends, with `keys_only` leaves the
    layer as soon as they are stored; `reads(...)` attends from last tokens over K,V stored before.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None
        self._at: Chunk | Reads | None = None
        self._keys_only = False
        self._held: tuple[Tensor, Tensor] | None = None
        self.calls = 0  # by the current layer call; more or fewer than one is no layer we know
        self.windows: set[int] = set()  # sliding windows that layers asked for

    def __enter__(self) -> ForestAttention:
        self._token = _active.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _active.reset(self._token)

    def start_layer(self, held: tuple[Tensor, Tensor] | None) -> None:
        """Begin a layer, with the K,V of the held tokens if there are any."""
        self._held = held

    def chunk(self, chunk: Chunk, *, keys_only: bool = False) -> None:
        self._at, self._keys_only, self.calls = chunk, keys_only, 0

    def reads(self, reads: Reads) -> None:
        self._at, self._keys_only, self.calls = reads, False, 0

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
        strange = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
        if strange or attention_mask is not None or dropout:
            what = ", ".join(strange) or ("an attention mask of its own" if attention_mask is not None else "dropout")
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {what} to attention, which the walk does not know"
            )
        if key.shape[:3] != value.shape[:3] or key.shape[2] != query.shape[2] or query.shape[0] != 1:
            raise UnsupportedModelError(f"{type(module).__name__} attends over other keys than its own tokens'")
        if sliding_window is not None:
            self.windows.add(sliding_window)
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
        if isinstance(self._at, Chunk):
            self._store(self._at, key, value)
            if self._keys_only:
                raise KeysStored
            out, lse = self._attend_chunk(self._at, query, key, value, scale, sliding_window, softcap)
        else:
            assert self._at is not None  # noqa: S101 - narrows the type; the walk always sets it
            out, lse = self._attend_reads(self._at, query, scale, sliding_window, softcap)
        if sinks is not None:
            apply_sinks(out, lse, sinks)
        return out.transpose(1, 2)

    def _store(self, chunk: Chunk, key: Tensor, value: Tensor) -> None:
        self.key_buffer = self._room(self.key_buffer, key)
        self.value_buffer = self._room(self.value_buffer, value)
        held = chunk.tree.held
        if self._held is not None:
            self.key_buffer[:, :, :held] = self._held[0][:, :, :held]
            self.value_buffer[:, :, :held] = self._held[1][:, :, :held]
            self._held = None
        self.key_buffer[:, :, held + chunk.start : held + chunk.end] = key
        self.value_buffer[:, :, held + chunk.start : held + chunk.end] = value

    def _room(self, buffer: Tensor | None, like: Tensor) -> Tensor:
        shape = (1, like.shape[1], self._tokens, like.shape[3])
        if buffer is None or buffer.shape != shape or buffer.dtype != like.dtype:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        return buffer

    def _attend_chunk(
        self,
        chunk: Chunk,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        view = chunk.view(window)
        if view.pieces == [(0, query.shape[2])]:
            band = _band(query.shape[2], window, query.device)
            out, lse = attend(query, key, value, scale=scale, causal=band is None, visible=band, softcap=softcap)
        else:
            out, lse = _room_for_output(query, value)
            for start, end in view.pieces:
                at = slice(start, end)
                band = _band(end - start, window, query.device)
                out[:, :, at], lse[:, :, at] = attend(
                    query[:, :, at], key[:, :, at], value[:, :, at],
                    scale=scale, causal=band is None, visible=band, softcap=softcap,
                )  # fmt: skip
            for group in view.groups:
                band = _band(group.index.shape[1], window, query.device)
                q, k, v = (x[0][:, group.index].transpose(0, 1) for x in (query, key, value))
                part, part_lse = attend(q, k, v, scale=scale, causal=band is None, visible=band, softcap=softcap)
                to = group.index[group.valid]
                out[0, :, to] = part.transpose(0, 1)[:, group.valid].to(out.dtype)
                lse[0, :, to] = part_lse.transpose(0, 1)[:, group.valid]
        self._merge_spans(view.spans, out, lse, query, chunk.positions, scale, window, softcap)
        return out, lse

    def _attend_reads(
        self, reads: Reads, query: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        assert self.key_buffer is not None  # noqa: S101 - narrows the type: chunks come first
        assert self.value_buffer is not None  # noqa: S101
        out, lse = _room_for_output(query, self.value_buffer)
        runs = reads.own(window)
        reader = {run: at for at, run in enumerate(runs)}
        long, short = split_by_length(runs, query.device)
        for start, end in long:
            at = slice(reader[start, end], reader[start, end] + 1)
            keys, values = self.key_buffer[:, :, start:end], self.value_buffer[:, :, start:end]
            out[:, :, at], lse[:, :, at] = attend(query[:, :, at], keys, values, scale=scale, softcap=softcap)
        for group in group_runs(short, query.device):
            rows = torch.as_tensor([reader[run] for run in group.runs], device=query.device)
            k = self.key_buffer[0][:, group.index].transpose(0, 1)
            v = self.value_buffer[0][:, group.index].transpose(0, 1)
            q = query[0][:, rows].transpose(0, 1).unsqueeze(2)
            part, part_lse = attend(q, k, v, scale=scale, visible=group.valid[:, None, None], softcap=softcap)
            out[0, :, rows] = part[:, :, 0].transpose(0, 1).to(out.dtype)
            lse[0, :, rows] = part_lse[:, :, 0].transpose(0, 1)
        positions = reads.tree.positions[reads.tokens]
        self._merge_spans(reads.spans(window), out, lse, query, positions, scale, window, softcap)
        return out, lse

    def _merge_spans(
        self,
        spans: list[Span],
        out: Tensor,
        lse: Tensor,
        query: Tensor,
        positions: Any,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        assert self.key_buffer is not None  # noqa: S101 - narrows the type
        assert self.value_buffer is not None  # noqa: S101
        for span in spans:
            visible = None
            if span.masked and window is not None:
                at = torch.as_tensor(positions[span.q0 : span.q1], device=query.device)
                keys = torch.arange(span.k_position, span.k_position + span.k1 - span.k0, device=query.device)
                visible = (keys[None, :] > at[:, None] - window)[None, None]
            part, part_lse = attend(
                query[:, :, span.q0 : span.q1],
                self.key_buffer[:, :, span.k0 : span.k1],
                self.value_buffer[:, :, span.k0 : span.k1],
                scale=scale,
                visible=visible,
                softcap=softcap,
            )
            merge_into(out[:, :, span.q0 : span.q1], lse[:, :, span.q0 : span.q1], part, part_lse)


def _room_for_output(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised output `[1, heads, tokens, width]` (a view of `[1, tokens, heads, width]`) and log-sum-exp."""
    _, heads, tokens, _ = query.shape
    out = torch.empty(1, tokens, heads, value.shape[-1], dtype=query.dtype, device=query.device)
    return out.transpose(1, 2), torch.empty(1, heads, tokens, dtype=torch.float32, device=query.device)


def _band(tokens: int, window: int | None, device: torch.device) -> Tensor | None:
    """Causal visibility inside a sliding window; None where the window hides nothing."""
    if window is None or tokens <= window:
        return None
    ones = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    return (ones.tril() & ones.triu(1 - window))[None, None]
