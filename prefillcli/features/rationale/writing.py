"""What is written about rows, behind which words, and what becomes of what engines write."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prefillcli.core.further import Choice, Further, Question, WantedRow
from prefillcli.core.request import Request, scored_row
from prefillcli.data.prompts.templates import Beginnings, rationale_texts
from prefillcli.data.rows import FULL, Rationale, ScoredRow, Window, id_texts
from prefillcli.decode.continuations import Beginning, Continuation, Speculation, Writing
from prefillcli.engines.base import Answer
from prefillcli.models.open import Opened
from prefillcli.plan.pack import Limits

if TYPE_CHECKING:
    from prefillcli.features.rationale import WritingOptions
    from prefillcli.jobs.opening import Opening


@dataclass(frozen=True, slots=True)
class WritablePrompt:
    """A prompt that may be written on: how it is read, what makes its noise, and what stands behind it, by the label
    that it gets."""

    request: Request
    key: str
    words: tuple[tuple[int, ...], ...]

    def beginning(self, label: int) -> Beginning:
        """What is written behind the prompt when this label is its answer."""
        return Beginning(self.request.tokens, self.words[label], self.key, self.request.positions)


@dataclass(frozen=True, slots=True)
class ChosenByScores:
    """`Continuations` of the prompts of a pack whose scores decide who is wanted.

    `window` has the rows of the `candidates` alone, with the columns that the choice looks at.
    """

    writing: Writing
    choice: Choice
    candidates: Mapping[int, WritablePrompt]
    window: Window
    again: bool = False

    def wanted(self, answers: Sequence[Answer]) -> Mapping[int, Beginning]:
        scored = {
            answer.prompt: scored_row(self.candidates[answer.prompt].request, answer)
            for answer in answers
            if answer.prompt in self.candidates
        }
        if not scored:
            return {}
        labels = self.choice.wanted(self.window, list(scored.values()))
        return {
            prompt: self.candidates[prompt].beginning(labels[row.row])
            for prompt, row in scored.items()
            if row.row in labels
        }

    def of(self, prompts: Collection[int]) -> ChosenByScores:
        own = {prompt: each for prompt, each in self.candidates.items() if prompt in prompts}
        return replace(self, candidates=own, window=self.window.only(each.request.prompt for each in own.values()))


class Rationales(Further):
    """What a job writes about its rows. `texts` are what the template gives for each label."""

    def __init__(self, writing: Writing, texts: Mapping[str, str], opening: Opening, choice: Choice) -> None:
        self._writing, self._choice = writing, choice
        self._words = Beginnings(opening.opened.tokenizer, opening.labels, texts)
        self._id_column: str | None = opening.settings.id_column

    def continuations(self, window: Window, requests: Mapping[int, Request]) -> ChosenByScores:
        candidates = {number: self._writable(window, request) for number, request in requests.items()}
        part = window.only((request.prompt for request in requests.values()), self._choice.columns)
        return ChosenByScores(self._writing, self._choice, candidates, part)

    def scored(self, row: WantedRow, answer: Answer) -> None:
        if answer.continuation is not None:
            self._take(row, row.request, answer.continuation)

    def lacks(self, row: ScoredRow) -> bool:
        return row.rationale is None

    def questions(self, window: Window, row: WantedRow, limits: Limits) -> Sequence[Question]:
        # Tokens that the model's own layers leave behind in a row are read as well to write about it.
        request = row.request if row.request.thinning is None else Request(row.request.prompt)
        if limits.kept_size(len(request.tokens), 1) > limits.kept_tokens:
            self._take(row, request, UNREAD)
            return ()

        def take(answer: Answer | None) -> None:
            self._take(row, request, FAILED if answer is None else answer.continuation or UNREAD)

        beginning = self._writable(window, request).beginning(row.label)
        return [Question(request, take, (self._writing, beginning))]

    def _take(self, row: WantedRow, request: Request, written: Continuation) -> None:
        """Give the row a text that was written behind a request."""
        text = None
        if written.finish_reason in ("stop", "length"):
            text = self._words.text(self._words.tokens(request.prompt.labels, row.label), written.tokens)
        row.scored.rationale = Rationale(
            text=text,
            tokens=len(written.tokens),
            finish_reason=written.finish_reason,
            gap=written.gap,
            source=FULL if request.kept is None else request.method,
        )

    def _writable(self, window: Window, request: Request) -> WritablePrompt:
        prompt = request.prompt
        words = tuple(self._words.tokens(prompt.labels, label) for label in range(len(self._choice.schema.labels)))
        return WritablePrompt(request, self._key(window, prompt.row), words)

    def _key(self, window: Window, row: int) -> str:
        """A row's id, so that its text is the same wherever the row stands; else its number."""
        if self._id_column is None:
            return str(row)
        one = window.carried[self._id_column].slice(window.place(row), 1)
        (own,) = id_texts(one, json_text=self._choice.schema.json_carried)
        return own


UNREAD = Continuation((), "memory", float("inf"))
"""Of a prompt whose K,V of all layers do not fit."""
FAILED = Continuation((), "error", float("inf"))


def writing_of(settings: WritingOptions, opened: Opened, names: Sequence[str]) -> Writing | None:
    """How the texts of a job are written whose labels have these names; None where none are. Raises UsageError for a
    damaged model folder."""
    if not settings.rationale:
        return None
    from prefillcli.models.open import stop_tokens  # takes torch along

    texts = rationale_texts(settings.rationale_template, names).values()
    return Writing(
        tokens=settings.rationale,
        stop_tokens=stop_tokens(opened.files),
        beginning=max(len(opened.tokenizer.encode(f" {text}", add_special_tokens=False)) for text in texts) + 1,
        temperature=settings.rationale_temperature,
        seed=settings.rationale_seed,
        speculation=Speculation(
            drafter=settings.speculation,
            tokens=settings.speculation_tokens,
            budget=settings.retrieval_budget,
            chunk=settings.retrieval_chunk,
        ),
    )
