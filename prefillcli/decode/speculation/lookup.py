"""Prompt lookup: the tokens that followed the latest ones where they stood before, in the row's own prompt and text.

Text that quotes its input is guessed well, for next to nothing (transformers calls it prompt lookup decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from prefillcli.decode.contracts import RowText
from prefillcli.plan.trie import TokenArray

if TYPE_CHECKING:
    from prefillcli.decode.speculation.means import DraftingMeans

SHORTEST_MATCH = 2
LONGEST_MATCH = 16


class PromptLookup:
    """Finds the most recent of the longest matches of a text's end, of `SHORTEST_MATCH` to `LONGEST_MATCH` tokens.

    Each guess compares the last token with the whole text at once: 16,000 tokens take some microseconds, less than an
    index would take to build.
    """

    name = "lookup"

    def __init__(self) -> None:
        self._texts: dict[int, _RowTokens] = {}

    @classmethod
    def of(cls, means: DraftingMeans) -> Self:
        """For rows of a job."""
        return cls()

    def begin(self, rows: Sequence[RowText]) -> None:
        self._texts = {row.number: _RowTokens(row) for row in rows}

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        return [
            continuation(self._texts[row.number].upto(row), tokens) if tokens else []
            for row, tokens in zip(rows, most, strict=True)
        ]

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        """Nothing to learn."""

    def end(self, row: RowText) -> None:
        del self._texts[row.number]


class _RowTokens:
    """The tokens of a row's prompt, and room for its text."""

    def __init__(self, row: RowText) -> None:
        certain = [row.beginning.prompt, np.asarray(row.beginning.tokens, dtype=np.int32)]
        self._text = len(row.beginning.prompt) + len(row.beginning.tokens)
        self._tokens = np.concatenate([*certain, np.empty(256, dtype=np.int32)])

    def upto(self, row: RowText) -> TokenArray:
        """All tokens, int32 [tokens]: the text is taken as it is now, since guesses in it may have been taken back."""
        end = self._text + len(row.written)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(len(row.written), dtype=np.int32)])
        self._tokens[self._text : end] = row.written
        return self._tokens[:end]


def continuation(tokens: TokenArray, most: int) -> list[int]:
    """At most so many tokens that may follow `tokens`: those behind an earlier place that ends like them."""
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
    for at in range(len(guessed), most):  # the match reaches the end: what repeats goes on
        guessed.append(guessed[at - (end - start)])
    return guessed
