"""Lock-step decoding: one pass of a model reads the newest tokens of many rows, and tokens that were guessed for them.

A token is a function of the text before it (`Chooser`). So a guess is right if it is the token that the model chooses
there, and each pass writes the guesses up to the first wrong one, and the model's own choice after them: the text is
what it would be without guesses. (Speculative decoding: arXiv 2211.17192; with a choice that is a function, its rule
for accepting a guess is a comparison.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from prefillcli.stats.arrays import Float32Array
from prefillcli.walk.continuations import (
    Beginning,
    Continuation,
    DecodingReport,
    DrafterCounts,
    FinishReason,
    Writing,
)

# The types that lock-step decoding, its forward passes and its drafters share.


# Rows by their numbers, each with the tokens that follow those already read; no row twice, no row without tokens.
NewTokens = Sequence[tuple[int, Sequence[int]]]


@dataclass(slots=True)
class RowText:
    """A row and its text: `number` is its place among the rows that began together."""

    number: int
    beginning: Beginning
    written: list[int] = field(default_factory=list)  # the text so far: tokens that the model has chosen
    gap: float = float("inf")  # the smallest difference between the two best tokens so far
    finish_reason: FinishReason | None = None

    @property
    def position(self) -> int:
        """The place of the next token, from 0. Its noise depends on it."""
        return len(self.written)


class Forward(Protocol):
    """A model that reads the tokens after the prompts of rows, and keeps their K,V."""

    @property
    def can_forget(self) -> bool:
        """Return whether it can go back. A model with recurrent layers cannot, so nothing is guessed for it."""

    def __call__(self, new: NewTokens) -> Iterator[Tensor]:
        """Read new tokens in one pass. Yields float32 logits [tokens, vocabulary] after each of them, in pieces: first
        those of the first row's tokens, in their order."""

    def forget(self, row: int, tokens: int) -> None:
        """Forget the last `tokens` read of a row: they were wrong guesses."""

    def drop(self, rows: Collection[int]) -> None:
        """These rows have ended."""


class Drafter:
    """Guesses tokens. A wrong guess costs time alone."""

    name: str

    def begin(self, rows: Sequence[RowText]) -> None:
        """These rows are written together from now on."""

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        """For each of these rows at most this many tokens that may follow; none where it has no guess.

        The tokens are of the vocabulary of the model that checks them.
        """
        raise NotImplementedError

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        """The first `accepted` of the tokens that it proposed last were right. `row.written` has them already, and
        the token that the model chose after them unless that was a stop token. Not called where nothing was proposed.
        """

    def end(self, row: RowText) -> None:
        """The row has ended."""


# The choice of the next token: the likeliest one, or one drawn by noise that follows from the text's key and the
# token's place.
#
# The token with the largest of `logits / temperature + noise`, with independent Gumbel noise, is a draw from the
# softmax of `logits / temperature` (the Gumbel-max trick). Here the noise follows from the seed, the key and the place
# alone, so the token is a function of the logits: it does not depend on the rows beside it, on an order, or on earlier
# guesses. Two models that read the same text with the same noise mostly choose the same token, which makes one a good
# drafter of the other (coupled drafting: arXiv 2408.07978).


_NUMBERS_AT_ONCE = 1 << 23  # numbers that one step of choosing may copy: 32 MiB of float32
# Numbers of noise that are remembered, for the levels of speculation that choose a token for the same place.
_NUMBERS_REMEMBERED = 1 << 24


class Choices(NamedTuple):
    """Chosen tokens, and the lead of each over the second best of the compared numbers."""

    tokens: list[int]
    gaps: list[float]


class Chooser:
    """Chooses tokens. At a `temperature` of 0 the likeliest, the first of equals; else it draws with the `seed`."""

    def __init__(self, temperature: float = 0.0, seed: int = 0) -> None:
        self.temperature = temperature
        self.seed = seed
        self._noise: OrderedDict[tuple[str, int], Float32Array] = OrderedDict()
        self._remembered = 0

    def choose(self, logits: Tensor, keys: Sequence[str], places: Sequence[int]) -> Choices:
        """The token after each row of float32 `logits` [tokens, vocabulary].

        `keys` are those of the texts, `places` those of the chosen tokens in them, from 0: one of each for a row.
        """
        tokens: list[int] = []
        gaps: list[float] = []
        step = max(1, _NUMBERS_AT_ONCE // logits.shape[-1])
        for start in range(0, len(logits), step):
            numbers = logits[start : start + step]
            if self.temperature > 0:
                noise = [
                    self.noise(keys[at], places[at], logits.shape[-1]) for at in range(start, start + len(numbers))
                ]
                numbers = numbers / self.temperature
                numbers += torch.from_numpy(np.stack(noise)).to(numbers.device)
            tokens += numbers.argmax(dim=-1).tolist()
            best = numbers.topk(min(2, numbers.shape[-1]), dim=-1).values
            gaps += (best[:, 0] - best[:, 1]).tolist() if best.shape[-1] == 2 else [float("inf")] * len(best)
        return Choices(tokens, gaps)

    def noise(self, key: str, place: int, vocabulary: int) -> Float32Array:
        """Gumbel noise of a place in a text, float32 [vocabulary]. A larger vocabulary's begins with a smaller one's.

        It is drawn in float64: one in 2^23 draws in float32 is 0, which makes infinite noise, and any token the best.
        """
        known = self._noise.get((key, place))
        if known is not None and len(known) >= vocabulary:
            return known[:vocabulary]
        digest = blake2b(b"%d %d " % (self.seed, place) + key.encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        drawn = -np.log(generator.standard_exponential(vocabulary)).astype(np.float32)
        self._remember((key, place), drawn)
        return drawn

    def _remember(self, of: tuple[str, int], drawn: Float32Array) -> None:
        self._remembered += len(drawn) - len(self._noise.pop(of, ()))
        self._noise[of] = drawn
        while self._remembered > _NUMBERS_REMEMBERED:
            self._remembered -= len(self._noise.popitem(last=False)[1])


def write_texts(
    forward: Forward,
    beginnings: Sequence[Beginning],
    writing: Writing,
    *,
    longest: int | None = None,
    switch: int = 0,
    chooser: Chooser | None = None,
    drafter: Drafter | None = None,
    report: DecodingReport | None = None,
) -> list[Continuation]:
    """Write with `forward` after each of the beginnings, whose prompts it has read. Row i is beginning i.

    `longest` and `switch` as in `Beginning.room`. Passes, tokens and guesses are counted in `report`.
    """
    report = report if report is not None else DecodingReport()
    chooser = chooser or Chooser(writing.temperature, writing.seed)
    level = LockStep(forward, chooser, writing.stop_tokens, drafter, writing.speculation.tokens, report)
    rows = [RowText(number, beginning) for number, beginning in enumerate(beginnings)]
    most = [beginning.room(writing.tokens, longest, switch) for beginning in beginnings]
    level.begin(rows)
    going = rows
    while going:
        for row in going:
            if row.finish_reason is None and len(row.written) >= most[row.number]:
                row.finish_reason = "length"
            if row.finish_reason is None and row.written and writing.ends is not None and writing.ends(row.written):
                row.finish_reason = "stop"
        ended = [row for row in going if row.finish_reason is not None]
        if ended:
            level.end(ended)
        going = [row for row in going if row.finish_reason is None]
        if going:
            level.advance(going, [most[row.number] - len(row.written) for row in going])
    report.texts += len(rows)
    report.tokens += sum(len(row.written) for row in rows)
    return [Continuation(tuple(row.written), row.finish_reason or "length", row.gap) for row in rows]


class LockStep:
    """Writes texts of rows, pass by pass: a level of speculation over a model's forward pass.

    At most `guesses` tokens of the `drafter` are read in a pass for each row; none by a model that cannot forget them.
    Passes and guesses are counted in `report`.
    """

    def __init__(
        self,
        forward: Forward,
        chooser: Chooser,
        stop_tokens: frozenset[int],
        drafter: Drafter | None,
        guesses: int,
        report: DecodingReport,
    ) -> None:
        self._forward = forward
        self._chooser = chooser
        self._stop_tokens = stop_tokens
        self._drafter = drafter if forward.can_forget and guesses > 0 else None
        self._guesses = guesses
        self._report = report
        self._read: dict[int, int] = {}  # by row: how many of the tokens after its prompt have been read

    def begin(self, rows: Sequence[RowText]) -> None:
        """These rows are written together from now on. Nothing after their prompts has been read."""
        self._read = {row.number: 0 for row in rows}
        if self._drafter:
            self._drafter.begin(rows)

    def advance(self, rows: Sequence[RowText], most: Sequence[int]) -> None:
        """Write at least one and at most this many tokens to each of these rows, in one pass.

        A row whose model chooses a stop token gets the finish reason "stop"; the token is not written.
        """
        guessed = self._guess(rows, most)
        unread = [self._unread(row) for row in rows]
        new = [(row.number, [*first, *then]) for row, first, then in zip(rows, unread, guessed, strict=True)]
        choices = self._choose(rows, new, [len(then) for then in guessed])
        self._report.passes += 1
        self._report.row_passes += len(rows)
        at = 0
        for row, first, then in zip(rows, unread, guessed, strict=True):
            end = at + len(then) + 1
            accepted = _write(row, then, choices.tokens[at:end], choices.gaps[at:end], self._stop_tokens)
            at = end
            self._read[row.number] += len(first) + accepted
            if accepted < len(then):
                self._forward.forget(row.number, len(then) - accepted)
            if self._drafter and then:
                counts = self._report.drafters.setdefault(self._drafter.name, DrafterCounts())
                counts.rounds += 1
                counts.proposed += len(then)
                counts.accepted += accepted
                self._drafter.checked(row, then, accepted)

    def has_read(self, row: RowText, tokens: int) -> None:
        """Take note that this many tokens after a row's prompt are read already."""
        self._read[row.number] = tokens

    def rewind(self, row: RowText, written: int) -> None:
        """The text of a row goes back to its first `written` tokens: forget those that were read after them."""
        stays = len(row.beginning.tokens) + written
        if self._read[row.number] > stays:
            self._forward.forget(row.number, self._read[row.number] - stays)
            self._read[row.number] = stays
        del row.written[written:]
        row.finish_reason = None

    def end(self, rows: Iterable[RowText]) -> None:
        rows = list(rows)
        self._forward.drop([row.number for row in rows])
        for row in rows:
            del self._read[row.number]
            if self._drafter:
                self._drafter.end(row)

    def _unread(self, row: RowText) -> list[int]:
        # Tokens of a row that the model has not read, at least the last one.
        read, first = self._read[row.number], row.beginning.tokens
        return [*first[read:], *row.written[max(0, read - len(first)) :]]

    def _guess(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        # The drafter's guesses, at most one less than the tokens to write: a pass also writes a token of the model's
        # own.
        if self._drafter is None:
            return [[] for _ in rows]
        room = [min(self._guesses, tokens - 1) for tokens in most]
        return self._drafter.propose(rows, room) if any(room) else [[] for _ in rows]

    def _choose(self, rows: Sequence[RowText], new: NewTokens, guesses: Sequence[int]) -> Choices:
        # Read the new tokens; the choices after the last token that is certain and after each guess, row by row.
        read: list[bool] = []
        keys: list[str] = []
        places: list[int] = []
        for row, (_, tokens), count in zip(rows, new, guesses, strict=True):
            read += [at >= len(tokens) - count - 1 for at in range(len(tokens))]
            keys += [row.beginning.key] * (count + 1)
            places += range(row.position, row.position + count + 1)
        choices, at, seen = Choices([], []), 0, 0
        for logits in self._forward(new):
            wanted = [index for index in range(len(logits)) if read[seen + index]]
            seen += len(logits)
            if len(wanted) < len(logits):
                logits = logits[torch.tensor(wanted, dtype=torch.long, device=logits.device)]
            then = at + len(wanted)
            tokens, gaps = self._chooser.choose(logits, keys[at:then], places[at:then])
            choices.tokens.extend(tokens)
            choices.gaps.extend(gaps)
            at = then
        return choices


def _write(
    row: RowText, guessed: Sequence[int], chosen: Sequence[int], gaps: Sequence[float], stop_tokens: frozenset[int]
) -> int:
    # Write the guesses that were chosen and the choice after them. Returns how many guesses were right.
    for at, (token, gap) in enumerate(zip(chosen, gaps, strict=True)):
        row.gap = min(row.gap, gap)
        if token in stop_tokens:
            row.finish_reason = "stop"
            return at
        row.written.append(token)
        if at == len(guessed) or token != guessed[at]:
            return at
    return len(guessed)
