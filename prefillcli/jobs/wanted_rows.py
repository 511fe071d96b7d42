"""Which rows of a job are written about, behind which words, and what becomes of what engines write."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from prefillcli.core.feature import features_of
from prefillcli.core.request import Request, kept_tokens, method_of
from prefillcli.data.output.columns import Probabilities, ResultRows
from prefillcli.data.output.file_formats import id_texts
from prefillcli.data.prompts.sections import Ablation, Beginnings
from prefillcli.data.prompts.templates import rationale_texts
from prefillcli.data.rows import (
    FULL,
    Float64Array,
    Prompt,
    Rationale,
    ScoredRow,
    SectionEffect,
    Window,
    early_exit_method,
)
from prefillcli.decode.continuations import Beginning, Continuation, Speculation, Writing
from prefillcli.engines.base import Answer
from prefillcli.jobs.row_choice import RowChoice
from prefillcli.models.open import Opened
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.rationale import WritingOptions
from prefillcli.stats.probabilities import Measure, label_scores

if TYPE_CHECKING:
    from prefillcli.jobs.inputs import Opening
    from prefillcli.models.law import TextsOf

# What each section of a prompt contributes to a row's score: the row is scored again without it.


@dataclass(frozen=True, slots=True)
class Evidence:
    """Weighs the sections of prompts that `ablation` leaves out, by scores of this `temperature` and `measure`."""

    ablation: Ablation
    temperature: float = 1.0
    measure: Measure = Measure.SHARES

    def weigh(self, request: Request, scored: ScoredRow) -> WeighedRow:
        """What has to be read for the evidence of a row that was read by this request."""
        prompt = request.prompt
        return WeighedRow(self, prompt, _whole_answer(prompt, scored))

    def score(self, numbers: Float64Array) -> float:
        """The score of the first label."""
        return float(label_scores(numbers, self.temperature, self.measure)[0])

    def close(self) -> None:
        """Let go of the process that renders templates."""
        self.ablation.close()


class WeighedRow:
    """A row, scored without each of its sections.

    There is one of the `requests` for each section: the prompt without it. Where the row's own answer, of which
    `whole` are the label numbers, is not of the whole prompt and all layers, the last request is the whole prompt:
    like is compared with like. All are to be read in full and to the last layer. There are none where the prompt has
    no sections.
    """

    def __init__(self, evidence: Evidence, prompt: Prompt, whole: Float64Array | None) -> None:
        self._evidence = evidence
        ablated = evidence.ablation.of(prompt)
        self._sections = [each.section for each in ablated]
        self._numbers: dict[int, Float64Array] = {} if whole is None else {len(ablated): whole}
        prompts = [each.prompt for each in ablated] + ([prompt] if ablated and whole is None else [])
        self.requests = tuple(map(Request, prompts))

    def take(self, place: int, answer: Answer) -> None:
        """The answer to the request at this place among the `requests`."""
        self._numbers[place] = answer.logprobs

    def effects(self) -> tuple[SectionEffect, ...]:
        """By how much each section raises the score of the first label, the largest change first, ties in their order.

        Sections without an answer, or with one that is not a finite number, are left out; so are all where the whole
        prompt has none.
        """
        scores = {place: self._evidence.score(numbers) for place, numbers in self._numbers.items()}
        whole = scores.get(len(self._sections), float("nan"))
        changes = [whole - scores.get(place, float("nan")) for place in range(len(self._sections))]
        found = [
            SectionEffect(name, change)
            for name, change in zip(self._sections, changes, strict=True)
            if np.isfinite(change)
        ]
        return tuple(sorted(found, key=lambda effect: -abs(effect.change)))


def _whole_answer(prompt: Prompt, scored: ScoredRow) -> Float64Array | None:
    """The label numbers of a row's whole prompt after the last layer, if it was read so."""
    if scored.audit is not None:
        return scored.audit
    if scored.exit_layer is None and scored.kept_tokens == len(prompt.tokens):
        return scored.logprobs
    return None


# What an engine's answer makes of a row.


def scored_row(request: Request, answer: Answer, *, audited: bool = False) -> ScoredRow:
    """What an answer makes of a row. Of an `audited` one it has what an exit would have given, and the full read."""
    logprobs, layer, audit = answer.logprobs, answer.exit_layer, None
    if audited:
        audit = answer.logprobs
        if answer.early is not None:
            layer, logprobs = answer.early
    return ScoredRow(
        row=request.prompt.row,
        logprobs=logprobs,
        shared_tokens=answer.shared_tokens,
        computed_tokens=answer.computed_tokens,
        kept_tokens=kept_tokens(request, answer),
        seconds=answer.seconds + request.pick_seconds,
        method=method_of(request, answer) if layer is None else early_exit_method(method_of(request, answer)),
        exit_layer=None if layer is None else layer + 1,
        audit=audit,
    )


@dataclass(frozen=True, slots=True)
class LabelledChoice:
    """Which rows the `rows` choice wants, and which labels these have got. It can be pickled.

    `temperature` and `probabilities` are what the scores of the output are made with.
    """

    rows: RowChoice
    temperature: float = 1.0
    probabilities: Probabilities | None = None

    def wanted(self, window: Window, scored: Sequence[ScoredRow]) -> dict[int, int]:
        """Of these rows of a window the wanted ones, by row: the number of the label that each has got.

        A row whose score is not a finite number is not wanted.
        """
        done = ResultRows.of(window, scored, {}, self.rows.schema, self.temperature, self.probabilities)
        best = {each.row: int(scores.argmax()) for each, scores in zip(done.scored, done.scores, strict=True)}
        return {row: best[row] for row in self.rows.chosen(window, done)}


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
    choice: LabelledChoice
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


@dataclass(frozen=True, slots=True)
class GivenContinuations:
    """`Continuations` of prompts that are known to be wanted."""

    writing: Writing
    beginnings: Mapping[int, Beginning]
    again: bool = True

    def wanted(self, answers: Sequence[Answer]) -> Mapping[int, Beginning]:
        found = (answer.prompt for answer in answers)
        return {prompt: self.beginnings[prompt] for prompt in found if prompt in self.beginnings}

    def of(self, prompts: Collection[int]) -> GivenContinuations:
        own = {prompt: each for prompt, each in self.beginnings.items() if prompt in prompts}
        return replace(self, beginnings=own)


@dataclass(frozen=True, slots=True)
class JobRationales:
    """What a job writes about its rows, and for which rows it weighs the sections of their prompts.

    Without `writing` nothing is written; without `evidence` nothing is weighed. At most `limit` rows are wanted (None:
    all for which the choice is), the first ones in the input; `chosen` says how many of them are written out so far.
    """

    choice: LabelledChoice
    writing: Writing | None = None
    words: Beginnings | None = None
    limit: int | None = None
    chosen: Callable[[], int] = lambda: 0
    id_column: str | None = None
    evidence: Evidence | None = None

    def has_room(self, rows: int) -> bool:
        """Whether all of so many more rows may be wanted."""
        return self.limit is None or self.chosen() + rows <= self.limit

    def continuations(self, window: Window, requests: Mapping[int, Request]) -> ChosenByScores | None:
        """Which of these requests of a window are written on, by their numbers; None where none can be."""
        if self.writing is None or self.words is None or not requests:
            return None
        candidates = {number: self._writable(window, request) for number, request in requests.items()}
        part = window.only((request.prompt for request in requests.values()), self.choice.rows.columns)
        return ChosenByScores(self.writing, self.choice, candidates, part)

    def beginning(self, window: Window, request: Request, label: int) -> Beginning:
        """What is written behind a request of a window when this label is its answer."""
        return self._writable(window, request).beginning(label)

    def rationale(self, request: Request, label: int, written: Continuation) -> Rationale:
        """What an output says of a text that was written behind a request with this label."""
        text = None
        if written.finish_reason in ("stop", "length"):
            text = self._words.text(self._words.tokens(request.prompt.labels, label), written.tokens)
        return Rationale(
            text=text,
            tokens=len(written.tokens),
            finish_reason=written.finish_reason,
            gap=written.gap,
            source=FULL if request.kept is None else request.method,
        )

    def _writable(self, window: Window, request: Request) -> WritablePrompt:
        prompt, labels = request.prompt, range(len(self.choice.rows.schema.labels))
        words = tuple(self._words.tokens(prompt.labels, label) for label in labels)
        return WritablePrompt(request, self._key(window, prompt.row), words)

    @property
    def _words(self) -> Beginnings:
        if self.words is None:
            raise ValueError("this job writes nothing")
        return self.words

    def _key(self, window: Window, row: int) -> str:
        """A row's id, so that its text is the same wherever the row stands; else its number."""
        if self.id_column is None:
            return str(row)
        one = window.carried[self.id_column].slice(window.place(row), 1)
        (own,) = id_texts(one, json_text=self.choice.rows.schema.json_carried)
        return own


# A job's rationales, made of its options and of what it has opened.


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


class TextRoom(TypedDict):
    """For how long texts, and of which prompts, memory is needed: see `LoadRequest`."""

    text_tokens: int
    texts_of: TextsOf


def text_room(settings: ScoreSettings, opened: Opened, names: Sequence[str]) -> TextRoom:
    """What room the texts of a job need. Arguments as of `writing_of`."""
    writing = writing_of(settings, opened, names)
    later = settings.rationale_limit is not None or any(each.between_layers() for each in features_of(settings))
    texts_of: TextsOf = "later" if later else "all" if settings.rationale_when is None else "some"
    return {"text_tokens": 0 if writing is None else writing.most_tokens, "texts_of": texts_of}


def job_rationales(
    opening: Opening, choice: RowChoice | None, chosen: Callable[[], int] = lambda: 0
) -> JobRationales | None:
    """What a job does with the rows of its `choice`; None for nothing. `chosen` counts the rows so far."""
    if choice is None:
        return None
    settings, labels = opening.settings, opening.labels
    writing = writing_of(settings, opening.opened, labels.names)
    words, evidence, temperature = None, None, settings.temperature
    if writing is not None:
        tokenizer, template = opening.opened.tokenizer, settings.rationale_template
        words = Beginnings(tokenizer, labels, rationale_texts(template, labels.names))
    if settings.evidence:
        evidence = Evidence(Ablation(opening.builder, labels), temperature, labels.measure)
    return JobRationales(
        LabelledChoice(choice, temperature, opening.probabilities),
        writing,
        words,
        settings.rationale_limit,
        chosen,
        settings.id_column,
        evidence,
    )
