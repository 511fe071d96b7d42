"""Greedy decoding behind all reads of a pack in lock step, for the queries of the decoded tokens.

This is SpecPrefill's lookahead: what the decoded tokens attend to is used, the tokens themselves are not. The pack's
K,V in all layers are kept while it lasts, with those of the decoded tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from prefillcli.plan.pack import Pack
from prefillcli.prefill.attention import attend, merge_into
from prefillcli.prefill.branch_recurrence import BranchRecurrence
from prefillcli.prefill.forest import ForestAttention, Scoring, WatchedLayer
from prefillcli.prefill.held_parts import KeyValue
from prefillcli.prefill.layout import Chunk, LastTokens
from prefillcli.prefill.walk import LayerWalk, Tick
from prefillcli.prefill.walk_state import WalkState


@dataclass(slots=True)
class Lookahead:
    """Queries of a pack's watched tokens, and of tokens decoded greedily behind its reads.

    `counts[i]` tokens were decoded behind read i before an end of text. `layers`, one for each of the model's that
    attend, begin with the queries of the watched tokens in their order; those of each read's first decoded token
    follow, then of the second.
    """

    counts: list[int]
    layers: Iterator[WatchedLayer]


@torch.inference_mode()
def look_ahead(
    walk: LayerWalk,
    pack: Pack,
    watched: Sequence[int],
    steps: int,
    stop_tokens: frozenset[int],
    tick: Tick = lambda tokens: None,
) -> Lookahead:
    """`walk.watch`, and decode `steps` tokens behind each read, greedily.

    All layers' K,V, and the states of recurrent layers behind each read, stay in memory as long as the result.
    Raises UnsupportedModelError for a model that is walked with its own cache.
    """
    walk.check_queries()
    state = walk.begin(pack, keep_ends=True)
    passed: list[_PassedLayer] = []
    with _DecodingAttention(len(pack.tokens), watched) as attention:
        hidden = state.hidden
        for index, layer in walk.through_layers(state, attention, tick):
            passed.append(_PassedLayer.of(index, state, attention))
            if index == len(walk.layers) - 1:
                passed[-1].resume(attention)
                hidden = walk.read_last(state, layer, attention)
        decoding = _Decoding(walk, state, attention, passed)
        counts = torch.zeros(len(pack.reads), dtype=torch.long)
        going = torch.ones(len(pack.reads), dtype=torch.bool)
        for step in range(1, steps + 1):
            tokens = torch.cat([logits.argmax(dim=-1) for logits in walk.logits(hidden)]).cpu()
            going &= ~torch.isin(tokens, torch.as_tensor(sorted(stop_tokens), dtype=torch.long))
            if not going.any():
                break
            counts += going
            hidden = decoding.forward(tokens, step, tick)
    return Lookahead(counts.tolist(), decoding.watched_layers())


@dataclass(slots=True)
class _PassedLayer:
    """What decoding needs of a layer that the pack has passed: K,V, queries, states behind the reads."""

    watched: WatchedLayer | None  # None of a layer without attention
    stored: KeyValue | None
    recurrence: BranchRecurrence
    queries: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, index: int, state: WalkState, attention: _DecodingAttention) -> Self:
        """The layer of number `index`, which all chunks have passed."""
        recurrence = BranchRecurrence([state.recurrence.end_of(node) for node, _ in state.pack.reads])
        if not attention.attended:
            return cls(None, None, recurrence)
        watched = attention.watched_layer(index)
        return cls(watched, attention.take_keys_values(), recurrence, [watched.queries])

    def resume(self, attention: _DecodingAttention) -> None:
        """Begin the layer again."""
        if self.watched is not None and self.stored is not None:
            attention.resume_layer(self.stored, self.watched.scoring)


@dataclass(slots=True)
class _DecodedTokens:
    """Tokens decoded behind the reads, the same number behind each: the newest are the queries.

    `keys` and `values` [reads, kv heads, steps, width] are theirs in one layer.
    """

    reads: LastTokens
    keys: Tensor | None = None
    values: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> None:
        """One more token behind each read; `key`, `value` are [1, kv heads, reads, width]."""
        key, value = key[0].transpose(0, 1).unsqueeze(2), value[0].transpose(0, 1).unsqueeze(2)
        self.keys = key if self.keys is None else torch.cat([self.keys, key], dim=2)
        self.values = value if self.values is None else torch.cat([self.values, value], dim=2)


class _Decoding:
    """Runs the model's layers over the newest tokens, step by step."""

    def __init__(
        self,
        walk: LayerWalk,
        state: WalkState,
        attention: _DecodingAttention,
        passed: list[_PassedLayer],
    ) -> None:
        self._walk = walk
        self._attention = attention
        self._passed = passed
        self._positions = state.tree.positions[state.last_tokens]
        nodes = [node for node, _ in state.pack.reads]
        self._decoded = [_DecodedTokens(LastTokens(state.tree, nodes, walk.device)) for _ in passed]

    def forward(self, tokens: Tensor, step: int, tick: Tick) -> Tensor:
        """The residual stream after the last layer, [1, reads, hidden], of the tokens decoded as number `step`."""
        recording = self._walk.record(tokens, self._positions + step)
        hidden = recording.hidden
        for index, (passed, decoded) in enumerate(zip(self._passed, self._decoded, strict=True)):
            decoded.reads.ahead = step
            passed.resume(self._attention)
            self._attention.decoded_tokens(decoded)
            with self._walk.layers.use(index) as layer, passed.recurrence.calls(layer):
                hidden = self._walk.call(layer, hidden, recording.calls[index], self._attention)
            if passed.watched is not None:
                passed.queries.append(self._attention.watched_layer(index).queries)
            tick(0.0)
        return hidden

    def watched_layers(self) -> Iterator[WatchedLayer]:
        """Each layer that attends, with all queries."""
        for passed in self._passed:
            if passed.watched is not None:
                yield replace(passed.watched, queries=torch.cat(passed.queries, dim=1))


class _DecodingAttention(ForestAttention):
    """Attention of a pack and of tokens decoded behind it."""

    def __init__(self, tokens: int, watched: Sequence[int]) -> None:
        super().__init__(tokens, watched)
        self._decoded: _DecodedTokens | None = None

    def take_keys_values(self) -> KeyValue:
        """Hand over the layer's K,V; the next layer gets room of its own."""
        taken = self.keys_values
        self.keys = self.values = None
        return taken

    def resume_layer(self, keys_values: KeyValue, scoring: Scoring) -> None:
        """Begin a layer whose K,V were taken before."""
        self.start_layer(())
        self.keys, self.values = keys_values
        self.include_keys([self.keys], scoring)

    def chunk(self, chunk: Chunk, *, keys_only: bool = False) -> None:
        self._decoded = None
        super().chunk(chunk, keys_only=keys_only)

    def last_tokens(self, tokens: LastTokens) -> None:
        self._decoded = None
        super().last_tokens(tokens)

    def decoded_tokens(self, decoded: _DecodedTokens) -> None:
        """The next call computes the newest of these."""
        super().last_tokens(decoded.reads)
        self._decoded = decoded

    def receive(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> None:
        if self._decoded is None:
            super().receive(query, key, value, scoring)
            return
        self.include_keys([key], scoring)
        self._decoded.append(key, value)
        self.queries.append(query[0])

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out, lse = super().compute(query, key, value, scoring)
        decoded = self._decoded
        if decoded is None or decoded.keys is None or decoded.values is None:
            return out, lse
        visible = None
        if scoring.window is not None:
            steps = decoded.keys.shape[2]
            behind = decoded.reads.depths[:, None] - np.arange(steps)[::-1][None, :]
            seen = behind >= scoring.window.oldest(decoded.reads.depths)[:, None]
            visible = None if seen.all() else torch.as_tensor(seen, device=query.device)[:, None, None]
        part, part_lse = attend(
            query[0].transpose(0, 1).unsqueeze(2),
            decoded.keys,
            decoded.values,
            scale=scoring.scale,
            visible=visible,
            softcap=scoring.softcap,
            shift=self.shift,
        )
        merge_into(out, lse, part[:, :, 0].transpose(0, 1)[None], part_lse[:, :, 0].transpose(0, 1)[None])
        return out, lse
