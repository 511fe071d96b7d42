"""Attention of new tokens over the kept K,V of their prompts and over what was read behind them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from prefillcli.decode.kept_pack import Run
from prefillcli.decode.row_tokens import RowTokens
from prefillcli.prefill.attention import attend, merge_into
from prefillcli.prefill.forest import ForestAttention, Scoring
from prefillcli.prefill.held_parts import KeyValue
from prefillcli.prefill.layout import IntArray, KeyWindow, on_device

OWN_STEP = 32  # tokens by which the room behind the prompts grows


def whole_steps(tokens: int) -> int:
    """The room that a row has for so many tokens behind its prompt."""
    return -(-tokens // OWN_STEP) * OWN_STEP


class OwnTokens:
    """One layer's K,V of what each row has by itself: [rows, kv heads, room, width] each.

    These are the copied end of its prompt, of `ends[row]` tokens, and what was read behind it. `kept` are the layer's
    K,V of the prompts, on the runs `paths`.
    """

    def __init__(self, kept: KeyValue | None, paths: Sequence[Sequence[Run]], ends: IntArray) -> None:
        self._rows = len(paths)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        if kept is not None and ends.any():
            last = np.asarray([path[-1][1] - 1 if path else 0 for path in paths])
            first = np.where(ends > 0, last + 1 - ends, last)
            index = np.minimum(first[:, None] + np.arange(ends.max())[None, :], last[:, None])
            at = on_device(index, kept[0].device).flatten()
            copies = (each[0][:, at].view(each.shape[1], *index.shape, -1).transpose(0, 1) for each in kept)
            tokens = int(ends.max()) + 1
            self.keys, self.values = (self._room(each, each, tokens) for each in copies)

    def append(self, tokens: RowTokens, key: Tensor, value: Tensor) -> None:
        """Put K,V [1, kv heads, tokens, width] of new tokens where they belong."""
        self.keys, self.values = (
            self._room(x, new, tokens.own) for x, new in ((self.keys, key), (self.values, value))
        )
        for whole, new in ((self.keys, key), (self.values, value)):
            whole.transpose(1, 2)[tokens.slot_index, tokens.place_index] = new[0].transpose(0, 1)

    def _room(self, whole: Tensor | None, new: Tensor, tokens: int) -> Tensor:
        """The K,V `whole`, if there are any, with room for so many tokens of each row."""
        if whole is not None and whole.shape[2] >= tokens:
            return whole
        room = whole_steps(tokens)
        grown = new.new_zeros(self._rows, new.shape[1], room, new.shape[3])
        if whole is not None:
            grown[:, :, : whole.shape[2]] = whole
        return grown

    def keep(self, slots: IntArray) -> None:
        """Go on with these rows alone."""
        self._rows = len(slots)
        if self.keys is not None and self.values is not None:
            at = on_device(slots, self.keys.device)
            self.keys, self.values = self.keys[at], self.values[at]

    def of(self, tokens: RowTokens) -> KeyValue:
        """Those of the rows that have new tokens, up to the last of these, [rows, kv heads, tokens, width] each."""
        if self.keys is None or self.values is None:
            raise RuntimeError("nothing was read behind the prompts")
        if len(tokens.slots) == self._rows and (tokens.slots[1:] > tokens.slots[:-1]).all():
            return self.keys[:, :, : tokens.own], self.values[:, :, : tokens.own]
        at = on_device(tokens.slots, self.keys.device)
        return self.keys[at, :, : tokens.own], self.values[at, :, : tokens.own]


class RowAttention(ForestAttention):
    """Attention of new tokens of several rows. Those of the layer are in `queries`."""

    def __init__(self) -> None:
        super().__init__(0)
        self._new: RowTokens | None = None
        self._own: OwnTokens | None = None

    @property
    def depths(self) -> IntArray:
        return self._now[0].depths

    @property
    def _now(self) -> tuple[RowTokens, OwnTokens]:
        if self._new is None or self._own is None:
            raise RuntimeError("say what is computed before a layer is called")
        return self._new, self._own

    @property
    def window(self) -> KeyWindow | None:
        """What the layer that was called last sees at most, where it attends through a window."""
        return None if self._scoring is None else self._scoring.window

    def new_tokens(self, tokens: RowTokens, kept: KeyValue | None, own: OwnTokens) -> None:
        """The next call of a layer computes these. `kept` are its K,V of the prompts, `own` of what follows them."""
        self.start_layer(())
        self._new, self._own, self.calls = tokens, own, 0
        self.keys, self.values = (None, None) if kept is None else kept

    def receive(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> None:
        tokens, own = self._now
        own.append(tokens, key, value)
        self.queries.append(query[0])

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        tokens, own = self._now
        out, lse = _attend_own(tokens, query, own.of(tokens), scoring)
        keys, values = self.keys_values
        for span, visible in tokens.spans(scoring.window):
            at, run = slice(span.q0, span.q1), slice(span.k0, span.k1)
            q, k, v = query[:, :, at], keys[:, :, run], values[:, :, run]
            if visible is None:
                part = _attend_together(q, k, v, scoring)
            else:
                part = attend(q, k, v, visible=visible, **scoring.how)
            merge_into(out[:, :, at], lse[:, :, at], *part)
        return out, lse


def _attend_own(tokens: RowTokens, query: Tensor, own: KeyValue, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Attention over what rows have by themselves: output [1, heads, tokens, width] and its log-sum-exp."""
    heads, width = query.shape[1], query.shape[3]
    batch = tokens.batch
    rows = len(tokens.slots)
    if batch is None:
        padded = query.reshape(heads, rows, tokens.most, width)
    else:
        padded = query[0][:, batch.index.flatten()].view(heads, rows, tokens.most, width)
    kv_heads = own[0].shape[1]
    groups = heads // kv_heads
    together = padded.transpose(0, 1).reshape(rows, kv_heads, groups * tokens.most, width)
    out, lse = attend(together, *own, visible=tokens.visible(scoring.window, groups), **scoring.how)
    out, lse = out.reshape(rows, heads, tokens.most, -1), lse.reshape(rows, heads, tokens.most)
    by_token, lse = out.transpose(1, 2).reshape(-1, heads, out.shape[3]), lse.transpose(0, 1).reshape(heads, -1)
    if batch is not None:
        by_token, lse = by_token[batch.places], lse[:, batch.places]
    return by_token.contiguous()[None].transpose(1, 2), lse[None]  # some layers only view the tokens' outputs


def _attend_together(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """`attend` where every query sees every key: the heads of a K,V head are queries of one head, so that K,V are
    read once for all of them."""
    heads, tokens, width = query.shape[1:]
    kv_heads = key.shape[1]
    out, lse = attend(query.reshape(1, kv_heads, heads // kv_heads * tokens, width), key, value, **scoring.how)
    return out.reshape(1, heads, tokens, -1), lse.reshape(1, heads, tokens)
