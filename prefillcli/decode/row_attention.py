"""Attention of new tokens over the kept K,V of their prompts and over what was read behind them."""

from __future__ import annotations

from torch import Tensor

from prefillcli.decode.row_tokens import RowTokens
from prefillcli.prefill.attention import attend, merge_into
from prefillcli.prefill.forest import ForestAttention, Scoring
from prefillcli.prefill.held_parts import KeyValue
from prefillcli.prefill.key_window import KeyWindow
from prefillcli.prefill.layout import IntArray, on_device

OWN_STEP = 32  # tokens by which the room behind the prompts grows


def whole_steps(tokens: int) -> int:
    """The room that a row has for so many tokens behind its prompt."""
    return -(-tokens // OWN_STEP) * OWN_STEP


class OwnTokens:
    """One layer's K,V of what was read behind the prompts of `rows` rows: [rows, kv heads, room, width] each."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, tokens: RowTokens, key: Tensor, value: Tensor) -> None:
        """Put K,V [1, kv heads, tokens, width] of new tokens where they belong."""
        self.keys, self.values = (
            self._room(x, new, tokens.own) for x, new in ((self.keys, key), (self.values, value))
        )
        for whole, new in ((self.keys, key), (self.values, value)):
            whole.transpose(1, 2)[tokens.slot_index, tokens.place_index] = new[0].transpose(0, 1)

    def _room(self, whole: Tensor | None, new: Tensor, tokens: int) -> Tensor:
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
        """Those of the rows that have new tokens, up to the last of these: [rows, kv heads, tokens, width] each."""
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
        self._own = OwnTokens(0)

    @property
    def depths(self) -> IntArray:
        return self._tokens_now.depths

    @property
    def _tokens_now(self) -> RowTokens:
        if self._new is None:
            raise RuntimeError("say what is computed before a layer is called")
        return self._new

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
        self._own.append(self._tokens_now, key, value)
        self.queries.append(query[0])

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        tokens = self._tokens_now
        out, lse = _attend_own(tokens, query, self._own.of(tokens), scoring)
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
    """What new tokens see of those behind the prompts: output [1, heads, tokens, width] and its log-sum-exp."""
    heads, width = query.shape[1], query.shape[3]
    batch = tokens.batch
    rows = len(tokens.slots)
    if batch is None:
        padded = query.reshape(heads, rows, tokens.most, width)
    else:
        padded = query[0][:, batch.index.flatten()].view(heads, rows, tokens.most, width)
    out, lse = attend(padded.transpose(0, 1), *own, visible=tokens.visible(scoring.window), **scoring.how)
    by_token, lse = out.transpose(1, 2).reshape(-1, heads, out.shape[3]), lse.transpose(0, 1).reshape(heads, -1)
    if batch is not None:
        by_token, lse = by_token[batch.places], lse[:, batch.places]
    return by_token[None].transpose(1, 2), lse[None]  # layers take the tokens' outputs as they lie


def _attend_together(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """`attend` where every query sees every key: the heads of a K,V head are queries of one head, so that K,V are
    read once for all of them."""
    heads, tokens, width = query.shape[1:]
    kv_heads = key.shape[1]
    out, lse = attend(query.reshape(1, kv_heads, heads // kv_heads * tokens, width), key, value, **scoring.how)
    return out.reshape(1, heads, tokens, -1), lse.reshape(1, heads, tokens)
