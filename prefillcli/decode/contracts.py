"""What lock-step decoding, its forward passes and its drafters have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from prefillcli.decode.continuations import Beginning, FinishReason

NewTokens = Sequence[tuple[int, Sequence[int]]]
"""Rows by their numbers, each with tokens that follow what was read of it; no row twice, no row without tokens."""


@dataclass(slots=True)
class RowText:
    """A row that is written on: `number` is its place among the rows that began together."""

    number: int
    beginning: Beginning
    written: list[int] = field(default_factory=list)
    """The text so far: tokens that the model has chosen."""
    gap: float = float("inf")
    """The smallest difference between the two best tokens so far."""
    finish_reason: FinishReason | None = None

    @property
    def position(self) -> int:
        """The place of the next token, from 0: what its noise is made of."""
        return len(self.written)


class Forward(Protocol):
    """A model that reads what comes behind the prompts of rows, and keeps the K,V of it."""

    @property
    def can_forget(self) -> bool:
        """Whether it can go back: a model with recurrent layers cannot, so nothing is guessed for it."""

    def __call__(self, new: NewTokens) -> Iterator[Tensor]:
        """Read new tokens in one pass. Yields float32 logits [tokens, vocabulary] after each of them, in pieces: first
        those of the first row's tokens, in their order."""

    def forget(self, row: int, tokens: int) -> None:
        """Forget the last `tokens` that were read of a row: they were guessed wrong."""

    def drop(self, rows: Collection[int]) -> None:
        """These rows have ended."""


class Drafter(Protocol):
    """Guesses tokens. A wrong guess costs time alone."""

    name: str

    def begin(self, rows: Sequence[RowText]) -> None:
        """These rows are written together from now on."""

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        """For each of these rows at most so many tokens that may follow; none where it has no guess.

        The tokens are of the vocabulary of the model that checks them.
        """

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        """The first `accepted` of the tokens that it proposed last were right. `row.written` has them already, and
        the token that the model chose behind them unless that was a stop token. Not called where nothing was proposed.
        """

    def end(self, row: RowText) -> None:
        """The row has ended."""
