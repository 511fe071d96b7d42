"""Attention of new tokens over the kept K,V of their prompts and over what was read behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefillcli.decode.kept_pack import Run
from prefillcli.prefill.attention import attend, merge_into
from prefillcli.prefill.forest import ForestAttention, Scoring
from prefillcli.prefill.layout import IntArray, KeyWindow, Span, SpanSet, on_device
from prefillcli.prefill.walk_state import KeyValue

# New tokens behind several rows: which keys each of them sees.


MOST_END = 256  # tokens of a prompt's end that are copied
MOST_PADDED = 2  # times what is copied, if all rows are padded to the longest end


@dataclass(frozen=True, slots=True)
class PaddedTokens:
    """New tokens as one padded batch [rows, longest]: `index` of each (padded with a row's first), the `places` of
    all tokens in the flattened batch."""

    index: Tensor
    places: Tensor


def private_ends(paths: Sequence[Sequence[Run]]) -> IntArray:
    """Of how many tokens at the end of each row's prompt the K,V are copied to stand with what follows it: short ends
    that no other row sees. Attention over all of them is then one call."""
    seen = Counter(run for path in paths for run in path)
    ends = np.asarray([path[-1][1] - path[-1][0] if path and seen[path[-1]] == 1 else 0 for path in paths])
    ends[ends > MOST_END] = 0
    fits = [most for most in set(ends.tolist()) if most * len(ends) <= MOST_PADDED * ends[ends <= most].sum()]
    ends[ends > max(fits, default=0)] = 0
    return ends


def room_of_end(tokens: int) -> int:
    """How much the copy of a prompt's end of so many tokens takes at most, with the padding that it is worth."""
    return MOST_PADDED * tokens if tokens <= MOST_END else 0


class RowTokens:
    """Some new tokens of each of some rows, one row after the other.

    `slots` are the rows' numbers, `counts` how many new tokens each has. Behind what it sees of the kept K,V, the runs
    `paths[slot]` with `lengths[slot]` tokens, a row has `read[slot]` tokens by itself already.
    """

    def __init__(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        *,
        paths: Sequence[Sequence[Run]],
        lengths: IntArray,
        read: IntArray,
        device: torch.device,
    ) -> None:
        self.slots = np.asarray(slots, dtype=np.int64)
        self.counts = np.asarray(counts, dtype=np.int64)
        self._paths, self._device = paths, device
        self._ends = np.cumsum(self.counts)
        self.tokens = int(self._ends[-1])
        self.most = int(self.counts.max())
        self._row = np.repeat(np.arange(len(slots)), self.counts)  # of each token
        steps = np.arange(self.tokens) - np.repeat(self._ends - self.counts, self.counts)
        self._lengths = lengths[self.slots]
        self._places: IntArray = read[self.slots][self._row] + steps  # among what the row has by itself
        self.own = int(self._places.max()) + 1
        self.depths: IntArray = self._lengths[self._row] + self._places
        self.slot_index = on_device(self.slots[self._row], device)
        self.place_index = on_device(self._places, device)
        self._steps = steps
        self._batch: PaddedTokens | None = None
        self._spans: dict[KeyWindow | None, list[tuple[Span, Tensor | None]]] = {}
        self._visible: dict[tuple[KeyWindow | None, int], Tensor | None] = {}

    @property
    def batch(self) -> PaddedTokens | None:
        """The tokens as a padded batch; None where each row has the same number of them."""
        if self._batch is None and self.most * len(self.slots) > self.tokens:
            index = np.repeat((self._ends - self.counts)[:, None], self.most, axis=1)
            index[self._row, self._steps] = np.arange(self.tokens)
            places = self._row * self.most + self._steps
            self._batch = PaddedTokens(on_device(index, self._device), on_device(places, self._device))
        return self._batch

    def spans(self, window: KeyWindow | None) -> list[tuple[Span, Tensor | None]]:
        """What the tokens see of the prompts, and where a window hides some of it, bool [1, 1, queries, keys]."""
        if window not in self._spans:
            found = SpanSet(self.depths, window)
            starts = (self._ends - self.counts).tolist()
            for slot, first, last in zip(self.slots.tolist(), starts, self._ends.tolist(), strict=True):
                for start, end, depth in self._paths[slot]:
                    found.add(first, last, start, end, depth)
            self._spans[window] = [(span, self._seen(span, window)) for span in found.merged()]
        return self._spans[window]

    def _seen(self, span: Span, window: KeyWindow | None) -> Tensor | None:
        if window is None or not span.masked:
            return None
        oldest = window.oldest(self.depths[span.q0 : span.q1])
        keys = np.arange(span.k0, span.k1) - span.k0 + span.k_depth
        return on_device(keys[None, :] >= oldest[:, None], self._device)[None, None]

    def visible(self, window: KeyWindow | None, groups: int) -> Tensor | None:
        """What the padded batch sees of the first `own` tokens that rows have by themselves; None: all of it.

        Bool [rows, 1, groups * longest, own]: `groups` heads of the queries, one behind the other, see the same.
        """
        if (window, groups) not in self._visible:
            last = np.full((len(self.slots), self.most), self.own - 1)
            last[self._row, self._steps] = self._places
            keys = np.arange(self.own)
            seen = keys <= last[:, :, None]
            if window is not None:
                oldest = window.oldest(self._lengths[:, None] + last) - self._lengths[:, None]
                seen &= keys >= oldest[:, :, None]
            repeated = np.tile(seen, (1, groups, 1))[:, None]
            self._visible[window, groups] = None if seen.all() else on_device(repeated, self._device)
        return self._visible[window, groups]


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
