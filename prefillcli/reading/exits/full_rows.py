"""Rows of a job that are read in full before its first window, for its exits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from prefillcli.core.request import Request, Tick, plan_requests, scored_row, thinning_of
from prefillcli.engines.base import Answer, EarlyExits, Treatment
from prefillcli.reading.exits.first import FirstReader, FirstReading, Readers, readings_of
from prefillcli.reading.exits.proof import LearningRows, learning_rows
from prefillcli.reading.exits.report import FirstUse
from prefillcli.rows.records import Prompt, ScoredRow, joined_row
from prefillcli.runtime import log
from prefillcli.runtime.clock import step
from prefillcli.stats.arrays import Int64Array

if TYPE_CHECKING:
    from prefillcli.core.run import Run
    from prefillcli.core.scorer import ModelScorer
    from prefillcli.engines.base import PlanEngine
    from prefillcli.models.open import Opened


@dataclass(slots=True)
class ReadRows:
    """Questions that were answered in full, with readings after these `layers` and, by layer, those of the `first`
    models and after layers inside them. `unique` is the size of their trie, in tokens."""

    requests: list[Request]
    answers: list[Answer]
    unique: int
    layers: Sequence[int]
    first: dict[int, list[FirstReading | None]]

    def add(self, other: ReadRows) -> None:
        """Add more questions, with readings of the same layers."""
        self.requests += other.requests
        self.answers += other.answers
        self.unique += other.unique
        for layer, found in other.first.items():
            self.first.setdefault(layer, []).extend(found)

    def of_part(self, part: int, labels: int) -> LearningRows:
        """Return the rows of the questions with this number among those about a row, which have so many labels. Each
        question has the same share of its row's tokens."""
        asked = Counter(request.prompt.row for request in self.requests)
        own = [number for number, each in enumerate(self.requests) if each.prompt.part == part]
        requests, answers = [self.requests[number] for number in own], [self.answers[number] for number in own]
        rows = learning_rows(requests, answers, self.layers, labels)
        first = {layer: readings_of([found[number] for number in own]) for layer, found in self.first.items()}
        shares = np.array([asked[each.prompt.row] for each in requests], np.float64)
        return replace(rows, readings=first | dict(rows.readings), weights=rows.weights / shares)

    def first_use(self, opened: Opened, readers: Readers) -> list[FirstUse]:
        """Return what a token costs each of the first models' `readers`.

        The seconds of a token, a median because the first packs take longer than others, are for the report alone.
        """
        used = []
        for layer, (name, reader) in readers.items() if self.first else ():
            found = self.first[layer]
            able = [number for number, each in enumerate(found) if each is not None]
            lengths = [(own.length, len(asked.tokens)) for own, asked in zip(found, self.requests, strict=True) if own]
            # Words cost next to nothing
            cost = reader.cost(opened, lengths) if able and isinstance(reader, FirstReader) else 0.0
            token = [self.answers[number].seconds / len(self.requests[number].tokens) for number in able]
            seconds = float(np.median(token)) if able else 0.0
            inner = [each + 1 for each in reader.inner]
            used.append(FirstUse(model=name, layer=layer + 1, inner=inner, cost=cost, token_seconds=seconds))
        return used

    def scored(self, prompts: int) -> list[ScoredRow]:
        """Return the rows of which all their `prompts` are answered."""
        found: dict[int, list[ScoredRow]] = {}
        for request, answer in zip(self.requests, self.answers, strict=True):
            found.setdefault(request.prompt.row, []).append(scored_row(request, answer))
        return [own[0] if prompts == 1 else joined_row(own) for own in found.values() if len(own) == prompts]


def read_first(readers: Readers, prompts: Sequence[Prompt], tick: Tick) -> dict[int, list[FirstReading | None]]:
    """Return the readings of prompts by first models, by layer, with those after layers inside them."""
    found: dict[int, list[FirstReading | None]] = {}
    for layer, (_, reader) in readers.items():
        found[layer] = own = reader.read(prompts, tick)
        for at, inner in enumerate(reader.inner):
            found[inner] = [None if each is None else each.inner[at] for each in own]
    return found


@dataclass(frozen=True, slots=True)
class FullRows:
    """Reads rows of a job in full before its first window, each with the `first` models, by layer with their names."""

    run: Run
    scorer: ModelScorer
    first: Readers = field(default_factory=dict)

    @property
    def places(self) -> frozenset[int]:
        """The layers of the first models, and those inside them."""
        return frozenset(each for layer, (_, reader) in self.first.items() for each in (layer, *reader.inner))

    @property
    def engine(self) -> PlanEngine:
        """The engine that answers packs."""
        return self.scorer.pool

    def numbers(self) -> Int64Array:
        """Return the numbers of all rows of the job."""
        source = self.run.inputs.source
        return source.selection().within(0, source.count())

    def read(self, numbers: Int64Array, layers: Sequence[int], why: str) -> ReadRows:
        """Read the rows with these numbers that fit the memory, with readings after these layers. `why` completes the
        line that says so."""
        requests = self._requests(np.sort(numbers))
        if not requests:
            return ReadRows([], [], 0, layers, {})
        if not self.run.settings.run.quiet:
            rows = len({request.prompt.row for request in requests})
            log.info(f"{rows:,} rows are read in full first, {why}")
        step("reading rows in full")
        plan = plan_requests(requests, self.engine.limits)
        exits = EarlyExits(observed=tuple(layers)) if layers else None
        treatment = Treatment(exits, thinning=thinning_of(dict(enumerate(requests))))
        found: dict[int, Answer] = {}
        for answers in self.engine.answer_all(
            plan.packs, lambda i: requests[i].prompt.labels, self.run.tick, treatment
        ):
            found |= {answer.prompt: answer for answer in answers if answer.failure is None}
        answered = sorted(found)
        own = [requests[number] for number in answered]
        prompts = [each.prompt for each in own]
        first = read_first(self.first, prompts, self.run.tick)
        return ReadRows(own, [found[number] for number in answered], plan.unique_tokens, layers, first)

    def counted(self, read: ReadRows) -> list[ScoredRow]:
        """Return the rows that need not be read again, and count their tokens."""
        self.run.tokens.computed += sum(answer.computed_tokens for answer in read.answers)
        self.run.tokens.unique += read.unique
        # A compressed prompt may keep other tokens beside those that it shares a prefix with.
        return [] if self.scorer.read is not None else read.scored(len(self.run.inputs.labels.asked))

    def _requests(self, numbers: Int64Array) -> list[Request]:
        # The requests for the rows with these numbers, ascending. What depends on other answers is not asked here.
        prompts = [prompt for batch in self.prompts(numbers) for prompt in batch if not prompt.conditional]
        requests, _ = self.scorer.requests(prompts, self.run.tick)
        return [request for request in requests if len(request.tokens) <= self.engine.limits.max_tokens]

    def prompts(self, numbers: Int64Array) -> Iterator[list[Prompt]]:
        """Yield the prompts of the rows with these numbers, ascending."""
        source, builder = self.run.inputs.again()  # the job's own source is being read
        try:
            for batch in source.rows(numbers) if len(numbers) else ():
                yield builder.build(batch, self.run.inputs.labels)[0]
                self.run.tick(0.0)
        finally:
            builder.close()
