"""Requests for typed decisions as rows: a prompt for each question of a request, and the labels that answer it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from prefillcli.asking.batch_files import (
    BODY,
    METHOD,
    SERVED,
    URL,
    is_batch_file,
    require_batch_file,
    require_no_image_column,
    served_names,
)
from prefillcli.asking.choices import RowChoices
from prefillcli.asking.forms import QUESTION_END, Order, text_of, with_answers
from prefillcli.asking.layouts import answered_by, orders_in, require_own_layout
from prefillcli.asking.requests import (
    DecisionRequest,
    Kind,
    RequestError,
    carried_request,
    is_request_file,
    makes_prompts,
)
from prefillcli.core.asking import Asking
from prefillcli.errors import UsageError
from prefillcli.images.image import ImageError, RowImage
from prefillcli.options.asking import BATCH_ID
from prefillcli.options.judging import CONTENT, ProbabilityOptions
from prefillcli.options.settings import JobSettings
from prefillcli.plan.behind import AnsweringHead
from prefillcli.prompts.builder import PromptBuilder, RawPrompt
from prefillcli.prompts.encoding import Marks, NotLiteral, not_literal
from prefillcli.prompts.labels import Following, LabelError, Labels
from prefillcli.prompts.layouts import LaidOut, Layout, LayoutForm
from prefillcli.prompts.questions import Choice, Label, Option, Predicate, Question, Readout, Score
from prefillcli.prompts.settings import PromptSettings
from prefillcli.prompts.templates import LayoutTemplate, RowTemplate
from prefillcli.rows.output.batches import BARE, Responses
from prefillcli.rows.output.decisions import DECISIONS, SYSTEM_ONE
from prefillcli.rows.output.destination import FORMAT
from prefillcli.rows.proof import hash_value
from prefillcli.rows.records import ErrorCode, Prompt, RowBatch, RowError, Window
from prefillcli.rows.values import brief_json
from prefillcli.stats.labels import Measure

if TYPE_CHECKING:
    from prefillcli.models.open import Opened
    from prefillcli.rows.input.source import Source

KINDS: Mapping[str, Kind] = {DECISIONS: "openai", SYSTEM_ONE: "systemone"}
# The columns that prompts are made of here: of each question, and of the order of its options.
DOCUMENT, QUESTION, ANSWERS = "document", "question", "answers"


def kind_of_requests(settings: JobSettings, available: Collection[str], first: Mapping[str, Any]) -> Kind | None:
    """Return whose requests the rows with these columns are, by the `first` row; None if they are no requests for
    typed decisions."""
    if is_batch_file(settings, available):
        url = first.get(URL)
        return KINDS.get(url) if isinstance(url, str) else None
    if not is_request_file(settings, available):
        return None
    return "systemone" if "input" not in available or first.get("state") is not None else "openai"


AnyJob = TypeVar("AnyJob", bound=JobSettings)


def for_requests(settings: AnyJob, available: Sequence[str], first: Mapping[str, Any]) -> AnyJob:
    """Return the settings for rows with the `available` columns, of which this is the `first`: if they are requests,
    with the column of their ids, and if these ask typed questions, with the form of the answers. Raises UsageError for
    options that do not fit them."""
    require_batch_file(settings, available)
    kind, in_lines = kind_of_requests(settings, available, first), is_batch_file(settings, available)
    named = settings.ids.id_column if "ids" in settings.groups() else ""
    ids = [name for name in ((BATCH_ID,) if in_lines else (BATCH_ID, "id")) if name in available]
    found = settings
    if (kind or in_lines) and named is None and ids:
        found = found.with_options({"id_column": ids[0]})
    if "requests" not in settings.groups():
        if kind:
            raise UsageError(
                "the rows are requests with typed questions, which prefill score answers and prefill inspect shows\n"
                "prefill score --dry-run tells what they take"
            )
        return found
    if "probabilities" in settings.groups() and settings.probabilities.calibrate_with:
        _require_content(settings, kind)
    if settings.requests.format and not kind and "files" not in settings.groups():
        raise UsageError("--format: the rows are no requests with typed questions\nleave it out")
    if settings.requests.format and in_lines and named not in (None, BATCH_ID):
        raise UsageError(f"--id-column {named}: with --format ids are {BATCH_ID}\nleave it out")
    usual = kind or "openai"
    if settings.requests.format not in (None, usual):
        raise UsageError(
            f"--format {settings.requests.format}: the first request has another form\ngive --format {usual}"
        )
    if kind and not settings.requests.format:
        found = found.with_options({"format": kind})
        try:
            found.check()
        except UsageError as error:
            said = (
                f"the rows ask typed questions, which is --format {kind} unless --prompt-column or --template is given"
            )
            raise UsageError(f"{said}\n{error}") from None
    return found


def _require_content(settings: JobSettings, kind: Kind | None) -> None:
    # Raise UsageError where --calibrate-with has no text to replace.
    for text in settings.probabilities.calibrate_with if kind else ():
        if not text.strip():
            raise UsageError(
                f"--calibrate-with {text!r}: requests ask about a text, and it has none\ngive one like N/A"
            )
    if settings.probabilities.calibrate_columns and kind:
        raise UsageError("--set calibrate_columns: prompts of requests are made of no columns\nleave it out")
    if settings.requests.format and not kind and not makes_prompts(settings):
        raise UsageError(CONTENT.message("--calibrate-with"))


class DecisionAsking(Asking):
    """The questions that each row asks about its own document, as bodies of requests or as lines of a batch file."""

    typed = True

    def __init__(self, settings: JobSettings, available: Sequence[str]) -> None:
        super().__init__(settings)
        require_no_image_column(settings)
        in_lines = is_batch_file(settings, available)
        self.carried = (URL, BODY) if in_lines else tuple(name for name in BARE if name in available)
        self.requests = self.carried
        self._answered: Callable[[Question, Order | None], Question] = with_answers
        self._form: LayoutForm | None = None
        own = settings.probabilities if "probabilities" in settings.groups() else ProbabilityOptions()
        self._empty = tuple(own.calibrate_with)

    def columns(self, available: Sequence[str], template: RowTemplate | None) -> Sequence[str]:
        return (METHOD, URL) if BODY in self.carried else ()

    def take_layout(self, form: LayoutForm) -> None:
        require_own_layout(self.settings, form)
        self._form = form

    def labels(self, opened: Opened) -> Labels:
        self._answered = answered_by(opened)
        if opened.files.head is not None:
            raise UsageError(
                "requests with typed questions: the model's classification head is read, which has one answer to a "
                "text\nread the next token with --head vocabulary"
            )
        return QuestionChoices(opened.tokenizer, self.settings)

    def responses(self, opened: Opened, labels: Labels) -> Responses | None:
        return Responses("files" in self.settings.groups(), served_names(self.settings, opened)[-1])

    def builder(
        self,
        opened: Opened,
        labels: Labels,
        settings: PromptSettings,
        available: Sequence[str],
        template: RowTemplate | None,
    ) -> PromptBuilder:
        return DecisionBuilder(
            opened.tokenizer,
            settings,
            self.columns(available, None),
            carried=self.carried,
            models=served_names(self.settings, opened),
            orders=self.settings.asking.orders,
            empty=self._empty,
            layout=opened.layout,
            answered=answered_by(opened),
        )

    def require_lines(self, source: Source) -> None:
        """Raise UsageError unless the requests are lines of JSON."""
        if source.kind != "jsonl":
            raise UsageError("requests with typed questions are read from JSON Lines\nwrite each on a line")

    def questions(self, window: Window, row: int) -> list[Question]:
        """Return what each prompt of a row asks that has some."""
        texts = window.carried.select(self.carried).slice(window.place(row), 1).to_pylist()[0]
        asked = _asked(_request(texts, self._form), self.settings.asking.orders, self._form)
        return [self._answered(question, order) for question, order in asked]

    def identity(self, values: dict[str, Any]) -> Mapping[str, str]:
        values.pop("format")
        return {FORMAT: "decisions"}


def _request(texts: Mapping[str, str | None], form: LayoutForm | None) -> DecisionRequest:
    return carried_request(texts, stateless=form is not None and form.stateless)


def _asked(request: DecisionRequest, orders: int, form: LayoutForm | None) -> Iterator[tuple[Question, Order]]:
    # What each prompt of a request asks: a question, and the order of its options.
    return ((question, order) for question in request.questions for order in orders_in(form, question, orders))


class QuestionChoices(RowChoices):
    """The labels that answer the question of each prompt. Those that are said alike after the same end are found
    once."""

    measure = Measure.DECISIONS

    def __init__(self, tokenizer: Any, settings: JobSettings) -> None:
        super().__init__(tokenizer, settings, ANSWERS)
        self.question = Question(answers=(Label("decision"),))
        self.heads: dict[str, tuple[int, AnsweringHead]] = {}
        """What answers questions instead of the model, with the number of answers: by the digest of all words around a
        row's text, or by the name of the question."""

    def resolve_all(
        self, tails: Sequence[str], *, literal: bool = False, values: Sequence[Sequence[Any]] = ()
    ) -> list[Following | LabelError]:
        """Return, for every tail, the tokens of its question's labels, or why there are none."""
        return Labels.resolve_all(self, tails, literal=literal, values=values)

    def _resolve_new(self, keys: Sequence[tuple[Any, ...]]) -> list[Following | LabelError]:
        return self._after(keys)


class DecisionBuilder(PromptBuilder):
    """Makes the prompts of a request: its document, then a question, for each question and each order of its options.

    `needed` columns are read beside the `carried` ones, which the requests are in. They may ask for these `models`.
    """

    def __init__(
        self,
        tokenizer: Any,
        settings: PromptSettings,
        needed: Sequence[str],
        *,
        carried: Sequence[str],
        models: Sequence[str],
        orders: int,
        empty: Sequence[str],
        layout: Layout | None,
        answered: Callable[[Question, Order | None], Question],
    ) -> None:
        own = replace(settings, prompt_column=DOCUMENT, template=None, label_columns=(), question_end=QUESTION_END)
        if layout is not None:
            own = replace(own, chat=False, question_end="", laid_out=LaidOut(layout, {}))
        super().__init__(tokenizer, own)
        self._layout, self._answered = layout, answered
        self._further = self.optional
        # What a request is about, by which shards tell rows that begin alike.
        self.columns = tuple(name for name in (BODY, "input", "state") if name in carried)
        self.needed, self.optional = tuple(needed), (*self._further, *self.columns)
        self._carried = tuple(carried)
        self._models, self._orders, self._empty = models, orders, empty

    def another(self) -> PromptBuilder:
        """One that makes the same prompts, for another thread."""
        return DecisionBuilder(
            self._tokenizer,
            self.settings,
            self.needed,
            carried=self._carried,
            models=self._models,
            orders=self._orders,
            empty=self._empty,
            layout=self._layout,
            answered=self._answered,
        )

    def fingerprint(self) -> str:
        forms = [(text_of(each), with_answers(each).answers) for each in EVERY_FORM]
        text = json.dumps([super().fingerprint(), self._orders, forms, *self._empty])
        return hashlib.sha256(text.encode()).hexdigest()

    def build(self, batch: RowBatch, labels: Labels) -> tuple[list[Prompt], dict[int, RowError]]:
        """Make the prompts of a batch, ascending by row and part. An error of a question is one of its row."""
        errors = dict(batch.errors)
        optional = [name for name in self._further if name in batch.columns]
        columns: dict[str, list[Any]] = {name: [] for name in (DOCUMENT, QUESTION, ANSWERS, *optional)}
        # Of each prompt the row, its number there, its question's name, and whether it is about a text of `empty`.
        asked: list[tuple[int, int, str, bool]] = []
        images: dict[int, tuple[RowImage, ...]] = {}
        for at, row, request in self._requests(batch, errors):
            try:
                seen = self._seen(request)
                asks = [*_asked(request, self._orders, None if self._layout is None else self._layout.form)]
                about = [request, *(replace(request, document=text, state=text) for text in self._empty)]
                forms = [self._form(each, question, order) for each in about for question, order in asks]
            except UsageError as none:  # more options than the layout of the model has codes
                errors[row] = RowError(ErrorCode.INVALID_REQUEST, str(none))
                continue
            except ImageError as unread:
                errors[row] = RowError(ErrorCode.INVALID_IMAGE, str(unread))
                continue
            for part, (question, document, said, answers) in enumerate(forms):
                columns[DOCUMENT].append(document)
                columns[QUESTION].append(said)
                columns[ANSWERS].append(answers)
                for name in optional:
                    columns[name].append(batch.columns[name][at])
                if seen:
                    images[len(asked)] = seen
                asked.append((row, part, question.name, part >= len(asks)))
        apart = replace(
            batch,
            rows=np.arange(len(asked)),
            columns=columns,
            carried=batch.carried.slice(0, 0),
            errors={},
            images=images,
        )
        prompts, wrongs = super().build(apart, labels)
        for number, error in sorted(wrongs.items()):
            row, _, name, _ = asked[number]
            errors.setdefault(row, error.of_question(name))
        if isinstance(labels, QuestionChoices) and labels.heads:
            names = [name for _, _, name, _ in asked]
            self._answer_by_heads(prompts, labels, columns[QUESTION], columns[ANSWERS], names)
        for prompt in prompts:
            prompt.row, prompt.part, prompt.question, prompt.empty = asked[prompt.row]
        return [prompt for prompt in prompts if prompt.row not in errors], errors

    def _answer_by_heads(
        self,
        prompts: Sequence[Prompt],
        labels: QuestionChoices,
        said: Sequence[Any],
        answers: Sequence[Readout],
        names: Sequence[str],
    ) -> None:
        # Let heads answer the questions that they were fitted to. The prompts' rows are places in the other lists.
        for prompt in prompts:
            at = prompt.row
            found = labels.heads.get(hash_value(self.words(said[at]))) or labels.heads.get(names[at])
            read = answers[at]
            if found is not None and found[0] == len(read.weights[0] if read.weights else read.labels):
                prompt.labels = prompt.labels.answered_by(found[1], found[0])

    def _form(self, request: DecisionRequest, question: Question, order: Order) -> tuple[Question, Any, Any, Readout]:
        # A question, with its document, what is said of it, and the labels that answer it; their names have no part in
        # what is said. Raises UsageError for one that the model's layout has no room for.
        labels, weights = self._answered(question, order).read
        if self._layout is None:
            own = tuple(each._replace(name=each.said or each.name) for each in labels)
            return question, request.document, text_of(question, order), Readout(own)
        values = self._layout.values(question, order, request.given.get(question.name))
        if self._layout.lists_all:
            others = (self._layout.values(each, None, request.given.get(each.name)) for each in request.questions)
            values["questions"] = list(others)
        own = tuple(each._replace(name="".join(each.variants or ())) for each in labels)
        return question, self._layout.state(request.state), values, Readout(own, weights)

    def _seen(self, request: DecisionRequest) -> tuple[RowImage, ...]:
        # The images of a request. Raises UsageError where none are read, and ImageError.
        if not request.images:
            return ()
        if self.settings.images is None:
            raise UsageError(f"{request.images[0].place}: an image, and only text and JSON are read")
        found: list[RowImage] = []
        for url, place in request.images:
            try:
                found += self.settings.images.read(url)
            except ImageError as error:
                raise ImageError(f"{place}: {error}") from None
        return tuple(found)

    def _requests(self, batch: RowBatch, errors: dict[int, RowError]) -> Iterator[tuple[int, int, DecisionRequest]]:
        # The place, the number and the request of each row that is not in `errors`; rows without one are added there.
        texts = batch.carried.select(self._carried).to_pylist()
        for at, row in enumerate(batch.rows.tolist()):
            if row in errors:
                continue
            try:
                self._check_line({name: batch.columns[name][at] for name in self.needed})
                request = _request(texts[at], None if self._layout is None else self._layout.form)
                if request.model not in (None, *self._models):
                    raise RequestError(
                        f"model {brief_json(request.model)} is not the one of this job, {self._models[-1]}; {SERVED}"
                    )
                yield at, row, request
            except RequestError as error:
                errors[row] = RowError(ErrorCode.INVALID_REQUEST, str(error))

    def _check_line(self, line: Mapping[str, Any]) -> None:
        # Raise RequestError for a line of a batch file that asks something else.
        if line.get(METHOD, "POST") != "POST":
            raise RequestError(f"method is {brief_json(line[METHOD])}, not POST")
        if URL in line and line[URL] not in tuple(KINDS):  # it may be a list
            raise RequestError(
                f"url {brief_json(line[URL])}: the first line asks typed questions, so only {' and '.join(KINDS)} are "
                "answered; put other lines into a file of their own"
            )

    def _values(
        self, batch: RowBatch, errors: dict[int, RowError]
    ) -> Iterator[tuple[int, str | RowError | Any, Marks | None]]:
        # Document and question, both from the data.
        if self._laid_out is not None:
            yield from self._in_layout_of_model(batch, self._laid_out)
            return
        for row, document, question in zip(
            batch.rows.tolist(), batch.columns[DOCUMENT], batch.columns[QUESTION], strict=True
        ):
            texts, marks = self._literal({DOCUMENT: document, QUESTION: question}, joined=True)
            if isinstance(texts, RowError):
                yield row, texts, None
            else:
                blank = not texts[DOCUMENT].strip() and not (batch.images or {}).get(row)
                yield row, "" if blank else texts[DOCUMENT] + texts[QUESTION], marks

    def _in_layout_of_model(
        self, batch: RowBatch, template: LayoutTemplate
    ) -> Iterator[tuple[int, str | RowError, Marks | None]]:
        rows, values, marked = [], [], []
        for row, state, asked in zip(
            batch.rows.tolist(), batch.columns[DOCUMENT], batch.columns[QUESTION], strict=True
        ):
            given, marks = self._literal({**asked, "state": state}, joined=True)
            try:
                if self._layout is not None:
                    self._layout.require_uncut(given)
            except NotLiteral as error:
                given = not_literal(error)
            if isinstance(given, RowError):
                yield row, given, None
            else:
                rows.append(row)
                values.append(given)
                marked.append(marks)
        yield from zip(rows, template.render(values), marked, strict=True)

    def _in_layout(self, raw: list[RawPrompt], errors: dict[int, RowError]) -> list[RawPrompt]:
        return raw  # it is already

    def _cuttable(self, batch: RowBatch, place: int) -> dict[str, Any]:
        return {DOCUMENT: batch.columns[DOCUMENT][place]}

    def _cuts_texts(self, raw: RawPrompt) -> bool:
        return self.settings.on_long.startswith("truncate")


# Questions of each type and form, which stand for all.
EVERY_FORM = (
    Predicate("?", true="+", false="-"),
    Choice("?", (Option("a", "+"), Option("b"))),
    Choice("?", (Option("a", "+"), Option("ab"))),
    Score("?", (Option("a", "+"), Option("b"))),
    Score("?", (Option("a", "+"), Option("ab"))),
)
