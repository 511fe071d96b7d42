"""The model's forward over new tokens behind kept prompts: several of each of some rows in one pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from prefillcli.decode.kept_pack import KeptRows
from prefillcli.decode.lockstep import NewTokens
from prefillcli.decode.row_attention import OwnTokens, RowAttention, RowTokens, private_ends
from prefillcli.prefill.layout import IntArray, KeyWindow, on_device
from prefillcli.prefill.recurrent import BranchRecurrence
from prefillcli.prefill.walk import LayerWalk, Tick
from prefillcli.prefill.walk_state import KeyValue

# Queries of the newest tokens of rows, by layer: what a retrieval cache is chosen by.


class NewestQueries:
    """Those of a model's last pass over its rows. `windows` are the layers', as far as they have attended."""

    def __init__(self, layers: int) -> None:
        self.windows: list[KeyWindow | None] = [None] * layers
        self._queries: list[Tensor | None] = [None] * layers
        self._newest: dict[int, int] = {}  # by row: its newest token's number in the pass

    def begin(self, new: NewTokens) -> None:
        """A pass over these tokens begins."""
        self._newest, end = {}, 0
        for row, tokens in new:
            end += len(tokens)
            self._newest[row] = end - 1

    def put(self, layer: int, queries: Sequence[Tensor], window: KeyWindow | None) -> None:
        """Queries [heads, tokens, width] of the pass, in one piece; none of a layer without attention."""
        if queries:
            self._queries[layer], self.windows[layer] = queries[0], window

    def forget(self, row: int, tokens: int) -> None:
        """The last `tokens` of a row were guessed wrong."""
        if row in self._newest:
            self._newest[row] -= tokens

    def has(self, row: int) -> bool:
        """Whether the last pass was over this row."""
        return row in self._newest

    def of(self, layer: int, row: int) -> Tensor | None:
        """The query [heads, width] of a row's newest token, after position encoding."""
        queries = self._queries[layer]
        return None if queries is None else queries[:, self._newest[row]]


class KeptForward:
    """A walked model over new tokens of rows whose prompts are kept (`prefillcli.decode.lockstep.Forward`).

    Row number i is behind the prompt number i of `rows`. `tick` is called after each layer and may raise to stop.
    A model with recurrent layers cannot forget what it has read. With `watches_queries`, `queries` are those of each
    layer, [heads, tokens, width] for each pass.
    """

    def __init__(
        self, walk: LayerWalk, rows: KeptRows, tick: Tick = lambda tokens: None, *, watches_queries: bool = False
    ) -> None:
        self.walk, self._rows, self._tick = walk, rows, tick
        self._slots = {number: number for number in range(len(rows.paths))}
        self._ends = private_ends(rows.paths)
        self._paths = [path[:-1] if end else path for path, end in zip(rows.paths, self._ends, strict=True)]
        self._lengths = np.asarray(rows.lengths, dtype=np.int64) - self._ends
        self._positions = np.asarray(rows.positions, dtype=np.int64)
        self._read = self._ends.copy()
        self._own = [OwnTokens(layer.keys_values, rows.paths, self._ends) for layer in rows.layers]
        self._recurrences = [BranchRecurrence(layer.states) for layer in rows.layers]
        self._attention = RowAttention()
        self.queries: list[list[Tensor]] = [[] for _ in rows.layers]
        self._watches_queries = watches_queries
        self._newest: NewestQueries | None = None
        self.can_forget = not any(self._recurrences)

    def __call__(self, new: NewTokens) -> Iterator[Tensor]:
        """As in `Forward`."""
        return self._logits(self._hidden(new))

    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> Iterator[Tensor]:
        yield from self.walk.logits(hidden)

    @torch.inference_mode()
    def _hidden(self, new: NewTokens) -> Tensor:
        """The residual stream behind the last layer, [1, tokens, hidden]."""
        slots, counts = [self._slots[row] for row, _ in new], [len(own) for _, own in new]
        tokens = RowTokens(
            slots,
            counts,
            paths=self._paths,
            lengths=self._lengths,
            read=self._read,
            device=self.walk.device,
        )
        ids = torch.as_tensor([token for _, own in new for token in own])
        behind = np.repeat((self._positions - self._lengths - self._ends + 1)[tokens.slots], tokens.counts)
        if self._newest is not None:
            self._newest.begin(new)
        recording = self.walk.record(ids, tokens.depths + behind)
        hidden = recording.hidden
        with self._attention as attention:
            for index, (kept, own) in enumerate(zip(self._rows.layers, self._own, strict=True)):
                attention.new_tokens(tokens, kept.keys_values, own)
                with self.walk.layers.use(index) as layer, self._recurrences[index].calls(layer, slots, counts):
                    hidden = self.walk.call(layer, hidden, recording.calls[index], attention)
                if self._watches_queries:
                    self.queries[index] += attention.queries
                if self._newest is not None:
                    self._newest.put(index, attention.queries, attention.window)
                self._tick(0.0)
        self._read[tokens.slots] += tokens.counts
        return hidden

    def forget(self, row: int, tokens: int) -> None:
        """As in `Forward`. Raises RuntimeError where `can_forget` is False."""
        if tokens and not self.can_forget:
            raise RuntimeError("the states of recurrent layers cannot be taken back")
        self._read[self._slots[row]] -= tokens
        if self._newest is not None:
            self._newest.forget(row, tokens)

    def drop(self, rows: Collection[int]) -> None:
        """As in `Forward`."""
        stay = [(row, slot) for row, slot in self._slots.items() if row not in rows]
        slots = np.asarray([slot for _, slot in stay], dtype=np.int64)
        self._slots = {row: slot for slot, (row, _) in enumerate(stay)}
        self._paths = [self._paths[slot] for slot in slots]
        self._lengths, self._positions = self._lengths[slots], self._positions[slots]
        self._ends, self._read = self._ends[slots], self._read[slots]
        for own, recurrence in zip(self._own, self._recurrences, strict=True):
            own.keep(slots)
            recurrence.keep(slots.tolist())

    def watch_newest(self) -> NewestQueries:
        """The newest tokens' queries, from the next pass on."""
        self._newest = NewestQueries(len(self._rows.layers))
        return self._newest

    def prompt_keys_values(self, layer: int, row: int) -> KeyValue | None:
        """A layer's K,V [kv heads, tokens, width] of a row's prompt; None where it does not attend."""
        both, path = self._rows.layers[layer].keys_values, self._rows.paths[row]
        if both is None:
            return None
        keys, values = (torch.cat([each[0, :, start:end] for start, end, _ in path], dim=1) for each in both)
        return keys, values

    def text_keys_values(self, layer: int, rows: IntArray, places: IntArray) -> KeyValue | None:
        """A layer's K,V [tokens, kv heads, width] of some tokens behind prompts: of each its row, and its place behind
        the row's prompt. None where the layer does not attend."""
        keys, values = self._own[layer].keys, self._own[layer].values
        if keys is None or values is None:
            return None
        numbers = np.asarray([self._slots[row] for row in rows.tolist()], dtype=np.int64)
        slots, at = on_device(numbers, keys.device), on_device(places + self._ends[numbers], keys.device)
        return keys[slots, :, at], values[slots, :, at]

    def text_read(self, row: int) -> int:
        """How many tokens behind a row's prompt were read."""
        slot = self._slots[row]
        return int(self._read[slot] - self._ends[slot])

    def text_position(self, row: int) -> int:
        """The position of the first token behind a row's prompt."""
        return int(self._positions[self._slots[row]]) + 1
