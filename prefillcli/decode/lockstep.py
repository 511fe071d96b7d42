"""Lock-step decoding: one pass of a model reads the newest tokens of many rows, and tokens that were guessed for them.

A token is a function of the text before it (`prefillcli.decode.token_choice`). So a guess is right if it is the token
that the model chooses there, and each pass writes the guesses up to the first wrong one, and the model's own choice
after them: the text is what it would be without guesses. (Speculative decoding: arXiv 2211.17192; with a choice that
is a function, its rule for accepting a guess is a comparison.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from prefillcli.decode.continuations import Beginning, Continuation, DecodingReport, DrafterCounts, Writing
from prefillcli.decode.contracts import Drafter, Forward, NewTokens, RowText
from prefillcli.decode.token_choice import Choices, Chooser


def write_texts(
    forward: Forward,
    beginnings: Sequence[Beginning],
    writing: Writing,
    *,
    longest: int | None = None,
    chooser: Chooser | None = None,
    drafter: Drafter | None = None,
    report: DecodingReport | None = None,
) -> list[Continuation]:
    """What `forward` writes behind each of the beginnings, whose prompts it has read. Row i is beginning i.

    A prompt, what follows it and its text take up at most the `longest` places of the model. Passes, tokens and
    guesses are counted in `report`.
    """
    report = report if report is not None else DecodingReport()
    chooser = chooser or Chooser(writing.temperature, writing.seed)
    level = LockStep(forward, chooser, writing.stop_tokens, drafter, writing.speculation.tokens, report)
    rows = [RowText(number, beginning) for number, beginning in enumerate(beginnings)]
    most = [_most_tokens(beginning, writing.tokens, longest) for beginning in beginnings]
    level.begin(rows)
    going = rows
    while going:
        going = _without_ended(level, going, most)
        if going:
            level.advance(going, [most[row.number] - len(row.written) for row in going])
    report.texts += len(rows)
    report.tokens += sum(len(row.written) for row in rows)
    return [Continuation(tuple(row.written), row.finish_reason or "length", row.gap) for row in rows]


def _most_tokens(beginning: Beginning, tokens: int, longest: int | None) -> int:
    """How many tokens may be written behind a beginning."""
    if longest is None:
        return tokens
    last = len(beginning.prompt) - 1 if beginning.positions is None else int(beginning.positions[-1])
    return min(tokens, longest - (last + 1 + len(beginning.tokens)))


def _without_ended(level: LockStep, rows: Sequence[RowText], most: Sequence[int]) -> list[RowText]:
    """The rows that go on; the level forgets the others."""
    for row in rows:
        if row.finish_reason is None and len(row.written) >= most[row.number]:
            row.finish_reason = "length"
    ended = [row for row in rows if row.finish_reason is not None]
    if ended:
        level.end(ended)
    return [row for row in rows if row.finish_reason is None]


class LockStep:
    """Writes on rows, pass by pass: a level of speculation over a model's forward pass.

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
        self._read: dict[int, int] = {}  # by row: how many of the tokens behind its prompt have been read

    def begin(self, rows: Sequence[RowText]) -> None:
        """These rows are written together from now on. Nothing behind their prompts has been read."""
        self._read = {row.number: 0 for row in rows}
        if self._drafter:
            self._drafter.begin(rows)

    def advance(self, rows: Sequence[RowText], most: Sequence[int]) -> None:
        """Write at least one and at most so many tokens to each of these rows, in one pass.

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
                self._count(self._drafter.name, len(then), accepted)
                self._drafter.checked(row, then, accepted)

    def rewind(self, row: RowText, written: int) -> None:
        """The text of a row goes back to its first `written` tokens: forget those that were read behind them."""
        stays = len(row.beginning.tokens) + written
        if self._read[row.number] > stays:
            self._forward.forget(row.number, self._read[row.number] - stays)
            self._read[row.number] = stays
        del row.written[written:]
        row.finish_reason = None

    def end(self, rows: Iterable[RowText]) -> None:
        """These rows have ended."""
        rows = list(rows)
        self._forward.drop([row.number for row in rows])
        for row in rows:
            del self._read[row.number]
            if self._drafter:
                self._drafter.end(row)

    def _unread(self, row: RowText) -> list[int]:
        """Tokens of a row that the model has not read, at least the last one."""
        read, first = self._read[row.number], row.beginning.tokens
        return [*first[read:], *row.written[max(0, read - len(first)) :]]

    def _guess(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        """What the drafter guesses: a pass also writes a token of the model's own, so one less than may be written."""
        if self._drafter is None:
            return [[] for _ in rows]
        room = [min(self._guesses, tokens - 1) for tokens in most]
        return self._drafter.propose(rows, room) if any(room) else [[] for _ in rows]

    def _choose(self, rows: Sequence[RowText], new: NewTokens, guesses: Sequence[int]) -> Choices:
        """Read the new tokens; the choices after the last token that is certain and after each guess, row by row."""
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

    def _count(self, name: str, proposed: int, accepted: int) -> None:
        counts = self._report.drafters.setdefault(name, DrafterCounts())
        counts.rounds += 1
        counts.proposed += proposed
        counts.accepted += accepted


def _write(
    row: RowText, guessed: Sequence[int], chosen: Sequence[int], gaps: Sequence[float], stop_tokens: frozenset[int]
) -> int:
    """Write the guesses that were chosen and the choice behind them. Returns how many guesses were right."""
    for at, (token, gap) in enumerate(zip(chosen, gaps, strict=True)):
        row.gap = min(row.gap, gap)
        if token in stop_tokens:
            row.finish_reason = "stop"
            return at
        row.written.append(token)
        if at == len(guessed) or token != guessed[at]:
            return at
    return len(guessed)
