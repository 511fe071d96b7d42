"""A draft model, which guesses tokens: its forward pass over rows that see a few tokens each, over padded caches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefillcli.plan.trie import TokenArray, common_prefix
from prefillcli.stats.arrays import Int64Array
from prefillcli.walk.attention import attend, attend_blockwise
from prefillcli.walk.decoding import with_room
from prefillcli.walk.forest import ForestAttention, Scoring, UnsupportedModelError
from prefillcli.walk.layout import KeyWindow, made_once, on_device
from prefillcli.walk.lockstep import Chooser, Drafter, NewTokens, RowText
from prefillcli.walk.recurrent import recurrent_modules
from prefillcli.walk.walk import KeyValue, LayerWalk

# K,V of several rows side by side, padded: for rows that see few tokens each, and share none of them.


TEXT_STEP = 64  # tokens by which the room for text grows


@dataclass(slots=True)
class PassTokens:
    """The tokens of one pass, row by row: `rows` is the place of each token's row in the cache, `steps` its number
    among the row's new ones. `before[place]` text tokens of a row were read earlier. A query, at its depth in
    `depths`, sees the tokens up to its own."""

    rows: Int64Array
    steps: Int64Array
    before: Int64Array
    depths: Int64Array
    first_depths: Int64Array  # of each row's text
    device: torch.device
    tables: dict[Any, Any] = field(default_factory=dict)

    @property
    def columns(self) -> Int64Array:
        """Each token's place among its row's text."""
        return self.before[self.rows] + self.steps

    @property
    def most(self) -> int:
        """New tokens of a row, at most."""
        return int(self.steps.max()) + 1

    @property
    def text(self) -> int:
        """Text tokens of a row after this pass, at most, of all rows' that read."""
        return int(self.columns.max()) + 1

    def on_device(self, name: str) -> Tensor:
        """`rows`, `steps`, `columns`, as int64 [tokens]."""
        return made_once(self.tables, name, lambda: on_device(getattr(self, name), self.device))


class PaddedLayer:
    """One layer's K,V [rows, kv heads, columns, width]: `chosen` columns of tokens before the text, then the text.

    Of the chosen ones the first `counts[row]` are in use.
    """

    def __init__(self, rows: int, chosen: int) -> None:
        self.chosen = chosen
        self.counts = np.zeros(rows, dtype=np.int64)
        self.depths = np.zeros((rows, chosen), dtype=np.int64)
        self._both: KeyValue | None = None

    @property
    def keys_values(self) -> KeyValue:
        """All columns. Something must be stored."""
        if self._both is None:
            raise RuntimeError("nothing was stored yet")
        return self._both

    @torch.inference_mode()
    def choose(self, row: int, keys: Tensor, values: Tensor, depths: Int64Array | None = None) -> None:
        """Keep these K,V [kv heads, tokens, width] before a row's text, instead of those so far.

        `depths` are needed where the layer has a window.
        """
        tokens = keys.shape[1]
        self._make_room(keys[None], values[None], 0)
        every_key, every_value = self.keys_values
        every_key[row, :, :tokens].copy_(keys, non_blocking=True)
        every_value[row, :, :tokens].copy_(values, non_blocking=True)
        self.counts[row] = tokens
        if depths is not None:
            self.depths[row, :tokens] = depths

    @torch.inference_mode()
    def put_text(self, rows: Tensor, columns: Tensor, keys: Tensor, values: Tensor, longest: int) -> None:
        """Store K,V [tokens, kv heads, width] of text: of each token the row int64 [tokens] and its place in the text.

        No text is longer than `longest`.
        """
        self._make_room(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], longest)
        for place, own in zip(self.keys_values, (keys, values), strict=True):
            place[rows, :, columns + self.chosen] = own

    def append(self, new: PassTokens, key: Tensor, value: Tensor) -> None:
        both = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self.put_text(new.on_device("rows"), new.on_device("columns"), *both, new.text)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        self.counts, self.depths = self.counts[list(rows)], self.depths[list(rows)]
        if self._both is not None:
            at = torch.as_tensor(rows, dtype=torch.long, device=self._both[0].device)
            self._both = self._both[0][at], self._both[1][at]

    def visible(self, new: PassTokens, window: KeyWindow | None, first: int, last: int) -> Tensor | None:
        """The mask of the queries of rows `first` to `last`, bool [rows, 1, most, columns], up to the longest text;
        None if they see all."""
        at = (first, last, window, self.chosen, self.counts.tobytes(), window and self.depths.tobytes())
        return made_once(new.tables, at, lambda: self._visible(new, window, first, last))

    def _visible(self, new: PassTokens, window: KeyWindow | None, first: int, last: int) -> Tensor | None:
        rows = slice(first, last)
        before, starts = new.before[rows, None, None], new.first_depths[rows, None, None]
        text = np.arange(new.text)[None, None]
        steps = np.arange(new.most)[None, :, None]
        shape = (last - first, new.most)
        chosen = np.arange(self.chosen)[None, None] < self.counts[rows, None, None]
        seen = np.concatenate(
            [
                np.broadcast_to(chosen, (*shape, self.chosen)),
                np.broadcast_to(text <= before + steps, (*shape, new.text)),
            ],
            axis=2,
        )
        if window is not None:
            depths = np.concatenate(
                [
                    np.broadcast_to(self.depths[rows, None], (last - first, 1, self.chosen)),
                    starts + text,
                ],
                axis=2,
            )
            seen = seen & (depths >= window.oldest(starts + before + steps))
        return None if seen.all() else on_device(seen, new.device)[:, None]

    def _make_room(self, keys: Tensor, values: Tensor, text: int) -> None:
        # Room for this many text tokens of K,V like these [any, kv heads, any, width].
        rows, room = len(self.counts), self.chosen + -(-text // TEXT_STEP) * TEXT_STEP
        before = self._both or (None, None)
        self._both = (
            with_room(before[0], keys, rows, self.chosen + text, room),
            with_room(before[1], values, rows, self.chosen + text, room),
        )


DROP_SHARE = 0.5  # of the rows: when no more than these go on, the others' K,V leave the caches


class PaddedForward:
    """Reads the tokens after some chosen ones of each row; `open` the rows first.

    Raises UnsupportedModelError where the model's layers keep states, or are walked with the model's own cache.
    """

    can_forget = True

    def __init__(self, walk: LayerWalk) -> None:
        check_forgets(walk)
        self._walk = walk
        self._rows: dict[int, int] = {}  # the place of each row in the caches
        self._read = np.zeros(0, dtype=np.int64)  # text tokens, by place
        self._positions = np.zeros(0, dtype=np.int64)  # of the first one
        self._depths = np.zeros(0, dtype=np.int64)  # of the first one
        self._dropped: set[int] = set()
        self.layers: list[PaddedLayer] = []

    def open(self, rows: Sequence[int], chosen: Sequence[int] | None = None) -> None:
        """Read these rows from now on, and none of those before.

        Before a row's text each layer keeps at most `chosen[layer]` tokens; none where this is None.
        """
        self._rows = {row: place for place, row in enumerate(rows)}
        self._read, self._positions, self._depths = (np.zeros(len(rows), dtype=np.int64) for _ in range(3))
        self._dropped = set()
        self.layers = [PaddedLayer(len(rows), width) for width in chosen or [0] * len(self._walk.layers)]

    def begin_text(self, row: int, position: int, depth: int) -> None:
        """A row's text begins at this position and depth. Nothing of it was read."""
        place = self._rows[row]
        self._read[place], self._positions[place], self._depths[place] = 0, position, depth

    def place(self, row: int) -> int:
        return self._rows[row]

    def has_text(self, row: int, tokens: int) -> None:
        """The caches have the K,V of this many tokens of a row's text."""
        self._read[self._rows[row]] = tokens

    @torch.inference_mode()
    def __call__(self, new: NewTokens) -> Iterator[Tensor]:
        for part in self._parts(new):
            yield from self._walk.logits(self._hidden(part))

    @torch.inference_mode()
    def last_logits(self, new: NewTokens) -> Tensor:
        """As a call, but float32 [rows, vocabulary], after the last token of each row alone."""
        found: list[Tensor] = []
        for part in self._parts(new):
            ends = np.cumsum([len(tokens) for _, tokens in part]) - 1
            hidden = self._hidden(part)
            found += self._walk.logits(hidden[:, torch.as_tensor(ends, device=hidden.device)])
        return torch.cat(found)

    def forget(self, row: int, tokens: int) -> None:
        self._read[self._rows[row]] -= tokens

    def drop(self, rows: Collection[int]) -> None:
        self._dropped.update(row for row in rows if row in self._rows)
        going = [row for row in self._rows if row not in self._dropped]
        if len(going) > DROP_SHARE * len(self._rows):
            return
        places = [self._rows[row] for row in going]
        for layer in self.layers:
            layer.keep(places)
        self._read, self._positions, self._depths = (
            each[places] for each in (self._read, self._positions, self._depths)
        )
        self._rows, self._dropped = {row: place for place, row in enumerate(going)}, set()

    def _parts(self, new: NewTokens) -> Iterator[NewTokens]:
        # The rows in groups of no more tokens than one call of a layer computes, or of one row.
        part: list[tuple[int, Sequence[int]]] = []
        total = 0
        for row, tokens in new:
            if part and total + len(tokens) > self._walk.chunk_tokens:
                yield part
                part, total = [], 0
            part.append((row, tokens))
            total += len(tokens)
        if part:
            yield part

    @torch.inference_mode()
    def _hidden(self, new: NewTokens) -> Tensor:
        # The residual stream after the last layer, [1, tokens, hidden].
        walk = self._walk
        lengths = [len(tokens) for _, tokens in new]
        rows = np.repeat([self._rows[row] for row, _ in new], lengths)
        steps = np.concatenate([np.arange(length) for length in lengths])
        read = self._read[rows] + steps
        table = PassTokens(rows, steps, self._read.copy(), self._depths[rows] + read, self._depths, walk.device)
        tokens = torch.as_tensor([token for _, tokens in new for token in tokens], dtype=torch.long)
        recording = walk.record(tokens, self._positions[rows] + read)
        hidden = recording.hidden
        with _PaddedAttention(table) as attention:
            for index, cache in enumerate(self.layers):
                with walk.layers.use(index) as layer:
                    attention.start_cache(cache)
                    hidden = walk.call(layer, hidden, recording.calls[index], attention)
        for row, length in zip(new, lengths, strict=True):
            self._read[self._rows[row[0]]] += length
        return hidden


def check_forgets(walk: LayerWalk) -> None:
    """Raise UnsupportedModelError for layers that keep states, which cannot forget, or a cache of their own."""
    walk.check_queries()
    for index in range(len(walk.layers)):
        with walk.layers.use(index) as layer:
            if recurrent_modules(layer):
                walk.layers.end_pass()
                raise UnsupportedModelError("recurrent layers cannot forget tokens that were guessed wrong")


class _PaddedAttention(ForestAttention):
    """Attention of new tokens over the padded caches of their rows."""

    def __init__(self, new: PassTokens) -> None:
        super().__init__(0)
        self._new = new
        self._cache: PaddedLayer  # of the layer that is called

    def start_cache(self, cache: PaddedLayer) -> None:
        self.start_layer(())
        self._cache, self.calls = cache, 0

    @property
    def depths(self) -> Int64Array:
        return self._new.depths

    def receive(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> None:
        self._cache.append(self._new, key, value)

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        new, cache = self._new, self._cache
        first, last = int(new.rows.min()), int(new.rows.max()) + 1
        at = new.on_device("rows") - first, new.on_device("steps")
        queries = query.new_zeros(last - first, new.most, query.shape[1], query.shape[3])
        queries[at] = query[0].transpose(0, 1)
        keys, values = (each[first:last, :, : cache.chosen + new.text] for each in cache.keys_values)
        visible = cache.visible(new, scoring.window, first, last)
        out, lse = _attend(queries.transpose(1, 2), keys, values, visible, scoring)
        return out.transpose(1, 2)[at].transpose(0, 1)[None], lse.transpose(1, 2)[at].t()[None]


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    if query.device.type == "cpu" or visible is None:
        return attend(query, keys, values, visible=visible, **scoring.how)
    return attend_blockwise(query, keys, values, visible=visible, block=keys.shape[2], **scoring.how)


LEAST_ROOM = 64  # tokens after the first reading, before a sequence is full


@dataclass(slots=True)
class _Sequence:
    """The `tokens` that the draft model has read of a row: its `first` ones, then those from its token `start` on."""

    first: int
    start: int
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A small model with the tokenizer of the model that it guesses for.

    `max_length` is the longest sequence that its position encoding takes. Raises UnsupportedModelError for a model
    that cannot forget what it has read: one with recurrent layers, or one that is walked with its own cache.
    """

    walk: LayerWalk
    max_length: int

    def __post_init__(self) -> None:
        check_forgets(self.walk)


class StreamingDrafter(Drafter):
    """Guesses with `draft`, tokens below `vocabulary`: the target may know fewer than the draft model."""

    name = "draft"

    def __init__(
        self,
        draft: DraftModel,
        chooser: Chooser,
        *,
        vocabulary: int,
        sinks: int = 16,
        recent: int = 240,
    ) -> None:
        self._forward = PaddedForward(draft.walk)
        self._chooser = chooser
        self._vocabulary = vocabulary
        self._known = int(draft.walk.model.get_input_embeddings().weight.shape[0])
        self._longest = min(2 * (sinks + recent) + LEAST_ROOM, draft.max_length)
        self._sinks = min(sinks, self._longest // 4)
        self._recent = min(recent, self._longest // 2)
        self._sequences: dict[int, _Sequence] = {}

    def begin(self, rows: Sequence[RowText]) -> None:
        self._forward.open([row.number for row in rows])
        self._sequences = {}

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        room = self._longest - self._sinks - self._recent
        wanted = {row.number: min(tokens, room) for row, tokens in zip(rows, most, strict=True)}
        guessed: dict[int, list[int]] = {row.number: [] for row in rows}
        unread = {row.number: self._unread(row, wanted[row.number]) for row in rows if wanted[row.number] > 0}
        going = [row for row in rows if unread.get(row.number)]
        while going:
            logits = self._forward.last_logits([(row.number, unread[row.number]) for row in going])
            places = [row.position + len(guessed[row.number]) for row in going]
            keys = [row.beginning.key for row in going]
            tokens, _ = self._chooser.choose(logits[:, : self._vocabulary], keys, places)
            for row, token in zip(going, tokens, strict=True):
                self._sequences[row.number].tokens += unread[row.number]
                guessed[row.number].append(token)
                unread[row.number] = [token]
            going = [row for row in going if len(guessed[row.number]) < wanted[row.number]]
        return [guessed[row.number] for row in rows]

    def end(self, row: RowText) -> None:
        self._forward.drop([row.number])
        self._sequences.pop(row.number, None)

    def _unread(self, row: RowText, guesses: int) -> list[int]:
        # The tokens to read before this many are guessed; tokens that the row no longer has are forgotten. None where
        # the draft model does not know a token.
        text = [*row.beginning.tokens, *row.written]
        kept = self._sequences.get(row.number)
        length = len(row.beginning.prompt) + len(text)
        if kept is None or not kept.start < length <= self._longest - guesses + kept.start - kept.first:
            return self._read_anew(row, text)
        new, read = _from(row, text, kept.start), kept.tokens[kept.first :]
        same = min(common_prefix(np.asarray(read, dtype=np.int32), new), len(new) - 1)
        if same < len(read):
            self._forward.forget(row.number, len(read) - same)
            del kept.tokens[kept.first + same :]
        return [int(token) for token in new[same:]] if self._knows(new[same:]) else []

    def _read_anew(self, row: RowText, text: list[int]) -> list[int]:
        # Begin with the first tokens and the latest ones of a row's prompt and its text, which are to be read.
        length = len(row.beginning.prompt) + len(text)
        first = 0 if length <= self._sinks + self._recent else self._sinks
        start = length - self._recent if first < length - self._recent else 0
        tokens = np.concatenate([_from(row, text, 0, first), _from(row, text, start)])
        if not self._knows(tokens):
            self._sequences.pop(row.number, None)
            return []
        self._forward.begin_text(row.number, 0, 0)
        self._sequences[row.number] = _Sequence(first, start)
        return [int(token) for token in tokens]

    def _knows(self, tokens: TokenArray) -> bool:
        return int(tokens.max()) < self._known


def _from(row: RowText, text: Sequence[int], start: int, end: int | None = None) -> TokenArray:
    prompt = row.beginning.prompt
    behind = text[max(0, start - len(prompt)) : None if end is None else max(0, end - len(prompt))]
    return np.concatenate([prompt[start:end], np.asarray(behind, dtype=np.int32)])
