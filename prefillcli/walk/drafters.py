"""The drafters, which guess tokens: prompt lookup, earlier texts of a job, a draft model, the model over a part of
each prompt."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefillcli.plan.trie import TokenArray, common_prefix
from prefillcli.stats.arrays import Int64Array
from prefillcli.walk.attention import attend, attend_blockwise
from prefillcli.walk.continuations import DecodingReport, Writing
from prefillcli.walk.decoding import KeptForward, with_room
from prefillcli.walk.forest import ForestAttention, Scoring, UnsupportedModelError
from prefillcli.walk.layout import KeyWindow, made_once, on_device
from prefillcli.walk.lockstep import Chooser, Drafter, LockStep, NewTokens, RowText
from prefillcli.walk.recurrent import recurrent_modules
from prefillcli.walk.walk import KeyValue, LayerWalk

# Prompt lookup: the tokens that followed an earlier occurrence of the latest ones, in the row's own prompt and text.
# It guesses text that quotes its input well, for next to nothing (transformers: prompt lookup decoding).

SHORTEST_MATCH = 2
LONGEST_MATCH = 16


class PromptLookup(Drafter):
    """Finds the most recent of the longest matches of a text's end, of `SHORTEST_MATCH` to `LONGEST_MATCH` tokens.

    Each guess compares the last token with the whole text at once: 16,000 tokens take some microseconds, less than an
    index would take to build.
    """

    name = "lookup"

    def __init__(self) -> None:
        self._texts: dict[int, _RowTokens] = {}

    def begin(self, rows: Sequence[RowText]) -> None:
        self._texts = {row.number: _RowTokens(row) for row in rows}

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        return [
            continuation(self._texts[row.number].upto(row), tokens) if tokens else []
            for row, tokens in zip(rows, most, strict=True)
        ]

    def end(self, row: RowText) -> None:
        del self._texts[row.number]


class _RowTokens:
    def __init__(self, row: RowText) -> None:
        certain = [row.beginning.prompt, np.asarray(row.beginning.tokens, dtype=np.int32)]
        self._text = len(row.beginning.prompt) + len(row.beginning.tokens)
        self._tokens = np.concatenate([*certain, np.empty(256, dtype=np.int32)])

    def upto(self, row: RowText) -> TokenArray:
        # All tokens, int32 [tokens]: taken from the text anew, since guesses in it may have been taken back.
        end = self._text + len(row.written)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(len(row.written), dtype=np.int32)])
        self._tokens[self._text : end] = row.written
        return self._tokens[:end]


def continuation(tokens: TokenArray, most: int) -> list[int]:
    """At most this many tokens that may follow `tokens`: those after an earlier place with the same ending."""
    end = len(tokens)
    matches = np.flatnonzero(tokens[: end - 1] == tokens[-1])
    length = 1
    while length < min(LONGEST_MATCH, end - 1) and len(matches):
        longer = matches[matches >= length]
        longer = longer[tokens[longer - length] == tokens[end - 1 - length]]
        if not len(longer):
            break
        matches, length = longer, length + 1
    if length < SHORTEST_MATCH or not len(matches):
        return []
    start = int(matches[-1]) + 1
    guessed: list[int] = tokens[start : start + most].tolist()
    for at in range(len(guessed), most):  # the match reaches the end: the repetition goes on
        guessed.append(guessed[at - (end - start)])
    return guessed


# Earlier texts of a job as a drafter: the tokens that most often followed the latest ones in them.
#
# After SuffixDecoding (arXiv 2411.04975): the longest end of the text that occurs in earlier texts, and from there
# the most frequent continuation, as far as it is likely. In place of a suffix tree, the places of each pair of
# tokens are indexed, and longer matches are found among them.


# Tokens of earlier texts that are kept: about 30 MB with their index. Then the older half is forgotten.
MOST_TOKENS = 1 << 18
MOST_PLACES = 128  # places of a pair of tokens that are looked at, the latest ones
LONGEST_SUFFIX = 32
LEAST_SHARE = 0.3  # A continuation ends where fewer than this share of the matching places go on with it
LENGTH_PER_MATCH = 2  # A continuation has at most this many tokens for each one that matches
_END = -1


class EarlierTexts:
    """Texts of a job, the latest ones of at most `most_tokens` tokens, and the places of each two tokens in them."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._texts: OrderedDict[str, list[int]] = OrderedDict()
        self._clear()

    def _clear(self) -> None:
        self.tokens = np.empty(1024, dtype=np.int32)
        self._length = 0
        self._places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)

    def __len__(self) -> int:
        """Tokens and ends that are kept."""
        return self._length

    def add(self, key: str, tokens: Sequence[int]) -> None:
        """Keep a text, once for its key."""
        if key in self._texts or len(tokens) >= self._most_tokens // 2:
            return
        self._texts[key] = list(tokens)
        if self._length + len(tokens) + 1 > self._most_tokens:
            self._forget_half()
        else:
            self._append(tokens)

    def _forget_half(self) -> None:
        kept = sum(len(text) + 1 for text in self._texts.values())
        while kept > self._most_tokens // 2:
            kept -= len(self._texts.popitem(last=False)[1]) + 1
        self._clear()
        for text in self._texts.values():
            self._append(text)

    def _append(self, tokens: Sequence[int]) -> None:
        start, end = self._length, self._length + len(tokens)
        if end + 1 > len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(max(end, len(self.tokens)), dtype=np.int32)])
        self.tokens[start:end] = tokens
        self.tokens[end] = _END
        for at in range(2, len(tokens) + 1):
            self._places[tokens[at - 2], tokens[at - 1]].append(start + at)
        self._length = end + 1

    def continuation(self, text: Sequence[int], most: int) -> list[int]:
        """At most this many tokens that may follow the text."""
        if len(text) < 2:
            return []
        places = np.asarray(self._places.get((text[-2], text[-1]), ())[-MOST_PLACES:], dtype=np.int64)
        matched = 2
        while len(places) and matched < min(LONGEST_SUFFIX, len(text)):
            longer = places[places > matched]
            longer = longer[self.tokens[longer - matched - 1] == text[-matched - 1]]
            if not len(longer):
                break
            places, matched = longer, matched + 1
        return self._most_frequent(places, min(most, LENGTH_PER_MATCH * matched)) if len(places) else []

    def _most_frequent(self, places: np.ndarray, most: int) -> list[int]:
        # The continuation that most of these places share, token by token; of equals the latest.
        guessed: list[int] = []
        first = len(places)
        while len(guessed) < most:
            following = self.tokens[places]
            token, count = Counter(following[::-1].tolist()).most_common(1)[0]
            if token == _END or count < LEAST_SHARE * first:
                break
            guessed.append(token)
            places = places[following == token] + 1
        return guessed


class SuffixDrafter(Drafter):
    """Guesses by the texts that ended before, of this group of rows and of earlier ones."""

    name = "suffix"

    def __init__(self, earlier: EarlierTexts) -> None:
        self._earlier = earlier

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        return [
            self._earlier.continuation([*row.beginning.tokens, *row.written][-LONGEST_SUFFIX:], tokens)
            for row, tokens in zip(rows, most, strict=True)
        ]

    def end(self, row: RowText) -> None:
        self._earlier.add(row.beginning.key, [*row.beginning.tokens, *row.written])


# A draft model: its forward pass over the newest tokens of rows that see a few tokens each, over padded caches.


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


# The model as its own drafter, over a small part of each prompt's K,V (TriForce, arXiv 2404.11912).
#
# The target's own layers read the text after a retrieval cache: per layer and K,V head the chunks of the prompt that
# the newest token attends to most. Their guesses are checked over all K,V. A drafter of its own may guess for them in
# turn: then this is the paper's hierarchy (algorithm 1), where each level is the same loop over another forward pass.


# The tokens of a prompt that a retrieval cache keeps (TriForce, arXiv 2404.11912, section 4.1).
#
# A layer's keys are cut into chunks. The newest token's query is scored against the mean key of each chunk, and the
# best chunks stay. The queries that share a K,V head vote together. The first chunk and the latest tokens always
# stay.


LATEST = 64  # tokens that always stay
LATEST_SHARE = 0.25  # of the budget, at most


def latest_chunks(budget: int, chunk: int) -> int:
    """Return how many of the latest chunks always stay, at least one."""
    return max(1, min(LATEST, int(budget * LATEST_SHARE)) // chunk)


def saves(tokens: int, budget: int, chunk: int) -> bool:
    """Return whether the cache leaves out some of this many tokens, and the budget holds those that always stay."""
    return tokens > budget and budget // chunk > latest_chunks(budget, chunk) + 2


def chosen_tokens(keys: Tensor, query: Tensor, budget: int, chunk: int) -> Tensor:
    """The tokens that stay for each K,V head, int64 [kv heads, kept], ascending; at most `budget`.

    `keys` [kv heads, tokens, width] are a prompt's, more than the budget, and `query` [heads, width] the newest one's,
    both after position encoding.
    """
    heads, tokens, width = keys.shape
    chunks, rest = divmod(tokens, chunk)
    most = (budget - rest) // chunk
    always = min(latest_chunks(budget, chunk), most - 1)
    votes = query.view(heads, -1, width).sum(dim=1, dtype=torch.float32)
    # A mean key's score is the mean of its chunk's scores, and a sum of queries scores the sum of theirs.
    scored = keys[:, chunk : (chunks - always) * chunk]
    means = scored.reshape(heads, -1, chunk, width).mean(dim=2, dtype=torch.float32)
    best = (means @ votes.unsqueeze(-1)).squeeze(-1).topk(most - 1 - always, dim=1).indices + 1
    first = torch.zeros(heads, 1, dtype=torch.long, device=keys.device)
    latest = torch.arange(chunks - always, chunks, device=keys.device).expand(heads, -1)
    kept = torch.cat([first, best.sort(dim=1).values, latest], dim=1)
    within = (kept.unsqueeze(-1) * chunk + torch.arange(chunk, device=keys.device)).flatten(1)
    behind = torch.arange(chunks * chunk, tokens, device=keys.device).expand(heads, -1)
    return torch.cat([within, behind], dim=1)


def gathered(states: Tensor, tokens: Tensor) -> Tensor:
    """These tokens [kv heads, kept] of K or V [kv heads, tokens, width]."""
    return states.gather(1, tokens.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


REBUILD_BELOW = 0.5  # rolling share of accepted guesses under which a cache is built anew
REBUILD_STRIDE = 128  # tokens of text after which it is built anew in any case
REBUILD_LEAST = 16  # tokens of text that a cache serves at least
ROLLING = 0.25  # weight of the latest round in the rolling acceptance


@dataclass(slots=True)
class _Cached:
    """A row with a retrieval cache. `draft` is its text as the cache's level has it."""

    draft: RowText
    built: int | None = None  # tokens after the prompt that had been read when the cache was built
    exact: int = 0  # tokens after the prompt whose K,V are those of the whole prompt
    accepted: float = 1.0  # rolling share


class RetrievalDrafter(Drafter):
    """Guesses with the model of `source` over `budget` tokens of each prompt, in chunks of `chunk` tokens.

    It has no guess for a row whose prompt is no longer than the budget, or if memory runs out. `inner` guesses
    `inner_tokens` tokens for it in turn; `report` counts their fate. Raises UnsupportedModelError for recurrent
    layers.
    """

    name = "retrieval"

    def __init__(
        self,
        source: KeptForward,
        chooser: Chooser,
        *,
        budget: int,
        chunk: int,
        report: DecodingReport,
        inner: Drafter | None = None,
        inner_tokens: int = 0,
    ) -> None:
        self._source = source
        self._newest = source.watch_newest()
        self._budget, self._chunk = budget, chunk
        self._forward = PaddedForward(source.walk)
        counts = DecodingReport(drafters=report.drafters)  # passes over the cache are not passes of the whole
        self._level = LockStep(self._forward, chooser, frozenset(), inner, inner_tokens, counts)
        self._rows: dict[int, _Cached] = {}
        self._open = False

    def begin(self, rows: Sequence[RowText]) -> None:
        able = [row for row in rows if saves(len(row.beginning.prompt), self._budget, self._chunk)]
        self._rows = {row.number: _Cached(RowText(row.number, row.beginning)) for row in able}
        self._open = False
        self._level.begin([each.draft for each in self._rows.values()])

    def reaches(self, row: RowText) -> bool:
        return row.number in self._rows

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        try:
            return self._propose(rows, most)
        except torch.OutOfMemoryError:  # texts need no guesses
            self._rows, self._forward.layers = {}, []
            return [[] for _ in rows]

    @torch.inference_mode()
    def _propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        wanted = {row.number: len(row.written) + tokens for row, tokens in zip(rows, most, strict=True)}
        able = [row for row in rows if wanted[row.number] > len(row.written) and self._is_ready(row)]
        if able and not self._open:
            self._open_caches()
        if able:
            self._catch_up(able)
        going = [self._rows[row.number].draft for row in able]
        while going:
            self._level.advance(going, [wanted[draft.number] - len(draft.written) for draft in going])
            going = [draft for draft in going if len(draft.written) < wanted[draft.number]]
        asked = {row.number for row in able}
        return [
            self._rows[row.number].draft.written[len(row.written) :] if row.number in asked else [] for row in rows
        ]

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        cached = self._rows[row.number]
        cached.accepted += ROLLING * (accepted / len(proposed) - cached.accepted)

    def end(self, row: RowText) -> None:
        cached = self._rows.pop(row.number, None)
        if cached is not None:
            self._level.end([cached.draft])

    def _is_ready(self, row: RowText) -> bool:
        cached = self._rows.get(row.number)
        return cached is not None and (cached.built is not None or row.number in self._newest.places)

    def _open_caches(self) -> None:
        # Make room. The model has been called by now, so that its layers' windows are known.
        longest = max(len(cached.draft.beginning.prompt) for cached in self._rows.values())
        widths = [self._budget if each is None else min(each.size, longest) for each in self._newest.windows]
        self._forward.open(list(self._rows), widths)
        self._open = True

    def _catch_up(self, rows: Sequence[RowText]) -> None:
        of, places = [], []
        for row in rows:
            cached, read = self._rows[row.number], self._source.text_read(row.number)
            draft = cached.draft
            same = common_prefix(np.asarray(draft.written, dtype=np.int32), np.asarray(row.written, dtype=np.int32))
            self._level.rewind(draft, same)
            draft.written[same:] = row.written[same:]
            if self._is_due(cached, read) and row.number in self._newest.places:
                self._build(row, cached, read)
            of.append(np.full(read - cached.exact, row.number))
            places.append(np.arange(cached.exact, read))
            cached.exact = read
            self._forward.has_text(row.number, read)
            self._level.has_read(draft, read)
        self._put_text(np.concatenate(of), np.concatenate(places))

    def _put_text(self, rows: Int64Array, places: Int64Array) -> None:
        if not len(rows):
            return
        device = self._source.walk.device
        at = on_device(np.asarray([self._forward.place(row) for row in rows.tolist()]), device)
        columns, longest = on_device(places, device), int(places.max()) + 1
        for index, layer in enumerate(self._forward.layers):
            text = self._source.text_keys_values(index, rows, places)
            if text is not None:
                layer.put_text(at, columns, *text, longest)

    def _is_due(self, cached: _Cached, read: int) -> bool:
        if cached.built is None:
            return True
        since = read - cached.built
        return since >= REBUILD_STRIDE or (since >= REBUILD_LEAST and cached.accepted < REBUILD_BELOW)

    def _build(self, row: RowText, cached: _Cached, read: int) -> None:
        prompt = len(row.beginning.prompt)
        place, device = self._forward.place(row.number), self._source.walk.device
        for index, layer in enumerate(self._forward.layers):
            both = self._source.prompt_keys_values(index, row.number)
            query = self._newest.of(index, row.number)
            if both is None or query is None:
                continue
            window = self._newest.windows[index]
            if window is not None:
                first = max(0, min(window.oldest(prompt), prompt))
                layer.choose(place, both[0][:, first:], both[1][:, first:], np.arange(first, prompt))
                continue
            keys = both[0].to(device)
            kept = chosen_tokens(keys, query, self._budget, self._chunk)
            layer.choose(place, gathered(keys, kept), gathered(both[1], kept.to(both[1].device)))
        if cached.built is None:
            self._forward.begin_text(row.number, self._source.text_position(row.number), prompt)
        cached.built, cached.accepted = read, 1.0


# TriForce's hierarchy (arXiv 2404.11912, algorithm 1): three levels.
#
# A cheap drafter guesses for the model over its retrieval cache. The model over all K,V checks the tokens gathered
# there. All levels choose by the same noise, so each checks by comparing, and the text is that of the last one.


FIRST_LEVEL_TOKENS = 3  # that are guessed for one pass over the retrieval cache


class HierarchyDrafter(Drafter):
    """Guesses by `retrieval`, which has its own drafter, and by `beside` for rows whose prompts are too short for
    retrieval."""

    name = "hierarchy"

    def __init__(self, retrieval: RetrievalDrafter, beside: Drafter) -> None:
        self._retrieval, self._beside = retrieval, beside
        self._long: set[int] = set()  # the rows that retrieval has begun with

    def begin(self, rows: Sequence[RowText]) -> None:
        self._retrieval.begin(rows)
        self._long = {row.number for row in rows if self._retrieval.reaches(row)}
        self._beside.begin([row for row in rows if row.number not in self._long])

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for drafter in (self._retrieval, self._beside):
            own = [(row, tokens) for row, tokens in zip(rows, most, strict=True) if self._of(row) is drafter]
            if own:
                guessed = drafter.propose([row for row, _ in own], [tokens for _, tokens in own])
                found |= {row.number: guess for (row, _), guess in zip(own, guessed, strict=True)}
        return [found[row.number] for row in rows]

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        self._of(row).checked(row, proposed, accepted)

    def end(self, row: RowText) -> None:
        self._of(row).end(row)

    def _of(self, row: RowText) -> Drafter:
        return self._retrieval if row.number in self._long else self._beside


class JobDrafters:
    """Makes drafters, and remembers the texts of the job. `draft` is the draft model, if there is one."""

    def __init__(self) -> None:
        self.draft: DraftModel | None = None
        self._earlier = EarlierTexts()

    def of(self, forward: KeptForward, writing: Writing, report: DecodingReport) -> Drafter | None:
        """The drafter of the rows of `forward`; None with "off", for a model with recurrent layers, which cannot
        forget a wrong guess, and where a required draft model is missing: the text is the same without."""
        speculation, chooser = writing.speculation, Chooser(writing.temperature, writing.seed)
        draft_model = self.draft

        def over_cache(inner: Drafter | None = None) -> RetrievalDrafter:
            return RetrievalDrafter(
                forward,
                chooser,
                budget=speculation.budget,
                chunk=speculation.chunk,
                report=report,
                inner=inner,
                inner_tokens=FIRST_LEVEL_TOKENS,
            )

        def draft(model: DraftModel) -> StreamingDrafter:
            return StreamingDrafter(
                model,
                chooser,
                vocabulary=int(forward.walk.model.config.get_text_config().vocab_size),
                sinks=speculation.sinks,
                recent=speculation.recent,
            )

        if speculation.drafter == "off" or not forward.can_forget:
            return None
        if speculation.drafter == "lookup":
            return PromptLookup()
        if speculation.drafter == "suffix":
            return SuffixDrafter(self._earlier)
        if speculation.drafter == "retrieval":
            return over_cache()
        if draft_model is None:
            return None
        if speculation.drafter == "draft":
            return draft(draft_model)
        # It also guesses alone, where prompts are too short for retrieval.
        return HierarchyDrafter(over_cache(draft(draft_model)), draft(draft_model))
