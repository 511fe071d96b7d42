"""Prompts that are too long for a model: the texts of their rows are cut, and the template around them stays whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from prefillcli.prompts.encoding import Encoder
from prefillcli.prompts.images import PLACE
from prefillcli.rows.records import Prompt
from prefillcli.stats.arrays import Int64Array

_KEPT_ROLES = ("system", "developer")  # of messages that say what to do, and are no document
_PIECE_CHARS = 1 << 16  # characters whose tokens' places are looked for together
_TOGETHER = 64  # such pieces
_MOST_ROUNDS = 16


def texts_in(value: Any) -> Iterator[str]:
    """The texts in a row's value that may be cut, in their order: not those of a system message, nor what names a
    role."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key in _open_keys(value):
            yield from texts_in(value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


def with_texts(value: Any, texts: Iterator[str]) -> Any:
    """A value with others instead of its `texts_in`. A text of a list that has become empty is left out."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, dict):
        return {**value, **{key: with_texts(value[key], texts) for key in _open_keys(value)}}
    if isinstance(value, list | tuple):
        made = [(each, with_texts(each, texts)) for each in value]
        return [after for before, after in made if before == "" or not isinstance(after, str) or after]
    return value


def _open_keys(value: Mapping[str, Any]) -> list[str]:
    if isinstance(value.get("role"), str) and "content" in value:
        return [] if value["role"] in _KEPT_ROLES else ["content"]
    if value == PLACE:
        return []
    return ["text"] if value.get("type") == "text" and "text" in value else list(value)


class RowTexts:
    """The texts of a row, by the column that they are in, and where their tokens begin.

    Of several columns the longest is cut first, down to the length of the next one, as tokenizers cut pairs. The texts
    of one column are cut as one, by the rule `on_long`.
    """

    def __init__(self, values: Mapping[str, Any], starts: Mapping[str, Int64Array], on_long: str) -> None:
        self._values = values
        self._starts = starts
        self._on_long = on_long
        self.size = sum(map(len, starts.values()))  # tokens of all texts

    @classmethod
    def of_rows(cls, encoder: Encoder, rows: Sequence[Mapping[str, Any]], on_long: str) -> list[RowTexts]:
        """Those of rows with these values by column."""
        texts = [list(texts_in(value)) for values in rows for value in values.values()]
        found = iter(_starts_of(encoder, texts))
        return [cls(values, {name: next(found) for name in values}, on_long) for values in rows]

    def without(self, tokens: int) -> dict[str, Any]:
        """The values with texts that are shorter by this many tokens, or by a few more."""
        most = self._most(self.size - tokens)
        return {
            name: with_texts(value, self._cut(name, most)) if len(self._starts[name]) > most else value
            for name, value in self._values.items()
        }

    def _most(self, room: int) -> int:
        # The most tokens of a column, so that all have at most `room`.
        sizes = sorted(map(len, self._starts.values()))
        for number, size in enumerate(sizes):
            if size * (len(sizes) - number) > room:
                return max(room, 0) // (len(sizes) - number)
            room -= size
        return max(sizes, default=0)

    def _cut(self, name: str, most: int) -> Iterator[str]:
        starts, texts = self._starts[name], list(texts_in(self._values[name]))
        ends = [0, *accumulate(map(len, texts))]
        head = {"truncate-right": most, "truncate-middle": most // 2}.get(self._on_long, 0)
        tail = most - head
        first, last = int(starts[head]), int(starts[len(starts) - tail]) if tail else ends[-1]
        for at, text in zip(ends, texts, strict=False):
            yield text[: max(first - at, 0)] + text[max(last - at, 0) :]


def _starts_of(encoder: Encoder, columns: Sequence[Sequence[str]]) -> list[Int64Array]:
    # The character with which each token of a column begins, where its texts stand one after the other.
    pieces = [
        (column, at + begin, text[begin : begin + _PIECE_CHARS].encode("utf-8", "replace").decode())  # as long
        for column, texts in enumerate(columns)
        for at, text in zip([0, *accumulate(map(len, texts))], texts, strict=False)
        for begin in range(0, len(text), _PIECE_CHARS)
    ]
    found: list[list[Int64Array]] = [[np.empty(0, np.int64)] for _ in columns]
    for some in (pieces[at : at + _TOGETHER] for at in range(0, len(pieces), _TOGETHER)):
        if encoder.has_offsets:
            coded = encoder.encode_with_offsets([piece for *_, piece in some], special=False)
            starts = [each.offsets[:, 0] for each in coded]
        else:
            starts = [np.arange(len(piece), dtype=np.int32) for *_, piece in some]
        for (column, at, _), own in zip(some, starts, strict=True):
            found[column].append(np.maximum.accumulate(own.astype(np.int64) + at))
    return [np.concatenate(own) for own in found]


class Shortening:
    """The search for the fewest tokens of a row's texts without which its prompt fits.

    `amount` is the number to try next; None: the search has ended. How many tokens fewer the prompt then has depends
    on its template, which may write a text twice, or not at all.
    """

    def __init__(self, texts: RowTexts, excess: int, limit: int) -> None:
        self._texts = texts
        self._low = (0, excess)
        self._high: tuple[int, int] | None = None
        self._spare = max(2, limit // 100)  # tokens of the limit that may be left unused
        self._rounds = 0
        self.prompt: Prompt | None = None  # the longest one that fits so far
        self.amount = self._next()

    @property
    def excess(self) -> int:
        """Tokens by which the prompt is still too long where no `prompt` was found."""
        return self._low[1]

    def values(self) -> dict[str, Any]:
        """The row's values to try."""
        return self._texts.without(self.amount or 0)

    def fits(self, prompt: Prompt, spare: int) -> None:
        """The prompt of these values fits, and leaves this many tokens unused."""
        self._high, self.prompt = (self.amount or 0, spare), prompt
        self.amount = self._next()

    def exceeds(self, excess: int) -> None:
        """The prompt of these values is too long by this many tokens."""
        self._low = (self.amount or 0, excess)
        self.amount = self._next()

    def fails(self) -> None:
        """These values make no prompt."""
        self.amount = None

    def _next(self) -> int | None:
        self._rounds += 1
        (low, excess), size = self._low, self._texts.size
        if self._high is None:
            if low >= size:
                return None
            return size if self._rounds == _MOST_ROUNDS else min(size, low + excess * (1 << (self._rounds // 4)))
        high, spare = self._high
        if spare <= self._spare or high - low <= 1 or self._rounds > _MOST_ROUNDS:
            return None
        return min(max(low + (high - low) * excess // (excess + spare), low + 1), high - 1)
