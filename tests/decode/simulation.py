"""Lock-step decoding on a simulated machine: passes and guesses take what formulas say, on a clock of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from prefillcli.decode.continuations import Beginning, DecodingReport, Speculation, Writing
from prefillcli.decode.contracts import Drafter, NewTokens, RowText
from prefillcli.decode.lockstep import write_texts
from prefillcli.decode.speculation.auto_drafter import AutoDrafter
from prefillcli.decode.speculation.controller import Controller
from prefillcli.decode.speculation.registry import DrafterKind

VOCABULARY = 4


@dataclass
class Machine:
    """Seconds of a pass: `fixed`, more for each row and each token; at least what reading the weights takes."""

    fixed: float = 0.0
    per_row: float = 0.0
    per_token: float = 1.0
    least: float = 0.0
    noise: float = 0.0
    now: float = 0.0
    draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def clock(self) -> float:
        return self.now

    def spend(self, rows: int, tokens: int) -> None:
        seconds = self.fixed + self.per_row * rows + max(self.least, self.per_token * tokens)
        self.now += seconds * float(np.exp(self.draw.normal(0, self.noise)))


class Simulated:
    """A model that writes the `texts`, one for each row."""

    can_forget = True

    def __init__(self, machine: Machine, texts: Sequence[Sequence[int]]) -> None:
        self._machine = machine
        self._texts = texts
        self._read = [0] * len(texts)

    def __call__(self, new: NewTokens) -> Iterator[Tensor]:
        following = []
        for row, tokens in new:
            following += self._texts[row][self._read[row] : self._read[row] + len(tokens)]
            self._read[row] += len(tokens)
        self._machine.spend(len(new), len(following))
        yield torch.nn.functional.one_hot(torch.tensor(following), VOCABULARY).float()

    def forget(self, row: int, tokens: int) -> None:
        self._read[row] -= tokens

    def drop(self, rows: Collection[int]) -> None: ...


class Guesser:
    """Guesses each token of the `texts` rightly with a chance that may depend on the row and the place."""

    def __init__(
        self,
        machine: Machine,
        texts: Sequence[Sequence[int]],
        chance: Callable[[int, int], float],
        *,
        per_token: float = 0.0,
        begins: float = 0.0,
    ) -> None:
        self.name = "guesser"
        self._machine, self._texts, self._chance = machine, texts, chance
        self._per_token, self._begins = per_token, begins

    def begin(self, rows: Sequence[RowText]) -> None:
        self._machine.now += self._begins

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        self._machine.now += self._per_token * max(most)
        return [
            [self._one(row.number, row.position + ahead) for ahead in range(tokens)]
            for row, tokens in zip(rows, most, strict=True)
        ]

    def _one(self, row: int, place: int) -> int:
        right = self._machine.draw.random() < self._chance(row, place)
        return (self._texts[row][place] + (not right)) % VOCABULARY

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None: ...

    def end(self, row: RowText) -> None: ...


def kind(name: str, *, free: bool) -> DrafterKind:
    return DrafterKind(name, "", "", "", free=free)


def decoded(
    machine: Machine,
    lengths: Sequence[Sequence[int]],
    drafters: Callable[[list[list[int]]], dict[DrafterKind, Callable[[], Drafter]]] | None,
    *,
    guesses: int = 6,
) -> tuple[float, DecodingReport]:
    """Seconds for groups of rows with texts of these lengths, and what was done: with `auto`, or plainly.

    A text ends with its stop token, 0.
    """
    report, controller, began = DecodingReport(), Controller(machine.clock), machine.now
    for number, group in enumerate(lengths):
        draw = np.random.default_rng(number)
        tokens = max(group)
        texts = [[*draw.integers(1, VOCABULARY, length).tolist(), *[0] * (tokens + 20 - length)] for length in group]
        rows = [Beginning(np.zeros(1, dtype=np.int32), (0,), f"{row}") for row in range(len(group))]
        writing = Writing(tokens, frozenset({0}), speculation=Speculation(tokens=guesses))
        drafter = AutoDrafter(controller, drafters(texts), tokens) if drafters else None
        written = write_texts(Simulated(machine, texts), rows, writing, drafter=drafter, report=report)
        assert [len(text.tokens) for text in written] == list(group)
    return machine.now - began, report
