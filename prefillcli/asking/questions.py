"""Prompts and labels of several questions about each row, and the second pass, in which conditional ones are asked."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prefillcli.asking.forms import QUESTION_END, Order, text_of
from prefillcli.asking.layouts import MIRRORED, answered_by, require_own_layout
from prefillcli.asking.question_file import AskedQuestion, QuestionFile, read_questions
from prefillcli.core.asking import Asking
from prefillcli.core.further import Further, RowSelection, WantedRow
from prefillcli.core.request import Request, scored_row
from prefillcli.core.roles import FollowUp
from prefillcli.engines.base import Answer
from prefillcli.errors import UsageError, did_you_mean
from prefillcli.models.files import has_classes
from prefillcli.models.open import label_names
from prefillcli.options.requirements import bounds_alone, leaves_early
from prefillcli.options.settings import JobSettings
from prefillcli.plan.pack import Limits
from prefillcli.plan.trie import build_forest, forest_tokens, token_order
from prefillcli.prompts.builder import INSTRUCTIONS, PromptBuilder
from prefillcli.prompts.labels import Labels
from prefillcli.prompts.layouts import LaidOut, Layout, LayoutForm
from prefillcli.prompts.settings import DOCUMENT_COLUMNS, PromptSettings
from prefillcli.prompts.templates import RowTemplate, read_template
from prefillcli.rows.input.selection import DEFAULT_COLUMN
from prefillcli.rows.output.answers import described
from prefillcli.rows.output.columns import ResultRows
from prefillcli.rows.output.destination import ANSWERS
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.rows.records import Prompt, RowBatch, RowError, ScoredRow, Window

if TYPE_CHECKING:
    from prefillcli.core.inputs import Inputs
    from prefillcli.models.open import Opened
    from prefillcli.report.section import Section


class QuestionAsking(Asking):
    """The questions of a file. Raises UsageError for a wrong file."""

    typed = True

    def __init__(self, settings: JobSettings, questions: str) -> None:
        super().__init__(settings)
        self._option = asked = "--ask" if settings.asking.asks_once else "--questions"
        document = None if settings.prompts.template is None else read_template(settings.prompts.template)[0]
        self.file = read_questions(questions, document, asked, settings.asking.orders)
        self._require_whole()
        self.named = self.file.answers
        self._templates: Sequence[QuestionTemplates] = ()
        by_column = any(each.template is None for each in self.file.questions)
        if not by_column and "prompt_column" in settings.given:
            raise UsageError("--prompt-column: each question has a template, which names the columns\nleave it out")
        if settings.prompts.template is not None and not any(each.put for each in self.file.questions):
            raise UsageError("--template: each question of the file has its own\nleave it out")

    def _require_whole(self) -> None:
        # Raise UsageError for a question of several prompts with an option that needs one.
        settings, further = self.settings, self.file.further
        apart = any(each.apart for each in self.file.questions)
        what = "a score of this model" if apart else "a question with swap or orders"
        if further and settings.rationales.evidence:
            raise UsageError(
                f"--evidence: {what} has several prompts, which a section changes differently\nleave one of them out"
            )
        if further and leaves_early(settings) and not bounds_alone(settings):
            raise UsageError(
                f"{settings.exits.exit_option}: {what} has several prompts, whose flips are not those of their mean\n"
                "leave one of them out"
            )
        if apart and settings.rationales.rationale:
            raise UsageError(f"--rationale: {what} has a prompt for each level\nleave one of them out")

    @property
    def names(self) -> list[str]:
        """The names of the questions."""
        return [each.name for each in self.file.questions]

    def columns(self, available: Sequence[str], template: RowTemplate | None) -> Sequence[str]:
        self._templates = compiled(self.file, available, self._option)
        found: list[str] = []
        for whole, instructions in self._templates:
            found += whole.columns if whole else (self._document(available),)
            found += instructions.columns if instructions else ()
        return tuple(dict.fromkeys(found))

    def _document(self, available: Sequence[str]) -> str:
        # The column with documents, where no template makes them.
        named = self.settings.prompts.prompt_column
        if named != DEFAULT_COLUMN:
            return str(named)
        images = self.settings.images.image_column  # which may be all that there is
        found = next((name for name in (*DOCUMENT_COLUMNS, *images) if name in available), None)
        if found is None and available:
            raise UsageError(
                f"the input has no column {' or '.join(DOCUMENT_COLUMNS)}; it has {', '.join(available)}\n"
                "name the one to ask about with --prompt-column, or write several with --template, like "
                f"'{{{{ {available[0]} }}}}'"
            )
        return found or DEFAULT_COLUMN

    def named_labels(self, model: Path) -> Labels | None:
        if has_classes(model, self.settings.lm.model_head):
            return None
        each = tuple(label_names(own.question) for own in self.file.questions)
        each[0].each = each
        return each[0]

    def take_layout(self, form: LayoutForm) -> None:
        require_own_layout(self.settings, form)
        for each in self.file.questions:
            what = "has a template of its own" if not each.put else "differs from row to row" * each.rendered
            if what or each.swap:
                raise UsageError(
                    f"{self._option}: question {each.name!r} {what or 'exchanges two columns'}, and the model asks in "
                    f"a layout of its own ({form.type})\n"
                    "ask it about a document, or ask the model like any other with --layout generic"
                )
            if form.mirrored and len(each.orders) > 1 and each.orders != form.orders(each.question):
                raise UsageError(f"{self._option}: question {each.name!r}: orders: {MIRRORED}")
        self.file = self.file.in_layout(form)
        self.named = self.file.answers
        self._require_whole()

    def labels(self, opened: Opened) -> Labels:
        if opened.files.head is not None:
            raise UsageError(
                f"{self._option}: the model's classification head is read, which has one answer to a text\n"
                "read the next token with --head vocabulary"
            )
        return QuestionLabels(opened, self.file, self.settings)

    def builder(
        self,
        opened: Opened,
        labels: Labels,
        settings: PromptSettings,
        available: Sequence[str],
        template: RowTemplate | None,
    ) -> PromptBuilder:
        if not isinstance(labels, QuestionLabels) or labels.digest != self.file.digest:
            raise UsageError(
                f"--questions {self.settings.asking.questions}: the file is not as it was\nmake another Scorer"
            )
        # A builder closes its templates: another one gets its own.
        templates, self._templates = self._templates or compiled(self.file, available, self._option), []
        if any(whole is None for whole, _ in templates):
            settings = replace(settings, prompt_column=self._document(available))
        return QuestionsBuilder(opened.tokenizer, settings, available, self.file, templates, opened.layout)

    def identity(self, values: dict[str, Any]) -> Mapping[str, str]:
        values.pop("questions")
        heat = self.settings.answers.temperature
        answers = [replace(own, temperature=heat) for own in self.file.answers]
        return {"questions": self.file.digest, ANSWERS: described(answers)}


class QuestionLabels(Labels):
    """The labels of the first question, and those after `each` prompt of a row. They are those of the file with this
    `digest`."""

    def __init__(self, opened: Opened, file: QuestionFile, settings: JobSettings) -> None:
        self.digest = file.digest
        norm, end = settings.answers.label_norm, settings.answers.label_end
        answered, questions = answered_by(opened), [each.question for each in file.questions]
        first, *others = [answered(each.question, each.first) for each in file.questions]
        for number, order in file.further:
            own = answered(questions[number], order)
            others.append(own.exchanged if order is None else own)
        super().__init__(opened.tokenizer, first, norm=norm, end=end)
        self.each = (self, *(Labels(opened.tokenizer, question, norm=norm, end=end) for question in others))


class QuestionTemplates(NamedTuple):
    """The templates of a question: of its whole prompt or the document before it, and of what is asked, where that
    differs from row to row."""

    whole: RowTemplate | None = None
    instructions: RowTemplate | None = None


def compiled(file: QuestionFile, available: Sequence[str], option: str) -> list[QuestionTemplates]:
    """Compile the templates of each question, for rows with the `available` columns (none: they are not known yet).
    Raises UsageError, which names the option and the question."""
    found: list[RowTemplate] = []
    done = []
    for each in file.questions:
        try:
            template = None if each.template is None else RowTemplate(each.template)
            found += filter(None, [template])
            asked = RowTemplate(each.question.instructions, name="instructions") if each.rendered else None
            found += filter(None, [asked])
            done.append(QuestionTemplates(template, asked))
            for name in each.swap or ():
                if available and name not in available:
                    raise UsageError(f"swap: the input has no column {name!r}{did_you_mean(name, available)}")
                if template is None or name not in template.columns:
                    raise UsageError(f"swap: its prompt does not use the column {name!r}")
        except UsageError as error:
            for own in found:
                own.close()
            raise UsageError(f"{option}: question {each.name!r}: {error}") from None
    return done


class QuestionsBuilder(PromptBuilder):
    """Makes a prompt of each row for each question: `Prompt.part` is the question's number. Those of
    `QuestionFile.further` follow.

    It makes those of the first question itself. Raises UsageError as `PromptBuilder` does.
    """

    def __init__(
        self,
        tokenizer: Any,
        settings: PromptSettings,
        available: Sequence[str],
        file: QuestionFile,
        templates: Sequence[QuestionTemplates],
        layout: Layout | None = None,
    ) -> None:
        count = len(file.questions)
        # The number of the question and the order of its options, of each prompt that a builder of its own makes.
        asked: list[tuple[int, Order | None]] = [(number, each.first) for number, each in enumerate(file.questions)]
        asked += [(number, order) for number, order in file.further if order is not None]
        if layout is None:
            first, *others = [_asking(settings, file.questions[at], templates[at], order) for at, order in asked]
        else:
            first, *others = [_laid_out(settings, file, layout, templates[at], at, order) for at, order in asked]
        super().__init__(
            tokenizer, first, available, template=templates[0].whole, instructions=templates[0].instructions
        )
        self._file = file
        self._rest = [
            PromptBuilder(
                tokenizer,
                own,
                available,
                template=templates[number].whole,
                instructions=templates[number].instructions,
                chats_of=self,
            )
            for own, (number, _) in zip(others, asked[1:], strict=True)
        ]
        # The number of the question that each prompt of a row asks, its builder, and whether two values are exchanged.
        builders = iter([self, *self._rest])
        self._parts = [(number, next(builders), False) for number in range(count)]
        for number, order in file.further:
            self._parts.append((number, self._parts[number][1] if order is None else next(builders), order is None))
        for each in self._rest:
            each.told = self.told
        found = [name for each in self._rest for name in each.needed]
        self.needed = tuple(dict.fromkeys((*self.needed, *found)))

    def fingerprint(self) -> str:
        parts = [super().fingerprint(), *(each.fingerprint() for each in self._rest)]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def build(self, batch: RowBatch, labels: Labels) -> tuple[list[Prompt], dict[int, RowError]]:
        """Make the prompts of a batch, ascending by row and part. An error of a question is one of its row, unless
        the question is conditional: then the row's first prompt has it."""
        errors = dict(batch.errors)
        batch = replace(self.with_images(batch, errors), errors=errors)  # once for all questions
        errors = dict(errors)
        prompts: list[Prompt] = []
        failed: dict[int, dict[int, RowError]] = {}
        for part, ((number, builder, exchanged), answers) in enumerate(zip(self._parts, labels.asked, strict=True)):
            rows = self._exchanged(batch, number) if exchanged else batch
            found, wrong = super().build(rows, answers) if builder is self else builder.build(rows, answers)
            question = self._file.questions[number]
            for prompt in found:
                prompt.part, prompt.question, prompt.conditional = part, question.name, question.when is not None
            prompts += found
            for row, error in wrong.items():
                if question.when is not None:
                    failed.setdefault(row, {})[part] = error.of_question(question.name)
                elif row not in errors:
                    errors[row] = error.of_question(question.name)
        prompts = [prompt for prompt in prompts if prompt.row not in errors]
        for prompt in prompts:
            if prompt.part == 0:
                prompt.failed = failed.get(prompt.row)
        prompts.sort(key=lambda prompt: (prompt.row, prompt.part))
        self.render_seconds += sum(each.render_seconds for each in self._rest)
        self.tokenize_seconds += sum(each.tokenize_seconds for each in self._rest)
        for each in self._rest:
            each.render_seconds = each.tokenize_seconds = 0.0
        return prompts, errors

    def of_part(self, part: int, labels: Labels) -> tuple[PromptBuilder, Labels]:
        return self._parts[part][1], labels.asked[part]

    def _exchanged(self, batch: RowBatch, number: int) -> RowBatch:
        # The rows with the values of a question's two columns exchanged.
        one, other = self._file.questions[number].swap or ("", "")
        return replace(batch, columns={**batch.columns, one: batch.columns[other], other: batch.columns[one]})

    def close(self) -> None:
        """Stop rendering and tokenising for good, in whatever thread."""
        super().close()
        for each in self._rest:
            each.close()


def _asking(
    settings: PromptSettings, asked: AskedQuestion, templates: QuestionTemplates, order: Order | None
) -> PromptSettings:
    # The settings by which rows become prompts with this question, its options in this order.
    text = None if templates.whole is None else templates.whole.text
    if not asked.put:
        return replace(settings, template=text)
    question = replace(asked.question, instructions=INSTRUCTIONS) if templates.instructions else asked.question
    return replace(settings, template=text, question=text_of(question, order), question_end=QUESTION_END)


def _laid_out(
    settings: PromptSettings,
    file: QuestionFile,
    layout: Layout,
    templates: QuestionTemplates,
    number: int,
    order: Order | None,
) -> PromptSettings:
    # The settings by which rows become prompts with the question of this number in the layout of the model.
    values = layout.values(file.questions[number].question, order)
    if layout.lists_all:
        values["questions"] = [layout.values(each.question) for each in file.questions]
    text = None if templates.whole is None else templates.whole.text
    return replace(settings, template=text, chat=False, laid_out=LaidOut(layout, values))


# The assumed number of rows for which a condition holds, as it is not known yet. The choice of packs must not depend
# on answers: a resumed job repeats it.
SHARE = 0.5


class WaitingQuestions(FollowUp):
    """The conditional questions of a file that wait for the answers to others."""

    def __init__(self, asking: QuestionAsking) -> None:
        self._asking = asking

    def further(self, inputs: Inputs, choice: RowSelection) -> SecondPass | None:
        return choice.condition if isinstance(choice.condition, SecondPass) else None

    def condition(self, schema: OutputSchema) -> SecondPass:
        """Return which rows of an output with this schema have questions that wait."""
        return SecondPass(schema, self._asking.file.waiting)

    def shown(self, row: WantedRow, labels: Sequence[str]) -> Section | None:
        return None


class SecondPass(Further):
    """Asks conditional questions in a second pass over a window where that computes fewer tokens: what they share with
    the other questions is read again, but only for the chosen rows. It is the `Condition` that chooses them.

    `prompts` has the number of the question by the numbers of the prompts that may wait.
    """

    columns: frozenset[str] = frozenset()
    limit = None

    def __init__(self, schema: OutputSchema, prompts: Mapping[int, int]) -> None:
        self.most = len(prompts)
        self._schema = schema
        self._prompts = prompts
        self._waiting: dict[int, dict[int, Request]] = {}  # by row and number of the prompt

    def later(self, window: Window, requests: Sequence[Request]) -> Collection[int]:
        waiting = {number for number, each in enumerate(requests) if each.prompt.part in self._prompts}
        first = _computed([each for number, each in enumerate(requests) if number not in waiting])
        if _computed(requests) - first <= _computed([requests[number] for number in waiting]) * SHARE:
            return ()
        for number in waiting:
            prompt = requests[number].prompt
            self._waiting.setdefault(prompt.row, {})[prompt.part] = requests[number]
        return waiting

    def chosen(self, window: Window, rows: ResultRows) -> Collection[int]:
        """Return the rows that waiting questions are asked about."""
        holds = {number: self._holding(number, rows) for number in set(self._prompts.values())}
        found = set()
        for each in rows.scored:
            waiting = self._waiting.pop(each.row, {})
            asked = {part: own for part, own in waiting.items() if each.row in holds[self._prompts[part]]}
            if asked:
                self._waiting[each.row] = asked
                found.add(each.row)
        return found

    def requests(self, window: Window, row: WantedRow, limits: Limits) -> Sequence[Request]:
        waiting = self._waiting.pop(row.scored.row).values()
        return [replace(each, take=partial(_take, row.scored, each), required=True) for each in waiting]

    def _holding(self, number: int, rows: ResultRows) -> Collection[int]:
        when = self._schema.questions[number].when
        return () if when is None else when(rows)


def _computed(requests: Sequence[Request]) -> int:
    # The tokens that these questions take together.
    prompts = [each.tokens for each in requests]
    behind = sum(each.prompt.labels.tokens for each in requests)
    return forest_tokens(build_forest(prompts, token_order(prompts))) + behind if prompts else 0


def _take(row: ScoredRow, request: Request, answer: Answer | None) -> None:
    # Put the answer to one of its prompts into a row.
    if answer is None:  # the row is an error row, as the question is required
        return
    found, part = scored_row(request, answer), request.prompt.part
    row.parts = (*row.parts[:part], found, *row.parts[part + 1 :])
    row.shared_tokens += found.shared_tokens
    row.computed_tokens += found.computed_tokens
    row.kept_tokens += found.kept_tokens
