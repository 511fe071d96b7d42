"""The drafter of `auto`: for each pass, the one that the controller chooses; it measures what that took and gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from prefillcli.decode.contracts import Drafter, RowText
from prefillcli.decode.speculation.controller import PLAIN, PLAIN_EVERY, WATCHING, Choice, Controller
from prefillcli.decode.speculation.registry import DrafterKind


class _Pass(NamedTuple):
    """A pass that began at a time, with so many guesses for so many rows, whose slowest had so many tokens.

    `written` tokens were there in all, also of rows that had ended.
    """

    began: float
    guesses: int
    rows: int
    slowest: int
    written: int


class _Compared(NamedTuple):
    """What would have been guessed for a row of `start` tokens; `asked` tokens were."""

    start: int
    asked: int
    guess: list[int]


class AutoDrafter:
    """Guesses for one group of rows, of at most `tokens` each, as `controller` chooses among what the `makers` make.

    A drafter that is a model begins when it is chosen, and ends when another one is.
    """

    def __init__(
        self, controller: Controller, makers: Mapping[DrafterKind, Callable[[], Drafter]], tokens: int
    ) -> None:
        self.name = "auto"
        self._controller = controller
        self._makers = makers
        self._kinds = {kind.name: kind for kind in makers}
        self._tokens = tokens
        self._drafters: dict[str, Drafter] = {}
        self._compared: dict[tuple[str, int], _Compared] = {}
        self._asked: dict[int, int] = {}
        self._choice = PLAIN
        self._pass: _Pass | None = None
        self._since_plain = 0
        self._turn = 0
        self._ended = 0  # tokens of rows that have ended, and of their stop tokens

    def begin(self, rows: Sequence[RowText]) -> None:
        self._controller.begin()
        self._drafters = {kind.name: make() for kind, make in self._makers.items() if kind.free}
        for drafter in self._drafters.values():
            drafter.begin(rows)
        self._compared, self._pass, self._since_plain, self._turn = {}, None, 0, 0
        self._ended = 0

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        control = self._controller
        began = control.clock()
        if self._pass is not None:
            self._measure(self._pass, rows, began)
        self._choice = self._choose(rows, most) if self._turn else PLAIN
        self._watch(rows, most)
        guessed = self._guess(rows, most) if self._choice.tokens else [[] for _ in rows]
        guesses = sum(map(len, guessed))
        self._since_plain = self._since_plain + 1 if guesses else 0
        now = control.clock()
        if self._turn:  # the first pass, of one token, also reads what the texts begin with: it is not measured
            slowest, written = min(row.position for row in rows), sum(row.position for row in rows)
            self._pass = _Pass(now, guesses, len(rows), slowest, self._ended + written)
            control.spent += now - began
        self._turn += 1
        return guessed

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        kind = self._kinds[self._choice.name]
        self._controller.record(kind).add(row.number, self._asked[row.number], len(proposed), accepted)
        self._drafters[kind.name].checked(row, proposed, accepted)

    def end(self, row: RowText) -> None:
        self._ended += row.position + (row.finish_reason == "stop")
        for name in [name for name, number in self._compared if number == row.number]:
            self._compare(name, row)
            self._compared.pop((name, row.number), None)
        for drafter in self._drafters.values():
            drafter.end(row)

    def _choose(self, rows: Sequence[RowText], most: Sequence[int]) -> Choice:
        if self._since_plain >= PLAIN_EVERY:
            return PLAIN
        left = max(self._tokens - row.position for row in rows)
        kinds = list(self._kinds.values())
        return self._controller.choose(kinds, self._drafters.keys(), [row.number for row in rows], max(most), left)

    def _guess(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        """What the chosen drafter guesses, in turn for a share of the rows."""
        control, choice, began = self._controller, self._choice, self._controller.clock()
        kind = self._kinds[choice.name]
        self.name = choice.name
        first = choice.name not in self._drafters
        if first:
            self._end_models(rows)
            self._drafters[choice.name] = self._makers[kind]()
            self._drafters[choice.name].begin(rows)
        count = min(len(rows), int(choice.share * len(rows)) or 1)
        turned = {(self._turn + at) % len(rows) for at in range(count)}
        asked = [min(choice.tokens, tokens) if at in turned else 0 for at, tokens in enumerate(most)]
        guessed = self._drafters[choice.name].propose(rows, asked)
        record = control.record(kind)
        self._asked = {row.number: tokens for row, tokens in zip(rows, asked, strict=True)}
        for row, tokens, guess in zip(rows, asked, guessed, strict=True):
            if tokens and not guess:
                record.add(row.number, tokens, 0, 0)
        seconds = control.clock() - began
        if first:
            control.beginnings[kind.name] = seconds / control.times.slowest()
        elif count == len(rows):
            record.add_cost(len(rows), seconds / choice.tokens)
        return guessed

    def _end_models(self, rows: Sequence[RowText]) -> None:
        """End the drafters that are models: one at a time has memory."""
        for name in [name for name in self._drafters if not self._kinds[name].free]:
            drafter = self._drafters.pop(name)
            for row in rows:
                drafter.end(row)

    def _measure(self, done: _Pass, rows: Sequence[RowText], now: float) -> None:
        """Take down what the last pass took, and what it gave to the rows that go on and to those that have ended."""
        control, seconds = self._controller, now - done.began
        control.spent += seconds
        plain = control.times.plain(done.rows)
        if not done.guesses:
            control.times.add_plain(done.rows, seconds)
        elif plain:
            control.times.add_guessed(done.rows, done.guesses, seconds / plain)
        slowest = min(row.position for row in rows) - done.slowest
        written = self._ended + sum(row.position for row in rows) - done.written
        control.progress(slowest, written, None if done.guesses else seconds)

    def _watch(self, rows: Sequence[RowText], most: Sequence[int]) -> None:
        """Compare what free drafters would have guessed with what was written, as far as there is time for it."""
        control = self._controller
        for name in [kind.name for kind in self._kinds.values() if kind.free and kind.name != self._choice.name]:
            spent = 0.0
            watched = 0
            for at in range(len(rows)):
                index = (self._turn + at) % len(rows)
                row, asked = rows[index], most[index]
                self._compare(name, row)
                if (name, row.number) in self._compared or not asked:
                    continue
                if control.watching + spent > WATCHING * control.all_plain:
                    break
                began = control.clock()
                (guess,) = self._drafters[name].propose([row], [asked])
                spent += control.clock() - began
                watched += 1
                self._compared[name, row.number] = _Compared(row.position, asked, guess)
            control.watching += spent
            if watched:
                control.record(self._kinds[name]).add_cost(len(rows), spent / watched * len(rows) / max(most))

    def _compare(self, name: str, row: RowText) -> None:
        """Whether a guess was right, as soon as the row's text tells."""
        compared = self._compared.get((name, row.number))
        if compared is None:
            return
        start, asked, guess = compared
        right = 0
        written = row.written[start : start + len(guess)]
        while right < len(written) and written[right] == guess[right]:
            right += 1
        if right == len(guess) or right < len(written) or row.finish_reason == "stop":
            self._controller.record(self._kinds[name]).add(row.number, asked, len(guess), right)
            del self._compared[name, row.number]
